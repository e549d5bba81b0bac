"""Checks of the exercises of lesson 08, "Data parallelism": each names the misconception, never the answer."""

import inspect
import json
import tempfile
import textwrap
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from course_utils.interactive.feedback import (
    CheckFailed,
    Mistakes,
    by_name,
    call,
    call_for_effect,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
    recognized,
)
from course_utils.ranks.launch import run_ranks

# ------------------------------------------------------------------------------------------------------ 08.1: traffic

TRAFFIC_CASES = ((4, 1_000), (8, 6_000_000), (2, 512), (5, 10_000))
TRAFFIC: dict[str, Callable[[int, int], float]] = {
    "server": lambda D, S: 2 * D * S,
    "naive": lambda D, S: (D - 1) * S,
    "ring": lambda D, S: 2 * (D - 1) * S / D,
}
TRAFFIC_MISTAKES: Mistakes = {
    "server: that is one way. Gradients come in, and weights go out.": lambda D, S: D * S,
    "server: that is one worker's traffic. All of them talk to the same machine.": lambda D, S: 2 * S,
    "server: here the server is a machine of its own, and all D workers use it.": lambda D, S: 2 * (D - 1) * S,
    "naive: one too many. Nobody sends to itself.": lambda D, S: D * S,
    "naive: that is what all ranks send together. One rank's was asked for.": lambda D, S: D * (D - 1) * S,
    "naive: that counts what is received, too.": lambda D, S: 2 * (D - 1) * S,
    "ring: that is half of the way. Who hands out the complete parts?": lambda D, S: (D - 1) * S / D,
    "ring: a message holds one part, not the whole gradient.": lambda D, S: 2 * (D - 1) * S,
    "ring: that is the limit of very many ranks. How many steps has a ring of D?": lambda D, S: 2 * S,
    "ring: that counts what is received, too.": lambda D, S: 4 * (D - 1) * S / D,
}


@exercise("08.1", "Server and naive grow with D; the ring stays below twice the gradient.")
def traffic(answer: Any) -> None:
    """`answer(D, S)` is a dictionary: server, naive and ring, in bytes."""
    got = [entries(call(answer, D=D, S=S, returns=Mapping), tuple(TRAFFIC)) for D, S in TRAFFIC_CASES]
    for name, right in TRAFFIC.items():
        mistakes = {message: wrong for message, wrong in TRAFFIC_MISTAKES.items() if message.startswith(name)}
        otherwise = f"{name} is off. Draw three machines, and an arrow for each message."
        recognized([one[name] for one in got], TRAFFIC_CASES, right, mistakes, otherwise)


# --------------------------------------------------------------------------------------------------------- 08.2: ring

RING_SIZES = (4, 2, 3, 5, 1)


@exercise("08.2", "Every rank holds every sum for 2(D−1) messages; on three real processes, too.")
def ring(answer: Any) -> None:
    """`answer(parts, rank, ranks, send, receive)` returns this rank's parts, each the sum over all ranks."""

    def program(*arguments: Any) -> Any:
        return call(answer, *arguments, returns=(list, tuple), may_change=(0,))  # a ring may add into its own parts

    for ranks in RING_SIZES:
        # on rank r part p is full of 10^r + p
        inputs = [[torch.full((3,), float(10**rank + part)) for part in range(ranks)] for rank in range(ranks)]
        wanted = [torch.stack(parts).sum(dim=0) for parts in zip(*inputs, strict=True)]
        network = Network(ranks)
        _expect_sums(network.run(program, inputs), wanted)
        _expect_ring(network, inputs[0][0].nbytes)
    for real in outcomes([("ring", answer)])[0]:
        expect("error" not in real, f"In one process all is right, but on real ranks it raised {real.get('error')}")
        expect(real.get("reduced"), "In one process all is right, but not on real ranks: do you keep anything outside?")


def _expect_sums(found: list[Any], wanted: list[torch.Tensor]) -> None:
    ranks = len(wanted)
    for parts in found:
        expect(len(parts) == ranks, f"With {ranks} ranks, return the list of all {ranks} parts.")
        for part, total in zip(parts, wanted, strict=True):
            of_kind(part, torch.Tensor, "One of your parts is")
            expect(part.shape == total.shape, "One of your parts has another length than it came with.")
    pairs = [list(zip(parts, wanted, strict=True)) for parts in found]
    whole = [sum(torch.allclose(part.to(total.dtype), total) for part, total in one) for one in pairs]
    if whole == [ranks] * ranks:
        return
    expect(any(whole), f"With {ranks} ranks no part is a whole sum. Which part leaves first, and which comes?")
    once = all(float(part.max()) <= 1.05 * float(total.max()) for one in pairs for part, total in one)
    expect(once, "Some numbers are in a sum more than once. What arrives in the second half is whole already.")
    expect(whole != [1] * ranks, "Each rank has one whole sum: that is the first half of the way.")
    fail(f"With {ranks} ranks, some parts are whole sums on some ranks only. Count your steps in each half.")


