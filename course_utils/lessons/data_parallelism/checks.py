"""Checks of lesson 10, "Data parallelism": each names the misconception, never the answer."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from ...interactive.feedback import (
    Mistakes,
    alike,
    call,
    call_for_effect,
    entries,
    exercise,
    expect,
    of_kind,
    recognized,
)
from ..shared.judging import same
from ..shared.on_ranks import expect_together, found_on_ranks, pretended
from .check_ranks import (
    BATCH,
    CLASSES,
    EPOCHS,
    LENGTH,
    TEXTS,
    TOKENS,
    WIDTH,
    DryModel,
    body,
    reader,
    samples,
    texts,
)

RANKS = 3
PROGRAM = "course_utils.lessons.data_parallelism.check_ranks"
STARTS = "Three processes start; this takes about ten seconds."

# --------------------------------------------------------------------------------------------------
# 10.1: traffic
TRAFFIC_CASES = ((8, 6_000_000), (2, 512), (7, 1_000))
# Of 7 parts of 1,000 bytes some are rounded up: this may be counted, a part that is lost may not.
WHOLE_BYTES = 2e-3
TRAFFIC: dict[str, Callable[[int, int], float]] = {
    "server": lambda D, S: 2 * D * S,
    "naive": lambda D, S: (D - 1) * S,
    "ring": lambda D, S: 2 * (D - 1) * S / D,
}
TRAFFIC_MISTAKES: Mistakes = {
    "server: you count one way. Gradients come in, and weights go out.": lambda D, S: D * S,
    "server: this is one worker's traffic. All D workers talk to the same machine.": lambda D, S: 2 * S,
    "naive: one message too many. No rank sends to itself.": lambda D, S: D * S,
    "naive: this is the sum over all ranks. Return the bytes of one rank.": lambda D, S: D * (D - 1) * S,
    "ring: this is the first half. Who hands out the complete parts?": lambda D, S: (D - 1) * S / D,
    "ring: you send the whole gradient in each message. A message holds one part.": (
        lambda D, S: 2 * (D - 1) * S
    ),
    "ring: your D parts together are not all S bytes. `//` rounds down.": lambda D, S: 2 * (D - 1) * (S // D),
}


@exercise("10.1", "Server and naive grow with D; the ring stays below twice the gradient.")
def traffic(answer: Any) -> None:
    """`answer(D, S)` is a dictionary: server, naive and ring, in bytes."""
    got = [entries(call(answer, D=D, S=S, returns=Mapping), tuple(TRAFFIC)) for D, S in TRAFFIC_CASES]
    for name, right in TRAFFIC.items():
        mistakes = {message: wrong for message, wrong in TRAFFIC_MISTAKES.items() if message.startswith(name)}
        otherwise = f"{name} is off. Draw three machines, and an arrow for each message."
        close = partial(alike, tolerance=WHOLE_BYTES)
        recognized([one[name] for one in got], TRAFFIC_CASES, right, mistakes, otherwise, close)


# --------------------------------------------------------------------------------------------------
# 10.2: ring
THREADS = {
    "has not been initialized": "These ranks are threads: use `send` and `receive`, not `dist`.",
    "has no attribute 'wait'": "`send` returns nothing to wait for: the copy is already on its way.",
}


@exercise("10.2", "Every rank holds every sum after 2(D−1) messages, on three real processes, too.", STARTS)
def ring(answer: Any) -> None:
    """`answer(parts, rank, ranks, send, receive)` returns this rank's parts, each the sum over all ranks."""
    program = partial(call, answer, returns=(list, tuple, torch.Tensor), may_change=(0,), hints=THREADS)
    for ranks in (4, 2, 5, 1):
        inputs = [
            [torch.full((3,), float(10**rank + part)) for part in range(ranks)] for rank in range(ranks)
        ]
        wanted = [torch.stack(parts).sum(dim=0) for parts in zip(*inputs, strict=True)]
        network = Network(ranks)
        right = "The sums are right, but"
        _expect_sums(network.run(program, inputs), wanted)
        around = all(to == (sender + 1) % ranks for sender, to, _ in network.sent)
        expect(around, f"{right} not all messages go to the right neighbor: this is not a ring.")
        most = max(Counter(sender for sender, _, _ in network.sent).values(), default=0)
        often = f"{right} with {ranks} ranks a rank sends {most} messages, more than needed."
        expect(most <= 2 * (ranks - 1), often)
        small = all(size <= inputs[0][0].nbytes for _, _, size in network.sent)
        expect(small, f"{right} some messages are larger than a part. A ring sends one part at a time.")
    real = all(one["reduced"] for one in found_on_ranks(PROGRAM, RANKS, "ring", answer))
    outside = "Right in one process, but not on real ranks: do you keep anything outside of your function?"
    expect(real, outside)


