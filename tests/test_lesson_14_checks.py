"""The checks of lesson 14: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

from typing import Any

import pytest
from checking import passes, said

from course_utils import TrainingRun, estimate, fit
from course_utils.checks import lesson_14
from course_utils.checks.lesson_14_labs import (
    BROKEN,
    CHOOSE_MISTAKES,
    DIAGNOSE_MISTAKES,
    HIDDEN,
    PEAK_MISTAKES,
    SPLIT_MISTAKES,
    TOLERANCE,
    choose_right,
    diagnose_right,
    evidence,
    peak_right,
    peaks,
    split_right,
    true_peaks,
)

ON_T4 = TrainingRun(
    "gpt2-large", 4, 1024, "amp-fp16", "adamw-fused", "efficient", "every-2", accumulation_steps=8, loss_chunks=8
)


# ------------------------------------------------------------------------------------------------------- 14.1: choose


def by_loop(configurations: Any, room: int) -> int | None:
    best = None
    for index, (peak, lost) in enumerate(configurations):
        if 1.05 * peak <= room and (best is None or (lost, peak) < configurations[best][::-1]):
            best = index
    return best


@pytest.mark.parametrize("answer", [choose_right, by_loop])
def test_choose_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_14.choose, answer, capsys, "14.1")


@pytest.mark.parametrize("message", CHOOSE_MISTAKES)
def test_choose_names_the_misconception(message: str) -> None:
    assert said(lesson_14.choose, CHOOSE_MISTAKES[message]) == message


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda configurations, room: None, "You find nothing"),
        (lambda configurations, room: choose_right(configurations, room) or 0, "where nothing fits"),
        (lambda configurations, room: 9, "not one of the list"),
        (lambda configurations, room: "0", "where a whole number or None is asked for"),
        (lambda configurations, room: (1, 2), "returned a tuple, where a whole number or None"),
        (
            lambda configurations, room: 0 if room == 84 * 10**9 else choose_right(configurations, room),
            "Some choices are off",
        ),
    ],
)
def test_choose_explains_the_rest(answer: Any, hint: str) -> None:
    assert hint in said(lesson_14.choose, answer)


# -------------------------------------------------------------------------------------------------------- 14.2: split


def from_above(batch: int, fixed: float, each: float, room: float) -> tuple[int, int] | None:
    for size in range(batch, 0, -1):
        if batch % size == 0 and 1.05 * (fixed + each * size) <= room:
            return size, batch // size
    return None


@pytest.mark.parametrize("answer", [split_right, from_above])
def test_split_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_14.split, answer, capsys, "14.2")
    passes(lesson_14.split, lambda **case: [size / 1 for size in answer(**case) or ()] or None, capsys, "14.2")


@pytest.mark.parametrize("message", SPLIT_MISTAKES)
def test_split_names_the_misconception(message: str) -> None:
    assert said(lesson_14.split, SPLIT_MISTAKES[message]) == message


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda **case: None, "something fits"),
        (lambda **case: split_right(**case) or (1, case["batch"]), "not even one sequence fits"),
        (lambda **case: split_right(**case) and (2, 2), "is another batch"),
        (lambda **case: split_right(**case) and (case["batch"], 1), "is not the largest that fits"),
        (lambda **case: (1, 2, 3), "two whole numbers"),
        (lambda **case: (1.5, 2), "where a whole number is asked for"),
        (lambda **case: 4, "where a tuple or None is asked for"),
    ],
)
def test_split_explains_the_rest(answer: Any, hint: str) -> None:
    assert hint in said(lesson_14.split, answer)


# ------------------------------------------------------------------------------------------------------ 14.3: on_a_t4


def found() -> TrainingRun:
    plan = fit("gpt2-large", "T4-16GB", global_batch=32)
    assert plan.best is not None
    return plan.best.run


@pytest.mark.parametrize("answer", [found, lambda: ON_T4])
def test_on_a_t4_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_14.on_a_t4, answer, capsys, "14.3")


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"model": "gpt2-medium"}, "gpt2-large was asked for"),
        ({"seq_len": 512}, "as long as they are"),
        ({"accumulation_steps": 1}, "another batch"),
        ({"world_size": 8, "accumulation_steps": 1}, "There is one T4"),
        ({"precision": "amp-bf16"}, "does not compute in bf16"),
        ({"attention": "flash"}, "no flash kernel"),
        ({"precision": "fp16-master"}, "fp16-master changes the training"),
        ({"optimizer": "adam8bit"}, "AdamW was asked for"),
        ({"lora_rank": 8}, "All weights were to be trained"),
        ({"dropout": 0.0}, "has dropout"),
        ({"recompute": "none"}, "too much for a T4"),
        ({"micro_batch": 1, "accumulation_steps": 32}, "times what the best plan loses"),
    ],
)
def test_on_a_t4_says_what_is_off(changes: dict[str, Any], hint: str) -> None:
    assert hint in said(lesson_14.on_a_t4, lambda: ON_T4.replace(**changes))


# ----------------------------------------------------------------------------------------------- 14.4: predicted_peak


def without_small_parts(N: int, L: int, h: int, a: int, V: int, s: int, b: int) -> float:
    copies, loss = 24 * L * h * h, 2 * s * b * V
    return 16 * N + 2 * h * V + 4 * s * b * h * L + 8 * s * b * V + max(copies, loss)


@pytest.mark.parametrize("answer", [peak_right, without_small_parts])
def test_predicted_peak_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_14.predicted_peak, answer, capsys, "14.4")


@pytest.mark.parametrize("message", PEAK_MISTAKES)
def test_predicted_peak_names_the_misconception(message: str) -> None:
    assert said(lesson_14.predicted_peak, PEAK_MISTAKES[message]) == message


def test_a_peak_in_another_unit_is_told_so() -> None:
    assert "Right in GB" in said(lesson_14.predicted_peak, lambda **of: peak_right(**of) / 1e9)
    assert "Right in GiB" in said(lesson_14.predicted_peak, lambda **of: peak_right(**of) / 2**30)
    assert "prediction − peak is +40 %" in said(lesson_14.predicted_peak, lambda **of: 1.4 * peak_right(**of))


def test_the_formula_is_within_its_tolerance_and_the_mistakes_are_not() -> None:
    for one, other in zip(peaks(peak_right), true_peaks(), strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE / 2)
    for mistaken in PEAK_MISTAKES.values():
        assert any(abs(a / b - 1) > TOLERANCE for a, b in zip(peaks(mistaken), true_peaks(), strict=True))
    assert true_peaks()[0] == estimate(HIDDEN[0]).total


# ----------------------------------------------------------------------------------------------------- 14.5: diagnose


def test_diagnose_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_14.diagnose, diagnose_right, capsys, "14.5")


@pytest.mark.parametrize("message", DIAGNOSE_MISTAKES)
def test_diagnose_names_the_misconception(message: str) -> None:
    assert said(lesson_14.diagnose, DIAGNOSE_MISTAKES[message]) == message


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda seen: "memory", "not one of activations"),
        (lambda seen: "loss", "The same cause for every run"),
        (lambda seen: "weights" if seen.phase == "loss" else diagnose_right(seen), "did not die of 'weights'"),
        (lambda seen: None, "returned nothing"),
    ],
)
def test_diagnose_explains_the_rest(answer: Any, hint: str) -> None:
    assert hint in said(lesson_14.diagnose, answer)


def test_hidden_cases_are_of_every_cause_that_can_be_told() -> None:
    assert {cause for cause, _, _ in BROKEN} == set(lesson_14.CAUSES) - {"weights"}
    assert [diagnose_right(evidence(number)) for number in range(len(BROKEN))] == [cause for cause, _, _ in BROKEN]
    assert lesson_14.example(2).step > 1
