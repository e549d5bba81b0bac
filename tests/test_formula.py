"""The closed form against the exact engine, which simulations confirm, and against papers' own formulas."""

import statistics
from itertools import product
from typing import Any

import pytest

from course_utils import TrainingRun, estimate, moments
from course_utils.estimating import formula
from course_utils.estimating.published import korthikanti_block_bytes
from course_utils.evidence.frozen_runs import frozen_runs


def error(run: TrainingRun) -> float | None:
    """Percent by which the closed form's peak is off; None for a run that one of the two does not cover."""
    try:
        return 100 * (estimate(run, "formula").total / estimate(run).total - 1)
    except ValueError:
        return None


def errors(runs: list[TrainingRun]) -> list[float]:
    return [abs(off) for off in map(error, runs) if off is not None]


FUSED = [run.replace(unfused=False) for run in frozen_runs()]
"""The frozen runs, all as the closed form covers them."""


def test_one_rank_is_within_what_the_module_states_over_the_frozen_runs() -> None:
    found = errors([run for run in FUSED if run.world_size == 1])
    assert len(found) > 200
    assert statistics.median(found) < 0.01 and max(found) < 1.1


def test_several_ranks_are_within_it_too() -> None:
    shallow = errors([run for run in FUSED if run.world_size > 1])
    assert len(shallow) > 20 and max(shallow) < 13
    sizes = {"micro_batch": 2, "seq_len": 1024, "world_size": 8}
    deep = []
    models = ("gpt2-xl", "llama3.2-1b", "llama3-8b", "llama3-70b")
    for model, stage in product(models, (0, 1, 2, 3)):
        for precision, recompute in product(("bf16-master", "amp-bf16"), ("none", "full")):
            run = TrainingRun(model, precision=precision, zero_stage=stage, recompute=recompute, **sizes)
            deep.append(run)
    found = errors(deep)
    assert len(found) == len(deep) and max(found) < 5


@pytest.mark.parametrize("model", ["gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b", "mistral-7b"])
@pytest.mark.parametrize("recompute", ["none", "full", "every-4", "selective", "selective-attention"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_what_lessons_teach_is_within_a_percent(model: str, recompute: str, attention: str) -> None:
    for precision in ("amp-bf16", "bf16-master", "bf16"):
        off = error(TrainingRun(model, 8, 1024, precision, attention=attention, recompute=recompute))
        assert off is not None and abs(off) < (0.1 if recompute == "none" else 1)


def test_kinds_agree_at_the_peak_of_gpt2_xl() -> None:
    run = TrainingRun("gpt2-xl", micro_batch=32)
    closed = estimate(run, "formula")
    exact = estimate(run)
    assert (closed.phase, closed.label) == (exact.phase, exact.label)
    assert all(closed[kind] == pytest.approx(size, rel=1e-3, abs=1e6) for kind, size in exact.items())


def test_a_block_is_korthikantis_plus_the_norms_statistics() -> None:
    run = TrainingRun("gpt2-xl", 4, 512, "bf16", attention="eager")
    assert formula.block(run) == korthikanti_block_bytes(run) + 2 * 8 * 4 * 512


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "adafactor", "adam8bit", "lion", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-master", "bf16"])
def test_states_between_the_steps_agree(precision: str, optimizer: str) -> None:
    run = TrainingRun("gpt2", 1, 64, precision, optimizer, "efficient", set_to_none=False)
    closed = formula.states(run)
    exact = moments(run)["end of step"]
    for kind, size in closed.items():
        assert size == pytest.approx(exact[kind], rel=5e-3, abs=1e6)


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"lora_rank": 8}, "LoRA"),
        ({"recompute": "offload"}, "offloading"),
        ({"precision": "fp8"}, "fp8"),
        ({"tensor_parallel": 2}, "tensor parallelism"),
        ({"model": "mixtral-8x7b"}, "a mixture of experts"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(choices: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"model": "gpt2", **choices}
    run = TrainingRun(**given)
    for ask in (estimate, moments):
        with pytest.raises(ValueError, match=f"does not cover {named}"):
            ask(run, method="formula")


def test_an_unknown_method_lists_what_there_is() -> None:
    words = r"unknown method 'formular'.*did you mean 'formula'.*Known: exact, formula"
    with pytest.raises(ValueError, match=words):
        estimate(TrainingRun("gpt2"), method="formular")
