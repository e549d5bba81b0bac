"""Checks of lesson 11, "ZeRO and FSDP", and their judges on real ranks; none tells the answer."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from math import prod
from time import sleep
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import parameters_to_vector

from ...interactive.feedback import Mistakes, call, exercise, expect, recognized
from ...watching.on_gpu import on_gpu
from ..shared.judging import alive_during, same, told
from ..shared.on_ranks import expect_together, found_on_ranks, pretended

RANKS, STEPS, RATE = 4, 3, 0.01
STARTS = "The check starts four processes. This takes about ten seconds."


def _network() -> nn.Sequential:
    """Layers whose rows four ranks cannot share evenly, a bias of three numbers, one that does not learn."""
    torch.manual_seed(0)
    inner = (layer for _ in range(5) for layer in (nn.Linear(33, 33), nn.Tanh()))
    model = nn.Sequential(*inner, nn.Linear(33, 3))
    model[2].bias.requires_grad_(False)
    return model


# --------------------------------------------------------------------------------------------------
# 11.1: start
def _rows(whole: torch.Tensor, rank: int, pick: Callable[..., Any] = lambda rank, rows: rank * rows) -> Any:
    """The rows of a rank, from the row that `pick` says on."""
    rows = -(-len(whole) // RANKS)
    return whole[pick(rank, rows) :][:rows]


ROW_MISTAKES: Mistakes = {
    "Every rank has rank 0's rows. Where do those of this rank begin?": (
        partial(_rows, pick=lambda rank, rows: 0)
    ),
    "Your rows begin at the rank's number. How many rows do the ranks before it have?": (
        partial(_rows, pick=lambda rank, rows: rank)
    ),
}
START_HINTS = {
    "meta": "A tensor on the meta device has no numbers to read or write: when does the model get its bytes?",
    "index out of range": "With few rows, the last ranks have none: `chunk` then makes fewer pieces.",
    "leaf Variable": "Fill the shards under `torch.no_grad()`: it is not a step of the training.",
}


@exercise("11.1", "Each rank has its own rows, and nothing whole was ever on its GPU.")
def start(answer: Any) -> None:
    """`answer(model, whole, mesh)` is the model, sharded, on the mesh's device, with the rows of `whole`."""
    asked = partial(call, answer, returns=nn.Module, may_change=(0, 2), hints=START_HINTS)
    for rank in (0, 1, RANKS - 1):
        whole = _network().state_dict()
        with torch.device("meta"):
            empty = _network()
        with pretended(rank, RANKS):
            model = asked(empty, whole, dist.init_device_mesh("cpu", (RANKS,)))
            units = "Each layer with weights is a unit, and so is the model itself."
            layers = [one for one in (model, *model) if list(one.parameters())]
            expect(all(isinstance(one, FSDPModule) for one in layers), units)
            shards = {name: weight.to_local() for name, weight in model.named_parameters()}
        meta = "A weight is still on the meta device. Does the sharded model have its bytes?"
        expect(not any(shard.is_meta for shard in shards.values()), meta)
        known = [(whole[name], rank) for name in shards]
        otherwise = "Some weights are not this rank's rows of the whole ones. What did `to_empty` leave?"
        recognized(list(shards.values()), known, _rows, ROW_MISTAKES, otherwise, same)
    most, peak = _peak_of_start(asked)
    all_whole = "The whole model was on the GPU. Which comes first, its shards or its bytes?"
    expect(peak < 3 * most, all_whole)
    one_whole = "A whole weight was on the GPU. Cut it on the host, and copy the rows alone."
    expect(peak < 1.5 * most, one_whole)


def _peak_of_start(asked: Callable[..., nn.Module]) -> tuple[int, int]:
    """Bytes of a rank's shards, and the peak while a simulated GPU gets them."""
    layers = [nn.Linear(256, 256) for _ in range(4)]
    whole = nn.Sequential(*layers).state_dict()
    with redirect_stdout(StringIO()), on_gpu(ranks=RANKS):
        dist.init_process_group("nccl")
        asked(nn.Sequential(*layers).to("meta"), whole, dist.init_device_mesh("cuda", (RANKS,)))
        return sum(one.nbytes for one in whole.values()) // RANKS, torch.cuda.max_memory_allocated()


# --------------------------------------------------------------------------------------------------
# 11.2: Zero1Adam
TINY = 3e-8  # gradients next to Adam's ε, where a sum takes another step than a mean
Shapes = Sequence[tuple[int, ...]]
SHAPES: tuple[Shapes, ...] = (((40, 26), (13,)), ((4, 4),), ((2,), (1,)))  # 1,053, 16, fewer than ranks
UNEVEN = "The vector is not D slices. Did you pad weights and gradients? Are the arguments in order?"
STEP_HINTS = {"output tensor size": UNEVEN, "same size as output size": UNEVEN}


