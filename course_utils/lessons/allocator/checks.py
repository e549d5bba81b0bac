"""Checks of lesson 10, "Allocator and fragmentation": each names the misconception, never the answer."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from numbers import Real
from operator import eq
from typing import Any

import torch
from torch import nn

from course_utils.allocator.policy import CachingAllocator
from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import snapshot_of
from course_utils.interactive.feedback import (
    Mistakes,
    alike,
    call,
    entries,
    exercise,
    expect,
    fail,
    recognized,
    unit_slip,
)
from course_utils.measuring import measure
from course_utils.measuring.tracker import Tracker
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import KiB, MiB, round_up

from .traces import Process, in_one_process

# ---------------------------------------------------------------------------------------------------- 10.1: handed_out

REQUESTS = (1, 512, 513, 700 * KiB, MiB, MiB + 1, 5 * MiB, 10 * MiB - 512, 10 * MiB - 511, 10 * MiB, 11 * MiB - 512,
            11 * MiB, 11 * MiB + 1, 12 * MiB + 5, 786 * MiB + 3, 787 * MiB + 3)  # fmt: skip
"""Bytes. Of a segment for a large block up to 2 MiB are left over; from 11 MiB on it is too little to be split off."""


def handed_out_right(name: str, size: int) -> int:
    """Bytes of the "block" or of the "segment" for a first request."""
    allocator = CachingAllocator()
    address = allocator.malloc(size)
    return allocator.block_size(address) if name == "block" else allocator.reserved


def _segment(size: int, small: int = MiB, large: int = 10 * MiB, step: int = 2 * MiB) -> int:
    """The segment for a first request, by the two limits and the step of large segments."""
    block = round_up(size)
    return 2 * MiB if block <= small else 20 * MiB if block < large else round_up(block, step)


def _unsplit(size: int, limit: int) -> int:
    """The block of a first request if a rest has to be more than `limit` bytes to be split off in the large pool."""
    block, segment = round_up(size), _segment(size)
    return block if block <= MiB or segment - block > limit else segment


BLOCK_MISTAKES: Mistakes = {
    "Your block is the request, rounded. But does the allocator split every segment? A small rest stays.": round_up,
    "Your block is the whole segment. The allocator splits it, and the rest is free.": _segment,
    "A rest of 1 MiB exactly is not split off.": partial(_unsplit, limit=MiB - 1),
    "You keep large rests with the block: what is larger than 1 MiB is split off.": partial(_unsplit, limit=2 * MiB),
}
SEGMENT_MISTAKES: Mistakes = {
    "You give each block a segment of its own size. Small blocks share segments.": round_up,
    "Large segments come in multiples of 2 MiB.": partial(_segment, step=512),
    "A block of 1 MiB exactly still belongs to the small pool.": partial(_segment, small=MiB - 512),
    "A block of 10 MiB exactly gets a segment of its own.": partial(_segment, large=10 * MiB + 512),
    "You choose by the request. The *block* decides, and it is larger.": (
        lambda size: 2 * MiB if size <= MiB else 20 * MiB if size < 10 * MiB else round_up(size, 2 * MiB)
    ),
    "The small pool takes 2 MiB at once; you give it the large pool's 20.": partial(_segment, small=0),
    "Large blocks get a segment of their own; 20 MiB are for those under 10 MiB.": partial(_segment, step=20 * MiB),
}


@exercise("10.1", "From request to segment, from segment to block: two roundings, and a rest too small to split off.")
def handed_out(answer: Any) -> None:
    """`answer(size)` is a dictionary: the block's and the segment's bytes for a first request of `size` bytes."""
    found = [call(answer, size=size, returns=Mapping) for size in REQUESTS]
    got = [entries(one, ("block", "segment"), int) for one in found]
    slip = unit_slip(got[0]["segment"], handed_out_right("segment", REQUESTS[0]))
    expect(slip is None, f"{slip}")
    requests = [(size,) for size in REQUESTS]
    for name, mistakes, otherwise in (
        ("segment", SEGMENT_MISTAKES, "There are three cases for the rounded request: to 1 MiB, under 10, and more."),
        ("block", BLOCK_MISTAKES, "It is a multiple of 512 bytes, with any rest that is not split off."),
    ):
        mine, right = [both[name] for both in got], partial(handed_out_right, name)
        recognized(mine, requests, right, mistakes, f"Some {name} is off. {otherwise}", eq)


# ----------------------------------------------------------------------------------------------------- 10.2: lean_norm

NORM_SIZES = (300_000, 1_000, 150_000, 300_000, 7, 250_000, 300_000)
NORM_LIMIT = round(2.2 * 4 * max(NORM_SIZES))
"""Bytes: one gradient in fp32, its square, and some room; all gradients in fp32 are more than twice that."""

BIG = 200.0  # factor of a second set of gradients, whose squares no 16-bit float holds


def _norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    return [float(tensor.float().norm()) for tensor in tensors]


NORM_MISTAKES: Mistakes = {
    "You add the norms. The norm of all is not their sum: what adds up is squares.": lambda gs: sum(_norms(gs)),
    "That is the square of the norm: a root is missing.": lambda gs: math.hypot(*_norms(gs)) ** 2,
    "That is the largest gradient's norm alone.": lambda gs: max(_norms(gs)),
    "One gradient is missing: the first or the last.": lambda gs: math.hypot(*_norms(gs)[1:]),  # equally large
    "That is the mean of the norms. What adds up is squares.": lambda gs: sum(_norms(gs)) / len(gs),
}


def taken_by(operation: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return the result of `operation(*arguments)`, and the most bytes that it had allocated at once on the CPU.

    Its arguments are not counted; sizes are whole blocks of 512 bytes, as on a GPU.
    """
    with torch.autograd.set_multithreading_enabled(False), Tracker("cpu") as tracker:
        result = operation(*arguments)
        peak = tracker.at(tracker.peak_event()).total if tracker.events else 0
    return result, peak


