"""Checks of the exercises of lesson 08, "Data parallelism": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from course_utils.interactive.feedback import (
    alike,
    by_name,
    call,
    call_for_effect,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
)

from .labs import (
    DryModel,
    Network,
    exposed_right,
    factor_right,
    outcomes,
    parts_of,
    ranks_right,
    ring_seconds,
    run_in_threads,
    sums_of,
    traffic_right,
)

__all__ = ["exposed", "loss_factor", "mended_step", "most_ranks", "on_real_ranks", "ring", "traffic"]

# ------------------------------------------------------------------------------------------------------ 08.1: traffic

TRAFFIC_CASES = ((4, 1_000), (8, 6_000_000), (2, 512), (5, 10_000))
Formula = Callable[[int, int], float]

TRAFFIC_MISTAKES: dict[str, tuple[tuple[Formula, str], ...]] = {
    "server": (
        (lambda D, S: D * S, "server: that is one way. Gradients come in, and weights go out."),
        (lambda D, S: 2 * S, "server: that is one worker's traffic. All of them talk to the same machine."),
        (lambda D, S: 2 * (D - 1) * S, "server: here the server is a machine of its own, and all D workers use it."),
        (lambda D, S: (D + 1) * S, "server: one copy of the weights for all? Each worker needs a message of its own."),
    ),
    "naive": (
        (lambda D, S: D * S, "naive: one too many. Nobody sends to itself."),
        (lambda D, S: D * (D - 1) * S, "naive: that is what all ranks send together. One rank's was asked for."),
        (lambda D, S: 2 * (D - 1) * S, "naive: that counts what is received, too."),
        (lambda D, S: S, "naive: that is one message. Everybody gets one."),
    ),
    "ring": (
        (lambda D, S: (D - 1) * S / D, "ring: that is half of the way. The complete parts have to be handed out, too."),
        (lambda D, S: 2 * (D - 1) * S, "ring: a message holds one part, not the whole gradient."),
        (lambda D, S: 2 * S, "ring: that is the limit of very many ranks. How many steps has a ring of D?"),
        (lambda D, S: 2 * S / D, "ring: that is two messages. How many steps are there?"),
        (lambda D, S: 4 * (D - 1) * S / D, "ring: that counts what is received, too."),
    ),
}


@exercise("08.1", "Server and naive grow with D; the ring stays below twice the gradient.")
def traffic(answer: Any) -> None:
    """`answer(D, S)` is a dictionary: server, naive and ring, in bytes."""
    got = [entries(call(answer, D=D, S=S, returns=Mapping), tuple(TRAFFIC_MISTAKES)) for D, S in TRAFFIC_CASES]
    for name, mistakes in TRAFFIC_MISTAKES.items():
        values = [one[name] for one in got]
        if alike(values, [traffic_right(D, S)[name] for D, S in TRAFFIC_CASES]):
            continue
        for mistaken, message in mistakes:
            expect(not alike(values, [mistaken(D, S) for D, S in TRAFFIC_CASES]), message)
        fail(f"{name} is off. Draw three machines, and an arrow for each message.")


# --------------------------------------------------------------------------------------------------------- 08.2: ring

RING_SIZES = (4, 2, 3, 5, 1)


@exercise("08.2", "Every rank holds every sum for 2(D−1) messages; on three real processes, too.")
def ring(answer: Any) -> None:
    """`answer(parts, rank, ranks, send, receive)` returns this rank's parts, each the sum over all ranks."""

    def program(*arguments: Any) -> Any:
        return call(answer, *arguments, returns=(list, tuple), may_change=(0,))  # a ring may add into its own parts

    for ranks in RING_SIZES:
        inputs = parts_of(ranks)
        network = Network(ranks, part_bytes=inputs[0][0].nbytes)
        wanted = sums_of(inputs)
        found = run_in_threads(program, inputs, network)
        _expect_sums(found, wanted, ranks)
        _expect_ring(network)
    for real in outcomes([("ring", answer)])[0]:
        expect("error" not in real, f"In one process all is right, but on real ranks it raised {real.get('error')}")
        expect(real.get("reduced"), "In one process all is right, but not on real ranks: do you keep anything outside?")


