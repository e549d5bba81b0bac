"""Checks of lesson 10, "Data parallelism", and their judges on real ranks; none tells the answer."""

import copy
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from math import isfinite
from numbers import Real
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from ...interactive.feedback import (
    Mistakes,
    alike,
    call,
    call_for_effect,
    exercise,
    expect,
    of_kind,
    recognized,
)
from ..shared.judging import same
from ..shared.on_ranks import expect_together, found_on_ranks, pretended, sending

RANKS, WIDTH = 3, 8
STARTS = "Three processes start; this takes about ten seconds."

# --------------------------------------------------------------------------------------------------
# 10.1: exposed
EXPOSED_CASES = (  # when buckets are ready, their bytes, ranks, α and β
    ((0.1, 0.2, 0.3), (1000, 3000, 2000), 4, 1e-3, 5e-5),  # the link is busy nearly all the time
    ((0.2, 0.5, 0.6), (1000, 1000, 500), 8, 2e-4, 1e-5),  # only the last one waits
    ((0.1, 0.15), (4000, 1000), 3, 1e-3, 4e-5),
    ((0.4,), (700,), 1, 1e-3, 1e-4),
)


def _ring_time(size: float, D: int, alpha: float, beta: float) -> float:
    """Seconds of an all-reduce in a ring (Patarasuk and Yuan 2009)."""
    return 2 * (D - 1) * (alpha + beta * size / D)


def _exposed(
    ready: Sequence[float],
    sizes: Sequence[int],
    *link: Any,
    time: Callable[..., float] = _ring_time,
    waits: bool = True,
) -> float:
    """Seconds from the end of backward to that of the last exchange; on request with a mistake."""
    free = end = 0.0
    for at, size in zip(ready, sizes, strict=True):
        free = (max(free, at) if waits else at) + time(size, *link)
        end = max(end, free)
    return end - ready[-1]


EXPOSED_MISTAKES: Mistakes = {
    "You add up all exchanges. Which of them run while backward does?": (
        lambda ready, sizes, *link: sum(_ring_time(size, *link) for size in sizes)
    ),
    "You count only the last bucket. Is the link free when it is ready?": (
        lambda ready, sizes, *link: _ring_time(sizes[-1], *link)
    ),
    "Each of your buckets leaves when it is ready, although the one before it is still on its way.": (
        partial(_exposed, waits=False)
    ),
    "This is when the last exchange ends. Return only the time after backward.": (
        lambda ready, *how: ready[-1] + _exposed(ready, *how)
    ),
    "Your messages hold a whole bucket. A ring cuts it into D parts.": partial(
        _exposed, time=lambda size, D, alpha, beta: _ring_time(size * D, D, alpha, beta)
    ),
    "Your exchanges begin with the step. A bucket cannot leave before it is ready.": (
        lambda ready, sizes, *link: sum(_ring_time(size, *link) for size in sizes) - ready[-1]
    ),
}


@exercise("10.1", "One link, one bucket after the other: only what is left after backward costs time.")
def exposed(answer: Any) -> None:
    """`answer(ready, sizes, D, alpha, beta)` is the seconds that a step waits after backward."""
    got = [call(answer, list(ready), list(sizes), *link) for ready, sizes, *link in EXPOSED_CASES]
    otherwise = "Some time is off. Draw a row for backward and one for the link, with a box for each bucket."
    recognized(got, EXPOSED_CASES, _exposed, EXPOSED_MISTAKES, otherwise)


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
        network = Network(ranks)
        _expect_sums(network.run(program), ranks)
        right = "The sums are right, but"
        around = all(to == (sender + 1) % ranks for sender, to, _ in network.sent)
        expect(around, f"{right} not all messages go to the right neighbor: this is not a ring.")
        most = max(Counter(sender for sender, _, _ in network.sent).values(), default=0)
        often = f"{right} with {ranks} ranks a rank sends {most} messages, more than needed."
        expect(most <= 2 * (ranks - 1), often)
        small = all(size <= _parts(0, ranks)[0].nbytes for _, _, size in network.sent)
        expect(small, f"{right} some messages are larger than a part. A ring sends one part at a time.")
    outside = "Right in one process, but not on real ranks: do you keep anything outside of your function?"
    expect(all(one["sums"] for one in found_on_ranks(judge_ring, RANKS, answer)), outside)


