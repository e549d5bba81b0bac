"""Replicas of a small network on several ranks: what keeps them equal, and what happens if something is not shared."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

SEQUENCES, INPUTS, CLASSES = 24, 16, 4
STEPS, RATE = 30, 0.2
LEFT_OUT = "2.bias"  # the one gradient that is not shared: four numbers of several hundred

Batch = tuple[torch.Tensor, torch.Tensor]


def network() -> nn.Module:
    """The same network with the same weights wherever it is called."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def whole_batch() -> Batch:
    """The global batch (inputs, classes), the same wherever it is called."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SEQUENCES, INPUTS, generator=generator)
    return inputs, torch.randint(CLASSES, (SEQUENCES,), generator=generator)


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """The part of `batch` that one rank works on; all are equally large. ValueError if it cannot be shared out."""
    if len(batch[0]) % ranks:
        raise ValueError(f"a batch of {len(batch[0])} cannot be shared out evenly among {ranks} ranks")
    inputs, targets = (tensor.chunk(ranks)[rank] for tensor in batch)
    return inputs, targets


def gradients(model: nn.Module, batch: Batch) -> torch.Tensor:
    """All gradients of the mean loss over `batch`, as one vector."""
    model.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def train(model: nn.Module, batch: Batch, is_shared: Callable[[str], bool]) -> list[float]:
    """Train on this rank's `batch`; after each step, how far the weights of any two ranks are apart at most."""
    apart = []
    for _ in range(STEPS):
        gradients(model, batch)
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            if is_shared(name):
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
            weight.data -= RATE * weight.grad
        apart.append(distance(model))
    return apart


def weights(model: nn.Module) -> torch.Tensor:
    """All weights as one vector, copied."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def distance(model: nn.Module) -> float:
    """The largest difference of any weight between any two ranks."""
    highest, lowest = weights(model), weights(model)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


SHARING: dict[str, Callable[[str], bool]] = {
    "all gradients": lambda name: True,
    f"all but {LEFT_OUT}": lambda name: name != LEFT_OUT,
    "no gradient": lambda name: False,
}
"""Three ways to train: True for the names of parameters whose gradients are shared."""