def _expect_sums(found: list[Any], wanted: list[torch.Tensor], ranks: int) -> None:
    for parts in found:
        expect(len(parts) == ranks, f"With {ranks} ranks, return the list of all {ranks} parts.")
        for part, sum_ in zip(parts, wanted, strict=True):
            of_kind(part, torch.Tensor, "One of your parts is")
            expect(part.shape == sum_.shape, "One of your parts has another length than it came with.")
    whole = [
        [torch.allclose(part.to(sum_.dtype), sum_) for part, sum_ in zip(parts, wanted, strict=True)] for parts in found
    ]
    if all(map(all, whole)):
        return
    once = [sum(parts) for parts in whole]
    expect(once != [0] * ranks, f"With {ranks} ranks no part is a whole sum. Which part leaves first, and which comes?")
    too_much = [
        float(part.max()) > 1.05 * float(sum_.max())
        for parts in found
        for part, sum_ in zip(parts, wanted, strict=True)
    ]  # fmt: skip
    expect(
        not any(too_much),
        "Some numbers are in a sum more than once. In the second half what arrives is whole: is it added again?",
    )
    expect(
        once != [1] * ranks,
        "Each rank has one whole sum now, and the other parts are not finished: that is the first half of the way.",
    )
    fail(f"With {ranks} ranks, some parts are whole sums on some ranks only. Count your steps in each half.")


def _expect_ring(network: Network) -> None:
    D = network.ranks
    expect(
        all(to == (sender + 1) % D for sender, to, _ in network.sent),
        "The sums are right, but not all messages go to the right neighbor: that is no ring.",
    )
    expect(not network.left_over(), "The sums are right, but some messages were never received.")
    counts = [sum(sender == rank for sender, _, _ in network.sent) for rank in range(D)]
    expect(min(counts) > 0 or D == 1, "The sums are right, but a rank sends nothing: who told the others its numbers?")
    expect(
        max(counts, default=0) <= 2 * (D - 1),
        f"The sums are right, but with {D} ranks a rank sends {max(counts, default=0)} messages. Where do they go "
        "around more often than needed?",
    )
    expect(
        all(size <= network.part_bytes for _, _, size in network.sent),
        "The sums are right, but some messages are larger than a part. A ring sends one part at a time, as it came: "
        "whole gradients in each message would be the naive way again.",
    )


# --------------------------------------------------------------------------------------------------- 08.3: loss_factor

FACTOR_CASES = (([100, 300], 0), ([100, 300], 1), ([5, 5, 5], 2), ([10, 20, 30, 40], 3), ([7, 1], 0))
FactorFormula = Callable[[list[int], int], float]

FACTOR_MISTAKES: tuple[tuple[FactorFormula, str], ...] = (
    (lambda n, r: 1.0, "That leaves the loss as it is: a rank with few tokens then counts as much as one with many."),
    (lambda n, r: n[r] / sum(n), "That is the rank's share, and would be right for a sum. DDP takes the mean."),
    (lambda n, r: sum(n) / (len(n) * n[r]), "Upside down: a rank with more tokens has to count for more."),
    (lambda n, r: n[r], "That turns the mean into a sum over tokens. Nobody divides by all tokens then."),
    (lambda n, r: n[r] / max(n), "You compare with the largest. What is the mean over *all* tokens?"),
    (lambda n, r: 1 / n[r], "The loss is a mean over the rank's tokens already."),
    (lambda n, r: 1 / len(n), "DDP divides by the number of ranks by itself."),
    (lambda n, r: sum(n) / n[r], "Upside down: a rank with more tokens has to count for more."),
)


@exercise("08.3", "Mean of means is the mean of all only if all are equally large; now it is either way.")
def loss_factor(answer: Any) -> None:
    """`answer(counts, rank)` is what a rank multiplies its mean loss by under DDP."""
    got = [float(call(answer, counts=list(counts), rank=rank)) for counts, rank in FACTOR_CASES]
    if alike(got, [factor_right(counts, rank) for counts, rank in FACTOR_CASES]):
        return
    for mistaken, message in FACTOR_MISTAKES:
        expect(not alike(got, [mistaken(counts, rank) for counts, rank in FACTOR_CASES]), message)
    equal = got[2]
    expect(math.isclose(equal, 1.0), "With equal counts nothing should change: the factor is then 1.")
    fail("The factor is off. Write the gradient over all tokens as a sum over ranks, then as DDP's mean.")


# --------------------------------------------------------------------------------------------------- 08.4: mended_step

