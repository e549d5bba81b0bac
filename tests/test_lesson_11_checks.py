"""The checks of lesson 11: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from checking import passes, said

from course_utils.checks import lesson_11
from course_utils.checks.lesson_11 import FEWEST_MISTAKES, best_cut, equal_cut, fewest_right, greedy_cut
from course_utils.lessons.pipeline_memory import stage_memory
from course_utils.lessons.pipelines import bubble, micro_batches_for, simulate

# -------------------------------------------------------------------------------------------------------- 11.1: enough


def solved(p: int, idle: float) -> float:
    return max(1, math.ceil(round((p - 1) * (1 / idle - 1), 9)))


@pytest.mark.parametrize(
    "answer", [lambda p, idle: micro_batches_for(p, idle), solved, lambda p, idle: float(solved(p, idle))]
)
def test_enough_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_11.enough, answer, capsys, "11.1")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, idle: next(m for m in range(1, 999) if bubble(p, m) < idle - 1e-12), "At most `idle` was asked for"),
        (lambda p, idle: next(m for m in range(1, 999) if (p - 1) / m <= idle + 1e-12), "do you divide by m alone"),
        (lambda p, idle: next(m for m in range(1, 999) if p / (m + p) <= idle + 1e-12), "one too many"),
        (lambda p, idle: max(1, solved(p, idle) - 1), "One too few"),
        (lambda p, idle: solved(p, idle) + p - 1, "all columns, m + p − 1"),
        (lambda p, idle: 4 * p, "rule of thumb"),
        (lambda p, idle: (p - 1) * (1 / idle - 1), "round up"),
        (lambda p, idle: math.ceil(round((p - 1) * (1 / idle - 1), 9)), "At least one micro-batch"),
        (lambda p, idle: 1, "leaves a larger bubble"),
        (lambda p, idle: 500, "not the smallest"),
    ],
)
def test_enough_names_the_mistake(answer: Any, words: str) -> None:
    assert words in said(lesson_11.enough, answer)


# ---------------------------------------------------------------------------------------------------------- 11.2: kept


def keeping(one_f: Callable[[int, int, int], int], gpipe: Callable[[int, int, int], int] = lambda p, m, s: m) -> Any:
    return lambda p, m, stage: {"GPipe": gpipe(p, m, stage), "1F1B": one_f(p, m, stage)}


def right_kept(p: int, m: int, stage: int) -> int:
    return min(m, p - stage)


def simulated_kept(p: int, m: int, stage: int) -> dict[str, int]:
    return {name: simulate(name, p, m).most_kept(stage) for name in ("1F1B", "GPipe")}


@pytest.mark.parametrize("answer", [keeping(right_kept), simulated_kept])
def test_kept_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_11.kept, answer, capsys, "11.2")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (keeping(right_kept, lambda p, m, s: min(m, p)), "however many stages there are"),
        (keeping(right_kept, right_kept), "That is 1F1B"),
        (keeping(right_kept, lambda p, m, s: m - 1), "One is missing"),
        (keeping(right_kept, lambda p, m, s: m * p), "all stages together"),
        (keeping(lambda p, m, s: p - s), "m may be small"),
        (keeping(lambda p, m, s: min(m, p)), "That is the first stage"),
        (keeping(lambda p, m, s: p), "That is the first stage"),
        (keeping(lambda p, m, s: min(m, s + 1)), "Turned round"),
        (keeping(lambda p, m, s: s + 1), "Turned round"),
        (keeping(lambda p, m, s: min(m, p - s - 1)), "One too few"),
        (keeping(lambda p, m, s: min(m, p - s + 1)), "One too many"),
        (keeping(lambda p, m, s: m), "That is GPipe"),
        (keeping(lambda p, m, s: 7), "1F1B is off somewhere"),
        (lambda p, m, stage: {"GPipe": m}, "exactly the keys"),
    ],
)
def test_kept_names_the_mistake(answer: Any, words: str) -> None:
    assert words in said(lesson_11.kept, answer)


# --------------------------------------------------------------------------------------------------------- 11.3: order


def with_ahead(ahead: Callable[[int, int, int], int]) -> Any:
    """1F1B with another number of forwards at first."""

    def answer(p: int, m: int, stage: int) -> list[str]:
        first = max(1, ahead(p, m, stage))
        works = [f"F{micro}" for micro in range(first)]
        for micro in range(m):
            works += [f"B{micro}", *([f"F{micro + first}"] if micro + first < m else [])]
        return works

    return answer


def swapped(p: int, m: int, stage: int) -> list[str]:
    """The right number at first, then all the other forwards."""
    works = simulate("1F1B", p, m).order(stage)
    ahead = works.index("B0")
    rest = works[ahead + 1 :]
    return [*works[: ahead + 1], *(w for w in rest if w[0] == "F"), *(w for w in rest if w[0] == "B")]


def backwards_reversed(p: int, m: int, stage: int) -> list[str]:
    works = simulate("1F1B", p, m).order(stage)
    return [*(w for w in works if w[0] == "F"), *reversed([w for w in works if w[0] == "B"])] if m == 2 else works


@pytest.mark.parametrize(
    "answer", [with_ahead(right_kept), lambda p, m, stage: tuple(simulate("1F1B", p, m).order(stage))]
)
def test_order_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_11.order, answer, capsys, "11.3")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_ahead(lambda p, m, s: m), "that is GPipe"),
        (with_ahead(lambda p, m, s: min(m, s + 1)), "Turned round"),
        (with_ahead(lambda p, m, s: min(m, p - s - 1)), "Too few forwards"),
        (with_ahead(lambda p, m, s: min(m, p - s + 1)), "Too many forwards"),
        (swapped, "alternate"),
        (backwards_reversed, "in the order of the micro-batches"),
        (lambda p, m, stage: with_ahead(right_kept)(p, m, stage)[:-1], "1 works are missing"),
        (lambda p, m, stage: with_ahead(right_kept)(p, m, stage)[::-1], "before its own forward"),
        (lambda p, m, stage: [*with_ahead(right_kept)(p, m, stage), "B0"], "occurs twice"),
        (lambda p, m, stage: [*with_ahead(right_kept)(p, m, stage), f"F{m}"], "do not exist"),
        (lambda p, m, stage: list(range(2 * m)), "list of words"),
    ],
)
def test_order_names_the_mistake(answer: Any, words: str) -> None:
    assert words in said(lesson_11.order, answer)


# ----------------------------------------------------------------------------------------------------------- 11.4: cut


def by_bound(times: list[float], p: int) -> list[int]:
    """Another style: the smallest bound under which filling stage after stage leaves no layer over."""
    n = len(times)
    for bound in sorted({sum(times[a:b]) for a in range(n) for b in range(a + 1, n + 1)}):
        counts, start = [], 0
        for stage in range(p):
            end = start
            while end < n - (p - stage - 1) and sum(times[start : end + 1]) <= bound:
                end += 1
            counts.append(end - start)
            start = end
        if start == n and min(counts) >= 1:
            return counts
    raise AssertionError("the largest bound always fits")


@pytest.mark.parametrize("answer", [best_cut, by_bound, lambda times, p: tuple(best_cut(times, p))])
def test_cut_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_11.cut, answer, capsys, "11.4")
    passes(lesson_11.cut, lambda times, p: [n / 1 for n in answer(times, p)], capsys, "11.4")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (equal_cut, "equal numbers of layers"),
        (greedy_cut, "up to the mean"),
        (lambda times, p: [1] * (p - 1) + [len(times) - p + 1], "another cut is quicker"),
        (lambda times, p: [len(times)], "one for each"),
        (lambda times, p: [0] * (p - 1) + [len(times)], "no layer at all"),
        (lambda times, p: [sum(best_cut(times, p)[: s + 1]) for s in range(p)], "places, not numbers"),
        (lambda times, p: [n + 0.5 for n in best_cut(times, p)], "where a whole number is asked for"),
    ],
)
def test_cut_names_the_mistake(answer: Any, words: str) -> None:
    assert words in said(lesson_11.cut, answer)


# ------------------------------------------------------------------------------------------------- 11.5: fewest_stages


def backwards_search(run: Any, sequences: int, room: int) -> int | None:
    """Another style: from many stages to few, as long as they fit."""
    found = None
    for p in (p for p in (16, 8, 4, 2, 1) if p <= run.model.layers):
        m = sequences // run.micro_batch
        if max(stage_memory(run, "1F1B", p, m, stage).total for stage in range(p)) <= room:
            found = p
    return found


@pytest.mark.parametrize("answer", [fewest_right, backwards_search])
def test_fewest_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_11.fewest_stages, answer, capsys, "11.5")


@pytest.mark.parametrize("words", FEWEST_MISTAKES)
def test_fewest_names_the_mistake(words: str) -> None:
    assert said(lesson_11.fewest_stages, FEWEST_MISTAKES[words]) == words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda run, sequences, room: 3, "not one of 1, 2, 4, 8, 16"),
        (lambda run, sequences, room: None, "You find nothing where"),
        (lambda run, sequences, room: fewest_right(run, sequences, room) or 16, "With 1 GB a stage"),
        (lambda run, sequences, room: {4: 8}.get(p := fewest_right(run, sequences, room) or 0, p) or None,
         "another number is right"),
    ],
)  # fmt: skip
def test_fewest_names_other_mistakes(answer: Any, words: str) -> None:
    assert words in said(lesson_11.fewest_stages, answer)
