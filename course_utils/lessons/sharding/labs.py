"""What the checks of lesson 09 compare with: right answers, and the wrong ones that learners give."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils.estimating import estimate
from course_utils.estimating.sharding import fsdp_groups
from course_utils.gpus import gpu
from course_utils.run import TrainingRun

from .zero import formula, gathered_terms

# --------------------------------------------------------------------------------------------------- 09.1: rank_bytes

BYTES_CASES = (
    (1000, 4, 0, 2, 2, 12), (1000, 4, 1, 2, 2, 12), (1000, 4, 2, 2, 2, 12), (1000, 4, 3, 2, 2, 12),
    (64_000, 8, 1, 4, 4, 8), (64_000, 8, 2, 2, 4, 12), (64_000, 8, 3, 4, 2, 6),
    (1001, 32, 1, 2, 2, 12), (1001, 32, 3, 2, 2, 12),
)  # fmt: skip
"""(N, D, stage, weight, gradient, optimizer): bytes per parameter that differ, so that none is mistaken for another;
at the end shares that are no whole bytes.
"""


def bytes_right(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> float:
    """The right answer: from each stage on, one kind more is divided by D."""
    cut = (1, 1, 1) if stage == 0 else tuple(D if stage >= first else 1 for first in (3, 2, 1))
    return sum(each * N / part for each, part in zip((weight, gradient, optimizer), cut, strict=True))


def rounded_share(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> float:
    """A wrong answer: the parameters of a share are counted in whole numbers before bytes are."""
    kinds = ((3, weight), (2, gradient), (1, optimizer))
    return sum(each * (N // D if stage and stage >= first else N) for first, each in kinds)


# ------------------------------------------------------------------------------------------------------ 09.2: padding

Shapes = Sequence[tuple[int, ...]]

PADDING_CASES: tuple[tuple[Shapes, int], ...] = (
    ([(50257, 768), (768,)], 64),
    ([(250, 1000), (250,), (4001, 250)], 4),
    ([(3,)], 8),
    ([(10, 6), (7, 2)], 3),
    ([(64, 64)], 8),
    ([(10, 4, 3), (7, 2, 3, 5)], 4),
)


def padding_right(shapes: Shapes, D: int) -> dict[str, int]:
    """The right answer: rows rounded up for each parameter."""
    shard = sum(-(-shape[0] // D) * prod(shape[1:]) for shape in shapes)
    return {"shard": shard, "padding": D * shard - sum(map(prod, shapes))}


# -------------------------------------------------------------------------------------------------- 09.3: zero_1_step

STEP_CASES = ((4, 2), (12, 3), (8, 4), (5, 1))
"""Numbers of parameters, and ranks."""

RATE, BETA, STEPS = 0.1, 0.9, 3

Tensors = list[torch.Tensor]
Step = Callable[[torch.Tensor, Tensors, Tensors, float, float], torch.Tensor]


def step_right(weights: torch.Tensor, gradients: Tensors, momenta: Tensors, rate: float, beta: float) -> torch.Tensor:
    """The right answer: mean, a slice for each rank, its momentum and its weights, all slices together."""
    parts = []
    mean = torch.stack(gradients).mean(0)
    for part, gradient, momentum in zip(weights.chunk(len(momenta)), mean.chunk(len(momenta)), momenta, strict=True):
        momentum.mul_(beta).add_(gradient)
        parts.append(part - rate * momentum)
    return torch.cat(parts)


def gradients_of(case: tuple[int, int], step: int) -> Tensors:
    """One gradient for each rank, the same for everybody."""
    generator = torch.Generator().manual_seed(100 * case[0] + step)
    return [torch.randn(case[0], generator=generator) for _ in range(case[1])]


def several_steps(answer: Step, case: tuple[int, int], steps: int = STEPS) -> tuple[torch.Tensor, Tensors]:
    """Weights and momenta after some steps from zero momentum, with `answer` making each step."""
    N, D = case
    weights, momenta = torch.linspace(-1, 1, N), [torch.zeros(N // D) for _ in range(D)]
    for step in range(steps):
        weights = answer(weights, gradients_of(case, step), momenta, RATE, BETA)
    return weights, momenta


def _with(change: Callable[[Tensors], Tensors], rate: float = 1.0) -> Step:
    def step(weights: torch.Tensor, gradients: Tensors, momenta: Tensors, lr: float, beta: float) -> torch.Tensor:
        return step_right(weights, change(gradients), momenta, rate * lr, beta)

    return step


def _own_only(weights: torch.Tensor, gradients: Tensors, momenta: Tensors, lr: float, beta: float) -> torch.Tensor:
    D = len(momenta)
    own = torch.cat([gradient.chunk(D)[rank] for rank, gradient in enumerate(gradients)])
    return step_right(weights, [own] * D, momenta, lr, beta)


def _forgotten(weights: torch.Tensor, gradients: Tensors, momenta: Tensors, lr: float, beta: float) -> torch.Tensor:
    return step_right(weights, gradients, [momentum.clone() for momentum in momenta], lr, beta)


def _faded(weights: torch.Tensor, gradients: Tensors, momenta: Tensors, lr: float, beta: float) -> torch.Tensor:
    return step_right(weights, [gradient * (1 - beta) for gradient in gradients], momenta, lr, beta)


class RanksApart(TorchDispatchMode):
    """Watches a step: `mixed` says whether some rank's momentum was computed from another rank's.

    Each storage is followed with the ranks whose momenta it was computed from. Inherits because a dispatch mode is the
    one place to see every operation.
    """

    def __init__(self, momenta: Tensors) -> None:
        super().__init__()
        self.mixed = False
        self._sources: dict[int, set[int]] = {}
        self._owner = {self._key(momentum): rank for rank, momentum in enumerate(momenta)}
        self._alive: list[torch.Tensor] = list(momenta)
        for key, rank in self._owner.items():
            self._sources[key] = {rank}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name.startswith("aten::_foreach"):  # a list of tensors, each by itself
            lists = [argument for argument in args if isinstance(argument, (list, tuple))]
            for index, output in enumerate(found or ()):
                self._follow([one[index] for one in lists], output)
        else:
            for output in tree_leaves(found):
                self._follow(tree_leaves((args, kwargs)), output)
        return found

    def _follow(self, inputs: Iterable[Any], output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            return
        sources: set[int] = set()
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor):
                sources |= self._sources.get(self._key(tensor), set())
        self._alive.append(output)  # so that no other storage gets its address
        key = self._key(output)
        self._sources[key] = self._sources.get(key, set()) | sources
        self.mixed |= key in self._owner and self._sources[key] != {self._owner[key]}

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


STEP_MISTAKES: dict[str, Step] = {
    "You add the ranks' gradients. Data parallelism takes their mean.": _with(
        lambda gradients: [sum(gradients, torch.zeros_like(gradients[0]))] * len(gradients)
    ),
    "Each slice is stepped with its own rank's gradient alone: the reduction is missing.": _own_only,
    "You take one rank's gradient for all: the others' data are lost.": _with(
        lambda gradients: [gradients[0]] * len(gradients)
    ),
    "Momenta are forgotten from step to step: change the tensors that you were given, in place.": _forgotten,
    "The gradient enters the momentum whole here: m ← β·m + g, without a factor 1 − β.": _faded,
    "Weights climb: a step goes against the gradient.": _with(lambda gradients: gradients, rate=-1.0),
}
"""What a learner's step may do instead, and what to say to it."""


