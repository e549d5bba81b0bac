"""The second verb and the comparison: sources, refusals, fallbacks, and what a measurement says of itself."""

import dataclasses
import gc
import json

import pytest
import torch
from engine import GPT, shallow, simulate, tiny

from course_utils import PRESETS, compare, estimate, measure, replay
from course_utils.breakdown import KINDS
from course_utils.measuring import recorded, sources
from course_utils.measuring.compare import Comparison
from course_utils.run import TrainingRun
from course_utils.units import GB, plus_minus

RUN = TrainingRun(tiny("gpt2", dropout=0.1), 2, 64)
ON_CPU = RUN.replace(precision="fp32", attention="eager")


def test_on_the_cpu_only_what_a_gpu_does_too():
    with pytest.raises(ValueError, match=r"precision='fp32' with attention='eager' .* simulate it instead"):
        measure(ON_CPU.replace(attention="efficient"), "cpu")


def test_too_large_for_a_laptop_says_how_large_and_what_to_choose():
    run = TrainingRun("gpt2-medium", 1, 128, "fp32", attention="eager")
    needed = estimate(run).total / GB
    words = rf"needs about {needed:.1f} GB of host memory; .* up to 4 GB: .*'tiny-gpt'"
    with pytest.raises(ValueError, match=words):
        measure(run, "cpu")


@pytest.mark.parametrize("source", ["simulated", "cpu"])
def test_peak_moments_timeline_and_allocations_agree(source):
    found = measure(ON_CPU, source)
    totals = found.timeline.totals()
    last_step = next(mark.event for mark in found.timeline.marks if mark.step == 2)
    assert found.peak == max(totals[last_step:]) == totals[found.peak_event - 1]
    assert found.peak == sum(item.bytes for item in found.alive_at(found.peak_event))
    curves = found.timeline.curves()
    for kind in KINDS:
        alive = [item.bytes for item in found.alive_at(found.peak_event) if item.kind == kind]
        assert sum(alive) == found.breakdown[kind]
        assert kind not in curves or curves[kind][found.peak_event - 1] == found.breakdown[kind]
    assert found.moments["end of step 2"].total == totals[-1]
    highest = max(found.phase_peaks.values(), key=lambda moment: moment.total)
    assert (highest.total, highest.phase) == (found.peak, found.peak_phase)


def test_the_first_step_differs_the_second_repeats():
    found = simulate(TrainingRun(tiny("llama"), 16, 128, optimizer="momentum"), 3)
    assert found.peak_phase == "backward"  # before the first step ends there are no states
    peaks = found.timeline.step_peaks()
    assert peaks[1] < peaks[2] == peaks[3] == found.peak
    first, second, third = (found.moments[f"end of step {step}"] for step in (1, 2, 3))
    assert dict(first) == dict(second) == dict(third)
    assert {kind for kind, size in third.items() if size} == {"parameters", "optimizer_states", "inputs"}


@pytest.mark.parametrize("source", ["cpu", "simulated"])
def test_random_numbers_go_on_as_if_nothing_had_been_measured(source):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = measure(ON_CPU, source, steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert measure(ON_CPU, source, steps=1).losses == first.losses


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_tensor_of_a_step_waits_for_python_to_find_a_cycle(recompute):
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        sources.simulated_run.__wrapped__(RUN.replace(recompute=recompute), 2, "")
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_comparison_shows_each_difference_and_explains_it_term_by_term():
    assert "The gap is 0 bytes" in compare(RUN, "simulated").explanation()  # it peaks in the optimizer step
    run = RUN.replace(optimizer="adamw-fused", seq_len=128)
    compared = compare(run, "simulated")
    gap = compared.estimate.total - compared.measurement.peak
    assert 0.99 < compared.ratio < 1 and sum(compared.differences.values()) == gap
    assert sum(compared.terms.values()) == gap and abs(compared.terms["elsewhere"]) < abs(gap) / 4
    said = compared.explanation()
    assert f"{plus_minus(gap)} bytes are left" in said and "tensors to blocks of 512 bytes" in said
    sums = {row["name"]: [row["estimated"], row["simulated"]] for row in compared.rows()}
    assert sums["tensors"] == [compared.estimate.total, compared.measurement.peak]
    assert compared.counters and sums["allocator's counter"] == [None, compared.counters.allocated]
    for shown in (str(compared), compared._repr_html_()):
        assert str(run) in shown and "simulated GPU" in shown and "+0" not in shown
        assert " MB" in shown and "GB" not in shown  # a unit in which a small run shows something


def test_a_comparison_names_what_is_off():
    right = Comparison(RUN, estimate(RUN), simulate(RUN))
    parts = dict(estimate(RUN)) | {"activations": estimate(RUN)["activations"] + 10**6}
    compared = Comparison(RUN, dataclasses.replace(estimate(RUN), parts=parts), simulate(RUN))
    assert compared.differences["activations"] - right.differences["activations"] == 10**6
    assert compared.terms["elsewhere"] - right.terms["elsewhere"] == 10**6
    assert "elsewhere, most of it in activations" in compared.explanation() and compared.ratio > 1


def test_most_of_the_rest_is_looked_for_in_what_has_no_name():
    wide = shallow(PRESETS["gpt2-xl"], 2)  # its vectors fill no whole blocks
    compared = compare(TrainingRun(wide, 1, 64, "bf16-master", "adamw-foreach"), "simulated")
    off = compared.differences  # the larger one is the rounding of temporaries
    assert off["temporaries"] < -off["gradients"] < 0 and compared.terms["elsewhere"] == off["gradients"]
    assert "elsewhere, most of it in gradients" in compared.explanation()


def test_a_comparison_tells_scratch_from_blocks_that_were_not_split():
    run = TrainingRun(shallow(GPT, 3), 4, 256)
    measured = simulate(run)
    rounded = replay(measured).step_peaks()[2] - measured.peak
    assert rounded > 0
    counted = dataclasses.replace(measured, counters={"allocated": measured.peak + rounded + 1_000_000})
    said = Comparison(run, estimate(run), counted).explanation()
    assert f"{rounded:+,} bytes are rounding to blocks that were not split, +1,000,000 bytes scratch" in said


@pytest.mark.parametrize("source", ["auto", "simulated"])
def test_a_recording_takes_its_place_and_says_why(monkeypatch, source):
    cannot = (False, "on this platform it cannot")
    text = recorded.save({recorded.key(RUN, 2): simulate(RUN)})
    monkeypatch.setattr("course_utils.measuring.simulated.availability", lambda: cannot)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(recorded, "load", lambda: json.loads(text)["runs"])
    monkeypatch.setenv("COURSE_SOURCE", "auto")
    found = measure(RUN, source)
    assert found.source == "recorded" and found.breakdown == simulate(RUN).breakdown
    assert "recorded on a simulated GPU" in str(found.provenance)
    assert "not simulated here: on this platform it cannot" in str(found.provenance)


def test_provenance_says_where_it_ran():
    assert str(simulate(RUN).provenance).startswith("simulated GPU · torch 2.")
    assert str(measure(ON_CPU, "cpu").provenance).startswith("traced on the CPU · torch 2.")
    assert " MB at the peak" in simulate(RUN).summary() and "simulated GPU" in simulate(RUN).summary()