def _expect_ring(network: "Network", part_bytes: int) -> None:
    D, right = network.ranks, "The sums are right, but"
    around = all(to == (sender + 1) % D for sender, to, _ in network.sent)
    expect(around, f"{right} not all messages go to the right neighbor: that is no ring.")
    expect(not any(network.queues.values()), f"{right} some messages were never received.")
    counts = Counter(sender for sender, _, _ in network.sent)
    expect(len(counts) == D or D == 1, f"{right} a rank sends nothing: who told the others its numbers?")
    most = max(counts.values(), default=0)
    expect(most <= 2 * (D - 1), f"{right} with {D} ranks a rank sends {most} messages, more often than needed.")
    small = all(size <= part_bytes for _, _, size in network.sent)
    expect(small, f"{right} some messages are larger than a part. A ring sends one part at a time, as it came.")


class Network:
    """Ranks as threads with a queue between each two; notices a standstill. `sent` lists (sender, receiver, bytes)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = self._running = ranks
        self.sent: list[tuple[int, int, int]] = []
        self.queues: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._waiting: dict[int, int] = {}  # for whom each rank waits
        self._changed = threading.Condition()

    def run(self, program: Callable[..., Any], inputs: Sequence[list[torch.Tensor]]) -> list[Any]:
        """Results of `program(parts, rank, ranks, send, receive)` on each rank; raises what one of them raises."""

        def one(rank: int) -> Any:
            try:
                return program(inputs[rank], rank, self.ranks, partial(self._send, rank), partial(self._receive, rank))
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.ranks)]
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:
            raise min(errors, key=lambda error: "Standstill" in str(error))  # mostly a consequence of another error
        return [future.result() for future in futures]

    def _send(self, sender: int, tensor: torch.Tensor, to: int) -> None:
        expect(isinstance(tensor, torch.Tensor), f"`send` takes one tensor, a part, not a {type(tensor).__name__}.")
        expect(to in range(self.ranks), f"There is no rank {to} to send to: a ring closes with `% ranks`.")
        with self._changed:
            self.sent.append((sender, to, tensor.nbytes))
            self.queues[sender, to].append(tensor.detach().clone())
            if self._waiting.get(to) == sender:
                del self._waiting[to]
            self._changed.notify_all()

    def _receive(self, receiver: int, source: int) -> torch.Tensor:
        expect(source in range(self.ranks), f"Rank {source} is asked for a message: a ring closes with `% ranks`.")
        with self._changed:
            queue = self.queues[source, receiver]
            if not queue:
                self._waiting[receiver] = source
                self._changed.notify_all()
                self._changed.wait_for(lambda: queue or len(self._waiting) >= self._running)
                waits = f"rank {receiver} waits for a message from rank {source}, and nobody is left to send one"
                expect(queue, f"Standstill: {waits}. Does each rank send before it receives, and as often?")
            return queue.popleft()


# --------------------------------------------------------------------------------------------------- 08.3: loss_factor

FACTOR_CASES = (([100, 300], 0), ([100, 300], 1), ([5, 5, 5], 2), ([10, 20, 30, 40], 3), ([7, 1], 0))
FACTOR_MISTAKES: Mistakes = {
    "That leaves the loss as it is: a rank with few tokens then counts as much as one with many.": lambda n, r: 1.0,
    "That is the rank's share, and would be right for a sum. DDP takes the mean.": lambda n, r: n[r] / sum(n),
    "Upside down: a rank with more tokens has to count for more.": lambda n, r: sum(n) / (len(n) * n[r]),
    "That turns the mean into a sum over tokens. Nobody divides by all tokens then.": lambda n, r: n[r],
    "You compare with the largest. What is the mean over *all* tokens?": lambda n, r: n[r] / max(n),
    "The loss is a mean over the rank's tokens already.": lambda n, r: 1 / n[r],
    "DDP divides by the number of ranks by itself.": lambda n, r: 1 / len(n),
}


@exercise("08.3", "Mean of means is the mean of all only if all are equally large; now it is either way.")
def loss_factor(answer: Any) -> None:
    """`answer(counts, rank)` is what a rank multiplies its mean loss by under DDP."""
    got = [call(answer, counts=list(counts), rank=rank) for counts, rank in FACTOR_CASES]
    otherwise = "The factor is off. With equal counts it is 1. Write the gradient over all tokens as a sum over ranks."
    recognized(got, FACTOR_CASES, lambda n, r: len(n) * n[r] / sum(n), FACTOR_MISTAKES, otherwise)


# --------------------------------------------------------------------------------------------------- 08.4: mended_step

TOLERANCE = 1e-6  # for weights near 0.1: rounding stays well below it, a mistake far above
RANKS = 3
_outcomes: dict[tuple[str, str, str], list[dict[str, Any]]] = {}  # by function: starting processes takes seconds


def outcomes(functions: Iterable[tuple[str, Callable[..., Any]]]) -> list[list[dict[str, Any]]]:
    """Outcome of each function on each of three real ranks; the same processes run all functions.

    Functions come with their kind, "ring" or "step". Raises CheckFailed for one without a source to send to the ranks.
    """
    wanted = [(kind, *_source_of(function)) for kind, function in functions]
    new = [function for function in dict.fromkeys(wanted) if function not in _outcomes]
    if new:
        with tempfile.TemporaryDirectory(prefix="course-check-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "functions.json")
            file.write_text(json.dumps(new), encoding="utf-8")
            by_rank = run_ranks("course_utils.lessons.data_parallelism.check_ranks", RANKS, [str(file)])
        _outcomes.update({function: list(found) for function, *found in zip(new, *by_rank, strict=True)})
    return [_outcomes[function] for function in wanted]


def _source_of(function: Callable[..., Any]) -> tuple[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise CheckFailed("The text of your function cannot be found: define it in a cell, with `def`.") from error
    expect(source.startswith("def "), "Define your function in a cell, with `def`: its text goes to other processes.")
    return source, function.__name__


def on_real_ranks(step: Any) -> dict[str, Any]:
    """The notes of `check_ranks.trained` on a step under DDP, for 4 and for 6 micro-batches."""
    return outcomes([("step", step)])[0][0]


class DryModel(torch.nn.Linear):
    """A model in one process with DDP's interface."""

    no_sync = torch.enable_grad
    module = property(lambda self: self)