TOLERANCE = 1e-6
"""Of weights near 0.1: rounding stays well below it, a mistake far above."""


def on_real_ranks(step: Any) -> dict[str, Any]:
    """Run a training step under DistributedDataParallel on three real ranks, for 4 and for 6 micro-batches.

    Returns for each how far the ranks are apart after each of three steps, how far they are from one process with the
    whole batch, and how many times the gradients were exchanged in a step.
    """
    return outcomes([("step", step)])[0][0]


@exercise("08.4", "On three real ranks: not apart by a bit, equal to one large batch, and exchanged once.")
def mended_step(answer: Any) -> None:
    """`answer(model, optimizer, micro_batches)` is one optimizer step under DDP."""
    dry = DryModel()
    call_for_effect(answer, dry, dry.optimizer(), [(torch.ones(2, 8), torch.zeros(2, 8)) for _ in range(2)])
    found = on_real_ranks(answer)
    expect("error" not in found, f"On real ranks, your function raised {found.get('error')}")
    four, six = found["4"], found["6"]
    expect(
        not (four["exchanged"] == six["exchanged"] == 0),
        "No gradient is exchanged at all. Is any backward outside of `no_sync`, with a forward that went through DDP?",
    )
    expect(
        max(four["apart"]) == 0 or max(six["apart"]) == 0,
        "The ranks drift apart, though gradients are exchanged: which of them were added before or after?",
    )
    expect(
        max(six["apart"]) == 0 == max(four["apart"]),
        "With one number of micro-batches the ranks stay equal, with the other they drift apart. When is the last one?",
    )
    expect(dry.stepped_on, "The ranks agree, and their weights never change: who calls `optimizer.step()`?")
    expect(len(dry.stepped_on) == 1, "You step more than once. One step on the sum of all gradients was asked for.")
    expect(all(dry.stepped_on), "When the optimizer steps, the gradients are gone: who cleared them before?")
    for one in (four, six):
        expect(
            one["off"][0] < TOLERANCE,
            "The ranks agree, but their step is not that of the large batch: by how much is the loss divided?",
        )
        expect(
            max(one["off"]) < TOLERANCE, "The first step is right, the next one is not: what does a step leave behind?"
        )
        expect(
            one["exchanged"] < 1.01,
            "All right, but the gradients are exchanged more than once a step. That was `no_sync`'s purpose.",
        )
    several = dry.largest > 2 or any(pair == ("forward", "forward") for pair in pairwise(dry.events))
    expect(
        not several,
        "The numbers are right, the memory is not: several micro-batches go forward before any goes backward, and all "
        "their graphs are kept.",
    )


# ------------------------------------------------------------------------------------------------------- 08.5: exposed

Buckets = list[tuple[float, float]]
EXPOSED_CASES: tuple[tuple[Buckets, float], ...] = (
    ([(10, 2), (20, 2), (30, 2)], 30),
    ([(10, 15), (20, 15), (30, 15)], 30),
    ([(30, 12)], 30),
    ([(5, 30), (10, 1), (30, 4)], 30),
    ([(5, 3), (9, 3)], 20),
    ([(2, 9), (8, 1), (14, 9), (15, 1)], 15),
)  # fmt: skip

EXPOSED_MISTAKES: tuple[tuple[Callable[[Buckets, float], float], str], ...] = (
    (lambda b, c: sum(t for _, t in b), "That is all transfer time. What of it hides behind backward?"),
    (lambda b, c: max(0.0, max(r + t for r, t in b) - c), "You let buckets pass one "
     "another. The network takes one at a time, so each waits for the one before."),
    (lambda b, c: b[-1][1], "That is the last bucket alone. It may have to wait for others, and may hide, too."),
    (lambda b, c: max(0.0, sum(t for _, t in b) - c), "You start the first transfer at time zero. It starts when the "
     "bucket is ready."),
    (lambda b, c: _queue(b) - c, "An exchange that ends before backward makes the step wait for nothing, not for less "
     "than nothing."),
    (lambda b, c: _queue(b), "That is when the exchange ends. How long does the step wait for it, after backward?"),
    (lambda b, c: max(0.0, b[0][0] + sum(t for _, t in b) - c), "You let transfers follow one another without a gap. A "
     "bucket that is not ready makes the network wait."),
)  # fmt: skip


def _queue(buckets: Buckets) -> float:
    return exposed_right(buckets, 0.0)


