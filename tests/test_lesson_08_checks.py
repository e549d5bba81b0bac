"""The checks of lesson 08: right answers of every style pass, each wrong answer gets the hint it deserves."""

import linecache
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from torch.nn.functional import mse_loss

from course_utils.lessons.data_parallelism.checks import outcomes


def by_steps(D: int, S: int) -> dict[str, float]:
    part, steps = S / D, range(D - 1)
    return {"server": D * (S + S), "naive": len(steps) * S, "ring": part * len(steps) + part * len(steps)}


def arrow_by_arrow(D: int, S: int) -> dict[str, float]:
    others = range(1, D)
    return {"ring": sum(S / D for _ in others) * 2, "naive": sum(S for _ in others), "server": sum([S + S] * D)}


def with_one(name: str, formula: Callable[[int, int], float]) -> Any:
    return lambda D, S: {**by_steps(D, S), name: formula(D, S)}


TRAFFIC = Answers(
    right=[arrow_by_arrow, by_steps, lambda D, S: {"server": S * 2 * D, "naive": S * D - S, "ring": 2 * (S - S / D)}],
    wrong=[
        (with_one("server", lambda D, S: D * S), "one way"),
        (with_one("server", lambda D, S: 2 * S), "one worker's traffic"),
        (with_one("server", lambda D, S: 2 * (D - 1) * S), "a machine of its own"),
        (with_one("server", lambda D, S: 3 * S), "server is off"),
        (with_one("naive", lambda D, S: D * S), "Nobody sends to itself"),
        (with_one("naive", lambda D, S: D * (D - 1) * S), "all ranks send together"),
        (with_one("naive", lambda D, S: 2 * (D - 1) * S), "what is received, too"),
        (with_one("ring", lambda D, S: (D - 1) * S / D), "half of the way"),
        (with_one("ring", lambda D, S: 2 * (D - 1) * S), "one part, not the whole"),
        (with_one("ring", lambda D, S: 2 * S), "the limit of very many ranks"),
        (with_one("ring", lambda D, S: 4 * (D - 1) * S / D), "what is received, too"),
    ],
)


