"""Runs learners' sharded optimizers and checkpoints on real ranks; a program that `checks` starts."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from ...interactive.feedback import expect
from ...measuring.tracker import Tracker
from ..shared.judging import alive
from ..shared.on_ranks import report_judged

RANKS, STEPS, RATE = 4, 3, 0.01
LARGEST = 4 * 33 * 33  # bytes of the largest weight in `network`
TINY = 3e-8  # gradients next to Adam's ε, where a sum takes another step than a mean
SHAPES = (((40, 26), (13,)), ((4, 4),), ((2,), (1,)))  # 1,053 parameters, 16, and fewer than ranks


def padded(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The vector that the exercise's notebook defines as well."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return functional.pad(vector, (0, -len(vector) % dist.get_world_size()))


# That a learner's function may use.
NAMES = {
    "torch": torch,
    "nn": nn,
    "dist": dist,
    "DTensor": DTensor,
    "pad": functional.pad,
    "padded": padded,
    "vector_to_parameters": nn.utils.vector_to_parameters,
}
Shapes = Sequence[tuple[int, ...]]


def weights_of(shapes: Shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, prod(shape)).reshape(shape)) for shape in shapes]


def gradients_of(shapes: Shapes, rank: int, step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 * rank + step)
    return [TINY * torch.randn(shape, generator=random) for shape in shapes]


def by_adam(shapes: Shapes, ranks: Sequence[int], factor: float) -> Iterator[torch.Tensor]:
    """All weights after each Adam step of one process, on these ranks' summed gradients times `factor`."""
    weights = weights_of(shapes)
    optimizer = torch.optim.Adam(weights, lr=RATE)
    for step in range(STEPS):
        gradients = zip(*(gradients_of(shapes, rank, step) for rank in ranks), strict=True)
        for weight, of_ranks in zip(weights, gradients, strict=True):
            weight.grad = torch.stack(of_ranks).sum(0) * factor
        optimizer.step()
        yield nn.utils.parameters_to_vector(weights).detach()