# -------------------------------------------------------------------------------------------------------- 09.4: above

ABOVE_CASES = (
    TrainingRun("llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=64, zero_stage=3),
    TrainingRun("gpt2-xl", 1, 1024, "bf16-master", recompute="full", world_size=64, zero_stage=3),
    TrainingRun("mistral-7b", 1, 2048, "bf16-master", recompute="full", world_size=16, zero_stage=3),
)


def units(run: TrainingRun) -> tuple[int, int]:
    """Elements, with padding, of the two units of FSDP2: what is outside the blocks, and one block."""
    outer, block = fsdp_groups(run)[:2]
    return outer.ranks * sum(outer.shards), block.ranks * sum(block.shards)


def above_right(run: TrainingRun) -> dict[str, int]:
    """The right answer, to the byte but for blocks of 512."""
    return dict(zip(("outer", "block", "next", "reduce"), gathered_terms(run).values(), strict=True))


# ------------------------------------------------------------------------------------------------------- 09.5: choose

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)

XL = TrainingRun("gpt2-xl", 1, 1024, "bf16-master")
LLAMA = TrainingRun("llama3-8b", 1, 2048, "bf16-master", recompute="full")
CHOOSE_CASES = (
    (XL, 8, "A100-80GB", 1),
    (XL, 8, "RTX5090-32GB", 4),
    (XL, 8, "A100-40GB", 4),
    (XL, 4, "T4-16GB", 2),
    (LLAMA, 8, "A100-40GB", 1),
    (LLAMA, 8, "RTX5090-32GB", 4),
    (LLAMA, 4, "RTX4080-16GB", 1),
    (LLAMA, 64, "RTX4080-16GB", 1),
)
"""(run, ranks, card, fewest sequences of a micro-batch)."""