@exercise(
    "11.2", "Adam's exact steps, one exchange of each kind, and a quarter of the states on each rank.", STARTS
)
def zero_1_adam(answer: Any) -> None:
    """`answer(parameters, lr)` has a `step()`: Adam, its states cut among the ranks."""

    def one_step() -> None:
        weights = _weights(SHAPES[0])
        optimizer = call(answer, weights, RATE, returns=object, may_change=(0,))
        expect(hasattr(optimizer, "step"), "Pass the class itself. Its objects need a method `step`.")
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        call(optimizer.step, returns=(object, NoneType), hints=STEP_HINTS)

    expect_together(one_step, RANKS)
    found_on_ranks(judge_zero_1, RANKS, answer)


def _weights(shapes: Shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, prod(shape)).reshape(shape)) for shape in shapes]


def _gradients(shapes: Shapes, rank: int, step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 * rank + step)
    return [TINY * torch.randn(shape, generator=random) for shape in shapes]


def _by_adam(
    shapes: Shapes, ranks: Sequence[int] = range(RANKS), factor: float = 1 / RANKS
) -> list[torch.Tensor]:
    """All weights after each Adam step of one process, on these ranks' summed gradients times `factor`."""
    weights, after = _weights(shapes), []
    optimizer = torch.optim.Adam(weights, lr=RATE)
    for step in range(STEPS):
        gradients = zip(*(_gradients(shapes, rank, step) for rank in ranks), strict=True)
        for weight, of_ranks in zip(weights, gradients, strict=True):
            weight.grad = torch.stack(of_ranks).sum(0) * factor
        optimizer.step()
        after.append(parameters_to_vector(weights).detach().clone())
    return after


def _stepped(answer: Any, shapes: Shapes) -> tuple[list[torch.Tensor], Counter[str], int]:
    """Weights after each step of a learner's optimizer, its exchanges, and bytes kept next to the weights."""
    weights = _weights(shapes)
    gradients = [_gradients(shapes, dist.get_rank(), step) for step in range(STEPS)]
    after: list[list[float]] = []
    sent: Counter[str] = Counter()

    def train() -> Any:
        optimizer = answer(weights, RATE)
        for of_step in gradients:
            for weight, gradient in zip(weights, of_step, strict=True):
                weight.grad = gradient.clone()
            with CommDebugMode() as exchanges:
                optimizer.step()
            sent.update({str(name): count for name, count in exchanges.get_comm_counts().items()})
            after.append(parameters_to_vector(weights).tolist())
        for weight in weights:
            weight.grad = None
        gc.collect()
        sleep(0.5)  # gloo's threads let go of what they sent a bit later
        return optimizer

    kept = alive_during(train, weights).end
    return list(map(torch.tensor, after)), sent, kept


