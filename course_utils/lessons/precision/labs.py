"""What the checks of lesson 03 try answers on: a training step in fp16, and cards to choose a precision for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.run import TrainingRun

# ------------------------------------------------------------------------------------------------------------ the step

Step = Callable[..., bool]

SCALE = 2.0**12
RATE = 0.5


@dataclass(frozen=True)
class Trial:
    """What one step left behind: how far the masters and the weights moved, whether it was said to be taken, and which
    gradients are still there.
    """

    masters: torch.Tensor
    weights: torch.Tensor
    taken: bool
    left_in_weights: bool
    left_in_masters: bool


@dataclass(frozen=True)
class Outcome:
    """The same step with small gradients, with tiny ones, with large ones, with infinite ones, and twice in a row."""

    small: Trial
    tiny: Trial
    large: Trial
    infinite: Trial
    twice: Trial


def right_step(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    """One step in fp16 with master weights, loss scaling and clipping at a norm of 1."""
    (loss * scale).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad, weight.grad = weight.grad.float() / scale, None
    taken = bool(clip_grad_norm_(masters, 1.0).isfinite())
    if taken:
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
    for master in masters:
        master.grad = None
    return taken


def outcome_of(step: Step) -> Outcome:
    """What `step` does in each situation; gradients are `size` times 1, 2, 3 and 4."""
    return Outcome(
        small=trial(step, 0.03), tiny=trial(step, 2.0**-27), large=trial(step, 1.5), infinite=trial(step, 100.0),
        twice=trial(step, 0.03, times=2),
    )  # fmt: skip


def trial(step: Step, size: float, times: int = 1) -> Trial:
    """`times` steps on two fp16 weights of two numbers each, whose true gradients are `size` · (1, 2, 3, 4)."""
    weights = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2)]
    masters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(masters, lr=RATE)
    slopes = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    taken = True
    for _ in range(times):
        parts = [(weight.float() * slope).sum() for weight, slope in zip(weights, slopes, strict=True)]
        taken = step(weights, masters, optimizer, sum(parts) * size, SCALE)
    return Trial(
        torch.cat([master.detach().float() for master in masters]),
        torch.cat([weight.detach().float() for weight in weights]),
        bool(taken),
        any(weight.grad is not None and bool(weight.grad.any()) for weight in weights),
        any(master.grad is not None and bool(master.grad.any()) for master in masters),
    )


def _moved(trial: Trial) -> bool:
    return bool(trial.masters.any())


def _norm(trial: Trial) -> float:
    return trial.masters.norm().item()


def _off(got: Trial, right: Trial) -> bool:
    return not torch.allclose(got.masters, right.masters, rtol=1e-3, atol=1e-12)


Differs = Callable[[Outcome, Outcome], bool]

STEP_MISTAKES: tuple[tuple[str, Differs], ...] = (
    ("The masters do not move: who calls `optimizer.step()`?", lambda got, right: not _moved(got.small)),
    (
        "The masters move 4,096 times too far, or to the limit of clipping: the gradients are still scaled when the "
        "optimizer, or the clipping, sees them.",
        lambda got, right: _norm(got.small) > 2 * _norm(right.small),
    ),
    (
        "With scaled gradients the norm looks 4,096 times as large, so you clip what is small enough. Divide first.",
        lambda got, right: (
            _norm(got.small) < _norm(right.small) / 2 and math.isclose(_norm(got.small), _norm(got.large), rel_tol=1e-3)
        ),
    ),
    (
        "The gradients arrive far too small: they are divided by the scale, but were they ever multiplied by it?",
        lambda got, right: _norm(got.small) < _norm(right.small) / 100,
    ),
    (
        "Small gradients do not arrive as they are: what else changes them?",
        lambda got, right: _off(got.small, right.small),
    ),
    (
        "Tiny gradients get lost: something divides by the scale while they are still fp16. Upcast first.",
        lambda got, right: _off(got.tiny, right.tiny),
    ),
    (
        "Large gradients are clipped, each tensor on its own: the norm of all of them *together* has to be 1 at most.",
        lambda got, right: math.isclose(_norm(got.large), 2**0.5 * _norm(right.large), rel_tol=1e-3),
    ),
    (
        "Large gradients are not clipped: the norm of all of them together, unscaled, has to be 1 at most.",
        lambda got, right: _norm(got.large) > 1.01 * _norm(right.large),
    ),
    (
        "Large gradients are clipped, but not to a norm of 1. Which norm do you take?",
        lambda got, right: _off(got.large, right.large),
    ),
    (
        "A step with infinite gradients changes the masters: look whether they are finite before the optimizer steps.",
        lambda got, right: _moved(got.infinite) or bool(got.infinite.masters.isnan().any()),
    ),
    (
        "The masters survive infinite gradients, the fp16 weights do not.",
        lambda got, right: bool(got.infinite.weights.any()),
    ),
    ("Your function says that it took a step in which gradients were infinite.", lambda got, right: got.infinite.taken),
    ("Your function says that a good step was not taken.", lambda got, right: not got.small.taken),
    (
        "The masters move, the fp16 weights do not: the next forward pass reads the weights. Who copies?",
        lambda got, right: not bool(got.small.weights.any()),
    ),
    (
        "The fp16 weights are not what the masters round to.",
        lambda got, right: not torch.equal(got.small.weights, got.small.masters.half().float()),
    ),
    (
        "The weights' gradients are left behind, and backward will add to them.",
        lambda got, right: got.small.left_in_weights or got.infinite.left_in_weights,
    ),
    (
        "The masters' gradients are left behind: 4 bytes a parameter, all through the next forward pass.",
        lambda got, right: got.small.left_in_masters or got.infinite.left_in_masters,
    ),
    ("The first step is right, the second is not.", lambda got, right: _off(got.twice, right.twice)),
)
"""What to say, and when: the learner's outcome and the right one, in this order."""