Choice = tuple[int, int] | None


@cache
def peak(run: TrainingRun, ranks: int, stage: int, micro_batch: int) -> int:
    """Estimated bytes at the peak of rank 0."""
    return estimate(run.replace(micro_batch=micro_batch, world_size=ranks, zero_stage=stage)).total


def _fitting(run: TrainingRun, ranks: int, card: str, least: int) -> list[tuple[int, int]]:
    sizes = [b for b in MICRO_BATCHES if b >= least]
    room = gpu(card).memory
    return [(stage, b) for stage in range(4) for b in sizes if peak(run, ranks, stage, b) <= room]


def choose_right(run: TrainingRun, ranks: int, card: str, least: int) -> Choice:
    """The right answer: the lowest stage with something that fits, and there the largest that does."""
    return min(_fitting(run, ranks, card, least), key=lambda both: (both[0], -both[1]), default=None)


def _by_formula(run: TrainingRun, ranks: int, card: str, least: int) -> Choice:
    room = gpu(card).memory
    stages = [run.replace(world_size=ranks, zero_stage=stage) for stage in range(4)]
    fitting = [one.zero_stage for one in stages if sum(formula(one).values()) <= room]
    return (fitting[0], MICRO_BATCHES[-1]) if fitting else None


def _formula_then_peak(run: TrainingRun, ranks: int, card: str, least: int) -> Choice:
    found = _by_formula(run, ranks, card, least)
    sizes = [b for stage, b in _fitting(run, ranks, card, least) if found and stage == found[0]]
    return (found[0], max(sizes)) if found and sizes else None


CHOOSE_MISTAKES: dict[str, Callable[[TrainingRun, int, str, int], Choice]] = {
    "You compare ZeRO's formula with the card. Activations, buckets, gathered weights need room, too: estimate.": (
        _by_formula
    ),
    "The stage comes from ZeRO's formula. Activations, buckets, gathered weights need room, too: estimate.": (
        _formula_then_peak
    ),
    "You shard as much as you can. Shard as little as you must: a higher stage sends more.": (
        lambda run, ranks, card, least: min(
            _fitting(run, ranks, card, least), key=lambda both: (-both[0], -both[1]), default=None
        )
    ),
    "The stage is right. At that stage, a larger micro-batch fits.": (
        lambda run, ranks, card, least: min(_fitting(run, ranks, card, least), default=None)
    ),
    "You take the largest micro-batch that fits at any stage. First the lowest stage, then the micro-batch.": (
        lambda run, ranks, card, least: min(
            _fitting(run, ranks, card, least), key=lambda both: (-both[1], both[0]), default=None
        )
    ),
    "You forget `least`: a micro-batch of fewer sequences does not count.": (
        lambda run, ranks, card, least: choose_right(run, ranks, card, 1)
    ),
    "A micro-batch of exactly `least` sequences counts, too.": (
        lambda run, ranks, card, least: choose_right(run, ranks, card, least + 1)
    ),
}
"""What a learner can choose instead, and what to say to it."""


# ---------------------------------------------------------------------------------------------- 09.6: rank_activations

ACTIVATION_CASES = (
    (2048, 1, 12288, 96, 8, False), (2048, 1, 12288, 96, 8, True), (1024, 4, 1600, 25, 5, False),
    (1024, 4, 1600, 25, 5, True), (512, 2, 1024, 16, 1, False), (128, 3, 384, 6, 3, False), (128, 3, 384, 6, 3, True),
)  # fmt: skip
"""(s, b, h, a, t, sequence): whole bytes, all of them."""


def activations_right(s: int, b: int, h: int, a: int, t: int, sequence: bool) -> float:
    """The right answer, in bytes: Korthikanti et al. 2022, table 2."""
    whole = 0 if sequence else 10
    return s * b * h * (whole + (34 - whole + 5 * a * s / h) / t)