def _expect_sums(found: list[Any], wanted: list[torch.Tensor]) -> None:
    """CheckFailed unless every rank has found all sums; says how far it came."""
    ranks = len(wanted)
    whole = []
    more = False
    for parts in found:
        expect(len(parts) == ranks, f"With {ranks} ranks, return the list of all {ranks} parts.")
        pairs = list(zip(parts, wanted, strict=True))
        for part, total in pairs:
            of_kind(part, torch.Tensor, "One of your parts is")
            expect(part.shape == total.shape, "One of your parts has changed its length.")
        more |= any(bool(part.max() > 1.05 * total.max()) for part, total in pairs)
        whole.append(sum(torch.allclose(part.float(), total) for part, total in pairs))
    twice = "Some numbers are in a sum more than once. In the second half, what arrives is already complete."
    expect(not more, twice)
    expect(ranks == 1 or whole != [1] * ranks, "Each rank has one complete sum: this is only the first half.")
    some = (
        f"With {ranks} ranks, not all parts are complete sums on all ranks, in their original order. How "
        "long is each half? In each, which part leaves first, and which arrives?"
    )
    expect(whole == [ranks] * ranks, some)


class Network:
    """Ranks as threads, a queue between each two; notices a standstill. `sent`: (sender, receiver, bytes)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = self._running = ranks
        self.sent: list[tuple[int, int, int]] = []
        self.queues: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._waiting: set[tuple[int, int]] = set()  # the queues in which ranks wait for a message
        self._changed = threading.Condition()

    def run(self, program: Callable[..., Any], inputs: Sequence[list[torch.Tensor]]) -> list[Any]:
        """Results of `program(parts, rank, ranks, send, receive)` on all ranks; raises what one raises."""

        def one(rank: int) -> Any:
            send = partial(self._send, rank)
            receive = partial(self._receive, rank)
            try:
                return program(inputs[rank], rank, self.ranks, send, receive)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.ranks)]
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:
            # A deadlock comes last: it is mostly a consequence of another error.
            raise min(errors, key=lambda error: "Deadlock" in str(error))
        return [future.result() for future in futures]

    def _send(self, sender: int, tensor: torch.Tensor, to: int) -> None:
        other = f"`send` takes one tensor, a part, not a {type(tensor).__name__}."
        expect(isinstance(tensor, torch.Tensor), other)
        expect(to in range(self.ranks), f"There is no rank {to} to send to: a ring closes with `% ranks`.")
        with self._changed:
            self.sent.append((sender, to, tensor.nbytes))
            self.queues[sender, to].append(tensor.detach().clone())
            self._changed.notify_all()

    def _receive(self, receiver: int, source: int) -> torch.Tensor:
        none = f"There is no rank {source} to receive from: a ring closes with `% ranks`."
        expect(source in range(self.ranks), none)
        with self._changed:
            self._waiting.add((source, receiver))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.queues[source, receiver] or self._stands_still())
            waits = f"rank {receiver} waits for a message from rank {source}, and nobody is left to send one"
            arrived = self.queues[source, receiver]
            expect(arrived, f"Deadlock: {waits}. Does each rank send before it receives, and as often?")
            self._waiting.remove((source, receiver))
            return arrived.popleft()

    def _stands_still(self) -> bool:
        """True if every rank that is still running waits for a message, and none of these is on its way."""
        return len(self._waiting) >= self._running and not any(self.queues[one] for one in self._waiting)


# --------------------------------------------------------------------------------------------------
# 10.3: token_backward
DDP_AVERAGES = (
    "The losses of all ranks add up to the right mean. "
    "But DDP takes the mean of their gradients, not the sum."
)
# factor(n, r): what rank r of n[r] tokens multiplies the mean over them by.
FACTOR_MISTAKES: Mistakes = {
    "You leave the loss as it is: a rank with few tokens counts as much as one with many.": lambda n, r: 1.0,
    DDP_AVERAGES: lambda n, r: n[r] / sum(n),
    "Your loss is a sum over tokens. Who divides it by all tokens?": lambda n, r: n[r],
    "You get the sum over all ranks' tokens. Which number must divide it?": lambda n, r: len(n) * n[r],
    "You divide by all targets. Those of -100 are not tokens.": lambda n, r: n[r] / (TEXTS * LENGTH),
}


def _after_ddp(factor: Callable[[list[int], int], float], *counts: int) -> list[torch.Tensor]:
    """The mean over ranks of their mean losses times factor(counts, rank), and its gradient."""
    model = reader()
    losses = list[torch.Tensor]()
    for rank, tokens in enumerate(counts):
        x, y = texts(rank, tokens)
        total = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        weight = factor(list(counts), rank) if tokens else 0
        losses.append(total / max(tokens, 1) * weight)
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    return [loss.detach(), torch.cat([one.flatten() for one in gradients])]


def _gradient_after_ddp(factor: Callable[[list[int], int], float], *counts: int) -> torch.Tensor:
    return _after_ddp(factor, *counts)[1]


@exercise("10.3", "Every token counts once, no matter which rank has it.", STARTS)
def token_backward(answer: Any) -> None:
    """`answer(model, inputs, targets)` goes backward from the mean over all ranks' tokens, and returns it."""
    right = partial(_after_ddp, lambda n, r: len(n) * n[r] / sum(n))
    with more_from_others():
        expect_together(lambda: _alone(answer, 0 if dist.get_rank() else 5), RANKS)  # one rank without tokens
    by_rank = [one.values() for one in found_on_ranks(PROGRAM, RANKS, "tokens", answer)]
    found = list(zip(*by_rank, strict=True))  # of each of TOKENS, all ranks'
    equal = all(one["gradient"] == ranks[0]["gradient"] for ranks in found[:2] for one in ranks)
    apart = "The ranks end with different gradients: who calls DDP's own forward, outside of `no_sync`?"
    expect(equal, apart)
    mistakes = {says: partial(_gradient_after_ddp, factor) for says, factor in FACTOR_MISTAKES.items()}
    otherwise = "The gradient is off. Write the mean over all tokens as a sum over ranks."
    got = [torch.tensor(ranks[0]["gradient"]) for ranks in found]
    recognized(got[:2], TOKENS[:2], lambda *n: right(*n)[1], mistakes, otherwise, same)
    # In the last of TOKENS a rank has none.
    last = right(*TOKENS[2])[1]
    filled = "Right only while every rank has tokens. DDP divides by all ranks, with or without them."
    expect(not same(got[2:], [last * (RANKS - 1) / RANKS]), filled)
    empty = "Right only while every rank has tokens. A mean over no token is 0/0: which reduction is not?"
    finite = isfinite(sum(one["loss"] for one in found[2]))
    expect(finite and same(got[2:], [last]), empty)
    with pretended(0, 7), more_from_others():
        left = _alone(answer, 5)
    mean = _after_ddp(lambda n, r: 1, 5)[1]
    # Its five tokens are half of a sum over ranks, and a fourteenth of what is gathered from seven.
    fixed = any(same([left], [RANKS / part * mean]) for part in (2, 14))
    expect(not fixed, "Right on three ranks, but only on three. Who knows how many ranks there are?")
    wanted = [right(*counts)[0].item() for counts in TOKENS for _ in range(RANKS)]
    own = "The gradients are right. What you return is not the mean over the tokens of *all* ranks."
    expect(alike([one["loss"] for ranks in found for one in ranks], wanted, 1e-4), own)