@exercise("10.2", "The same norm, in fp32, and never more than one gradient's copy at a time.")
def lean_norm(answer: Any) -> None:
    """`answer(gradients)` is the norm of all gradients together, computed in fp32 without a buffer for all of them."""
    for dtype, factor in ((torch.bfloat16, 1.0), (torch.float16, BIG)):
        generator = torch.Generator().manual_seed(10)
        tensors = [(factor * torch.randn(size, generator=generator)).to(dtype) for size in NORM_SIZES]
        before = [tensor.clone() for tensor in tensors]
        got = call(answer, tensors, returns=(Real, torch.Tensor), finite=False, may_change=(0,))
        same = len(tensors) == len(before) and all(map(torch.equal, before, tensors))
        expect(same, "Your function changes the gradients, or their list: the optimizer needs them as they are.")
        one = not isinstance(got, torch.Tensor) or got.numel() == 1
        expect(one, "You return several numbers. One was asked for: the norm of all gradients together.")
        _check_norm(float(got), tensors)
        _, taken = taken_by(answer, tensors)
        expect(taken <= NORM_LIMIT, "The norm is right, but takes more than one fp32 gradient: who keeps the copies?")


def _check_norm(got: float, tensors: list[torch.Tensor]) -> None:
    expect(math.isfinite(got), "Your norm is not finite: a sum of squares leaves the range of 16 bits. Add up in fp32.")
    right = math.hypot(*_norms(tensors))
    if not recognized([got], [(tensors,)], lambda _: right, NORM_MISTAKES, same=partial(alike, tolerance=1e-4)):
        near = math.isclose(got, right, rel_tol=1e-2)
        expect(not near, "Nearly right, in the first digits only: that is a norm added up in 16 bits.")
        fail("The norm is off: the root of the sum of all squares of all gradients.")


# ------------------------------------------------------------------------------------------------ 10.3, 10.4: counters

SMALL = TransformerConfig("small", "gpt2", 2, hidden=128, heads=4, vocab=4000, max_positions=128)


