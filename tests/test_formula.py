"""The closed form against the exact engine, which simulations confirm, and against papers' own formulas."""

import statistics
from itertools import product
from typing import Any

import pytest

from course_utils import TrainingRun, estimate
from course_utils.estimating import formula
from course_utils.estimating.published import korthikanti_block_bytes
from course_utils.evidence.frozen_runs import frozen_runs


def errors(runs: list[TrainingRun]) -> list[float]:
    """Percent by which the closed form's peak is off, for each of the runs that both methods cover."""
    found = []
    for run in runs:
        try:
            found.append(100 * abs(estimate(run, "formula").total / estimate(run).total - 1))
        except ValueError:
            continue
    return found


FUSED = [run.replace(unfused=False) for run in frozen_runs()]
"""The frozen runs, all as the closed form covers them."""


def test_one_rank_is_within_what_the_module_states_over_the_frozen_runs() -> None:
    found = errors([run for run in FUSED if run.world_size == 1])
    assert len(found) > 200
    assert statistics.median(found) < 0.01 and max(found) < 1.1


def test_several_ranks_are_within_it_too() -> None:
    shallow = errors([run for run in FUSED if run.world_size > 1])
    assert len(shallow) > 20 and max(shallow) < 13
    deep = [
        TrainingRun(model, 2, 1024, precision, recompute=recompute, world_size=8, zero_stage=stage)
        for model, stage in product(("gpt2-xl", "llama3-8b"), (0, 1, 2, 3))
        for precision, recompute in (("bf16-master", "none"), ("amp-bf16", "full"))
    ]
    found = errors(deep)
    assert len(found) == len(deep) and max(found) < 5


@pytest.mark.parametrize("model", ["gpt2-xl", "llama3-8b"])
@pytest.mark.parametrize("recompute", ["none", "full", "every-4", "selective", "selective-attention"])
def test_what_lessons_teach_is_within_a_percent(model: str, recompute: str) -> None:
    runs = [
        TrainingRun(model, 8, 1024, precision, attention=attention, recompute=recompute)
        for precision, attention in (("amp-bf16", "flash"), ("bf16-master", "eager"), ("bf16", "flash"))
    ]
    found = errors(runs)
    assert len(found) == 3 and max(found) < (0.1 if recompute == "none" else 1)


def test_kinds_agree_at_the_peak_of_gpt2_xl() -> None:
    run = TrainingRun("gpt2-xl", micro_batch=32)
    closed = estimate(run, "formula")
    exact = estimate(run)
    assert (closed.phase, closed.label) == (exact.phase, exact.label)
    assert all(closed[kind] == pytest.approx(size, rel=1e-3, abs=1e6) for kind, size in exact.items())


def test_a_block_is_korthikantis_plus_the_norms_statistics() -> None:
    run = TrainingRun("gpt2-xl", 4, 512, "bf16", attention="eager")
    assert formula.block(run) == korthikanti_block_bytes(run) + 2 * 8 * 4 * 512


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"lora_rank": 8}, "LoRA"),
        ({"recompute": "offload"}, "offloading"),
        ({"precision": "fp8"}, "fp8"),
        ({"tensor_parallel": 2}, "tensor parallelism"),
        ({"model": "mixtral-8x7b"}, "a mixture of experts"),
        ({"unfused": True}, "GELU or RMSNorm in single operations"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(choices: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"model": "gpt2", **choices}
    run = TrainingRun(**given)
    with pytest.raises(ValueError, match=f"does not cover {named}"):
        estimate(run, method="formula")


def test_an_unknown_method_lists_what_there_is() -> None:
    words = r"unknown method 'formular'.*did you mean 'formula'.*Known: exact, formula"
    with pytest.raises(ValueError, match=words):
        estimate(TrainingRun("gpt2"), method="formular")