@contextmanager
def more_from_others() -> Iterator[None]:
    """Inside `pretended`, sums are five larger than this rank's part, and what is gathered than its own."""
    own = {name: getattr(dist, name) for name in ("all_reduce", "reduce", "all_gather", "all_gather_object")}

    def five_more(one: Any) -> Any:
        return one + 5 if isinstance(one, (Real, torch.Tensor)) else one

    def exchange(name: str, x: Any, *how: Any, **more: Any) -> Any:
        work = own[name](x, *how, **more)
        if name == "all_gather":
            for part in x:
                part.copy_(how[0] + 5)
        elif name == "all_gather_object":
            x[:] = tree_map(five_more, [how[0]] * len(x))
        else:
            x.add_(5)
        return work

    with ExitStack() as stack:
        for name in own:
            stack.enter_context(patch.object(dist, name, partial(exchange, name)))
        yield


def _alone(answer: Any, tokens: int) -> torch.Tensor:
    """The gradient that a learner's function leaves in one process, whose exchanges send nothing."""
    torch.manual_seed(0)
    dry = DryModel(WIDTH, CLASSES)
    call(answer, dry, *texts(0, tokens), finite=False, may_change=(0,))
    went = "A rank does not go backward. The others wait for it in DDP's exchange, tokens or not."
    gradients = [one.grad.flatten() for one in dry.parameters() if one.grad is not None]
    expect(len(gradients) == 2, went)
    return torch.cat(gradients)