def enough_for(shapes: Shapes) -> int:
    """Bytes of weights, gradient and two moments of a slice, and some for a count of steps."""
    return 16 * -(-sum(map(prod, shapes)) // RANKS) + 64


def taken(answer: Any, shapes: Shapes) -> tuple[list[torch.Tensor], Counter[str], int]:
    """Weights after each step of a learner's optimizer, its exchanges, and bytes kept next to the weights."""
    weights = weights_of(shapes)
    rank = dist.get_rank()
    given = [weight.untyped_storage() for weight in weights]
    after = list[list[float]]()
    sent = Counter[str]()
    gradients = [gradients_of(shapes, rank, step) for step in range(STEPS)]
    with Tracker("cpu") as tracker:
        tracker.bind("parameters", weights)
        optimizer = answer(weights, RATE)
        for of_step in gradients:
            for weight, gradient in zip(weights, of_step, strict=True):
                weight.grad = gradient.clone()
            with CommDebugMode() as exchanges:
                optimizer.step()
            sent.update({str(name): count for name, count in exchanges.get_comm_counts().items()})
            after.append(nn.utils.parameters_to_vector(weights).tolist())
        for weight in weights:
            weight.grad = None
        # New storages of the weights are not counted: they take the place of the given ones.
        homes = {home._cdata: home.nbytes() for home in (weight.untyped_storage() for weight in weights)}
        new = sum(homes[home] for home in homes.keys() - {one._cdata for one in given})
        gc.collect()
        kept = 0
        for _ in range(25):  # gloo's threads let go of what they sent a bit later
            kept = alive(tracker)[-1] - new
            if kept <= enough_for(shapes):
                break
            sleep(0.02)
    return list(map(torch.tensor, after)), sent, kept


def judge_zero_1(answer: Any) -> dict[str, Any]:
    """Expect a learner's optimizer to take Adam's steps on the mean of all gradients, and to keep a slice."""
    # All ranks first take all steps together: one that fails would leave the others waiting.
    for shapes, (after, sent, kept) in [(shapes, taken(answer, shapes)) for shapes in SHAPES]:
        _expect_adam(after, shapes)
        _expect_exchanges(sent)
        more = "The numbers are right. But a rank keeps more than its own slice needs."
        expect(kept <= enough_for(shapes), more)
    return {}


def _expect_adam(after: list[torch.Tensor], shapes: Shapes) -> None:
    """CheckFailed unless these are the weights after each of Adam's steps on the mean gradient."""
    everybody = range(RANKS)
    close = partial(torch.allclose, rtol=0, atol=1e-6)
    first = after[0]
    before = nn.utils.parameters_to_vector(weights_of(shapes))
    stay = "The weights do not change. Does the slice have a `.grad`? Which line puts new weights back?"
    expect(not close(first, before), stay)
    summed = next(by_adam(shapes, everybody, 1.0))
    mean = "You step with the sum of all gradients. Data parallelism takes the mean."
    expect(not close(first, summed), mean)
    # Each slice as its own rank alone would make it.
    size = -(-sum(map(prod, shapes)) // RANKS)
    slices = [next(by_adam(shapes, [rank], 1.0))[rank * size : (rank + 1) * size] for rank in everybody]
    own = "Each rank steps with only its own gradients. Which exchange adds them up?"
    expect(not close(first, torch.cat(slices)), own)
    right = list(by_adam(shapes, everybody, 1 / RANKS))
    other = "The first step is not Adam's, with this learning rate. Follow one number to its slice and back."
    expect(close(first, right[0]), other)
    only_first = "Only the first step is right. What must Adam keep? Is an old gradient still there?"
    expect(close(after[-1], right[-1]), only_first)


def _expect_exchanges(sent: Counter[str]) -> None:
    """CheckFailed unless each step has made one reduce-scatter, one all-gather, and no other exchange."""
    reduced = sum(n for name, n in sent.items() if "reduce" in name and "scatter" not in name)
    scattered = sum(n for name, n in sent.items() if "scatter" in name)
    gathered = sum(n for name, n in sent.items() if "gather" in name)
    all_sums = "The numbers are right. But an all-reduce sends every rank all sums: a slice is enough."
    expect(not reduced, all_sums)
    once = scattered == gathered == STEPS and scattered + gathered == sum(sent.values())
    expect(once, "The numbers are right. In a step, make two exchanges, and each only once.")


def network() -> nn.Sequential:
    """Layers whose rows four ranks cannot share evenly, a bias of three numbers, one that does not learn."""
    torch.manual_seed(0)
    inner = (layer for _ in range(5) for layer in (nn.Linear(33, 33), nn.Tanh()))
    model = nn.Sequential(*inner, nn.Linear(33, 3))
    model[2].bias.requires_grad_(False)
    return model


def sharded(device: str = "cpu") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The network by `fully_shard`, and its optimizer."""
    model = network().to(device)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps on a batch that is the same for every rank."""
    for _ in range(2):
        model(torch.linspace(-1, 1, 165).reshape(5, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def judge_checkpoint(answer: Any) -> dict[str, Any]:
    """Expect one process's whole tensors on rank 0, untouched by further steps, and nothing elsewhere."""
    model, optimizer = sharded()
    train(model, optimizer)
    states = [one for kept in optimizer.state.values() for one in kept.values()]
    shards = [one.to_local() for one in (*model.parameters(), *states) if isinstance(one, DTensor)]
    with Tracker("cpu") as tracker:
        tracker.bind("parameters", shards)
        found = answer(model, optimizer)
    train(model, optimizer)
    if dist.get_rank():
        expect(not found, "Only rank 0 should return tensors. Now every rank holds the whole model.")
        many = "A rank other than 0 holds many whole tensors at once. Free each before you gather the next."
        expect(max(alive(tracker)) < 6 * LARGEST, many)
        return {}
    single = network()
    others = found.keys() - dict(single.named_parameters()).keys() if isinstance(found, dict) else ()
    expect(not others, f"{' and '.join(map(repr, others))} is not the name of a parameter.")
    alone = torch.optim.AdamW(single.parameters(), lr=RATE)
    train(single, alone)
    for name, weight in single.named_parameters():
        _expect_entry(name, found.get(name), {"weight": weight.detach(), **alone.state[weight]})
    return {}


def _expect_entry(name: str, mine: Any, wanted: dict[str, torch.Tensor]) -> None:
    """CheckFailed unless a parameter's entry has these tensors, whole and plain."""
    asked = f"Under {name!r}, return a dictionary: the weight, and what Adam keeps for it."
    expect(isinstance(mine, dict), asked)
    missing = wanted.keys() - mine.keys()
    expect(not missing, f"{name!r} has no {' and no '.join(sorted(missing))}.")
    more = mine.keys() - wanted.keys()
    unknown = f"{name!r} has {' and '.join(map(str, more))}, which the optimizer does not keep for it."
    expect(not more, unknown)
    for key, right in wanted.items():
        value = mine[key]
        what = f"{key!r} of {name!r}"
        plain = type(value) is torch.Tensor
        expect(plain, f"{what} is not a plain tensor. Which type can one process read?")
        expect(not value.requires_grad, f"{what} still carries a graph: use `detach`.")
        expect(value.shape == right.shape, f"{what} is not whole.")
        later = "changed after your function returned: is it a copy, or does the next step write to it?"
        expect(torch.allclose(value, right, atol=1e-5), f"{what} {later}")


if __name__ == "__main__":
    report_judged({"zero_1": judge_zero_1, "checkpoint": judge_checkpoint}, NAMES)