def _parts(rank: int, ranks: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(10**rank + part)) for part in range(ranks)]


def _sums(ranks: int) -> list[torch.Tensor]:
    of_ranks = [torch.stack(_parts(rank, ranks)) for rank in range(ranks)]
    return list(torch.stack(of_ranks).sum(0))


def _expect_sums(found: list[Any], ranks: int) -> None:
    """CheckFailed unless every rank has found all sums; says how far it came."""
    whole, more = [], False
    for parts in found:
        expect(len(parts) == ranks, f"With {ranks} ranks, return the list of all {ranks} parts.")
        pairs = list(zip(parts, _sums(ranks), strict=True))
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
        self.ranks = self.running = ranks
        self.sent: list[tuple[int, int, int]] = []
        self.queues: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.waiting: set[tuple[int, int]] = set()  # the queues in which ranks wait for a message
        self.changed = threading.Condition()

    def run(self, program: Callable[..., Any]) -> list[Any]:
        """Results of `program(parts, rank, ranks, send, receive)` on all ranks; raises what one raises."""
        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(self.one, program, rank) for rank in range(self.ranks)]
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:
            # A deadlock comes last: it is mostly a consequence of another error.
            raise min(errors, key=lambda error: "Deadlock" in str(error))
        return [future.result() for future in futures]

    def one(self, program: Callable[..., Any], rank: int) -> Any:
        try:
            exchange = partial(self.send, rank), partial(self.receive, rank)
            return program(_parts(rank, self.ranks), rank, self.ranks, *exchange)
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def send(self, sender: int, tensor: torch.Tensor, to: int) -> None:
        other = f"`send` takes one tensor, a part, not a {type(tensor).__name__}."
        expect(isinstance(tensor, torch.Tensor), other)
        expect(to in range(self.ranks), f"There is no rank {to} to send to: a ring closes with `% ranks`.")
        with self.changed:
            self.sent.append((sender, to, tensor.nbytes))
            self.queues[sender, to].append(tensor.detach().clone())
            self.changed.notify_all()

    def receive(self, receiver: int, source: int) -> torch.Tensor:
        none = f"There is no rank {source} to receive from: a ring closes with `% ranks`."
        expect(source in range(self.ranks), none)
        with self.changed:
            self.waiting.add((source, receiver))
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.queues[source, receiver] or self.stands_still())
            waits = f"rank {receiver} waits for a message from rank {source}, and nobody is left to send one"
            arrived = self.queues[source, receiver]
            expect(arrived, f"Deadlock: {waits}. Does each rank send before it receives, and as often?")
            self.waiting.remove((source, receiver))
            return arrived.popleft()

    def stands_still(self) -> bool:
        """True if every rank that is still running waits for a message, and none of these is on its way."""
        return len(self.waiting) >= self.running and not any(self.queues[one] for one in self.waiting)


def judge_ring(ring: Any) -> dict[str, Any]:
    """True for `sums` if a learner's ring adds up all parts by torch's own isend and recv."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def receive(source: int) -> torch.Tensor:
        arrived = torch.empty(3)
        dist.recv(arrived, source)
        return arrived

    with sending() as send:
        found = ring(_parts(rank, ranks), rank, ranks, send, receive)
    return {"sums": same(list(found), _sums(ranks))}


# --------------------------------------------------------------------------------------------------
# 10.3: token_backward
TEXTS, LENGTH, CLASSES = 2, 6, 5
TOKENS = ([3, 12, 6], [10, 1, 4], [7, 0, 5])  # of each rank: once one has none
# factor(n, r): what rank r of n[r] tokens multiplies the mean over them by.
FACTOR_MISTAKES: dict[str, Callable[[list[int], int], float]] = {
    "You leave the loss as it is: a rank with few tokens counts as much as one with many.": lambda n, r: 1.0,
    "The losses of all ranks add up to the right mean. But DDP takes the mean of their gradients, not the "
    "sum.": lambda n, r: n[r] / sum(n),
    "Your loss is a sum over tokens. Who divides it by all tokens?": lambda n, r: n[r],
    "You get the sum over all ranks' tokens. Which number must divide it?": lambda n, r: len(n) * n[r],
    "You divide by all targets. Those of -100 are not tokens.": lambda n, r: n[r] / (TEXTS * LENGTH),
}


class DryModel(nn.Linear):
    """A model in one process with DDP's interface."""

    no_sync = torch.enable_grad
    module = property(lambda self: self)