# --------------------------------------------------------------------------------------------------
# 10.4: mended_step
TOLERANCE = 1e-6  # for weights near 0.1: rounding stays well below it, a mistake far above


def on_real_ranks(step: Any) -> dict[str, Any]:
    """Notes of `check_ranks.trained` on a step under DDP, for each number of micro-batches in `COUNTS`."""
    return found_on_ranks(PROGRAM, RANKS, "step", step)[0]


@exercise(
    "10.4", "Three real ranks: equal to the last bit, equal to one large batch, and one exchange.", STARTS
)
def mended_step(answer: Any) -> None:
    """`answer(model, optimizer, micro_batches)` is one optimizer step under DDP."""
    dry = DryModel(8, 8)
    batches = [(torch.ones(2, 8), torch.zeros(2, 8)) for _ in range(2)]
    with pretended(0, RANKS):
        call_for_effect(answer, dry, torch.optim.SGD(dry.parameters(), lr=0.1), batches)
    four, *others = found = list(on_real_ranks(answer).values())
    drifts = [max(one["apart"]) > 0 for one in found]
    exchanged = any(one["exchanged"] for one in found)
    never = "DDP exchanges no gradient at all. Which backward is outside of `no_sync`, with DDP's forward?"
    expect(exchanged, never)
    after = "The ranks drift apart, though gradients are exchanged. Which gradients miss the exchange?"
    expect(not all(drifts[:-1]), after)  # with one micro-batch the first is the last
    some = "With some numbers of micro-batches the ranks drift apart. Which micro-batch is the last?"
    expect(not any(drifts), some)
    large = (
        "The ranks agree, but not with one large batch. By what do you divide? When do you step and clear?"
    )
    only = four["off"][0] < TOLERANCE and any(one["off"][0] > TOLERANCE for one in others)
    fixed = "Right with 4 micro-batches, wrong with another number. By how much do you divide the loss?"
    expect(not only, fixed)
    often = (
        "All right, but gradients are exchanged more than once per step. Put `no_sync` around forward, too."
    )
    for one in found:
        expect(one["off"][0] < TOLERANCE, large)
        expect(max(one["off"]) < TOLERANCE, "Only the first step is right: what does a step leave behind?")
        expect(one["exchanged"] < 1.01, often)
    message = "The numbers are right, the memory is not: run each backward before the next forward."
    expect(four["at_once"] <= 2, message)


