"""The checks of lesson 10: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checking import passes, said

from course_utils.checks import lesson_10
from course_utils.checks.lesson_10_labs import (
    ORDER_CASES,
    REQUESTS,
    SEGMENT_MISTAKES,
    handed_out_right,
    late_fits,
    leak_right,
    norm_right,
    report,
    snapshot,
    sweep,
)
from course_utils.units import MiB

# ----------------------------------------------------------------------------------------------------- 10.1: handed_out


def by_cases(size: int) -> dict[str, int]:
    """Another right style, in KiB and with a loop."""
    block = 512
    while block < size:
        block += 512 * max(1, (size - block) // 512)
    if block > MiB:
        return {
            "block": block,
            "segment": 20 * MiB if block < 10 * MiB else (block + 2 * MiB - 1) // (2 * MiB) * 2 * MiB,
        }
    return {"block": block, "segment": 2 * MiB}


def with_segment(mistaken: Callable[[int], int]) -> Any:
    return lambda size: handed_out_right(size) | {"segment": mistaken(size)}


def with_block(mistaken: Callable[[int], int]) -> Any:
    return lambda size: handed_out_right(size) | {"block": mistaken(size)}


def test_handed_out_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_10.handed_out, by_cases, capsys, "10.1")


@pytest.mark.parametrize("message", SEGMENT_MISTAKES)
def test_handed_out_names_the_misconception(message: str) -> None:
    assert said(lesson_10.handed_out, with_segment(SEGMENT_MISTAKES[message])) == message


def test_each_wrong_segment_differs_from_the_right_one_and_from_the_others() -> None:
    found = [tuple(mistaken(size) for size in REQUESTS) for mistaken in SEGMENT_MISTAKES.values()]
    right = tuple(handed_out_right(size)["segment"] for size in REQUESTS)
    assert len({right, *found}) == len(found) + 1


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (with_block(lambda size: size), "multiples of 512"),
        (with_block(lambda size: size // 512 * 512), "has to hold what was asked for"),
        (with_block(lambda size: (size // 512 + 1) * 512), "larger than it needs to be"),
        (with_segment(lambda size: 4 * MiB), "There are three cases"),
        (with_segment(lambda size: 2 if size <= MiB else 20), "MiB where bytes were asked"),
        (lambda size: {"block": 512}, "has no 'segment'"),
        (lambda size: 512, "where a dictionary is asked for"),
        (lambda size: {"block": 512.5, "segment": 1}, "where a whole number is asked for"),
    ],
)
def test_handed_out_explains_the_rest(answer: Any, hint: str) -> None:
    assert hint in said(lesson_10.handed_out, answer)


# ------------------------------------------------------------------------------------------------------ 10.2: lean_norm


def by_squares(gradients: list[torch.Tensor]) -> float:
    return sum(gradient.float().square().sum().item() for gradient in gradients) ** 0.5


def in_place(gradients: list[torch.Tensor]) -> torch.Tensor:
    norm = norm_right(gradients)
    for gradient in gradients:
        gradient.div_(norm)
    return norm


@pytest.mark.parametrize("answer", [norm_right, by_squares])
def test_lean_norm_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_10.lean_norm, answer, capsys, "10.2")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda gs: torch.cat([g.flatten().float() for g in gs]).norm(), "who keeps the copies"),
        (lambda gs: torch.stack([g.norm() for g in [g.float() for g in gs]]).norm(), "who keeps the copies"),
        (lambda gs: torch.stack([g.norm() for g in gs]).norm(), "added up in 16 bits"),
        (lambda gs: torch.stack([g.norm() for g in gs]).norm() if gs[0].dtype == torch.float16 else norm_right(gs),
         "leaves the range of 16 bits"),
        (lambda gs: sum(g.float().norm() for g in gs), "You add the norms"),
        (lambda gs: sum(g.float().norm() for g in gs) / len(gs), "the mean of the norms"),
        (lambda gs: sum(g.float().square().sum() for g in gs), "a root is missing"),
        (lambda gs: max(g.float().norm() for g in gs), "the largest gradient's norm"),
        (lambda gs: norm_right(gs[1:]), "One gradient is missing"),
        (lambda gs: norm_right(gs[:-1]), "One gradient is missing"),
        (lambda gs: 3 * norm_right(gs), "The norm is off"),
        (in_place, "changes the gradients"),
        (lambda gs: None, "returned nothing"),
        (lambda gradients: torch.stack([g.norm() for g in gradients]).norm().item(), "In which format do you add up"),
        (lambda gradients: torch.stack([g.float().norm() for g in gradients]), "You return several numbers"),
    ],
)  # fmt: skip
def test_lean_norm_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_10.lean_norm, answer)


# ------------------------------------------------------------------------------------------------- 10.3, 10.4: counters


def test_the_planted_report_does_not_move_and_the_true_one_does() -> None:
    planted, true = lesson_10.planted_report(), report(lesson_10.process(), "peak allocated")
    assert len(set(planted.values())) == 1
    assert list(true.values()) == sorted(set(true.values()), reverse=True) and true["32"] > 4 * true["4"]


def by_loop(process: Any) -> dict[str, int]:
    found = dict.fromkeys(process.spans, 0)
    for label, (first, last) in process.spans.items():
        for event in range(first, last):
            found[label] = max(found[label], process.replayed.allocated[event])
    return found


def test_peaks_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_10.peaks, by_loop, capsys, "10.3")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda process: report(process, "max_memory_allocated, never reset"), "a maximum since the process began"),
        (lambda process: report(process, "memory_allocated after the step"), "weights and states"),
        (lambda process: report(process, "memory_reserved after the step"), "keeps what the first run took"),
        (lambda process: dict.fromkeys(process.spans, 1), "Some peak is off"),
        (lambda process: {"32": 1}, "lacks '16'"),
        (lambda process: {label: size / 1e6 for label, size in by_loop(process).items()}, "MB where bytes were asked"),
        (lambda process: 3, "where a dictionary is asked for"),
    ],
)
def test_peaks_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_10.peaks, answer)


def by_trying(process: Any, report_: Any) -> str:
    return next(name for name in lesson_10.COUNTERS if report(process, name) == report_)


def accuse(**wrong: str) -> Any:
    """The right answer, but for some counters another."""
    names = {name.split(",")[0].replace(" ", "_"): name for name in lesson_10.COUNTERS}

    def answer(process: Any, report: Any) -> str:
        right = by_trying(process, report)
        return next((other for short, other in wrong.items() if names[short] == right), right) if wrong else right

    return lambda process, report: answer(process, report)


FLAT = "max_memory_allocated, never reset"
KEPT = "memory_reserved after the step"


@pytest.mark.parametrize("number", ["10.4"])
def test_culprit_takes_right_answers(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_10.culprit, lambda process, report: by_trying(process, report), capsys, number)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda process, report: FLAT, "whatever the report says"),
        (accuse(memory_reserved_after_the_step=FLAT), "you take one for the other"),
        (accuse(peak_allocated=KEPT), "an honest report"),
        (accuse(memory_allocated_after_the_step="peak allocated"), "pass as right"),
        (accuse(memory_allocated_after_the_step=KEPT), "from another counter"),
        (accuse(peak_allocated="nvidia-smi"), "not one of COUNTERS"),
        (lambda process, report: None, "returned nothing"),
    ],
)
def test_culprit_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_10.culprit, answer)


def test_where_batches_grow_a_maximum_never_reset_is_right() -> None:
    growing = sweep((4, 8, 32))
    assert report(growing, FLAT) == report(growing, "peak allocated") != report(growing, KEPT)


# ----------------------------------------------------------------------------------------------------- 10.5: fragmented


def filled(capacity: int, size: int, keep: Callable[[int], bool], late: int) -> list[tuple[int, str]]:
    made = [(size, f"t{index}") for index in range(capacity // size)]
    return [*made, *((-size, name) for index, (size, name) in enumerate(made) if not keep(index)), (late, "late")]


@pytest.mark.parametrize(
    "answer",
    [
        lambda capacity: filled(capacity, 4 * MiB, lambda index: index % 2 == 0, 8 * MiB),
        lambda capacity: tuple(filled(capacity, 4 * MiB, lambda index: index % 5 in (0, 2, 4), 5 * MiB)),
        lambda capacity: filled(capacity, 2 * MiB, lambda index: index % 10 == 0, 20 * MiB),
        lambda capacity: [(size / 1, name) for size, name in filled(capacity, 4 * MiB, lambda k: k % 2 == 0, 8 * MiB)],
        lambda capacity: [
            [np.int64(size), name] for size, name in filled(capacity, 4 * MiB, lambda k: k % 2 > 0, 8 * MiB)
        ],
    ],
)
def test_fragmented_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_10.fragmented, answer, capsys, "10.5")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda capacity: filled(capacity, 4 * MiB, lambda index: index % 2 == 0, 4 * MiB), "everything fits"),
        (lambda capacity: filled(capacity, 4 * MiB, lambda index: index % 10 > 0, 8 * MiB), "no more than 30 %"),
        (lambda capacity: filled(capacity, 4 * MiB, lambda index: index % 2 == 0, capacity), "a full GPU"),
        (
            lambda capacity: filled(2 * capacity, 4 * MiB, lambda index: index % 2 == 0, 8 * MiB),
            "before the last request",
        ),
        (lambda capacity: filled(capacity, 4 * MiB, lambda index: index % 10 > 4, 8 * MiB), "everything fits"),
        (lambda capacity: [], "is empty"),
        (lambda capacity: [(-4, "a")], "These are no events"),
        (lambda capacity: [4 * MiB], "These are no events"),
        (lambda capacity: {"a": 4}, "where a list or a tuple is asked for"),
    ],
)
def test_fragmented_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_10.fragmented, answer)


# ---------------------------------------------------------------------------------------------------------- 10.6: order


def grouped(tensors: Any, long_first: bool = True) -> list[str]:
    long = [name for name, _, lives_long in tensors if lives_long]
    short = [name for name, _, lives_long in tensors if not lives_long]
    return [*long, *short] if long_first else [*short, *long]


def test_order_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_10.order, grouped, capsys, "10.6")


def test_in_the_order_of_the_step_each_case_fails_and_grouped_it_fits() -> None:
    for tensors, late, capacity in ORDER_CASES:
        assert not late_fits(tensors, [name for name, _, _ in tensors], late, capacity)
        assert late_fits(tensors, grouped(tensors), late, capacity)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda tensors: [name for name, _, _ in tensors], "the order of the step"),
        (lambda tensors: [name for name, _, _ in reversed(tensors)], "as mixed as before"),
        (lambda tensors: [name for name, _, _ in sorted(tensors, key=lambda t: t[1])], "You sort by size."),
        (lambda tensors: [name for name, _, _ in sorted(tensors, key=lambda t: -t[1])], "You sort by size, turned"),
        (lambda tensors: grouped(tensors)[:-1], "Each tensor has to be made once"),
        (lambda tensors: tensors, "Return names alone"),
        (lambda tensors: sorted((name for name, _, _ in tensors), key=lambda name: name[1:]), "still fails"),
    ],
)
def test_order_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_10.order, answer)


# ----------------------------------------------------------------------------------------------------------- 10.7: leak


def living(content: Any) -> list[Any]:
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    return [block for block in blocks if block["state"] == "active_allocated"]


def by_counting(snapshot: Any) -> str | None:
    """Another right style: sorted pairs of module and step."""
    pairs = {(b["frames"][0]["filename"], b["frames"][1]["filename"].split()[1]) for b in living(snapshot)}
    names = [name for name, _ in pairs]
    return next((name for name in sorted(names) if names.count(name) >= 3), None)


def largest(snapshot: Any) -> str:
    return max(living(snapshot), key=lambda block: block["size"])["frames"][0]["filename"]


def of_two_steps(snapshot: Any) -> str | None:
    pairs = {(b["frames"][0]["filename"], b["frames"][1]["filename"]) for b in living(snapshot)}
    names = sorted(name for name, _ in pairs)
    return next((name for name in names if names.count(name) >= 2), None)


def test_leak_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_10.leak, by_counting, capsys, "10.7")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda snapshot: "last", "whatever the snapshot says"),
        (largest, "You find a leak where there is none"),
        (of_two_steps, "You find a leak where there is none"),
        (lambda snapshot: leak_right(snapshot) and of_two_steps(snapshot), "does not pile up"),
        (lambda snapshot: leak_right(snapshot) or "first.weight", "You find a leak where there is none"),
        (lambda snapshot: None if leak_right(snapshot) == "last" else leak_right(snapshot), "You find nothing"),
        (lambda snapshot: leak_right(snapshot) and f"addmm in {leak_right(snapshot)}", "is no module"),
        (lambda snapshot: leak_right(snapshot) and f"exp_avg of {leak_right(snapshot)}.weight", "made in one step"),
        (lambda snapshot: 3, "where a text or None is asked for"),
    ],
)
def test_leak_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_10.leak, answer)


def test_the_example_is_a_snapshot_of_five_steps() -> None:
    steps = {block["frames"][1]["filename"].split()[1] for block in living(lesson_10.example_snapshot())}
    assert steps == {"0", "1", "2", "3", "4", "5"} and leak_right(snapshot(None)) is None