@cache
def sweep(batches: tuple[int, ...] = (32, 16, 8, 4), seq_len: int = 64) -> Process:
    """A small GPT trained with one batch size after the other in one process, on the CPU, through one allocator."""
    runs = {str(batch): TrainingRun(SMALL, batch, seq_len, "fp32", attention="eager") for batch in batches}
    return in_one_process({label: measure(run, source="cpu") for label, run in runs.items()})


process = sweep


def _processes() -> tuple[Process, Process]:
    """The process that learners see, where batches fall, and a hidden one, where they grow. No peak is in both."""
    return sweep(), sweep((4, 8, 32), seq_len=48)


PEAK, FLAT = "peak allocated", "max_memory_allocated, never reset"
AFTER, KEPT = "memory_allocated after the step", "memory_reserved after the step"
COUNTERS = (PEAK, FLAT, AFTER, KEPT)


def shown(counter: str, process: Process, label: str) -> int:
    """Bytes that a counter shows for the run with that label."""
    curves, (first, last) = process.replayed, process.spans[label]
    if counter in (PEAK, FLAT):
        return max(curves.allocated[first if counter == PEAK else 0 : last])
    return (curves.allocated if counter == AFTER else curves.reserved)[last - 1]


PEAK_MISTAKES: Mistakes = {
    "Your figures are one: a maximum since the process began. Each batch size has its span.": partial(shown, FLAT),
    "That is what is left when a run has ended: weights and states. Where was it fullest?": partial(shown, AFTER),
    "That is `reserved`, which keeps what the first run took. Which curve knows tensors?": partial(shown, KEPT),
    "Those are the peaks of the process above: use the argument.": lambda _, label: report(sweep(), PEAK).get(label),
}


def report(process: Process, counter: str) -> dict[str, int]:
    """Bytes by label, of somebody who reads this counter once for each batch size."""
    return {label: shown(counter, process, label) for label in process.spans}


def planted_report() -> dict[str, int]:
    """A colleague's report of that process."""
    return report(sweep(), FLAT)


@exercise("10.3", "Each batch size by its own peak: the counter for the question.")
def peaks(answer: Any) -> None:
    """`answer(process)` maps each label to the most bytes allocated at once during its run."""
    for given in _processes():
        mine = list(entries(call(answer, process=given, returns=Mapping), list(given.spans)).values())
        cases = [(given, label) for label in given.spans]
        slip = unit_slip(mine[0], shown(PEAK, *cases[0]))
        expect(slip is None, f"{slip}")
        otherwise = "Some peak is off: for each label, cut `allocated` to its span and take the maximum."
        recognized(mine, cases, partial(shown, PEAK), PEAK_MISTAKES, otherwise, eq)


@exercise("10.4", "A report that does not move tells which counter it read.")
def culprit(answer: Any) -> None:
    """`answer(process, report)` is the name of the counter, one of COUNTERS, that gives this report."""
    cases = [(given, name) for given in _processes() for name in COUNTERS]
    got = [call(answer, process=given, report=report(given, name), returns=str) for given, name in cases]
    unknown = sorted({name for name in got if name not in COUNTERS})
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of COUNTERS.")
    expect(len(set(got)) > 1, "You accuse the same counter whatever the report says.")
    for mine, (given, name) in zip(got, cases, strict=True):
        if report(given, mine) == report(given, name):  # where batches grow, two counters agree
            continue
        if {mine, name} == {FLAT, KEPT}:
            fail("Two counters never fall within a process, and you take one for the other: compare the bytes.")
        expect(name != PEAK, "You accuse an honest report: one in which each batch size has its own peak.")
        expect(mine != PEAK, "You let a wrong report pass as right: is it the peak of each batch size, byte for byte?")
        fail("Some report is from another counter: what would each one have said? Compute all four, then compare.")


# ---------------------------------------------------------------------------------------------------- 10.5: fragmented


