"""Checks of the exercises of lesson 11, "ZeRO and FSDP": each names the misconception, never the answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from math import prod
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ...interactive.feedback import alike, call, entries, exercise, expect, recognized
from ...watching.on_gpu import on_gpu
from ..shared.judging import told
from ..shared.on_ranks import expect_together, found_on_ranks
from .check_ranks import RANKS, RATE, SHAPES, Shapes, sharded, weights_of

# --------------------------------------------------------------------------------------------------
# 11.1: padding
PADDING_CASES: tuple[tuple[Shapes, int], ...] = (
    ([(50257, 768), (768,)], 64), ([(250, 1000), (250,), (4001, 250), (250,)], 4), ([(3,)], 8),
    ([(10, 6), (7, 2)], 3), ([(64, 64)], 8), ([(10, 4, 3), (7, 2, 3, 5)], 4))  # fmt: skip


def _summed(numbers: Callable[[tuple[int, ...], int], int]) -> Callable[[Shapes, int], int]:
    return lambda shapes, D: sum(numbers(shape, D) for shape in shapes)


_all = _summed(lambda s, D: prod(s))
_shard = _summed(lambda s, D: -(-s[0] // D) * prod(s[1:]))
_padding = _summed(lambda s, D: -s[0] % D * prod(s[1:]))

SHARD_MISTAKES = {
    "You round down: then no rank owns the last numbers.": lambda shapes, D: _all(shapes, D) // D,
    "You share out single numbers. FSDP2 shards whole rows.": _summed(lambda s, D: -(-prod(s) // D)),
    "You shard all parameters as one flat piece. FSDP2 shards each one.": (
        lambda shapes, D: -(-_all(shapes, D) // D)
    ),
    "You count rows. Count numbers: the other dimensions say how many a row has.": (
        _summed(lambda s, D: -(-s[0] // D))
    ),
    "This is the sum over all shards. Return the numbers of one rank.": (
        lambda shapes, D: D * _shard(shapes, D)
    ),
}
PADDING_MISTAKES = {
    "This counts all numbers in all shards, not only the padding.": lambda shapes, D: D * _shard(shapes, D),
    "This is 1/D of the padding. Return the padding of all shards.": (
        lambda shapes, D: _padding(shapes, D) / D
    ),
}


@exercise("11.1", "FSDP2 rounds up the rows of each parameter by itself.")
def padding(answer: Any) -> None:
    """`answer(shapes, D)` is a dictionary: shard, the numbers of one rank, and padding, in all shards."""
    returned = [call(answer, shapes=list(shapes), D=D, returns=Mapping) for shapes, D in PADDING_CASES]
    got = [entries(one, ("shard", "padding")) for one in returned]
    for name, right, mistakes in (("shard", _shard, SHARD_MISTAKES), ("padding", _padding, PADDING_MISTAKES)):
        mine = [both[name] for both in got]
        off = (case for one, case in zip(mine, PADDING_CASES, strict=True) if one != right(*case))
        shapes, D = next(off, PADDING_CASES[0])
        otherwise = f"`{name}` is off for {shapes} on {D} ranks. Draw which rank has which rows."
        recognized(mine, PADDING_CASES, right, mistakes, otherwise, partial(alike, tolerance=1e-12))


# --------------------------------------------------------------------------------------------------
# 11.2: Zero1Adam, 11.3: checkpoint
PROGRAM = "course_utils.lessons.sharding.check_ranks"
STARTS = "The check starts four processes. This takes about ten seconds."
UNEVEN = "The vector is not D slices. Did you pad weights and gradients? Are the arguments in order?"
STEP_HINTS = {"output tensor size": UNEVEN, "same size as output size": UNEVEN}


@exercise(
    "11.2", "Adam's exact steps, one exchange of each kind, and a quarter of the states on each rank.", STARTS
)
def zero_1_adam(answer: Any) -> None:
    """`answer(parameters, lr)` has a `step()`: Adam, its states cut among the ranks."""

    def one_step() -> None:
        weights = weights_of(SHAPES[0])
        optimizer = call(answer, weights, RATE, returns=object, may_change=(0,))
        expect(hasattr(optimizer, "step"), "Pass the class itself. Its objects need a method `step`.")
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        call(optimizer.step, returns=(object, NoneType), hints=STEP_HINTS)

    expect_together(one_step, RANKS)
    found_on_ranks(PROGRAM, RANKS, "zero_1", answer)


@exercise(
    "11.3", "Rank 0 holds whole tensors that one process can read. Other ranks hold few at a time.", STARTS
)
def checkpoint(answer: Any) -> None:
    """`answer(model, optimizer)` is a dictionary of whole tensors on rank 0, and empty elsewhere."""

    def one_call() -> None:
        model, optimizer = sharded()
        for weight in model.parameters():  # so that there are states, as after a training
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        optimizer.step()
        call(answer, model, optimizer, returns=(Mapping, NoneType), may_change=(0, 1))

    expect_together(one_call, RANKS)
    found_on_ranks(PROGRAM, RANKS, "checkpoint", answer)
    gpu = "The numbers are right, but rank 0 keeps whole tensors on its GPU, which has no room for them."
    expect(_in_host_memory(answer), gpu)


def _in_host_memory(answer: Any) -> bool:
    """True if all that `answer` returns on rank 0 of a simulated GPU is in the host's memory."""
    with redirect_stdout(StringIO()), on_gpu(ranks=RANKS):
        dist.init_process_group("nccl")
        model, optimizer = sharded("cuda")
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        optimizer.step()
        found = call(answer, model, optimizer, returns=Mapping, may_change=(0, 1))
        return all(value.device.type == "cpu" for entry in found.values() for value in entry.values())


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