# --------------------------------------------------------------------------------------------------
# 10.5: fixed_training
STARTS_TWICE = "Three processes start, and then two; this takes about ten seconds."


def training_on_ranks(train: Any) -> dict[str, Any]:
    """Notes of `check_ranks.followed` on DDP training, by number of samples, with all ranks' losses."""
    found = found_on_ranks(PROGRAM, RANKS, "train", train)
    notes = {}
    for count, first in found[0].items():
        notes[count] = first | {"losses": [one[count].get("losses") for one in found]}
    return notes


@exercise(
    "10.5", "Equal ranks from the first step on, every sample seen, the numbers of one process.", STARTS_TWICE
)
def fixed_training(answer: Any) -> None:
    """`answer(body, data, epochs, batch)` trains `body` and a new head on all ranks: model and losses."""
    local = patch.object(DistributedDataParallel, "forward", lambda ddp, *x: ddp.module(*x))
    with pretended(0, RANKS), local:
        returned = call(answer, body(), samples(24), EPOCHS, BATCH, returns=(tuple, list), may_change=(0,))
    two = len(returned) == 2 and isinstance(returned[1], (list, tuple))
    expect(two, "Return two things: the model, and a list of losses.")
    for count, notes in training_on_ranks(answer).items():
        _expect_model(notes)
        _expect_drawn(notes["epochs"], int(count))
        large = (
            "Weights are not those of one process with SGD. "
            "Does every weight learn, at 0.1, only from this step? Do all ranks draw equally many samples?"
        )
        expect(notes["off"] < TOLERANCE, large)
        _expect_losses(notes)
    pair = found_on_ranks(PROGRAM, 2, "train", answer)[0]["24"]
    right = pair["ddp"] and pair["off"] < TOLERANCE and alike(pair["losses"], pair["means"], 1e-4)
    expect(right, "Right on three ranks, but not on two. Who knows how many ranks there are?")


def _expect_model(notes: Mapping[str, Any]) -> None:
    used = "What you return first is not the model in DDP, or you never call it: who exchanges gradients?"
    expect(notes["ddp"] and notes["called"], used)
    start = "Ranks start with different weights. What was missing when DDP sent rank 0's?"
    expect(not notes["start"], start)
    end = "Ranks start equal and drift apart. Are all weights in DDP before the first step?"
    expect(not notes["end"], end)
    expect(notes["head"], "Your model returns what `body` does: where is the new head?")
    sizes = "A rank goes forward with more or fewer samples at once than `batch`."
    expect(max(notes["sizes"]) == BATCH, sizes)


def _expect_drawn(epochs: Sequence[Sequence[int]], count: int) -> None:
    """CheckFailed unless all ranks together draw each of `count` samples, in another order each epoch."""
    drawn = epochs[0]
    more = "Ranks draw more than all samples. Does each draw only its own, once?"
    expect(len(drawn) < count + RANKS, more)
    some = "Some samples are never drawn in an epoch. Do all ranks shuffle alike, and draw to the end?"
    expect(len(set(drawn)) == count, some)
    same_order = "Every epoch has the same order. Who shuffles, and tells the sampler which epoch it is?"
    expect(drawn != epochs[1], same_order)


def _expect_losses(notes: Mapping[str, Any]) -> None:
    first, *others = notes["losses"]
    expect(len(first) == EPOCHS, "Return one loss for each epoch.")
    equal = others == [first] * len(others)
    expect(equal, "Each rank returns losses of its own samples. Who adds up those of all ranks?")
    together = "Your losses are D times too large on D ranks. How many samples did all ranks draw?"
    expect(not alike(first, [RANKS * mean for mean in notes["means"]], 1e-4), together)
    mean = "Losses are not the mean over all samples drawn. One drawn twice counts twice."
    expect(alike(first, notes["means"], 1e-4), mean)