@exercise("10.5", "Out of memory with over 30 % free: you know how to make it, so you know how it is made.")
def fragmented(answer: Any) -> None:
    """`answer(capacity)` is a list of events; the last, a request, fails with more than 30 % free."""
    for capacity in (80 * MiB, 200 * MiB, 640 * MiB):
        events = call(answer, capacity=capacity, returns=(list, tuple))
        expect(events, "Your list is empty.")
        try:
            result = replay(events, capacity)
        except (TypeError, ValueError) as error:
            fail(f"These are no events for a GPU of {capacity // MiB} MiB: {error}")
        gpu, failure = f"On a GPU of {capacity // MiB} MiB", result.failure
        if failure is None:
            fail(f"{gpu} everything fits, the last request included.")
        last = len(result) == len(events) - 1
        expect(last, f"{gpu} memory runs out before the last request, at event {len(result) + 1}.")
        full = failure.requested > failure.free
        expect(not full, f"{gpu} the last request is larger than all that is free: a full GPU, no fragmented one.")
        expect(failure.free_share > 0.30, f"{gpu} it fails, but no more than 30 % is free then. Leave larger holes.")
        expect(failure.requested < failure.free, f"{gpu} the last request asks for all that is free. Let it ask less.")


# --------------------------------------------------------------------------------------------------------- 10.6: order

Tensors = list[tuple[str, int, bool]]
"""Name, bytes, and True for one that lives long."""


def _tensors(pattern: str, sizes: Sequence[int]) -> Tensors:
    """One tensor for each letter, L for a long life and s for a short one; sizes in MiB, over and over."""
    return [(f"t{index}", sizes[index % len(sizes)] * MiB, letter == "L") for index, letter in enumerate(pattern)]


ORDER_CASES: tuple[tuple[Tensors, int, int], ...] = (
    (_tensors("LsLsL" * 4, (6, 2, 7, 4)), 20 * MiB, 100 * MiB),
    (_tensors("LsLsL" * 4, (4,)), 8 * MiB, 80 * MiB),
    (_tensors("sLLsL" * 3, (4,)), 24 * MiB, 80 * MiB),
    (_tensors("sL" * 8, (9, 2)), 60 * MiB, 120 * MiB),
)
"""Tensors in the order of the step, the late request, and the GPU's memory, both in bytes."""


def _sorted_by(key: Callable[[tuple[str, int, bool]], Any]) -> Callable[[Tensors, int, int], list[str]]:
    return lambda tensors, late, capacity: [name for name, _, _ in sorted(tensors, key=key)]


ORDER_MISTAKES: Mistakes = {
    "That is the order of the step, in which it fails.": _sorted_by(lambda tensor: 0),
    "You sort by size. What matters is how long a tensor lives.": _sorted_by(lambda tensor: tensor[1]),
    "You sort by size, turned round. What matters is how long a tensor lives.": _sorted_by(lambda tensor: -tensor[1]),
    "Turned round it is as mixed as before.": lambda tensors, late, capacity: [name for name, _, _ in tensors[::-1]],
}


@exercise("10.6", "Nothing moved, nothing shrunk: only what lives alike now lies together.")
def order(answer: Any) -> None:
    """`answer(tensors)` is the names in the order in which to make them, so that the late request fits."""
    orders = []
    for tensors, _, _ in ORDER_CASES:
        got = list(call(answer, tensors=list(tensors), returns=(list, tuple)))
        expect(all(isinstance(name, str) for name in got), "Return names alone, the first item of each tensor.")
        complete = sorted(got) == sorted(name for name, _, _ in tensors)
        expect(complete, "Each tensor has to be made once: some name is missing, twice, or new.")
        orders.append(got)
    if all(late_fits(got, *case) for got, case in zip(orders, ORDER_CASES, strict=True)):
        return
    recognized(orders, ORDER_CASES, _sorted_by(lambda tensor: not tensor[2]), ORDER_MISTAKES, same=eq)
    short_first = all(_short_first(got, tensors) for got, (tensors, *_) in zip(orders, ORDER_CASES, strict=True))
    expect(not short_first, "You sort by lifetime, the short-lived ones first: long-lived ones fill up their segments.")
    fail("The late request still fails: short and long lives share segments. How few such segments can there be?")


