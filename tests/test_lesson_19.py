"""Lesson 19: answers and their hints; figures and tables of what `fit` found; the detective's cases."""

import gc
from typing import Any, cast

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from torch.nn.functional import cross_entropy

from course_utils import GPUS, TrainingRun, fit
from course_utils.interactive.guesses import Guess
from course_utils.lessons.will_it_fit import checks
from course_utils.lessons.will_it_fit.detective import CAUSES, ORDER, case
from course_utils.lessons.will_it_fit.fit_figures import Graded, catalog, grade, path_table, plan_figure
from course_utils.lessons.will_it_fit.widget import against, detective
from course_utils.units import GB


# --------------------------------------------------------------------------------------------------
# 19.1: largest_micro_batch
def halving(build: Any, start: int) -> int | None:
    """Tries in a function of its own, whose names are gone when it returns."""

    def fits(size: int) -> bool:
        try:
            step = build(size)
            for _ in range(2):
                step()
        except torch.OutOfMemoryError:
            return False
        return True

    while start:
        gc.collect()
        if fits(start):
            return start
        start //= 2
    return None


def within_the_handler(build: Any, start: int) -> int | None:
    try:
        step = build(start)
        step()
        step()
        return start
    except torch.OutOfMemoryError:
        return within_the_handler(build, start // 2) if start > 1 else None


LARGEST = Answers(
    right=halving,
    wrong=[
        (edited(halving, "range(2)", "range(1)"), "the second would not"),
        (edited(halving, "gc.collect()", "pass"), "What frees such a cycle"),
        (edited(halving, "torch.OutOfMemoryError", "RuntimeError"), "and you go on"),
        (within_the_handler, "Who refers to it"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 19.2: fitting_step
def in_two_parts(model: Any, optimizer: Any, batch: Any) -> None:
    """The head's pieces go backward one by one into a detached input, not recomputed; then the rest does."""
    for tokens, targets in zip(*(part.split(2) for part in batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = model.embedding(tokens)
            for block in model.blocks:
                x = block(x)
        cut = x.detach().requires_grad_()
        y = targets.flatten()
        for first in range(0, len(y), 200):
            with torch.autocast(tokens.device.type, torch.bfloat16):
                logits = model.head(cut.flatten(0, 1)[first : first + 200])
                loss = cross_entropy(logits, y[first : first + 200], reduction="sum") / batch[1].numel()
            loss.backward()
        x.backward(cut.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


STEPS = "x.backward(cut.grad)\n        optimizer.step()"

FITTING = Answers(
    right=in_two_parts,
    wrong=[
        (checks.plain_step, "Logits are among the largest tensors there"),
        (edited(in_two_parts, "/ batch[1].numel()", "/ targets.numel()"), "some tokens count more"),
        (edited(in_two_parts, "x.backward(cut.grad)", STEPS), "optimizer steps for one batch"),
        (edited(in_two_parts, "optimizer.zero_grad(set_to_none=True)", ""), "What did it leave behind"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 19.3: on_a_v100
ON_V100 = TrainingRun(
    "gpt2-large",
    12,
    1024,
    "amp-fp16",
    "adamw-fused",
    "efficient",
    "every-3",
    accumulation_steps=4,
    loss_chunks=16,
)


def changing(**changes: Any) -> Any:
    return lambda: ON_V100.replace(**changes)


ON_A_V100 = Answers(
    right=changing(),
    wrong=[
        (changing(accumulation_steps=1), "another batch"),
        (changing(precision="amp-bf16"), "does not compute in bf16"),
        (changing(recompute="none"), "more than the card's room"),
        (changing(micro_batch=1, accumulation_steps=48), "times the time of `fit`'s plan"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 19.4: diagnose
def by_phase(seen: Any) -> str:
    """Branches by phase, and the sizes as fractions."""
    last = seen.step_starts[-3:]
    if len(seen.step_starts) > 3 and last[0] < last[1] < last[2]:
        return "graphs"
    if seen.largest_free < seen.requested < seen.free and seen.free_share > 0.25:
        return "fragmentation"
    if seen.phase == "optimizer":
        complete = seen.alive["optimizer_states"] / seen.parameters >= 8
        return "update" if complete else "states"
    tokens = seen.micro_batch * seen.seq_len
    scores = tokens * seen.seq_len * seen.heads
    logits = tokens * seen.vocab
    if logits and any(abs(seen.requested / logits - n) < 0.01 for n in (2, 4)):
        return "loss"
    return "attention" if scores and seen.requested / scores in (1, 2, 4) else "activations"


FREE = "seen.largest_free < seen.requested < seen.free and seen.free_share > 0.25"

DIAGNOSE = Answers(
    right=by_phase,
    wrong=[
        (edited(by_phase, "seen.parameters >= 8", "seen.parameters > 0"), "Were its states complete"),
        (edited(by_phase, "last[0] < last[1] < last[2]", "seen.step > 100"), "You blame the last request"),
        (edited(by_phase, FREE, "seen.requested < seen.free"), "Less is crumbs"),
        (edited(by_phase, '"loss"', '"weights"'), "The cause was not 'weights'"),
        (lambda seen: max(seen.alive, key=lambda kind: seen.alive[kind]), "not one of activations"),
    ],
)


@pytest.fixture(autouse=True)
def a_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the check's simulated runs, as each takes seconds. The solution is judged by all of them."""
    some = [case for case in checks.BROKEN if case[1] in ("loss", "states", "graphs")]
    monkeypatch.setattr(checks, "BROKEN", some)


ANSWERS = {"19.1": LARGEST, "19.2": FITTING, "19.3": ON_A_V100, "19.4": DIAGNOSE}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# figures and tables of a plan
PLAN = fit("gpt2-medium", "T4-16GB", global_batch=32)


def test_the_figure_and_the_table_show_what_fit_found() -> None:
    figure = plan_figure(PLAN, "It fits")
    too_large, fitting, path, limit = [line.get_xydata() for line in cast("Any", figure.axes[0].lines)]
    assert limit[0, 1] == pytest.approx(PLAN.card.room / 1.05 / GB)
    assert len(too_large) + len(fitting) == len(PLAN.tried)
    assert too_large[:, 1].min() > limit[0, 1] >= fitting[:, 1].max()
    assert [tuple(place) for place in path] == [(step.lost, step.peak / GB) for step in PLAN.path]
    marks = ", ".join(text.get_text() for text in figure.axes[0].texts if text.get_text()[0].isdigit())
    assert sorted(map(int, marks.split(", "))) == [*range(len(PLAN.path))]
    assert (
        f"{sum(one.fits(PLAN.card) for one in PLAN.tried)} of {len(PLAN.tried)} configurations fit"
        in figure.alt
    )
    rows = path_table(PLAN).rows[1:]
    assert [row[0].split(" · ")[1] for row in rows] == [step.what for step in PLAN.path]
    assert rows[0][-1] == "no" and rows[-1][-1] == "yes"


def test_the_catalog_invents_nothing() -> None:
    rows = {row[0]: row for row in catalog().rows[1:]}
    assert set(rows) == set(GPUS)
    for name, card in GPUS.items():
        assert ("unknown" in rows[name][2]) == (not card.usable) == (rows[name][-1] == "–")


def test_a_prediction_is_graded_by_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    for guess, expected in ((10.05, "A"), (9.6, "B"), (11.4, "C"), (6.0, "D"), (20.0, "E")):
        graded = repr(Graded(10 * GB, Guess(guess, "GB", "2026-01-01"), "simulated"))
        sign = "+" if guess > 10 else "−"
        assert graded.startswith(f"Grade {expected}: prediction − simulated = {sign}")
    grade("19.nothing", 10 * GB, "measured")
    assert "nothing to grade" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# the detective
def test_a_case_ends_where_memory_did_and_names_no_tensor() -> None:
    for number in (1, 2, 3):
        found = case(number)
        assert "out of GPU memory" in found.message
        assert not found.measured.allocations
        assert not found.measured.moments
        assert not found.measured.provenance.note
        assert found.measured.peak == max(found.measured.timeline.totals())
        assert found.evidence.alive.total == found.measured.timeline.totals()[-1]
    assert case(2).evidence.step_starts[-1] > case(2).evidence.step_starts[1]
    with pytest.raises(ValueError, match="cases 1 to 6"):
        case(len(ORDER) + 1)


def test_the_detective_answers_and_keeps_score() -> None:
    widget = detective()
    assert "Solved: 0 of 6" in widget.message
    widget.controls["cause"].value = "fragmentation"
    assert "No." in widget.message and "% of the card" in widget.message
    widget.controls["cause"].value = ORDER[0][0]
    assert "Yes" in widget.message and widget.solved == {1}
    widget.controls["case"].value = 3
    assert widget.controls["cause"].value == "" and "Solved: 1 of 6" in widget.message
    assert widget.figure is not None and "Case 3" in widget.figure.alt
    assert all(CAUSES[ORDER[0][0]] not in against(cause, case(1)) for cause in CAUSES)