# ---------------------------------------------------------------------------------------------------------- the choice

_XL = TrainingRun("gpt2-xl", recompute="full")

CHOICES: tuple[tuple[str, TrainingRun], ...] = (
    ("A100-40GB", _XL.replace(micro_batch=16)),
    ("A100-40GB", _XL.replace(optimizer="adamw-fused")),
    ("RTX3090-24GB", _XL),
    ("RTX3090-24GB", _XL.replace(micro_batch=32)),
    ("RTX4080-16GB", _XL.replace(micro_batch=16)),
    ("V100-32GB", _XL.replace(micro_batch=16)),
    ("V100-32GB", _XL.replace(micro_batch=20)),
    ("V100-32GB", _XL.replace(micro_batch=48)),
    ("T4-16GB", _XL),
    ("T4-16GB", TrainingRun("gpt2-medium", 8, 1024, recompute="full")),
    ("T4-16GB", TrainingRun("gpt2-medium", 4, 1024, attention="eager")),
    ("H100-80GB", _XL.replace(micro_batch=32)),
    ("RTX4080-16GB", TrainingRun("llama3-8b", 1, 1024, recompute="full")),
)
"""Cards and runs to choose a precision for."""


def allowed(card: str) -> list[list[str]]:
    """The precisions to choose from on a card, by rank."""
    if gpu(card).has_bf16:
        return [["amp-bf16", "bf16-master-fp32grad"], ["bf16-master"], ["bf16"]]
    return [["amp-fp16"], ["fp16-master"]]


def _for_card(card: str, run: TrainingRun) -> TrainingRun:
    return run if gpu(card).has_bf16 else run.replace(precision="amp-fp16", attention="efficient")


def best_choice(card: str, run: TrainingRun) -> str:
    """The exercise's answer."""
    return _by_ranks(card, run, lambda peaks: min(peaks, key=peaks.__getitem__), gpu(card).memory)


def _by_ranks(
    card: str, run: TrainingRun, pick: Callable[[dict[str, int]], str], memory: float, given: TrainingRun | None = None
) -> str:
    """The choice by ranks; `given` is estimated as it is, whatever the card lacks."""
    base = given or _for_card(card, run)
    for names in allowed(card):
        peaks = {name: estimate(base.replace(precision=name)).total for name in names}
        fitting = {name: peak for name, peak in peaks.items() if peak <= memory}
        if fitting:
            return pick(fitting)
    return ""


def _smallest(card: str, run: TrainingRun) -> str:
    """The lowest peak of all, whatever its rank."""
    names: Sequence[str] = [name for rank in allowed(card) for name in rank]
    peaks = {name: estimate(_for_card(card, run).replace(precision=name)).total for name in names}
    best = min(peaks, key=peaks.__getitem__)
    return best if peaks[best] <= gpu(card).memory else ""


def _first_rank_only(card: str, run: TrainingRun) -> str:
    found = best_choice(card, run)
    return found if found in allowed(card)[0] else ""


def _by_name_gb(card: str, run: TrainingRun) -> str:
    return _by_ranks(card, run, lambda peaks: min(peaks, key=peaks.__getitem__), _gb_in_name(card) * 10**9)


def _gb_in_name(card: str) -> int:
    return int(card.rpartition("-")[2].removesuffix("GB"))


CHOICE_MISTAKES: dict[str, Callable[[str, TrainingRun], str]] = {
    "You take the lowest peak of all. What fits is enough: prefer the precision that adds up more in fp32.": (
        _smallest
    ),
    "You take autocast wherever it fits. In the first rank two names compete, and the lower peak wins.": (
        lambda card, run: _by_ranks(card, run, lambda peaks: next(iter(peaks)), gpu(card).memory)
    ),
    "In the first rank you take the higher peak: the lower one leaves more room.": (
        lambda card, run: _by_ranks(card, run, lambda peaks: max(peaks, key=peaks.__getitem__), gpu(card).memory)
    ),
    "You give up after the first rank: what does not fit with fp32 gradients may fit with masters.": _first_rank_only,
    "On a card without bf16 you keep the run's own kernel of attention: estimate with `efficient` there.": (
        lambda card, run: _by_ranks(card, run, lambda peaks: min(peaks, key=peaks.__getitem__), gpu(card).memory, run)
    ),
    "You took the number in the card's name for GB. Compare with `gpu(card).memory`, in bytes.": _by_name_gb,
}
"""What to say of choices that a wrong idea makes."""