def late_fits(order: Sequence[str], tensors: Tensors, late: int, capacity: int) -> bool:
    """True if a late request fits when the tensors are made in this order and the short-lived ones are freed."""
    size = {name: bytes_ for name, bytes_, _ in tensors}
    made = [(size[name], name) for name in order]
    freed = [(-bytes_, name) for name, bytes_, long in tensors if not long]
    return replay([*made, *freed, (late, "late")], capacity).failure is None


def _short_first(order: Sequence[str], tensors: Tensors) -> bool:
    lives = [name in {name for name, _, lives_long in tensors if lives_long} for name in order]
    return lives == sorted(lives)


# ---------------------------------------------------------------------------------------------------------- 10.7: leak

LEAKS: tuple[str | None, ...] = ("last", None, "first")
"""For each hidden snapshot the module whose tensors pile up in it; None where none do."""


def _leaky_step(leak: str | None, kept: list[Any]) -> Callable[..., None]:
    """A step that keeps what `leak` makes, and in step 3 alone something of another module, as a decoy."""
    numbers = count(1)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = model.first(x)
        active = model.act(hidden)
        output = model.last(active)
        if next(numbers) == 3:
            decoys = {"last": [hidden], None: [active]}.get(leak) or [model.last(active) for _ in range(6)]
            kept.extend(tensor.detach() for tensor in decoys)
        output.square().mean().backward()
        optimizer.step()
        if leak is not None:
            kept.append({"first": hidden, "last": output}[leak].detach())

    return step


@cache
def snapshot(leak: str | None) -> dict[str, Any]:
    """Five steps with one of the leaks, traced on the CPU, as a snapshot such as `read_snapshot` gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10)
        layers: dict[str, nn.Module] = {"first": nn.Linear(96, 640), "act": nn.GELU(), "last": nn.Linear(640, 48)}
        model, x = nn.Sequential(OrderedDict(layers)), torch.randn(512, 96)
    optimizer = torch.optim.AdamW(model.parameters())
    step = _leaky_step(leak, [])
    measured = measure(step=step, model=model, optimizer=optimizer, batch=x, steps=5, source="cpu")
    return snapshot_of(replay(measured))


def example_snapshot() -> dict[str, Any]:
    """A snapshot to look at: one of the hidden ones."""
    return snapshot(LEAKS[0])


def leak_right(content: dict[str, Any]) -> str | None:
    """The module whose living blocks come from the most steps, three at least."""
    steps = leak_steps(content)
    module = max(steps, key=lambda name: len(steps[name]))
    return module if len(steps[module]) > 2 else None


def leak_steps(content: dict[str, Any]) -> dict[str, set[str]]:
    """For each module the steps from which it has living blocks."""
    steps: dict[str, set[str]] = {}
    for segment in content["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                made_by, kind, *_ = block["frames"]
                steps.setdefault(made_by["filename"], set()).add(kind["filename"].split()[1])
    return steps


@exercise("10.7", "Not the largest, not the oldest: the one that is there from every step.")
def leak(answer: Any) -> None:
    """`answer(snapshot)` is the module whose tensors pile up, or None."""
    contents = [snapshot(module) for module in LEAKS]
    got = [call(answer, snapshot=content, returns=str | None) for content in contents]
    expect(len(set(got)) > 1, "You give the same answer whatever the snapshot says. The hidden ones differ.")
    wrong = [(mine, content) for mine, content in zip(got, contents, strict=True) if mine != leak_right(content)]
    leaks = all(leak_right(content) is not None for _, content in wrong)
    expect(leaks, "You find a leak where there is none: from how many steps are a leak's blocks?")
    for mine, content in wrong:
        steps = leak_steps(content)
        if mine is None:
            fail("You find nothing where something piles up: count the steps of each module's living blocks.")
        expect(mine in steps, f"{mine!r} is no module of a living block: its name is frames[0]['filename'].")
        expect(len(steps[mine]) > 1, "What you name was made in one step and kept. What is made in every step?")
    expect(not wrong, "What you name is alive, but it does not pile up: from how many steps are its blocks?")