@exercise("08.4", "On three real ranks: not apart by a bit, equal to one large batch, and exchanged once.")
def mended_step(answer: Any) -> None:
    """`answer(model, optimizer, micro_batches)` is one optimizer step under DDP."""
    dry = DryModel(8, 8)
    batches = [(torch.ones(2, 8), torch.zeros(2, 8)) for _ in range(2)]
    call_for_effect(answer, dry, torch.optim.SGD(dry.parameters(), lr=0.1), batches)
    found = on_real_ranks(answer)
    expect("error" not in found, f"On real ranks, your function raised {found.get('error')}")
    four, six = found["4"], found["6"]
    any_exchange, drifts = four["exchanged"] or six["exchanged"], [max(one["apart"]) > 0 for one in (four, six)]
    expect(any_exchange, "No gradient is exchanged at all. Which backward is outside of `no_sync`, with DDP's forward?")
    expect(not all(drifts), "The ranks drift apart, though gradients are exchanged: which were added before or after?")
    expect(not any(drifts), "With one number of micro-batches the ranks drift apart. When is the last one?")
    expect(four["stepped"], "The ranks agree, and their weights never change: who calls `optimizer.step()`?")
    expect(len(four["stepped"]) == len(four["off"]), "You step more than once. Step once, on the sum of all gradients.")
    expect(all(four["stepped"]), "When the optimizer steps, the gradients are gone: who cleared them before?")
    for one in (four, six):
        large = one["off"][0] < TOLERANCE
        expect(large, "The ranks agree, but not with one large batch: by how much is the loss divided?")
        expect(max(one["off"]) < TOLERANCE, "Only the first step is right: what does a step leave behind?")
        expect(one["exchanged"] < 1.01, "All right, but gradients are exchanged more than once a step: use `no_sync`.")
    message = "The numbers are right, the memory is not: go backward with each micro-batch before the next forward."
    expect(four["at_once"] <= 2, message)


# ------------------------------------------------------------------------------------------------------- 08.5: exposed

Buckets = list[tuple[float, float]]
EXPOSED_CASES: tuple[tuple[Buckets, float], ...] = (
    ([(10, 2), (20, 2), (30, 2)], 30),
    ([(10, 15), (20, 15), (30, 15)], 30),
    ([(30, 12)], 30),
    ([(5, 30), (10, 1), (30, 4)], 30),
    ([(5, 3), (9, 3)], 20),
    ([(2, 9), (8, 1), (14, 9), (15, 1)], 15),
)


