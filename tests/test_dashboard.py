"""The Explorer's core: it shows what closed forms say, and offers what can be chosen."""

import random
import re
from contextlib import suppress
from typing import Any

import pytest
from counting import calls

from course_utils import TrainingRun, estimate
from course_utils.estimating import moments
from course_utils.estimating.step_time import step_seconds
from course_utils.gpus import GPUS
from course_utils.interactive.explorer import (
    CONTROLS,
    FAR,
    best_plan,
    card_of,
    complete,
    dashboard,
    in_order,
    next_changes,
    run_of,
)
from course_utils.planning.fit import arrange
from course_utils.planning.twin import SAFETY
from course_utils.units import format_bytes

SHARDED = {"model": "llama3-8b", "micro_batch": 4, "seq_len": 4096, "world_size": 8, "zero_stage": 3}


def possible(count: int) -> list[dict[str, Any]]:
    """Choices drawn at random that can be estimated, half of them near the defaults."""
    lots = random.Random(0)
    found = []
    while len(found) < count:
        share = lots.choice((0.3, 1))
        chosen = {control.name: lots.choice(control.values) for control in CONTROLS if lots.random() < share}
        with suppress(ValueError):
            estimate(run_of(chosen))
            found.append(chosen)
    return found


def drawn_bytes(html: str) -> int:
    """The bytes of all parts of bars, after a look at their widths."""
    parts = re.findall(r"data-bytes='(\d+)' style='width:([\d.]+)%", html)
    size, width = max(parts, key=lambda part: int(part[0]))
    scale = float(width) / int(size)
    assert all(float(width) == pytest.approx(scale * int(size), abs=0.002) for size, width in parts)
    return sum(int(size) for size, _ in parts)


@pytest.mark.parametrize("chosen", possible(8), ids=str)
def test_it_shows_what_the_closed_forms_say(chosen: dict[str, Any]):
    shown = dashboard(chosen)
    said = estimate(run_of(chosen))
    assert shown.breakdown == said
    assert (shown.breakdown.phase, shown.breakdown.label) == (said.phase, said.label)
    assert drawn_bytes(shown.stack.html) == said.total
    assert drawn_bytes(shown.timeline.html) == sum(moment.total for moment in moments(shown.run).values())
    room = format_bytes(shown.card.room, "GB", 1)
    assert room in shown.stack.html and shown.stack.alt and shown.timeline.alt
    assert (room in shown.timeline.html) == (shown.card.memory <= FAR * said.total)
    pasted: dict[str, Any] = {}
    exec(shown.code, pasted)
    assert pasted["run"] == shown.run and eval(shown.code.partition("; ")[2], pasted) == said


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"recompute": "full"},
        {"gpu": "H200-141GB"},
        SHARDED,
        SHARDED | {"precision": "bf16-master"},
        *possible(2),
    ],
    ids=str,
)
def test_each_change_says_what_it_then_takes(chosen: dict[str, Any]):
    before = complete(chosen)
    seconds = sum(step_seconds(run_of(chosen), card_of(chosen)).values())
    changes = next_changes(chosen)
    assert len({change.words for change in changes}) == len(changes) <= 10
    for change in changes:
        assert complete(change.chosen) == change.chosen != before and change.words
        run = run_of(change.chosen)
        card = card_of(change.chosen)
        assert change.peak == estimate(run).total and change.fits == (change.peak * SAFETY <= card.room)
        assert change.lost == pytest.approx(sum(step_seconds(run, card).values()) - seconds)


def test_what_makes_it_fit_comes_first_by_the_time_that_it_loses():
    changes = next_changes({"recompute": "full"})
    fitting = [change for change in changes if change.fits and change.same_training]
    assert list(changes[: len(fitting)]) == fitting and len(fitting) >= 2
    assert [change.lost for change in fitting] == sorted(change.lost for change in fitting)
    words = "micro-batch: 4, micro-batches per step: 8"
    after = run_of(next(change.chosen for change in fitting if change.words == words))
    twice = after.replace(micro_batch=8, global_batch=32)  # 4 is the largest micro-batch that fits
    assert after.global_batch == 32 and estimate(twice).total * SAFETY > GPUS["RTX5090-32GB"].room
    others = [change for change in changes if not change.fits]
    assert others == list(changes[-len(others) :] if others else [])
    assert [change.peak for change in others] == sorted(change.peak for change in others)


def test_a_card_that_lacks_a_format_is_offered_what_it_has():
    old = {"model": "gpt2", "micro_batch": 8, "gpu": "T4-16GB"}
    assert "no bf16 and no flash kernel" in dashboard(old).verdict
    change = next(change for change in next_changes(old) if not change.same_training)
    after = dashboard(change.chosen)
    assert after.run.precision.name == "amp-fp16" and after.run.attention == "efficient"
    assert "But" not in after.verdict


def test_the_best_plan_is_that_of_fit():
    plan = best_plan({})
    best = arrange(run_of({}), card_of({})).best
    assert plan is not None and best is not None
    assert run_of(plan.chosen) == best.run and plan.peak == best.peak and plan.fits
    assert best_plan({"model": "gpt3-175b", "micro_batch": 1}) is None


def test_it_opens_with_the_puzzle_whose_columns_begin_where_the_last_step_ended():
    of_step = moments(run_of({}))
    rows = in_order(of_step)
    assert rows[0].label == "end of step" and len(rows) == len(of_step)
    opened = dashboard({})
    assert opened.run == TrainingRun("gpt2-xl", micro_batch=32, clip_grad_norm=None) and not opened.fits
    assert "Does not fit an RTX5090-32GB by" in opened.verdict
    assert opened.peak_phase.startswith("The peak comes at")
    highest = format_bytes(max(row.total for row in rows), "GB", 1)
    assert re.findall(r"<b>([\d.]+ GB)</b>", opened.timeline.html) == [highest]


def test_a_picture_takes_tens_of_thousands_of_calls_which_are_milliseconds():
    dashboard({})
    next_changes({})  # formulas of this kind of run are compiled
    assert calls(lambda: dashboard({"micro_batch": 16})) < 50_000
    assert calls(lambda: next_changes({"micro_batch": 16})) < 80_000