def judge_zero_1(answer: Any) -> dict[str, Any]:
    """Expect a learner's optimizer to take Adam's steps on the mean of all gradients, and to keep a slice."""
    # All ranks first take all steps together: one that fails would leave the others waiting.
    for shapes, (after, sent, kept) in [(shapes, _stepped(answer, shapes)) for shapes in SHAPES]:
        _expect_adam(after, shapes)
        names = {part: sum(n for name, n in sent.items() if part in name) for part in ("scatter", "gather")}
        all_sums = "The numbers are right. But an all-reduce sends every rank all sums: a slice is enough."
        expect(not any("reduce" in name and "scatter" not in name for name in sent), all_sums)
        once = "The numbers are right. In a step, make two exchanges, and each only once."
        expect(set(names.values()) == {STEPS} and sum(sent.values()) == 2 * STEPS, once)
        most = 16 * -(-sum(map(prod, shapes)) // RANKS) + 64  # and a count of steps
        expect(kept <= most, "The numbers are right. But a rank keeps more than its own slice needs.")
    return {}


def _expect_adam(after: list[torch.Tensor], shapes: Shapes) -> None:
    """CheckFailed unless these are the weights after each of Adam's steps on the mean gradient."""
    close = partial(torch.allclose, rtol=0, atol=1e-6)
    stay = "The weights do not change. Does the slice have a `.grad`? Which line puts new weights back?"
    expect(not close(after[0], parameters_to_vector(_weights(shapes))), stay)
    mean = "You step with the sum of all gradients. Data parallelism takes the mean."
    expect(not close(after[0], _by_adam(shapes, factor=1.0)[0]), mean)
    # Each slice as its own rank alone would make it.
    size = -(-sum(map(prod, shapes)) // RANKS)
    alone = [_by_adam(shapes, [rank], 1.0)[0][rank * size : (rank + 1) * size] for rank in range(RANKS)]
    own = "Each rank steps with only its own gradients. Which exchange adds them up?"
    expect(not close(after[0], torch.cat(alone)), own)
    right = _by_adam(shapes)
    other = "The first step is not Adam's, with this learning rate. Follow one number to its slice and back."
    expect(close(after[0], right[0]), other)
    only_first = "Only the first step is right. What must Adam keep? Is an old gradient still there?"
    expect(close(after[-1], right[-1]), only_first)


# --------------------------------------------------------------------------------------------------
# 11.3: checkpoint
LARGEST = 4 * 33 * 33  # bytes of the largest weight in `_network`


def _sharded(device: str = "cpu") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The network by `fully_shard`, and its optimizer."""
    model = _network().to(device)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def _with_states(device: str = "cpu") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The same after a step, without a backward."""
    model, optimizer = _sharded(device)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step()
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps on a batch that is the same for every rank."""
    for _ in range(2):
        model(torch.linspace(-1, 1, 165).reshape(5, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@exercise(
    "11.3", "Rank 0 holds whole tensors that one process can read. Other ranks hold few at a time.", STARTS
)
def checkpoint(answer: Any) -> None:
    """`answer(model, optimizer)` is a dictionary of whole tensors on rank 0, and empty elsewhere."""
    asked = partial(call, answer, returns=(Mapping, NoneType), may_change=(0, 1))
    expect_together(lambda: asked(*_with_states()), RANKS)
    found_on_ranks(judge_checkpoint, RANKS, answer)
    with redirect_stdout(StringIO()), on_gpu(ranks=RANKS):
        dist.init_process_group("nccl")
        found = asked(*_with_states("cuda"))
        on_host = all(value.device.type == "cpu" for entry in found.values() for value in entry.values())
    gpu = "The numbers are right, but rank 0 keeps whole tensors on its GPU, which has no room for them."
    expect(on_host, gpu)


def judge_checkpoint(answer: Any) -> dict[str, Any]:
    """Expect one process's whole tensors on rank 0, untouched by further steps, and nothing elsewhere."""
    model, optimizer = _sharded()
    _train(model, optimizer)
    states = [one for kept in optimizer.state.values() for one in kept.values()]
    shards = [one.to_local() for one in (*model.parameters(), *states) if isinstance(one, DTensor)]
    found, _, _, peak = alive_during(lambda: answer(model, optimizer), shards)
    _train(model, optimizer)
    if dist.get_rank():
        expect(not found, "Only rank 0 should return tensors. Now every rank holds the whole model.")
        many = "A rank other than 0 holds many whole tensors at once. Free each before you gather the next."
        expect(peak < 6 * LARGEST, many)
        return {}
    single = _network()
    others = found.keys() - dict(single.named_parameters()).keys() if isinstance(found, dict) else ()
    expect(not others, f"{' and '.join(map(repr, others))} is not the name of a parameter.")
    alone = torch.optim.AdamW(single.parameters(), lr=RATE)
    _train(single, alone)
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
        value, what = mine[key], f"{key!r} of {name!r}"
        plain = f"{what} is not a plain tensor. Which type can one process read?"
        expect(type(value) is torch.Tensor, plain)
        expect(not value.requires_grad, f"{what} still carries a graph: use `detach`.")
        expect(value.shape == right.shape, f"{what} is not whole.")
        later = "changed after your function returned: is it a copy, or does the next step write to it?"
        expect(torch.allclose(value, right, atol=1e-5), f"{what} {later}")


# --------------------------------------------------------------------------------------------------
# 11.4: shard_to_fit
CARDS, WIDE = 8, 256
MOST = 8 * WIDE * WIDE + 8 * WIDE  # exactly a block's
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """The sum of some experts on the same tokens; with one, a plain block. The gate is the block's own."""

    def __init__(self, experts: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.gate = nn.Parameter(torch.ones(WIDE))
        layers = [(nn.Linear(WIDE, inner), nn.GELU(), nn.Linear(inner, WIDE)) for _ in range(experts)]
        self.experts = nn.ModuleList(nn.Sequential(*three) for three in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * torch.stack([expert(self.norm(x)) for expert in self.experts]).sum(0)


MODELS = {  # blocks, experts in each, how wide these are, and words
    "six blocks": (6, 1, 4 * WIDE, 8_000), "a block of four experts": (1, 4, 4 * WIDE, 8_000),
    "experts just too large": (1, 2, 1050, 90), "no block, and few words": (0, 1, 1, 90),
}  # fmt: skip


def peak_of(
    shard: Any, name: str = "six blocks", look: Callable[[nn.Module, Any], None] = lambda *_: None
) -> int:
    """Peak bytes of that model's step on rank 0 of 8 simulated ranks, after `shard(model, most, policy)`."""
    blocks, experts, inner, words = MODELS[name]
    with redirect_stdout(StringIO()), on_gpu(ranks=CARDS):
        middle = nn.Sequential(*(Block(experts, inner) for _ in range(blocks)))
        model = nn.Sequential(nn.Embedding(words, WIDE), middle, nn.Linear(WIDE, words)).to("cuda")
        lost = "FSDP2 loses weights: is a part sharded after the module that contains it?"
        hints = {"Invariant encountered": lost}
        optimizer = call(
            shard, model, MOST, POLICY, returns=torch.optim.Optimizer, may_change=(0,), hints=hints
        )
        look(model, optimizer)
        torch.cuda.reset_peak_memory_stats()
        with told("A step of the model that you sharded raised"):
            model(torch.zeros(32, dtype=torch.long, device="cuda")).float().square().mean().backward()
            optimizer.step()
        return torch.cuda.max_memory_allocated()


def _numbers(module: nn.Module, without: Sequence[nn.Module] = ()) -> int:
    others = {id(weight) for one in without for weight in one.parameters()}
    return sum(weight.numel() for weight in module.parameters() if id(weight) not in others)


def _units(part: nn.Module) -> Iterator[nn.Module]:
    """The units of the exercise's rule, the inner ones first."""
    if _numbers(part) > MOST:
        for child in part.children():
            yield from _units(child)
    if not isinstance(part, nn.ModuleList):
        yield part


def _by_the_rule(model: nn.Module, most: int, policy: MixedPrecisionPolicy) -> torch.optim.Optimizer:
    """A right answer, whose peak counts only in torch 2.11, where it is above the room.

    There the first backward of a norm that is called twice has no gradients yet, and does not free the last
    reduce-scatter's input. In 2.13 it does.
    """
    for part in list(_units(model)):
        fully_shard(part, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@exercise("11.4", "No unit is larger than necessary, so the peak stays near the size of the shards.")
def shard_to_fit(answer: Any) -> None:
    """`answer(model, most, policy)` shards the model in units up to `most` numbers, and is its optimizer."""
    formats = set[torch.dtype]()
    room = [0]

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        whole = "The model itself is not a unit. What shards weights outside its parts?"
        expect(isinstance(model, FSDPModule), whole)
        _expect_optimizer(optimizer, model)
        _expect_units(model)
        for part in model.modules():
            if not list(part.children()):
                part.register_forward_pre_hook(
                    lambda part, _: formats.update(weight.dtype for weight in part.parameters())
                )
        units = [part for part in model.modules() if isinstance(part, FSDPModule)]
        largest = max(_numbers(part, _inside(part, units)) for part in units)
        room.append(16 * _numbers(model) // CARDS + 4 * largest + 100_000)

    for name in MODELS:
        peak = peak_of(answer, name, look)
        fp32 = "Some weights are gathered in fp32. Does every unit have the policy?"
        expect(formats == {POLICY.param_dtype}, fp32)
        near = peak <= room[-1] or peak <= peak_of(_by_the_rule, name)
        high = "The units are right, but the peak is too high. What stays whole from forward to backward?"
        expect(near, high)


def _expect_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    old = "The optimizer steps weights that the model no longer has: `fully_shard` replaces the parameters."
    expect(stepped == set(map(id, model.parameters())), old)
    rates = {group["lr"] for group in optimizer.param_groups}
    adamw = isinstance(optimizer, torch.optim.AdamW) and rates == {1e-3}
    expect(adamw, "Return a `torch.optim.AdamW` with a learning rate of 1e-3 for all parameters.")


def _expect_units(model: nn.Module) -> None:
    """CheckFailed unless the units are those of the rule; one without numbers of its own may be missing."""
    cut = list(_units(model))
    small = "Your units are too small: a part of at most `most` numbers is one unit, without units inside."
    left = "A part that you split has parameters of its own, and no unit takes them: make it a unit, too."
    large = "A unit gathers more than `most` numbers, although it has parts. Do its parts have parts, too?"
    for part in model.modules():
        inner = _inside(part, cut)
        if isinstance(part, FSDPModule):
            expect(part in cut, small)
        elif part in cut:
            expect(not _numbers(part, inner), left if inner else large)


def _inside(part: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    return [one for one in part.modules() if one is not part and one in units]