@exercise("08.5", "What is ready early hides; what queues up does not.")
def exposed(answer: Any) -> None:
    """`answer(buckets, computed)` is how long a step waits for the exchange, with (ready, seconds) of each bucket."""
    got = [float(call(answer, buckets=list(buckets), computed=computed)) for buckets, computed in EXPOSED_CASES]
    if alike(got, [exposed_right(buckets, computed) for buckets, computed in EXPOSED_CASES]):
        return
    for mistaken, message in EXPOSED_MISTAKES:
        expect(not alike(got, [mistaken(buckets, computed) for buckets, computed in EXPOSED_CASES]), message)
    fail("Some wait is off. Draw the buckets on a time line, one below the other, as in the lesson's picture.")


# ---------------------------------------------------------------------------------------------------- 08.6: most_ranks

RANKS_CASES = (
    (50e-6, 1e-10, 500_000_000, 1.0, 0.9, 4096),
    (5e-6, 2e-11, 6_000_000_000, 2.0, 0.9, 4096),
    (5e-6, 2e-11, 6_000_000_000, 0.5, 0.9, 4096),
    (1e-3, 1e-9, 1_000_000, 0.25, 0.8, 4096),
    (0.0, 1e-12, 1_000_000, 1.0, 0.5, 64),
    (2e-5, 1e-9, 100_000_000, 0.3, 0.7, 1024),
    (0.05, 1e-9, 100_000_000, 1.0, 0.85, 1024),
)

RanksFormula = Callable[[float, float, float, int], float]
SECONDS_MISTAKES: tuple[tuple[RanksFormula, str], ...] = (
    (lambda a, b, S, D: 2 * (D - 1) * b * S / D, "You leave α out. With many ranks, that is all that counts."),
    (lambda a, b, S, D: (D - 1) * (a + b * S / D), "That is half a ring: parts are added up, and then handed out."),
    (lambda a, b, S, D: 2 * (D - 1) * (a + b * S), "A message holds one part of D, not the whole gradient."),
    (lambda a, b, S, D: 2 * D * (a + b * S / D), "Count the steps of a ring once more: with one rank there is none."),
    (lambda a, b, S, D: a + 2 * (D - 1) / D * b * S, "You start one message. A ring starts one in each of its steps."),
)  # fmt: skip


@exercise("08.6", "Bytes set a price that stays, messages one that grows: the second ends the scaling.")
def most_ranks(answer: Any) -> None:
    """`answer(alpha, beta, size, compute, floor, limit)` is the largest number of ranks with that efficiency."""
    names = ("alpha", "beta", "size", "compute", "floor", "limit")
    got = [call(answer, **by_name(names, case)) for case in RANKS_CASES]
    expect(all(value == int(value) for value in got), "Ranks come in whole numbers.")
    if got == [ranks_right(*case) for case in RANKS_CASES]:
        return
    expect(
        all(value <= case[-1] for value, case in zip(got, RANKS_CASES, strict=True)),
        "You go beyond the limit: it is there for links on which efficiency never falls below the floor.",
    )
    expect(min(got) >= 1, "One rank exchanges nothing, and so it is always efficient enough.")
    for seconds, message in SECONDS_MISTAKES:
        expect(got != [_most(seconds, case) for case in RANKS_CASES], message)
    expect(
        got != [_most(ring_seconds, case, strict=True) for case in RANKS_CASES]
        and got != [max(1, _most(ring_seconds, case) - 1) for case in RANKS_CASES],
        "One too few somewhere: the floor itself is still good enough.",
    )
    expect(
        got != [_most(ring_seconds, case, overhead=True) for case in RANKS_CASES],
        "You compare the exchange with the computing alone. Efficiency is computing over computing and exchange.",
    )
    fail("Some number is off. Print compute/(compute + exchange) for D = 1, 2, 3 and so on.")


def _most(seconds: RanksFormula, case: Any, strict: bool = False, overhead: bool = False) -> int:
    """The answer of somebody whose ring takes `seconds`, who asks for more than the floor, or takes another ratio."""
    alpha, beta, size, compute, floor, limit = case

    def good(D: int) -> bool:
        exchange = seconds(alpha, beta, size, D)
        efficiency = 1 - exchange / compute if overhead else compute / (compute + exchange)
        return efficiency > floor if strict else efficiency >= floor

    return max((D for D in range(1, limit + 1) if good(D)), default=1)
