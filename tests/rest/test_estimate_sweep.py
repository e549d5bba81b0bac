"""Sweeps: the closed form against simulations of many runs, and the gate's medians."""

import random
from itertools import product
from statistics import median

import pytest
from bad_input import FULL
from drawn_runs import random_run
from engine import GPT, LLAMA, RECIPES, shallow, simulate
from test_formula import RUNS, can_be_simulated

from course_utils import estimate
from course_utils.evidence import accuracy
from course_utils.models import PRESETS
from course_utils.run import TrainingRun

WIDE = [
    TrainingRun(shallow(model, 3), 2, 256, precision, optimizer, attention, recompute)
    for model, (precision, attention), optimizer, recompute in product(
        (GPT, LLAMA, PRESETS["tinyllama-1.1b"]),
        RECIPES,
        ("adamw", "adamw-loop", "momentum"),
        ("none", "full"),
    )
]

PUZZLE = [
    TrainingRun("gpt2-xl", 32, 1024, precision, attention=attention, recompute=recompute)
    for precision, attention, recompute in product(
        ("amp-bf16", "bf16-master"), ("flash", "eager"), ("none", "full")
    )
]


@pytest.mark.parametrize("run", WIDE, ids=str)
@pytest.mark.sweep(4)
def test_runs_of_published_widths_are_within_a_thousandth(run: TrainingRun) -> None:
    near(run)


@pytest.mark.parametrize("run", PUZZLE, ids=str)
@pytest.mark.sweep(0)
def test_gpt2_xl_of_the_opening_question_is_within_a_thousandth(run: TrainingRun) -> None:
    """Under --full alone: tests/rest/test_promises.py simulates one of them."""
    near(run)


def near(run: TrainingRun) -> None:
    found = estimate(run)
    assert found.total == pytest.approx(simulate(run).peak, rel=0.001)
    assert found.phase == simulate(run).peak_phase


@pytest.mark.parametrize("seed", range(7_000_000, 7_000_000 + (150 if FULL else 15)))
def test_an_estimate_is_as_near_as_promised(seed: int) -> None:
    run = random_run(random.randrange(10**9) if FULL else seed)
    found = accuracy.outcome(seed, run)
    assert not found.failed, found.failed
    if found.compared:
        assert found.right, (run.code(), found.percent, found.kinds)


def test_medians_and_phases_are_as_promised() -> None:
    """Over every 30th run that can be simulated; under --full over all."""
    chosen = [run for run in RUNS if can_be_simulated(run)][:: 1 if FULL else 30]
    found = [one for number, run in enumerate(chosen) if (one := accuracy.outcome(number, run)).compared]
    one_rank = [abs(one.percent) for one in found if one.run.world_size == 1]
    several = [abs(one.percent) for one in found if one.run.world_size > 1]
    assert median(one_rank) <= accuracy.MEDIAN_PERCENT and len(one_rank) > 10
    assert not several or median(several) <= accuracy.SEVERAL_RANKS_MEDIAN_PERCENT
    same = 100 * sum(map(accuracy.same_phase, found)) / len(found)
    assert same >= (accuracy.SAME_PHASE_PERCENT if FULL else 90)