def ring_right(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    for step in range(2 * (ranks - 1)):
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        send(parts[leaves], (rank + 1) % ranks)
        arrived = receive((rank - 1) % ranks)
        parts[comes] = parts[comes] + arrived if step < ranks - 1 else arrived
    return parts


def in_two_loops(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    current = rank
    for _ in range(ranks - 1):
        send(parts[current], (rank + 1) % ranks)
        current = (current - 1) % ranks
        parts[current] += receive((rank - 1) % ranks)
    for _ in range(ranks - 1):
        send(parts[current], (rank + 1) % ranks)
        current = (current - 1) % ranks
        parts[current].copy_(receive((rank - 1) % ranks))
    return tuple(parts)


def by_a_list(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    mine, order = list(parts), [(rank - step) % ranks for step in range(2 * ranks - 1)]
    for step in range(2 * ranks - 2):
        send(mine[order[step]], (rank + 1) % ranks)
        arrived = receive((rank - 1) % ranks)
        mine[order[step + 1]] = arrived if step >= ranks - 1 else torch.add(arrived, mine[order[step + 1]])
    return mine


def ring_of(steps: Callable[[int], int], added: int = 1, moves: int = 1, more: int = 0) -> Any:
    """A ring of other steps, which adds in `added` halves; a part that `moves` on with each, `more` messages."""

    def answer(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        for step in range(steps(ranks)):
            leaves, comes = (rank - step * moves) % ranks, (rank - (step + 1) * moves) % ranks
            send(parts[leaves], right)
            parts[comes] = receive(left) + (parts[comes] if step < added * (ranks - 1) else 0)
        for _ in range(more):
            send(parts[0], right)
        return parts

    return answer


def to_everybody(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    others = [other for other in range(ranks) if other != rank]
    for other in others:
        send(torch.stack(parts), other)
    return list(sum([receive(other) for other in others], torch.stack(parts)))


def around(joined: bool) -> Any:
    """Every part whole: D−1 rounds, in which all that came from the left is added and handed on."""

    def answer(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
        passing, sums = [torch.stack(parts)] if joined else list(parts), torch.stack(parts)
        for _ in range(ranks - 1):
            for piece in passing:
                send(piece, (rank + 1) % ranks)
            passing = [receive((rank - 1) % ranks) for _ in passing]
            sums += passing[0] if joined else torch.stack(passing)
        return list(sums)

    return answer


def typed_in(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    sums = [sum(10**other + part for other in range(ranks)) for part in range(ranks)]
    return [torch.full_like(part, float(whole)) for part, whole in zip(parts, sums, strict=True)]


def with_a_helper(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    return in_two_loops(parts, rank, ranks, send, receive)


def in_one_box(parts: Any, rank: int, ranks: int, send: Any, receive: Any, box: Any = {}) -> Any:  # noqa: B006, the slip
    box[ranks, rank] = [part.clone() for part in parts]
    for _ in range(ranks - 1):
        send(parts[rank], (rank + 1) % ranks)
        receive((rank - 1) % ranks)
    return [sum(kept[part] for (size, _), kept in box.items() if size == ranks) for part in range(ranks)]


RING = Answers(
    right=[ring_right, in_two_loops, by_a_list],
    wrong=[
        (ring_of(lambda D: D - 1), "first half of the way"),
        (ring_of(lambda D: 2 * D - 2, added=2), "more than once"),
        (ring_of(lambda D: 2 * D - 2 - (D > 2)), "on some ranks only"),
        (ring_of(lambda D: 2 * D - 2, more=1), "never received"),
        (ring_of(lambda D: D - 1, moves=0), "no part is a whole sum"),
        (to_everybody, "that is no ring"),
        (lambda parts, rank, ranks, send, receive: send(parts[rank], rank + 1) or parts, "closes with `% ranks`"),
        (lambda parts, rank, ranks, send, receive: send(parts, (rank + 1) % ranks), "not a list"),
        (around(joined=False), "a rank sends 12 messages"),
        (around(joined=True), "larger than a part"),
        (typed_in, "a rank sends nothing"),
        (lambda parts, rank, ranks, send, receive: receive(rank - 1 if rank else ranks - 1),
         "Standstill: rank 0 waits for a message from rank 3"),
        (lambda parts, rank, ranks, send, receive: receive(9), "Rank 9 is asked"),
        (lambda parts, rank, ranks, send, receive: parts[:1], "all 4 parts"),
        (lambda parts, rank, ranks, send, receive: [1] * ranks, "One of your parts is"),
        (lambda parts, rank, ranks, send, receive: [part[:2] for part in parts], "another length than it came with"),
        (in_one_box, "but not on real ranks: do you keep anything outside"),
        (with_a_helper, "on real ranks it raised NameError: name 'in_two_loops'"),
    ],
)  # fmt: skip


def by_shares(counts: list[int], rank: int) -> float:
    shares = torch.tensor(counts) / sum(counts)
    return (shares / shares.mean())[rank].double().item()


LOSS_FACTOR = Answers(
    right=[
        by_shares,
        lambda counts, rank: counts[rank] / (sum(counts) / len(counts)),
        lambda counts, rank: len(counts) / (sum(counts) / counts[rank]),
    ],
    wrong=[
        (lambda counts, rank: 1, "leaves the loss as it is"),
        (lambda counts, rank: counts[rank] / sum(counts), "DDP takes the mean"),
        (lambda counts, rank: sum(counts) / len(counts) / counts[rank], "a rank with more tokens"),
        (lambda counts, rank: counts[rank], "a sum over tokens"),
        (lambda counts, rank: counts[rank] / max(counts), "with the largest"),
        (lambda counts, rank: 1 / counts[rank], "over the rank's tokens already"),
        (lambda counts, rank: 1 / len(counts), "by itself"),
        (lambda counts, rank: len(counts) * counts[rank] // sum(counts), "The factor is off"),
    ],
)


def test_the_factor_makes_ddp_s_mean_the_mean_over_all_tokens() -> None:
    weight, counts = torch.ones(5, requires_grad=True), [2, 7, 3]
    tokens = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in counts]
    losses = [(part @ weight).square().mean() for part in tokens]
    scaled = [by_shares(counts, rank) * loss for rank, loss in enumerate(losses)]
    (mean,) = torch.autograd.grad(torch.stack(scaled).mean(), weight, retain_graph=True)
    (whole,) = torch.autograd.grad((torch.cat(tokens) @ weight).square().mean(), weight)
    torch.testing.assert_close(mean, whole)


STEP, CLEAR = "optimizer.step()", "optimizer.zero_grad()"
MEAN = "for weight in model.parameters(): weight.grad /= len(micro_batches)"


def step_of(
    loss: str = "mse_loss(model(x), y) / len(micro_batches)",
    waits: str = "index < len(micro_batches) - 1",
    after_each: Sequence[str] = (),
    end: Sequence[str] = (STEP, CLEAR),
) -> Any:
    """A training step with some of its lines in another way; its source can be found, as that of a cell's function."""
    lines = [
        "def step(model, optimizer, micro_batches):",
        "    for index, (x, y) in enumerate(micro_batches):",
        f"        with model.no_sync() if {waits} else nullcontext():",
        f"            ({loss}).backward()",
        *(f"        {line}" for line in after_each),
        *(f"    {line}" for line in end),
    ]
    source = "\n".join(lines)
    name, found = f"<step {hash(source)}>", {"nullcontext": nullcontext, "mse_loss": mse_loss}
    linecache.cache[name] = (len(source), None, [f"{line}\n" for line in lines], name)
    exec(compile(source, name, "exec"), found)
    return found["step"]


def two_blocks(model: Any, optimizer: Any, micro_batches: Any) -> None:
    optimizer.zero_grad()
    *early, last = micro_batches
    with model.no_sync():
        for x, y in early:
            (mse_loss(model(x), y) / len(micro_batches)).backward()
    (mse_loss(model(last[0]), last[1]) / len(micro_batches)).backward()
    optimizer.step()


def of_another_cell(model: Any, optimizer: Any, micro_batches: Any) -> None:
    two_blocks(model, optimizer, micro_batches)


def joined(model: Any, optimizer: Any, micro_batches: Any) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


MENDED_STEP = Answers(
    right=[step_of(), two_blocks, step_of(loss="mse_loss(model(x), y)", end=(MEAN, STEP, CLEAR))],
    wrong=[
        (step_of(loss="mse_loss(model.module(x), y) / len(micro_batches)"), "No gradient is exchanged at all"),
        (step_of(waits="True"), "No gradient is exchanged at all"),
        (step_of(waits="(index + 1) % 4"), "With one number of micro-batches"),
        (step_of(waits="index"), "The ranks drift apart, though gradients are exchanged"),
        (step_of(loss="mse_loss(model(x), y) / 4"), "by how much is the loss divided?"),
        (step_of(end=[STEP]), "what does a step leave behind?"),
        (step_of(waits="False"), "more than once a step"),
        (joined, "the memory is not"),
        (step_of(waits="False", after_each=(STEP, CLEAR), end=()), "You step more than once"),
        (step_of(end=(CLEAR, STEP)), "who cleared them before?"),
        (step_of(end=[CLEAR]), "who calls `optimizer.step()`?"),
        (of_another_cell, "raised NameError: name 'two_blocks' is not defined"),
        (lambda model, optimizer, micro_batches: None, "with `def`"),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """All that reach real ranks, by the same processes: a start takes seconds. Outcomes are kept for the checks."""
    steps = [*MENDED_STEP.right, *(step for step, _ in MENDED_STEP.wrong if step.__name__ != "<lambda>")]
    outcomes(
        [*(("ring", ring) for ring in (*RING.right, with_a_helper, in_one_box)), *(("step", step) for step in steps)]
    )


def by_waiting(buckets: Any, computed: float) -> float:
    free = 0.0
    for ready, seconds in sorted(buckets):
        start = ready if ready > free else free
        free = start + seconds
    return free - computed if free > computed else 0


def through(buckets: Any) -> float:
    return max(ready + sum(seconds for _, seconds in buckets[place:]) for place, (ready, _) in enumerate(buckets))


EXPOSED = Answers(
    right=[
        by_waiting,
        lambda buckets, computed: max(0, through(buckets) - computed),
        lambda buckets, computed: (
            max(computed, *accumulate(buckets, lambda free, one: max(free, one[0]) + one[1], initial=0)) - computed
        ),
    ],
    wrong=[
        (lambda buckets, computed: sum(t for _, t in buckets), "all transfer time"),
        (lambda buckets, computed: max(0, max(r + t for r, t in buckets) - computed), "pass one another"),
        (lambda buckets, computed: buckets[-1][1], "the last bucket alone"),
        (lambda buckets, computed: max(0, sum(t for _, t in buckets) - computed), "at time zero"),
        (lambda buckets, computed: through(buckets) - computed, "less than nothing"),
        (lambda buckets, computed: through(buckets), "when the exchange ends"),
        (lambda buckets, computed: max(0, buckets[0][0] + sum(t for _, t in buckets) - computed), "without a gap"),
        (lambda buckets, computed: max(0, sum(buckets[-1]) - computed), "Some wait is off"),
    ],
)


def ring_seconds(alpha: float, beta: float, size: float, D: int) -> float:
    return 2 * (D - 1) * (alpha + beta * size / D)


def up_to(seconds: Any, good: Any = lambda compute, exchange, floor: compute / (compute + exchange) >= floor) -> Any:
    def answer(alpha: float, beta: float, size: int, compute: float, floor: float, limit: int) -> int:
        fine = [D for D in range(1, limit + 1) if good(compute, seconds(alpha, beta, size, D), floor)]
        return max(fine, default=1)

    return answer


def instead(change: Callable[[int], float]) -> Any:
    return lambda alpha, beta, size, compute, floor, limit: change(by_halves(alpha, beta, size, compute, floor, limit))


def by_halves(alpha: float, beta: float, size: int, compute: float, floor: float, limit: int) -> int:
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        good = compute / (compute + ring_seconds(alpha, beta, size, middle)) >= floor
        low, high = (middle, high) if good else (low, middle - 1)
    return low


MOST_RANKS = Answers(
    right=[up_to(ring_seconds), by_halves],
    wrong=[
        (up_to(lambda a, b, S, D: 2 * (D - 1) * b * S / D), "You leave α out"),
        (up_to(lambda a, b, S, D: (D - 1) * (a + b * S / D)), "half a ring"),
        (up_to(lambda a, b, S, D: 2 * (D - 1) * (a + b * S)), "one part of D"),
        (up_to(lambda a, b, S, D: 2 * D * (a + b * S / D)), "with one rank there is none"),
        (up_to(lambda a, b, S, D: a + 2 * (D - 1) / D * b * S), "You start one message"),
        (up_to(ring_seconds, lambda c, t, floor: 1 - t / c >= floor), "with the computing alone"),
        (instead(lambda D: max(1, D - 1)), "One too few"),
        (instead(lambda D: D + 4096), "beyond the limit"),
        (instead(lambda D: 0), "always efficient enough"),
        (instead(lambda D: 1.5), "whole numbers"),
        (instead(lambda D: 2), "Some number is off"),
    ],
)

ANSWERS = {
    "08.1": TRAFFIC, "08.2": RING, "08.3": LOSS_FACTOR, "08.4": MENDED_STEP, "08.5": EXPOSED, "08.6": MOST_RANKS
}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