def _texts(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's inputs and its targets; all but `tokens` of these are -100, which stands for no token."""
    random = torch.Generator().manual_seed(rank)
    inputs = torch.randn(TEXTS, LENGTH, WIDTH, generator=random)
    targets = torch.randint(CLASSES, (TEXTS, LENGTH), generator=random)
    targets.view(-1)[tokens:] = -100
    return inputs, targets


def _reader() -> nn.Linear:
    torch.manual_seed(0)
    return DryModel(WIDTH, CLASSES)


def _by_ddp(*counts: int, factor: Callable[[list[int], int], float]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over ranks of their mean losses times factor(counts, rank), and its gradient."""
    model, losses = _reader(), []
    for rank, tokens in enumerate(counts):
        x, y = _texts(rank, tokens)
        total = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        losses.append(total / max(tokens, 1) * (factor(list(counts), rank) if tokens else 0))
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), parameters_to_vector(gradients)


def _right(*counts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _by_ddp(*counts, factor=lambda n, r: len(n) * n[r] / sum(n))


def judge_tokens(backward: Any) -> dict[str, Any]:
    """The loss that a learner's function returns on this rank, and its gradient, for each of TOKENS."""
    losses, gradients, rank = [], [], dist.get_rank()
    for counts in TOKENS:
        model = DistributedDataParallel(_reader())
        losses.append(float(backward(model, *_texts(rank, counts[rank]))))
        each = [torch.zeros(1) if one.grad is None else one.grad for one in model.parameters()]
        gradients.append(parameters_to_vector(each).tolist())
    return {"losses": losses, "gradients": gradients}


@exercise("10.3", "Every token counts once, no matter which rank has it.", STARTS)
def token_backward(answer: Any) -> None:
    """`answer(model, inputs, targets)` goes backward from the mean over all ranks' tokens, and returns it."""
    expect_together(lambda: _alone(answer, 0 if dist.get_rank() else 5), RANKS)  # one rank without tokens
    found = found_on_ranks(judge_tokens, RANKS, answer)
    apart = "The ranks end with different gradients: who calls DDP's own forward, outside of `no_sync`?"
    expect(all(one["gradients"][:2] == found[0]["gradients"][:2] for one in found), apart)
    mistakes: Mistakes = {
        says: lambda *counts, factor=factor: _by_ddp(*counts, factor=factor)[1]
        for says, factor in FACTOR_MISTAKES.items()
    }
    otherwise = "The gradient is off. Write the mean over all tokens as a sum over ranks."
    got = list(map(torch.tensor, found[0]["gradients"]))
    recognized(got[:2], TOKENS[:2], lambda *counts: _right(*counts)[1], mistakes, otherwise, same)
    last = _right(*TOKENS[2])[1]  # a rank has none
    filled = "Right only while every rank has tokens. DDP divides by all ranks, with or without them."
    expect(not same(got[2:], [last * (RANKS - 1) / RANKS]), filled)
    empty = "Right only while every rank has tokens. A mean over no token is 0/0: which reduction is not?"
    expect(isfinite(sum(one["losses"][2] for one in found)) and same(got[2:], [last]), empty)
    two = torch.tensor(found_on_ranks(judge_tokens, 2, answer)[0]["gradients"][0])
    fixed = "Right on three ranks, but only on three. Who knows how many ranks there are?"
    expect(same([two], [_right(*TOKENS[0][:2])[1]]), fixed)
    wanted = [_right(*counts)[0].item() for counts in TOKENS]
    own = "The gradients are right. What you return is not the mean over the tokens of *all* ranks."
    expect(all(alike(one["losses"], wanted, 1e-4) for one in found), own)


def _alone(answer: Any, tokens: int) -> None:
    """Expect a learner's function to go backward in one process, whose exchanges send nothing."""
    model = _reader()
    with more_from_others():
        call(answer, model, *_texts(0, tokens), finite=False, may_change=(0,))
    went = "A rank does not go backward. The others wait for it in DDP's exchange, tokens or not."
    expect(all(one.grad is not None for one in model.parameters()), went)


@contextmanager
def more_from_others() -> Iterator[None]:
    """Inside `pretended`, sums are five larger than this rank's part, and what is gathered than its own."""
    own = {name: getattr(dist, name) for name in ("all_reduce", "reduce", "all_gather", "all_gather_object")}

    def exchange(name: str, x: Any, *how: Any, **more: Any) -> Any:
        work = own[name](x, *how, **more)
        if name == "all_gather":
            for part in x:
                part.copy_(how[0] + 5)
        elif name == "all_gather_object":
            known = Real, torch.Tensor
            x[:] = tree_map(lambda one: one + 5 if isinstance(one, known) else one, [how[0]] * len(x))
        else:
            x.add_(5)
        return work

    with ExitStack() as stack:
        for name in own:
            stack.enter_context(patch.object(dist, name, partial(exchange, name)))
        yield


# --------------------------------------------------------------------------------------------------
# 10.4: mended_step
STEPS, RATE, SEQUENCES = 3, 0.1, 2
COUNTS = (4, 6, 5, 1)  # micro-batches of a step: a multiple of four first, then others
TOLERANCE = 1e-6  # for weights near 0.1: rounding stays well below it, a mistake far above


def _after_steps(
    model: nn.Module, batches: Iterable[Sequence[torch.Tensor]]
) -> Iterator[tuple[float, torch.Tensor]]:
    """The loss of each batch (inputs, targets) in one process, and all weights after its step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss.item(), parameters_to_vector(model.parameters()).detach()


def _apart(model: nn.Module) -> float:
    """The largest difference of any weight between any two ranks."""
    highest, lowest = (parameters_to_vector(model.parameters()).detach() for _ in range(2))
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


def _micro_batches(rank: int, step: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    random = torch.Generator().manual_seed(1000 * rank + step)
    return [pair.unbind() for pair in torch.randn(count, 2, SEQUENCES, WIDTH, generator=random)]


def _trained(step: Any, count: int) -> dict[str, Any]:
    """Notes on a few optimizer steps of `count` micro-batches.

    How far the ranks are `apart` after each, and `off` one process with the whole batch, how often gradients
    were `exchanged` in a step, and the most sequences that went forward before a backward (`at_once`).
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    single, model = copy.deepcopy(network), DistributedDataParallel(network)
    sent, forward = [], [0]  # bytes of buckets; sequences since the last backward

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, hook)
    network.register_forward_pre_hook(lambda _, inputs: forward.append(forward[-1] + len(inputs[0])))
    next(model.parameters()).register_hook(lambda _: forward.append(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    apart, off, ranks = [], [], range(dist.get_world_size())
    # For one process: in each step a batch of all ranks' micro-batches.
    of_all = ([_micro_batches(rank, number, count) for rank in ranks] for number in range(STEPS))
    large = ([torch.cat(tensors) for tensors in zip(*chain(*batches), strict=True)] for batches in of_all)
    for number, (_, right) in enumerate(_after_steps(single, large)):
        step(model, optimizer, _micro_batches(dist.get_rank(), number, count))
        apart.append(_apart(model))
        off.append((parameters_to_vector(model.parameters()) - right).abs().max().item())
    return {
        "apart": apart, "off": off, "exchanged": sum(sent) / right.nbytes / STEPS, "at_once": max(forward)
    }  # fmt: skip


def judge_step(step: Any) -> dict[str, Any]:
    """Notes for each number of micro-batches."""
    return {str(count): _trained(step, count) for count in COUNTS}


def on_real_ranks(step: Any) -> dict[str, Any]:
    """Notes of `_trained` on a step under DDP, for each number of micro-batches in `COUNTS`."""
    return found_on_ranks(judge_step, RANKS, step)[0]


@exercise(
    "10.4", "Three real ranks: equal to the last bit, equal to one large batch, and one exchange.", STARTS
)
def mended_step(answer: Any) -> None:
    """`answer(model, optimizer, micro_batches)` is one optimizer step under DDP."""
    dry = DryModel(WIDTH, WIDTH)
    with pretended(0, RANKS):
        optimizer = torch.optim.SGD(dry.parameters(), lr=RATE)
        call_for_effect(answer, dry, optimizer, _micro_batches(0, 0, 2))
    four, *others = found = list(on_real_ranks(answer).values())
    drifts = [max(one["apart"]) > 0 for one in found]
    never = "DDP exchanges no gradient at all. Which backward is outside of `no_sync`, with DDP's forward?"
    expect(any(one["exchanged"] for one in found), never)
    after = "The ranks drift apart, though gradients are exchanged. Which gradients miss the exchange?"
    expect(not all(drifts[:-1]), after)  # with one micro-batch the first is the last
    some = "With some numbers of micro-batches the ranks drift apart. Which micro-batch is the last?"
    expect(not any(drifts), some)
    only = four["off"][0] < TOLERANCE and any(one["off"][0] > TOLERANCE for one in others)
    fixed = "Right with 4 micro-batches, wrong with another number. By how much do you divide the loss?"
    expect(not only, fixed)
    for one in found:
        large = "The ranks agree, but not with one large batch. By what do you divide? When do you step?"
        expect(one["off"][0] < TOLERANCE, large)
        expect(max(one["off"]) < TOLERANCE, "Only the first step is right: what does a step leave behind?")
        often = "All right, but gradients are exchanged more than once per step. Is forward in `no_sync`?"
        expect(one["exchanged"] < 1.01, often)
    message = "The numbers are right, the memory is not: run each backward before the next forward."
    expect(four["at_once"] <= SEQUENCES, message)


# --------------------------------------------------------------------------------------------------
# 10.5: fixed_training
SAMPLES = (24, 23)  # a multiple of the ranks, and not
EPOCHS, BATCH = 2, 5  # the last batch of each rank's 8 samples is smaller


def _samples(count: int) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, WIDTH, generator=random), torch.randn(count, 1, generator=random))


def _body() -> nn.Sequential:
    """Other weights on each rank, as they are without a seed."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _followed(train: Any, count: int) -> dict[str, Any]:
    """Notes on a training on `count` samples.

    How far the ranks were apart at the `start` and `end`, the samples that each epoch draws on all ranks, how
    far weights are `off` one process with the same batches, and losses.
    """
    x, y = _samples(count).tensors
    first: list[Any] = []
    drawn: list[list[int]] = []

    def note(module: nn.Module, given: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            if not first:
                first.append(copy.deepcopy(module.module.state_dict()))
            # Which samples these are, by their inputs.
            drawn.append((given[0][:, None] == x).all(-1).nonzero()[:, 1].tolist())

    with register_module_forward_pre_hook(note):
        model, losses = train(_body(), _samples(count), EPOCHS, BATCH)
    if not (isinstance(model, DistributedDataParallel) and drawn):
        return {"ddp": False}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, drawn)
    batches = [list(chain.from_iterable(step)) for step in zip(*everybody, strict=True)]
    # One process that begins with the same weights takes the same steps.
    single = copy.deepcopy(model.module)
    single.load_state_dict(first[0])
    start = _apart(single)
    steps = list(_after_steps(single, ((x[batch], y[batch]) for batch in batches)))
    losses_of_samples = [loss for (loss, _), batch in zip(steps, batches, strict=True) for _ in batch]
    return {
        "ddp": True,
        "start": start,
        "end": _apart(model),
        "off": (steps[-1][1] - parameters_to_vector(model.parameters())).abs().max().item(),
        "epochs": torch.tensor(list(chain(*batches))).reshape(EPOCHS, -1).tolist(),
        "sizes": list(map(len, drawn)),
        "head": len(single(x).flatten()) == count,
        "means": torch.tensor(losses_of_samples).reshape(EPOCHS, -1).mean(1).tolist(),
        "losses": list(map(float, losses)),
    }


def judge_training(train: Any) -> dict[str, Any]:
    """Notes for each number of samples."""
    return {str(count): _followed(train, count) for count in SAMPLES}


def training_on_ranks(train: Any, ranks: int = RANKS) -> dict[str, Any]:
    """Notes of `_followed` on DDP training, by number of samples, with all ranks' losses."""
    found = found_on_ranks(judge_training, ranks, train)
    of_all = {count: [one[count].get("losses") for one in found] for count in found[0]}
    return {count: notes | {"losses": of_all[count]} for count, notes in found[0].items()}


@exercise(
    "10.5",
    "Equal ranks from the first step on, every sample seen, the numbers of one process.",
    "Three processes start, and then two; this takes about ten seconds.",
)
def fixed_training(answer: Any) -> None:
    """`answer(body, data, epochs, batch)` trains `body` and a new head on all ranks: model and losses."""
    local = patch.object(DistributedDataParallel, "forward", lambda ddp, *x: ddp.module(*x))
    with pretended(0, RANKS), local:
        returned = call(answer, _body(), _samples(24), EPOCHS, BATCH, returns=(tuple, list), may_change=(0,))
    two = len(returned) == 2 and isinstance(returned[1], (list, tuple))
    expect(two, "Return two things: the model, and a list of losses.")
    for count, notes in training_on_ranks(answer).items():
        _expect_weights(notes)
        _expect_drawn(notes["epochs"], int(count))
        _expect_losses(notes)
    pair = training_on_ranks(answer, 2)["24"]
    right = pair["ddp"] and pair["off"] < TOLERANCE and alike(pair["losses"][0], pair["means"], 1e-4)
    expect(right, "Right on three ranks, but not on two. Who knows how many ranks there are?")


def _expect_weights(notes: Mapping[str, Any]) -> None:
    used = "What you return first is not the model in DDP, or you never call it: who exchanges gradients?"
    expect(notes["ddp"], used)
    start = "Ranks start with different weights. What was missing when DDP sent rank 0's?"
    expect(not notes["start"], start)
    end = "Ranks start equal and drift apart. Are all weights in DDP before the first step?"
    expect(not notes["end"], end)
    expect(notes["head"], "Your model returns what `body` does: where is the new head?")
    sizes = "A rank goes forward with more or fewer samples at once than `batch`."
    expect(max(notes["sizes"]) == BATCH, sizes)


def _expect_drawn(epochs: Sequence[Sequence[int]], count: int) -> None:
    """CheckFailed unless all ranks together draw each of `count` samples, in another order each epoch."""
    more = "Ranks draw more than all samples. Does each draw only its own, once?"
    expect(len(epochs[0]) < count + RANKS, more)
    some = "Some samples are never drawn in an epoch. Do all ranks shuffle alike, and draw to the end?"
    expect(len(set(epochs[0])) == count, some)
    same_order = "Every epoch has the same order. Who shuffles, and tells the sampler which epoch it is?"
    expect(epochs[0] != epochs[1], same_order)


def _expect_losses(notes: Mapping[str, Any]) -> None:
    large = (
        "Weights are not those of one process with SGD. "
        "Does every weight learn, at 0.1, only from this step? Do all ranks draw equally many samples?"
    )
    expect(notes["off"] < TOLERANCE, large)
    first, *others = notes["losses"]
    expect(len(first) == EPOCHS, "Return one loss for each epoch.")
    equal = "Each rank returns losses of its own samples. Who adds up those of all ranks?"
    expect(others == [first] * len(others), equal)
    together = "Your losses are D times too large on D ranks. How many samples did all ranks draw?"
    expect(not alike(first, [RANKS * mean for mean in notes["means"]], 1e-4), together)
    mean = "Losses are not the mean over all samples drawn. One drawn twice counts twice."
    expect(alike(first, notes["means"], 1e-4), mean)