def _end(buckets: Buckets) -> float:
    end = 0.0
    for ready, seconds in buckets:
        end = max(end, ready) + seconds
    return end


def _transfers(buckets: Buckets) -> float:
    return sum(seconds for _, seconds in buckets)


EXPOSED_MISTAKES: Mistakes = {
    "That is all transfer time. What of it hides behind backward?": lambda b, c: _transfers(b),
    "You let buckets pass one another. Each waits for the one before.": lambda b, c: max(0.0, max(map(sum, b)) - c),
    "That is the last bucket alone. It may have to wait for others, and may hide, too.": lambda b, c: b[-1][1],
    "You start at time zero. A transfer starts when its bucket is ready.": lambda b, c: max(0.0, _transfers(b) - c),
    "An exchange that ends before backward costs nothing, not less than nothing.": lambda b, c: _end(b) - c,
    "That is when the exchange ends. How long does the step wait for it, after backward?": lambda b, c: _end(b),
    "You send without a gap. A bucket may not be ready.": lambda b, c: max(0.0, b[0][0] + _transfers(b) - c),
}


@exercise("08.5", "What is ready early hides; what queues up does not.")
def exposed(answer: Any) -> None:
    """`answer(buckets, computed)` is how long a step waits for the exchange, with (ready, seconds) of each bucket."""
    got = [call(answer, buckets=list(buckets), computed=computed) for buckets, computed in EXPOSED_CASES]
    otherwise = "Some wait is off. Draw the buckets on a time line, one below the other, as in the lesson's picture."
    recognized(got, EXPOSED_CASES, lambda b, c: max(0.0, _end(b) - c), EXPOSED_MISTAKES, otherwise)


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


def _most(seconds: Callable[[float, float, float, int], float], by_computing: bool = False) -> Callable[..., int]:
    """The largest number of ranks by a ring of `seconds(alpha, beta, size, D)`; `by_computing` is a mistake."""

    def most(alpha: float, beta: float, size: int, compute: float, floor: float, limit: int) -> int:
        def efficiency(D: int) -> float:
            exchange = seconds(alpha, beta, size, D)
            return 1 - exchange / compute if by_computing else compute / (compute + exchange)

        return max((D for D in range(1, limit + 1) if efficiency(D) >= floor), default=1)

    return most


most_right = _most(lambda a, b, S, D: 2 * (D - 1) * (a + b * S / D))
RANKS_MISTAKES: Mistakes = {
    "You leave α out. With many ranks, that is all that counts.": _most(lambda a, b, S, D: 2 * (D - 1) * b * S / D),
    "That is half a ring: parts have to be handed out, too.": _most(lambda a, b, S, D: (D - 1) * (a + b * S / D)),
    "A message holds one part of D, not the whole gradient.": _most(lambda a, b, S, D: 2 * (D - 1) * (a + b * S)),
    "Count the steps again: with one rank there is none.": _most(lambda a, b, S, D: 2 * D * (a + b * S / D)),
    "You start one message. A ring starts one in each step.": _most(lambda a, b, S, D: a + 2 * (D - 1) / D * b * S),
    "One too few somewhere: the floor itself is still good enough.": lambda *case: max(1, most_right(*case) - 1),
    "You compare the exchange with the computing alone. What is efficiency?":
        _most(lambda a, b, S, D: 2 * (D - 1) * (a + b * S / D), by_computing=True),
}  # fmt: skip


@exercise("08.6", "Bytes set a price that stays, messages one that grows: the second ends the scaling.")
def most_ranks(answer: Any) -> None:
    """`answer(alpha, beta, size, compute, floor, limit)` is the largest number of ranks with that efficiency."""
    names = ("alpha", "beta", "size", "compute", "floor", "limit")
    got = [call(answer, **by_name(names, case)) for case in RANKS_CASES]
    expect(all(value == int(value) for value in got), "Ranks come in whole numbers.")
    within = all(value <= case[-1] for value, case in zip(got, RANKS_CASES, strict=True))
    expect(within, "You go beyond the limit: on some links efficiency never falls below the floor.")
    expect(min(got) >= 1, "One rank exchanges nothing, and so it is always efficient enough.")
    otherwise = "Some number is off. Print compute/(compute + exchange) for D = 1, 2, 3 and so on."
    recognized(got, RANKS_CASES, most_right, RANKS_MISTAKES, otherwise)
