"""Checks of the exercises of lesson 09, "ZeRO and FSDP": each names the misconception, never the answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from operator import eq
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils.estimating import estimate
from course_utils.estimating.sharding import fsdp_groups
from course_utils.gpus import gpu
from course_utils.interactive.feedback import (
    Mistakes,
    alike,
    by_name,
    call,
    entries,
    exercise,
    expect,
    recognized,
    unit_slip,
)
from course_utils.run import TrainingRun

from .zero import formula, gathered_terms

exactly = partial(alike, tolerance=1e-12)

# ---------------------------------------------------------------------------------------------------- 09.1: rank_bytes

BYTES_NAMES = ("N", "D", "stage", "weight", "gradient", "optimizer")
BYTES_CASES = (
    *((1000, 4, stage, 2, 2, 12) for stage in range(4)), (1001, 32, 1, 2, 2, 12), (1001, 32, 3, 2, 2, 12),
    (64_000, 8, 1, 4, 4, 8), (64_000, 8, 2, 2, 4, 12), (64_000, 8, 3, 4, 2, 6),
)  # fmt: skip
"""Bytes per parameter differ, so that none is mistaken for another; the last shares are no whole bytes."""


def bytes_right(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int, whole: bool = False) -> float:
    """Bytes of states on one rank: each stage divides one kind more by D; `whole` rounds parameters down, a mistake."""
    share = N // D if whole else N / D
    kinds = ((3, weight), (2, gradient), (1, optimizer))
    return sum(each * (share if stage >= first else N) for first, each in kinds)


BYTES_MISTAKES: Mistakes = {
    "That is one rank without sharding, whatever the stage is.": lambda N, D, stage, w, g, K: (w + g + K) * N,
    "You divide everything, whatever the stage is.": lambda N, D, stage, w, g, K: (w + g + K) * N / D,
    "You took 2, 2 and 12 for granted.": lambda N, D, stage, w, g, K: bytes_right(N, D, stage, 2, 2, 12),
    "Those are all ranks together. One rank's was asked for.": lambda N, D, *rest: D * bytes_right(N, D, *rest),
    "At stage 3 weights are divided, too.": lambda N, D, stage, *rest: bytes_right(N, D, min(stage, 2), *rest),
    "You cut one kind more than the stage says.": lambda N, D, stage, *rest: bytes_right(N, D, stage + 1, *rest),
    "The order is off: weights go last.": lambda N, D, stage, w, g, K: bytes_right(N, D, stage, K, g, w),
    "Weights and gradients are swapped.": lambda N, D, stage, w, g, K: bytes_right(N, D, stage, g, w, K),
    "You round the share of the parameters, and lose some bytes: round last.": partial(bytes_right, whole=True),
}


@exercise("09.1", "One kind more at each stage, and what is not cut stays whole on every rank.")
def rank_bytes(answer: Any) -> None:
    """`answer(N, D, stage, weight, gradient, optimizer)` is bytes of states on one rank."""
    got = [float(call(answer, **by_name(BYTES_NAMES, case))) for case in BYTES_CASES]
    slip = unit_slip(got[0], bytes_right(*BYTES_CASES[0]))
    expect(slip is None, f"The first is {slip}")
    otherwise = "Some stage is off: which of the three kinds does it divide by D?"
    recognized(got, BYTES_CASES, bytes_right, BYTES_MISTAKES, otherwise, _but_for_rounding)


def _but_for_rounding(some: Sequence[float], others: Sequence[float]) -> bool:
    """True if each is equal, or was rounded to whole bytes: once for each of three kinds at most."""
    return all(abs(one - other) < 3 for one, other in zip(some, others, strict=True))


# ------------------------------------------------------------------------------------------------------- 09.2: padding

Shapes = Sequence[tuple[int, ...]]
PADDING_CASES: tuple[tuple[Shapes, int], ...] = (
    ([(50257, 768), (768,)], 64), ([(250, 1000), (250,), (4001, 250)], 4), ([(3,)], 8),
    ([(10, 6), (7, 2)], 3), ([(64, 64)], 8), ([(10, 4, 3), (7, 2, 3, 5)], 4),
)  # fmt: skip


def _summed(numbers: Callable[[tuple[int, ...], int], int]) -> Callable[[Shapes, int], int]:
    return lambda shapes, D: sum(numbers(shape, D) for shape in shapes)


_all = _summed(lambda s, D: prod(s))
_shard = _summed(lambda s, D: -(-s[0] // D) * prod(s[1:]))


def _padding(shapes: Shapes, D: int) -> int:
    return D * _shard(shapes, D) - _all(shapes, D)


SHARD_MISTAKES: Mistakes = {
    "You rounded down: then the last numbers belong to nobody.": lambda shapes, D: _all(shapes, D) // D,
    "You rounded down: then the last rows belong to nobody.": _summed(lambda s, D: s[0] // D * prod(s[1:])),
    "That is an even share of the numbers, a fraction. FSDP2 cuts whole rows.": lambda shapes, D: _all(shapes, D) / D,
    "You cut the numbers one by one. FSDP2 cuts whole rows.": _summed(lambda s, D: -(-prod(s) // D)),
    "You cut all as one flat piece. FSDP2 cuts each parameter.": lambda shapes, D: -(-_all(shapes, D) // D),
    "Those are rows. Each has as many numbers as the other dimensions say.": _summed(lambda s, D: -(-s[0] // D)),
    "How long is a row in more than two dimensions?": _summed(lambda s, D: -(-s[0] // D) * prod(s[1:2])),
    "Those are all shards together. One rank's was asked for.": lambda shapes, D: D * _shard(shapes, D),
}
PADDING_MISTAKES: Mistakes = {
    "Those are all shards together, real numbers included.": lambda shapes, D: D * _shard(shapes, D),
    "That is a D-th of it: all shards' padding was asked for.": lambda shapes, D: _padding(shapes, D) / D,
    "Those are rows of padding. Count their numbers.": _summed(lambda s, D: -s[0] % D),
    "That is the remainder. Padding is what is missing to the next multiple.": _summed(lambda s, D: prod(s) % D),
}


@exercise("09.2", "Whole rows, rounded up, for each parameter by itself.")
def padding(answer: Any) -> None:
    """`answer(shapes, D)` is a dictionary: shard (numbers of one rank's shard) and padding (in all shards)."""
    returned = [call(answer, shapes=list(shapes), D=D, returns=Mapping) for shapes, D in PADDING_CASES]
    got = [entries(one, ("shard", "padding")) for one in returned]
    for name, right, mistakes in (("shard", _shard, SHARD_MISTAKES), ("padding", _padding, PADDING_MISTAKES)):
        otherwise = f"{name} is off. Take one parameter of 10 rows on 3 ranks, and draw it."
        recognized([both[name] for both in got], PADDING_CASES, right, mistakes, otherwise, exactly)


# --------------------------------------------------------------------------------------------------- 09.3: zero_1_step

STEP_CASES = ((4, 2), (12, 3), (8, 4), (5, 1))  # numbers of parameters, and ranks
RATE, BETA, STEPS = 0.1, 0.9, 3

Tensors = list[torch.Tensor]


def step_right(weights: torch.Tensor, gradients: Tensors, momenta: Tensors, rate: float, beta: float) -> torch.Tensor:
    """New weights: mean, a slice for each rank, its momentum and its weights, all slices together."""
    parts = []
    mean = torch.stack(gradients).mean(0)
    for part, gradient, momentum in zip(weights.chunk(len(momenta)), mean.chunk(len(momenta)), momenta, strict=True):
        momentum.mul_(beta).add_(gradient)
        parts.append(part - rate * momentum)
    return torch.cat(parts)


def several_steps(step: Callable[..., torch.Tensor], N: int, D: int) -> tuple[torch.Tensor, Tensors]:
    """Weights and momenta after some steps from zero momentum, with the same gradients for everybody."""
    weights, momenta = torch.linspace(-1, 1, N), [torch.zeros(N // D) for _ in range(D)]
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(100 * N + number)
        gradients = [torch.randn(N, generator=generator) for _ in range(D)]
        weights = step(weights, gradients, momenta, RATE, BETA)
    return weights, momenta


STEP_MISTAKES: Mistakes = {message: partial(several_steps, step) for message, step in {
    "You add the ranks' gradients. Data parallelism takes their mean.":
        lambda w, gs, *rest: step_right(w, [len(gs) * g for g in gs], *rest),
    "Each slice is stepped with its own rank's gradient alone: the reduction is missing.":
        lambda w, gs, *rest: step_right(w, [torch.cat([g.chunk(len(gs))[r] for r, g in enumerate(gs)])], *rest),
    "You take one rank's gradient: the others' data are lost.": lambda w, gs, *rest: step_right(w, gs[:1], *rest),
    "Momenta are forgotten from step to step: change the tensors that you were given, in place.":
        lambda w, gs, ms, *rest: step_right(w, gs, [m.clone() for m in ms], *rest),
    "The gradient enters the momentum whole here: m ← β·m + g, without a factor 1 − β.":
        lambda w, gs, ms, rate, beta: step_right(w, [(1 - beta) * g for g in gs], ms, rate, beta),
    "Weights climb: a step goes against the gradient.":
        lambda w, gs, ms, rate, beta: step_right(w, gs, ms, -rate, beta),
}.items()}  # fmt: skip


class RanksApart(TorchDispatchMode):
    """Follows each storage with the ranks whose momenta it was computed from: `mixed` once a momentum has several."""

    def __init__(self, momenta: Tensors) -> None:
        super().__init__()
        self.mixed = False
        self._owner = {self._key(momentum): rank for rank, momentum in enumerate(momenta)}
        self._sources = {key: {rank} for key, rank in self._owner.items()}
        self._alive = list(momenta)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        outputs = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        sources = set[int]().union(*(self._sources.get(self._key(one), ()) for one in inputs + outputs))
        for key in map(self._key, outputs):
            self._sources[key] = sources
            self.mixed |= key in self._owner and sources != {self._owner[key]}
        self._alive += outputs  # so that no other storage gets their addresses
        return found

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


@exercise("09.3", "ZeRO-1 by hand: the weights of plain data parallelism, and a D-th of the momentum on each rank.")
def zero_1_step(answer: Any) -> None:
    """`answer(weights, gradients, momenta, lr, beta)` gives the new weights; each rank's momentum changes in place."""
    step = partial(_watched_step, answer)
    results = [several_steps(step, *case) for case in STEP_CASES]
    right = partial(several_steps, step_right)
    otherwise = "The new weights are off. Go through two steps with 4 weights on 2 ranks, by hand."
    recognized(results, STEP_CASES, right, STEP_MISTAKES, otherwise, _same_weights)
    pairs = [(mine, right(*case)[1]) for (_, mine), case in zip(results, STEP_CASES, strict=True)]
    kept = all(torch.allclose(torch.cat(mine), torch.cat(wanted), atol=1e-5) for mine, wanted in pairs)
    expect(kept, "The weights are right, the momenta that you were given are not: each rank keeps its own there.")


def _same_weights(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for (one, _), (other, _) in zip(some, others, strict=True))


def _watched_step(answer: Any, *arguments: Any) -> torch.Tensor:
    """The new weights by the learner's step. Raises CheckFailed where momenta are replaced, or mixed."""
    weights, _, momenta = arguments[:3]
    before = [(momentum.shape, momentum.data_ptr()) for momentum in momenta]
    given = by_name(("weights", "gradients", "momenta", "lr", "beta"), arguments)
    with RanksApart(momenta) as watched:
        found = call(answer, **given, returns=torch.Tensor, may_change=("weights", "momenta"))
    same_size = [momentum.shape for momentum in momenta] == [shape for shape, _ in before]
    expect(same_size, "A momentum has changed its size: each rank keeps that of its own slice, and no more.")
    in_place = [(momentum.shape, momentum.data_ptr()) for momentum in momenta] == before
    expect(in_place, "You put new tensors in the place of momenta. Change those that you were given.")
    expect(not watched.mixed, "Your step has the momenta of several ranks together. Take one rank after the other.")
    expect(found.shape == weights.shape, "The new weights have another shape than the old: gather all slices.")
    return found.detach().to(weights.dtype)


# --------------------------------------------------------------------------------------------------------- 09.4: above

ABOVE_NAMES = ("outer", "block", "next", "reduce")
ABOVE_CASES = (
    TrainingRun("llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=64, zero_stage=3),
    TrainingRun("gpt2-xl", 1, 1024, "bf16-master", recompute="full", world_size=64, zero_stage=3),
    TrainingRun("mistral-7b", 1, 2048, "bf16-master", recompute="full", world_size=16, zero_stage=3),
)


def units(run: TrainingRun) -> tuple[int, int]:
    """Elements, with padding, of the two units of FSDP2: what is outside the blocks, and one block."""
    outer, block = fsdp_groups(run)[:2]
    return outer.ranks * sum(outer.shards), block.ranks * sum(block.shards)


def _above_right(name: str, run: TrainingRun) -> int:
    return dict(zip(ABOVE_NAMES, gathered_terms(run).values(), strict=True))[name]


def _above_mistakes(name: str) -> Mistakes:
    right, reduced = partial(_above_right, name), name == "reduce"
    format_ = f"`{name}` is twice too much: weights are gathered in 16 bits."
    return {
        "Gradients are summed in another format: how many bytes?" if reduced else format_: (
            lambda run: right(run) * (0.5 if reduced else 2)
        ),
        f"`{name}` is nothing at your place, but it is there.": lambda run: 0,
        f"`{name}` is in elements, or in one byte each.": lambda run: right(run) / (4 if reduced else 2),
        f"`{name}` is a shard of it. While it is used it is whole.": lambda run: right(run) / run.world_size,
        f"`{name}` is all blocks at once. Others are let go.": lambda run: right(run) * run.model.layers,
    }


@exercise("09.4", "Four things that are whole for a moment, and none of them shrinks with D.")
def above(answer: Any) -> None:
    """`answer(outer, block)` is a dictionary of bytes: outer, block, next, reduce."""
    sizes, cases = [units(run) for run in ABOVE_CASES], [(run,) for run in ABOVE_CASES]
    got = [entries(call(answer, outer=outer, block=block, returns=Mapping), ABOVE_NAMES) for outer, block in sizes]
    nearly = partial(alike, tolerance=1e-4)
    for name in ABOVE_NAMES:
        mine, right = [terms[name] for terms in got], partial(_above_right, name)
        otherwise = f"`{name}` is off: which of the two units is it of, and how many bytes does an element take?"
        recognized(mine, cases, right, _above_mistakes(name), otherwise, nearly)


# -------------------------------------------------------------------------------------------------------- 09.5: choose

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)

XL = TrainingRun("gpt2-xl", 1, 1024, "bf16-master")
LLAMA = TrainingRun("llama3-8b", 1, 2048, "bf16-master", recompute="full")
CHOOSE_CASES = (
    (XL, 8, "A100-80GB", 1), (XL, 8, "RTX5090-32GB", 4), (XL, 8, "A100-40GB", 4), (XL, 4, "T4-16GB", 2),
    (LLAMA, 8, "A100-40GB", 1), (LLAMA, 8, "RTX5090-32GB", 4), (LLAMA, 4, "RTX4080-16GB", 1),
    (LLAMA, 64, "RTX4080-16GB", 1),
)  # fmt: skip
"""(run, ranks, card, fewest sequences of a micro-batch)."""

Choice = tuple[int, int]


@cache
def peak(run: TrainingRun, ranks: int, stage: int, micro_batch: int) -> int:
    return estimate(run.replace(micro_batch=micro_batch, world_size=ranks, zero_stage=stage)).total


def _first(by: Callable[[Choice], Any], more: Callable[[int], int] = lambda least: least) -> Any:
    """Choose the (stage, micro-batch) that fits and is first in the order of `by`."""

    def chosen(run: TrainingRun, ranks: int, card: str, least: int) -> Choice | None:
        sizes = [b for b in MICRO_BATCHES if b >= more(least)]
        room = gpu(card).memory
        fitting = [(stage, b) for stage in range(4) for b in sizes if peak(run, ranks, stage, b) <= room]
        return min(fitting, key=by, default=None)

    return chosen


def _lowest_stage(both: Choice) -> Choice:
    return both[0], -both[1]


choose_right = _first(_lowest_stage)


def _by_formula(run: TrainingRun, ranks: int, card: str, least: int) -> Choice | None:
    sharded = [run.replace(world_size=ranks, zero_stage=stage) for stage in range(4)]
    stage = next((one.zero_stage for one in sharded if sum(formula(one).values()) <= gpu(card).memory), None)
    found = _first(lambda both: (both[0] != stage, -both[1]))(run, ranks, card, least)
    return found if found and found[0] == stage else None


CHOOSE_MISTAKES: Mistakes = {
    "The stage comes from ZeRO's formula. Activations, buckets, gathered weights need room, too.": _by_formula,
    "You shard as much as you can. Shard as little as you must.": _first(lambda both: (-both[0], -both[1])),
    "The stage is right. At that stage, a larger micro-batch fits.": _first(lambda both: both),
    "You take the largest micro-batch at any stage. First the lowest stage.": _first(lambda both: (-both[1], both[0])),
    "You forget `least`: a micro-batch of fewer sequences does not count.": _first(_lowest_stage, lambda least: 1),
    "A micro-batch of exactly `least` sequences counts, too.": _first(_lowest_stage, lambda least: least + 1),
}


@exercise("09.5", "As little sharding as the card makes you do, then as many sequences as it takes.")
def choose(answer: Any) -> None:
    """`answer(run, ranks, card, least)` is (stage, micro_batch), or None if nothing fits."""
    names = ("run", "ranks", "card", "least")
    got = [call(answer, **by_name(names, case), returns=tuple | None) for case in CHOOSE_CASES]
    for found in filter(None, got):
        known = len(found) == 2 and found[0] in range(4) and found[1] in MICRO_BATCHES
        expect(known, "Return (stage, micro_batch), a stage from 0 to 3 and one of MICRO_BATCHES, or None.")
    otherwise = "Some choice is off: is it the lowest stage at which anything fits, and the most that fits there?"
    recognized(got, CHOOSE_CASES, choose_right, CHOOSE_MISTAKES, otherwise, eq)


# ---------------------------------------------------------------------------------------------- 09.6: rank_activations

ACTIVATION_NAMES = ("s", "b", "h", "a", "t", "sequence")
ACTIVATION_CASES = (
    (2048, 1, 12288, 96, 8, False), (2048, 1, 12288, 96, 8, True), (1024, 4, 1600, 25, 5, False),
    (1024, 4, 1600, 25, 5, True), (512, 2, 1024, 16, 1, False), (128, 3, 384, 6, 3, False), (128, 3, 384, 6, 3, True),
)  # fmt: skip


def activations_right(s: int, b: int, h: int, a: int, t: int, sequence: bool) -> float:
    """Bytes that one block keeps on one rank: Korthikanti et al. 2022, table 2."""
    whole = 0 if sequence else 10
    return s * b * h * (whole + (34 - whole + 5 * a * s / h) / t)


ACTIVATION_MISTAKES: Mistakes = {
    "You divide all by t. What stays whole without sequence parallelism?":
        lambda s, b, h, a, t, q: activations_right(s, b, h, a, t, True),
    "You keep the 10 even with sequence parallelism.": lambda s, b, h, a, t, q: activations_right(s, b, h, a, t, False),
    "That is one GPU: t is missing.": lambda s, b, h, a, t, q: activations_right(s, b, h, a, 1, q),
    "The attention scores are missing: 5·a·s²·b bytes.": lambda s, b, h, a, t, q: activations_right(s, b, h, 0, t, q),
    "Attention scores are split, too: each rank has a part of the heads.":
        lambda s, b, h, a, t, q: activations_right(s, b, h, 0, t, q) + 5 * a * s * s * b,
    "34 is in bytes already: no further 2.": lambda *case: 2 * activations_right(*case),
    "The two cases are turned round.": lambda s, b, h, a, t, q: activations_right(s, b, h, a, t, not q),
    "That is one sequence. There are b of them.": lambda s, b, h, a, t, q: activations_right(s, 1, h, a, t, q),
}  # fmt: skip


@exercise("09.6", "The matrices' parts are split, the norms' parts only along the sequence.")
def rank_activations(answer: Any) -> None:
    """`answer(s, b, h, a, t, sequence)` is bytes that one block keeps on one rank."""
    got = [float(call(answer, **by_name(ACTIVATION_NAMES, case))) for case in ACTIVATION_CASES]
    slip = unit_slip(got[0], activations_right(*ACTIVATION_CASES[0]))
    expect(slip is None, f"The first is {slip}")
    otherwise = "Some bytes are off: what is split by t, and what stays whole without sequence parallelism?"
    recognized(got, ACTIVATION_CASES, activations_right, ACTIVATION_MISTAKES, otherwise, exactly)
