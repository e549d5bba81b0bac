"""The closed form against the exact engine, which simulations confirm."""

import statistics
from itertools import product

import pytest

from course_utils import TrainingRun, estimate
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


FUSED = [run.replace(unfused=False) for run in frozen_runs()[::2]]
"""Every second of the frozen runs, as the closed form covers them."""


def test_one_rank_is_within_what_the_module_states_over_the_frozen_runs() -> None:
    found = errors([run for run in FUSED if run.world_size == 1])
    assert len(found) > 100
    assert statistics.median(found) < 0.01 and max(found) < 1.1


def test_several_ranks_are_within_it_too() -> None:
    shallow = errors([run for run in FUSED if run.world_size > 1])
    assert len(shallow) > 10 and max(shallow) < 13
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
