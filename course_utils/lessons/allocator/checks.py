"""Checks of lesson 10, "Allocator and fragmentation": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from course_utils.allocator.replay import Replay, replay
from course_utils.interactive.feedback import (
    call,
    call_or_none,
    entries,
    exercise,
    expect,
    fail,
    in_other_form,
    of_kind,
    unit_slip,
)
from course_utils.units import MiB

from .buffers import taken_by
from .labs import (
    BIG,
    BLOCK_MISTAKES,
    CAPACITIES,
    COUNTERS,
    ENOUGH_FREE,
    LEAKS,
    NORM_LIMIT,
    ORDER_CASES,
    REQUESTS,
    SEGMENT_MISTAKES,
    Tensors,
    gradients,
    handed_out_right,
    late_fits,
    leak_right,
    leak_steps,
    norm_right,
    processes,
    report,
    snapshot,
    sweep,
)
from .traces import Process

__all__ = [
    "COUNTERS",
    "culprit",
    "example_snapshot",
    "fragmented",
    "handed_out",
    "leak",
    "lean_norm",
    "order",
    "peaks",
    "planted_report",
    "process",
]

# ---------------------------------------------------------------------------------------------------- 10.1: handed_out


@exercise("10.1", "From request to segment, from segment to block: two roundings, and a rest too small to split off.")
def handed_out(answer: Any) -> None:
    """`answer(size)` is a dictionary: the block's and the segment's bytes for a first request of `size` bytes."""
    *got, again = [
        entries(call(answer, size=size, returns=Mapping), ("block", "segment"), int) for size in (*REQUESTS, 1)
    ]
    expect(again == got[0], "Asked again for the same size, your function answers differently: each call is a fresh "
           "process.")  # fmt: skip
    right = [handed_out_right(size) for size in REQUESTS]
    for size, mine, true in zip(REQUESTS, got, right, strict=True):
        slip = unit_slip(mine["segment"], true["segment"])
        expect(slip is None or mine["segment"] == true["segment"], f"{slip}")
        expect(mine["block"] >= size, "A block has to hold what was asked for: round up.")
        expect(mine["block"] % 512 == 0, "Blocks are multiples of 512 bytes.")
    segments, blocks = [mine["segment"] for mine in got], [mine["block"] for mine in got]
    if segments != [true["segment"] for true in right]:
        for message, mistaken in SEGMENT_MISTAKES.items():
            expect(segments != [mistaken(size) for size in REQUESTS], message)
        fail(
            "Some segment is off. There are three cases for the rounded request: up to 1 MiB, under 10 MiB, and more. "
            "Which is which?"
        )
    for message, mistaken in BLOCK_MISTAKES.items():
        expect(blocks != [mistaken(size) for size in REQUESTS], message)
    pairs = [(mine, true["block"]) for mine, true in zip(blocks, right, strict=True)]
    expect(
        all(mine <= true for mine, true in pairs),
        "Some block is larger than it needs to be: the next multiple of 512, and the rest only if that is not split "
        "off.",
    )
    expect(
        all(mine >= true for mine, true in pairs),
        "Some block is too small: a rest that is not split off belongs to it. When is one split off?",
    )


# ----------------------------------------------------------------------------------------------------- 10.2: lean_norm


@exercise("10.2", "The same norm, in fp32, and never more than one gradient's copy at a time.")
def lean_norm(answer: Any) -> None:
    """`answer(gradients)` is the norm of all gradients together, computed in fp32 without a buffer for all of them."""
    for dtype, factor in ((torch.bfloat16, 1.0), (torch.float16, BIG)):
        tensors = gradients(dtype, factor)
        before = [tensor.clone() for tensor in tensors]
        got = call(answer, tensors, returns=(Real, torch.Tensor), finite=False, may_change=(0,))
        untouched = len(tensors) == len(before) and all(map(torch.equal, before, tensors))
        expect(
            untouched,
            "Your function changes the gradients, or their list. It is to look at them only: the optimizer needs them.",
        )
        one = not isinstance(got, torch.Tensor) or got.numel() == 1
        expect(one, "You return several numbers. One was asked for: the norm of all gradients together.")
        _check_norm(float(got), tensors)
        _, taken = taken_by(answer, tensors)
        expect(
            taken <= NORM_LIMIT,
            "The norm is right, but at some moment far more than one gradient in fp32 is there: who keeps the copies?",
        )


def _check_norm(got: float, tensors: Sequence[torch.Tensor]) -> None:
    right = float(norm_right(tensors))
    expect(
        math.isfinite(got),
        "Your norm of large gradients in fp16 is not finite: a sum of squares leaves the range of 16 bits. In which "
        "format do you add up?",
    )
    if math.isclose(got, right, rel_tol=1e-4):
        return
    norms = [float(tensor.float().norm()) for tensor in tensors]
    mistakes = {
        "You add the norms. The norm of all is not their sum: what adds up is squares.": sum(norms),
        "That is the square of the norm: a root is missing.": right**2,
        "That is the largest gradient's norm alone.": max(norms),
        "One gradient is missing: the first or the last.": min(
            (math.sqrt(right**2 - norms[index] ** 2) for index in (0, -1)), key=lambda norm: abs(norm - got)
        ),
        "That is the mean of the norms. What adds up is squares.": sum(norms) / len(norms),
    }
    for message, mistaken in mistakes.items():
        expect(not math.isclose(got, mistaken, rel_tol=1e-4), message)
    expect(
        not math.isclose(got, right, rel_tol=1e-2),
        "Nearly right, in the first digits only: that is a norm added up in 16 bits. In which format do you add up?",
    )
    fail("The norm is off: the root of the sum of all squares of all gradients.")


# ------------------------------------------------------------------------------------------------ 10.3, 10.4: counters


def process() -> Process:
    """One process that has trained with one batch size after the other."""
    return sweep()


def planted_report() -> dict[str, int]:
    """What a colleague reported of it."""
    return report(sweep(), "max_memory_allocated, never reset")


PEAK_HINTS = {
    "max_memory_allocated, never reset": "Your figures are one: a maximum since the process began. Each batch size "
    "has a span of its own.",
    "memory_allocated after the step": "That is what is left when a run has ended: weights and states. Where was it "
    "fullest?",
    "memory_reserved after the step": "That is `reserved`, which keeps what the first run took. Which curve knows "
    "tensors?",
}


@exercise("10.3", "Each batch size by its own peak: the counter for the question.")
def peaks(answer: Any) -> None:
    """`answer(process)` maps each label to the most bytes allocated at once during its run."""
    visible = report(sweep(), "peak allocated")
    for given in processes():
        got = call(answer, process=given, returns=Mapping)
        missing = [label for label in given.spans if label not in got]
        expect(not missing, f"Your report lacks {', '.join(map(repr, missing))}: its keys are those of process.spans.")
        mine = {label: of_kind(got[label], Real, f"The peak of {label} is") for label in given.spans}
        right = report(given, "peak allocated")
        if mine == right:
            continue
        slip = unit_slip(*(next(iter(one.values())) for one in (mine, right)))
        expect(slip is None, f"{slip}")
        for counter, message in PEAK_HINTS.items():
            expect(mine != report(given, counter), message)
        expect(
            mine != {label: visible.get(label) for label in mine},
            "Those are the peaks of the process above, and your function was given another: compute them from its "
            "argument.",
        )
        fail("Some peak is off: for each label, cut `allocated` to its span and take the maximum.")


@exercise("10.4", "A report that does not move tells which counter it read.")
def culprit(answer: Any) -> None:
    """`answer(process, report)` is the name of the counter, one of COUNTERS, that gives this report."""
    cases = [(given, name) for given in processes() for name in COUNTERS]
    got = [call(answer, process=given, report=report(given, name), returns=str) for given, name in cases]
    unknown = sorted({name for name in got if name not in COUNTERS})
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of COUNTERS.")
    expect(len(set(got)) > 1, "You accuse the same counter whatever the report says.")
    for mine, (given, name) in zip(got, cases, strict=True):
        if report(given, mine) == report(given, name):  # where batches grow, two counters agree
            continue
        if {mine, name} == {"max_memory_allocated, never reset", "memory_reserved after the step"}:
            fail("Two counters never fall within a process, and you take one for the other: compare the bytes.")
        if mine != "peak allocated" and name == "peak allocated":
            fail("You accuse an honest report: one in which each batch size has its own peak.")
        if mine == "peak allocated":
            fail("You let a wrong report pass as right: is it the peak of each batch size, byte for byte?")
        fail("Some report is from another counter: what would each one have said? Compute all four, then compare.")


# ---------------------------------------------------------------------------------------------------- 10.5: fragmented


@exercise("10.5", "Out of memory with over 30 % free: you know how to make it, so you know how it is made.")
def fragmented(answer: Any) -> None:
    """`answer(capacity)` is a list of events of which the last, a request, fails with more than 30 % free."""
    for capacity in CAPACITIES:
        events = [_in_whole_bytes(event) for event in call(answer, capacity=capacity, returns=(list, tuple))]
        expect(events, "Your list is empty.")
        _check_failure(_replayed(events, capacity), events, capacity)


def _in_whole_bytes(event: Any) -> Any:
    """An event with its bytes as an int, where they only look different, as 4194304.0 does."""
    pair = isinstance(event, (tuple, list)) and len(event) == 2
    return (in_other_form(event[0], (int,)), event[1]) if pair else event


def _replayed(events: list[Any], capacity: int) -> Replay:
    try:
        return replay(events, capacity)
    except (TypeError, ValueError) as error:
        fail(f"These are no events for a GPU of {capacity // MiB} MiB: {error}")


def _check_failure(result: Replay, events: Sequence[Any], capacity: int) -> None:
    gpu = f"On a GPU of {capacity // MiB} MiB"
    failure = result.failure
    if failure is None:
        fail(f"{gpu} everything fits, the last request included.")
    expect(
        len(result) == len(events) - 1, f"{gpu} memory runs out before the last request, at event {len(result) + 1}."
    )
    expect(
        failure.requested <= failure.free,
        f"{gpu} the last request asks for more than is free in all: that is a full GPU, no fragmented one.",
    )
    expect(
        failure.free_share > ENOUGH_FREE,
        f"{gpu} it fails, but no more than 30 % is free then. Leave larger holes, or more of them.",
    )
    expect(
        failure.requested < failure.free,
        f"{gpu} the last request asks for all that is free. Let it fail although more is free than it asks for.",
    )


# --------------------------------------------------------------------------------------------------------- 10.6: order


@exercise("10.6", "Nothing moved, nothing shrunk: only what lives alike now lies together.")
def order(answer: Any) -> None:
    """`answer(tensors)` is the names in the order in which to make them, so that the late request fits."""
    orders = []
    for tensors, _, _ in ORDER_CASES:
        got = list(call(answer, tensors=list(tensors), returns=(list, tuple)))
        names = [name for name, _, _ in tensors]
        expect(all(isinstance(name, str) for name in got), "Return names alone, the first item of each tensor.")
        expect(sorted(got) == sorted(names), "Each tensor has to be made once: some name is missing, twice, or new.")
        orders.append(got)
    if all(late_fits(tensors, got, *sizes) for (tensors, *sizes), got in zip(ORDER_CASES, orders, strict=True)):
        return
    for message, key in ORDER_MISTAKES.items():
        expect(orders != [_names(sorted(tensors, key=key)) for tensors, _, _ in ORDER_CASES], message)
    expect(orders != [_names(tensors[::-1]) for tensors, _, _ in ORDER_CASES], "Turned round it is as mixed as before.")
    short_first = all(_short_first(tensors, got) for (tensors, _, _), got in zip(ORDER_CASES, orders, strict=True))
    expect(
        not short_first,
        "You sort by lifetime, the short-lived ones first, and the late request still fails: best fit puts long-lived "
        "tensors into what is left of their segments, and there they stay.",
    )
    fail("The late request still fails: short and long lives share segments. How few such segments can there be?")


ORDER_MISTAKES: dict[str, Callable[[tuple[str, int, bool]], int]] = {
    "That is the order of the step, in which it fails.": lambda tensor: 0,
    "You sort by size. What matters is how long a tensor lives.": lambda tensor: tensor[1],
    "You sort by size, turned round. What matters is how long a tensor lives.": lambda tensor: -tensor[1],
}


def _names(tensors: Tensors) -> list[str]:
    return [name for name, _, _ in tensors]


def _short_first(tensors: Tensors, order: Sequence[str]) -> bool:
    long = {name for name, _, lives_long in tensors if lives_long}
    lives = [name in long for name in order]
    return lives == sorted(lives)


# ---------------------------------------------------------------------------------------------------------- 10.7: leak


def example_snapshot() -> dict[str, Any]:
    """A snapshot to look at: one of the hidden ones."""
    return snapshot(LEAKS[0])


@exercise("10.7", "Not the largest, not the oldest: the one that is there from every step.")
def leak(answer: Any) -> None:
    """`answer(snapshot)` is the module whose tensors pile up, or None."""
    contents = [snapshot(module) for module in LEAKS]
    got = [call_or_none(answer, snapshot=content, returns=str) for content in contents]
    if got == [leak_right(content) for content in contents]:
        return
    expect(len(set(got)) > 1, "You give the same answer whatever the snapshot says. The hidden ones differ.")
    for mine, content in sorted(zip(got, contents, strict=True), key=lambda both: leak_right(both[1]) is not None):
        right, steps = leak_right(content), leak_steps(content)
        if mine == right:
            continue
        if right is None:
            fail(
                "You find a leak where there is none. Gradients of the last step share a name with weights, and a "
                "program may keep tensors of one step: from how many steps are a leak's blocks?"
            )
        if mine is None:
            fail(
                "You find nothing where something piles up: count, for each module, the steps its living blocks are of."
            )
        expect(mine in steps, f"{mine!r} is no module of a living block: it stands in frames[0]['filename'].")
        if len(steps[mine]) == 1:
            fail(
                "What you name was made in one step and kept, as states are, or an output for a plot. What is made in "
                "every step?"
            )
    fail("What you name is alive, but it does not pile up: from how many steps are its blocks?")
