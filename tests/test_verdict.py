"""Whether a run fits a card: the closed form, a simulated step, the allocator with the card's room."""

import dataclasses

import pytest
from engine import GPT, shallow

from course_utils import TrainingRun, estimate, gpu, measure, replay, verdict
from course_utils.errors import SimulationUnavailable
from course_utils.gpus import Gpu
from course_utils.measuring import verdict as module
from course_utils.measuring.verdict import CONTEXT

RUN = TrainingRun(shallow(GPT, 3), 4, 512)


def test_a_run_that_fits_says_how_many_bytes_each_of_the_three_finds() -> None:
    found = verdict(RUN, "A100-40GB")
    on_card = RUN.replace(card="A100-40GB")
    measured = measure(on_card, "simulated")
    assert found.fits and not found.failure and str(found).endswith("✓ It fits.")
    assert (found.estimated, found.tensors) == (estimate(on_card).total, measured.peak)
    assert found.reserved == replay(measured).peak_reserved > found.tensors
    assert found.room == gpu("A100-40GB").room - CONTEXT


def test_what_the_allocator_finds_no_room_for_does_not_fit_though_its_tensors_would() -> None:
    """The rule of 5 % accepts this card: the holes between blocks are larger."""
    measured = measure(RUN.replace(card="A100-40GB"), "simulated")
    between = (measured.peak + replay(measured).peak_allocated) // 2
    card = dataclasses.replace(gpu("A100-40GB"), usable=between + CONTEXT)
    found = verdict(RUN, card)
    assert found.tensors < found.room and not found.fits
    assert "out of GPU memory" in found.failure and f"✗ {found.failure}" in str(found)


def test_a_card_that_is_not_in_the_catalog_adds_no_workspaces() -> None:
    run = TrainingRun("tiny-gpt", 2, 64, "amp-fp16", attention="efficient")
    here, listed = verdict(run, Gpu("Tesla T4", 2 * 10**9, (7, 5))), verdict(run, "T4-16GB")
    assert here.fits and here.run == run and listed.run.card == "T4-16GB"
    assert here.estimated < listed.estimated, "cuBLAS's workspaces"
    assert not verdict(run, Gpu("Tesla T4", 10**8, (7, 5))).fits, "all of it is free"


def test_a_card_that_cannot_run_it_and_a_torch_that_cannot_simulate_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="does not compute in bf16"):
        verdict(RUN, "T4-16GB")
    with pytest.raises(ValueError, match="did you mean 'A100-40GB'"):
        verdict(RUN, "A100-40")
    traced = dataclasses.replace(
        measure(RUN, "simulated"),
        provenance=dataclasses.replace(measure(RUN, "simulated").provenance, source="recorded"),
    )
    monkeypatch.setattr(module, "measure", lambda *_: traced)
    with pytest.raises(SimulationUnavailable, match="a verdict needs a simulated step"):
        verdict(RUN, "A100-40GB")
