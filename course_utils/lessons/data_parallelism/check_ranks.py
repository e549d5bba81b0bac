"""Runs learners' rings, and training under DDP, on real ranks; a program that `checks` starts."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ..shared.on_ranks import report_judged, sending
from .ddp_training import Trace

STEPS, RATE, WIDTH, SEQUENCES = 3, 0.1, 8, 2
COUNTS = (4, 6, 5, 1)  # micro-batches of a step: a multiple of four first, then others
TEXTS, LENGTH, CLASSES = 2, 6, 5
TOKENS = ([3, 12, 6], [10, 1, 4], [7, 0, 5])  # of each rank: once one has none
SAMPLES = (24, 23)  # a multiple of the ranks, and not
EPOCHS, BATCH = 2, 5  # the last batch of each rank's 8 samples is smaller
# That a learner's function may use.
NAMES = {
    "torch": torch,
    "nn": nn,
    "F": functional,
    "mse_loss": functional.mse_loss,
    "nullcontext": nullcontext,
    "dist": dist,
    "cross_entropy": functional.cross_entropy,
    "DistributedDataParallel": DistributedDataParallel,
    "DataLoader": DataLoader,
    "DistributedSampler": DistributedSampler,
}


def network() -> nn.Module:
    """The same small network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def micro_batches(rank: int, step: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    """Inputs and targets of one rank in one step: other numbers on every rank."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    drawn = torch.randn(count, 2, SEQUENCES, WIDTH, generator=random)
    return [pair.unbind() for pair in drawn]


def trained(step: Any, count: int) -> dict[str, Any]:
    """Notes on a few optimizer steps of `count` micro-batches.

    How far the ranks are `apart` after each, and `off` one process with the whole batch, how often gradients
    were `exchanged` in a step, and the most sequences that went forward before a backward (`at_once`).
    """
    model = DistributedDataParallel(network())
    trace = Trace(torch.device("cpu"))
    model.register_comm_hook(None, trace.hook)
    forward = [0]  # sequences since the last backward
    model.module.register_forward_pre_hook(lambda _, inputs: forward.append(forward[-1] + len(inputs[0])))
    next(model.parameters()).register_hook(lambda _: forward.append(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    apart = []
    off = []
    ranks = range(dist.get_world_size())
    # For one process: in each step a batch of all ranks' micro-batches.
    of_all = ([micro_batches(rank, number, count) for rank in ranks] for number in range(STEPS))
    large = ([torch.cat(tensors) for tensors in zip(*chain(*batches), strict=True)] for batches in of_all)
    for number, (_, right) in enumerate(after_steps(network(), large)):
        step(model, optimizer, micro_batches(dist.get_rank(), number, count))
        apart.append(distance(model))
        off.append((weights(model) - right).abs().max().item())
    exchanged = sum(bucket["size"] for bucket in trace.buckets) / weights(model).nbytes / STEPS
    return {"apart": apart, "off": off, "exchanged": exchanged, "at_once": max(forward)}


def after_steps(
    model: nn.Module, batches: Iterable[Sequence[torch.Tensor]]
) -> Iterator[tuple[float, torch.Tensor]]:
    """The loss of each batch (inputs, targets) in one process, and all weights after its step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss.item(), weights(model)


def weights(model: nn.Module) -> torch.Tensor:
    """All weights as one vector, copied."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def distance(model: nn.Module) -> float:
    """The largest difference of any weight between any two ranks."""
    highest = weights(model)
    lowest = weights(model)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


def texts(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's inputs and its targets; all but `tokens` of these are -100, which stands for no token."""
    random = torch.Generator().manual_seed(rank)
    inputs = torch.randn(TEXTS, LENGTH, WIDTH, generator=random)
    targets = torch.randint(CLASSES, (TEXTS, LENGTH), generator=random)
    targets.view(-1)[tokens:] = -100
    return inputs, targets


def reader() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES)


class DryModel(nn.Linear):
    """A model in one process with DDP's interface."""

    no_sync = torch.enable_grad
    module = property(lambda self: self)


def token_gradients(backward: Any, counts: list[int]) -> dict[str, Any]:
    """Return value of a learner's `backward` on a rank with its number of tokens, and its gradient."""
    rank = dist.get_rank()
    model = DistributedDataParallel(reader())
    loss = float(backward(model, *texts(rank, counts[rank])))
    gradients = [
        weight.new_zeros(()) if weight.grad is None else weight.grad for weight in model.parameters()
    ]
    return {"loss": loss, "gradient": torch.cat([one.flatten() for one in gradients]).tolist()}


def samples(count: int) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, WIDTH, generator=random), torch.randn(count, 1, generator=random))


def body() -> nn.Sequential:
    """Other weights on each rank, as they are without a seed."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def followed(train: Any, count: int) -> dict[str, Any]:
    """Notes on a training on `count` samples.

    How far the ranks were apart at the `start` and `end`, the samples that each epoch draws on all ranks, how
    far weights are `off` one process with the same batches, and losses.
    """
    x, y = samples(count).tensors
    first = list[Any]()
    drawn = list[list[int]]()

    def note(module: nn.Module, given: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            if not first:
                first.append(copy.deepcopy(module.module.state_dict()))
            # Which samples these are, by their inputs.
            drawn.append((given[0][:, None] == x).all(-1).nonzero()[:, 1].tolist())

    with register_module_forward_pre_hook(note):
        model, losses = train(body(), samples(count), EPOCHS, BATCH)
    ddp = isinstance(model, DistributedDataParallel)
    if not (ddp and drawn):
        return {"ddp": ddp, "called": bool(drawn)}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, drawn)
    batches = [list(chain.from_iterable(step)) for step in zip(*everybody, strict=True)]
    # One process that begins with the same weights takes the same steps.
    single = copy.deepcopy(model.module)
    single.load_state_dict(first[0])
    start = distance(single)
    steps = list(after_steps(single, ((x[batch], y[batch]) for batch in batches)))
    losses_of_samples = [loss for (loss, _), batch in zip(steps, batches, strict=True) for _ in batch]
    epochs = torch.tensor(list(chain(*batches))).reshape(EPOCHS, -1)
    means = torch.tensor(losses_of_samples).reshape(EPOCHS, -1).mean(1)
    off = (steps[-1][1] - weights(model)).abs().max().item()
    return {
        "ddp": True,
        "called": True,
        "start": start,
        "end": distance(model),
        "off": off,
        "epochs": epochs.tolist(),
        "sizes": list(map(len, drawn)),
        "head": len(single(x).flatten()) == count,
        "means": means.tolist(),
        "losses": list(map(float, losses)),
    }


def reduced(ring: Any) -> bool:
    """True if a learner's `ring` adds up all parts by torch's own isend and recv."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()

    def receive(source: int) -> torch.Tensor:
        arrived = torch.empty(5)
        dist.recv(arrived, source)
        return arrived

    parts = [torch.full((5,), float(10**rank + part)) for part in range(ranks)]
    with sending() as send:
        found = ring(parts, rank, ranks, send, receive)
    sums = [sum(10**r + part for r in range(ranks)) for part in range(ranks)]
    return [part.tolist() for part in found] == [[total] * 5 for total in sums]


JUDGES = {
    "ring": lambda ring: {"reduced": reduced(ring)},
    "step": lambda step: {str(count): trained(step, count) for count in COUNTS},
    "tokens": lambda backward: {str(counts): token_gradients(backward, counts) for counts in TOKENS},
    "train": lambda train: {str(count): followed(train, count) for count in SAMPLES},
}

if __name__ == "__main__":
    report_judged(JUDGES, NAMES)
