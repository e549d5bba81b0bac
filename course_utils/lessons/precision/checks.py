"""Checks of the exercises of lesson 03, "Mixed precision": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from numbers import Real
from operator import eq
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.interactive.feedback import Mistakes, by_name, call, exercise, expect, fail, of_kind, recognized
from course_utils.run import TrainingRun
from course_utils.units import GB

from .number_formats import NumberFormat, decode

# ------------------------------------------------------------------------------------------------------- 03.1: limits

WIDTHS = ((5, 10), (8, 7), (8, 23), (5, 2), (3, 4), (6, 9))  # exponent and mantissa bits
EPSILON_MISTAKES: Mistakes = {
    "Half of epsilon: that is the largest error of rounding near 1, not the next number.": lambda f: f.epsilon / 2,
    "Twice epsilon. How many different mantissas are there from 1 up to 2?": lambda f: f.epsilon * 2,
}
LARGEST_MISTAKES: Mistakes = {
    "That is the first power of two *beyond* the largest number.": lambda f: 2.0 ** (f.bias + 1),
    "That has the largest exponent, but a mantissa of zeros. What makes it larger?": lambda f: 2.0**f.bias,
    "Twice too large: did you use the exponent that is set aside for infinity and NaN?": lambda f: 2 * f.largest,
}
SMALLEST_MISTAKES: Mistakes = {
    "That is the smallest *subnormal* number. Normal ones have E = 1 at least.": lambda f: f.smallest,
    "That has E = 0, which is for subnormal numbers.": lambda f: f.smallest_normal / 2,
}


@exercise("03.1", "Range from the exponent's bits, precision from the mantissa's: you need not remember any format.")
def limits(answer: Any) -> None:
    """`answer(e, m)` is epsilon, the largest finite and the smallest normal number of a format of e and m bits."""
    answers = [_numbers(answer, "epsilon", "largest", "smallest normal number", e=e, m=m) for e, m in WIDTHS]
    epsilons, largest, smallest = map(list, zip(*answers, strict=True))
    forms = [(NumberFormat("asked", e, m, 4),) for e, m in WIDTHS]
    off = "Epsilon is off. It depends on the mantissa's bits alone: change the last of them in 1."
    recognized(epsilons, forms, lambda f: f.epsilon, EPSILON_MISTAKES, off, eq)
    off = "The largest number is off: largest exponent, all mantissa bits 1."
    recognized(largest, forms, lambda f: f.largest, LARGEST_MISTAKES, off, eq)
    off = "The smallest normal number is off: E is 1, and the mantissa is 0."
    recognized(smallest, forms, lambda f: f.smallest_normal, SMALLEST_MISTAKES, off, eq)


def _numbers(answer: Any, *asked: str, **given: Any) -> list[Any]:
    got = call(answer, **given, returns=(tuple, list))
    expect(len(got) == len(asked), f"{len(got)} values, where {len(asked)} were asked for: {', '.join(asked)}.")
    return [of_kind(value, Real, f"Your {name} is") for name, value in zip(asked, got, strict=True)]


# ---------------------------------------------------------------------------------------------------- 03.2: read_bits

READ_FORMATS = (NumberFormat("fp16", 5, 10, 2), NumberFormat("bf16", 8, 7, 2), NumberFormat("small", 3, 2, 1))


@exercise("03.2", "Every pattern of three formats, subnormal, infinite and not a number.")
def read_bits(answer: Any) -> None:
    """`answer(bits, e)` is the number that the text of bits means, with e exponent bits."""
    patterns = [(form, one) for form in READ_FORMATS for one in range(0, 2**form.bits, 331 if form.bits > 8 else 1)]
    for form, pattern in sorted(patterns, key=_normal_first):
        bits, wanted = f"{pattern:0{form.bits}b}", decode(form, pattern)
        got = float(call(answer, bits=bits, e=form.exponent, finite=False))
        if got != wanted and not (math.isnan(got) and math.isnan(wanted)):
            _name_the_misreading(got, wanted, form, pattern)


def _normal_first(one: tuple[NumberFormat, int]) -> tuple[int, int, int]:
    """Normal numbers, then subnormal ones, then infinity and NaN; within each kind, large mantissas first."""
    form, pattern = one
    _, exponent, mantissa = form.fields(pattern)
    kind = 2 if exponent == 2**form.exponent - 1 else 1 if exponent == 0 else 0
    return kind, form.bits, -mantissa


def _name_the_misreading(got: float, wanted: float, form: NumberFormat, pattern: int) -> None:
    sign, exponent, mantissa = form.fields(pattern)
    part, shown = mantissa / 2**form.mantissa, f"{sign} {exponent:0{form.exponent}b} {mantissa:0{form.mantissa}b}"
    expect(got != -wanted or wanted == 0, f"The sign of {shown} is turned round, or forgotten: 1 means minus.")
    special = f"{shown}: all exponent bits are 1, so it is no number any more. Infinity with a mantissa of 0, else NaN."
    expect(exponent != 2**form.exponent - 1, special)
    if exponent == 0:
        hidden = f"{shown}: with all exponent bits 0 there is no hidden 1 in front of the mantissa."
        expect(abs(got) not in [2.0 ** (power - form.bias) * (1 + part) for power in (0, 1)], hidden)
        half = f"{shown}: half of it. Subnormal numbers share the exponent of the *smallest normal* ones."
        expect(abs(got) != abs(wanted) / 2, half)
    else:
        without_one = 2.0 ** (exponent - form.bias) * part
        expect(abs(got) != without_one, f"{shown}: a normal number has a hidden 1 in front of its mantissa.")
        power = got / wanted > 0 and math.log2(got / wanted).is_integer()
        expect(not power, f"{shown} is off by a power of two: is the bias 2^(e−1) − 1?")
    fail(f"{shown}: your value is off. Cut the text into 1, e and m bits. Is M divided by 2^m?")


# ---------------------------------------------------------------------------------------------- 03.3: round_at_random


@exercise("03.3", "Always one of the two neighbors, and right on average, below zero too.")
def round_at_random(answer: Any) -> None:
    """`answer(values, step, u)` rounds to multiples of step, up or down by u, without bias."""
    dice = torch.Generator().manual_seed(0)
    for value, step in ((0.3, 1.0), (1.001, 2.0**-7), (-0.7, 0.5), (0.9, 0.25)):
        values, u = torch.full((40_000,), value), torch.rand(40_000, generator=dice)
        got, again = (call(answer, values=values, step=step, u=u, returns=torch.Tensor) for _ in range(2))
        _expect_no_bias(got, value, step)
        expect(torch.equal(got, again), "The same u, another result: u is all the randomness that you may use.")
    exact, u = torch.tensor([2.0, -3.0, 0.0]), torch.tensor([0.0, 0.999, 0.5])
    got = call(answer, values=exact, step=0.5, u=u, returns=torch.Tensor)
    expect(got.tolist() == exact.tolist(), "A value that is a multiple already has to stay as it is.")


def _expect_no_bias(got: torch.Tensor, value: float, step: float) -> None:
    counted = step < 0.1 and bool(((got - value / step).abs() <= 1).all())
    expect(not counted, "Your results count steps. The multiples themselves were asked for: multiply at the end.")
    whole = bool((got / step - (got / step).round()).abs().max() < 1e-4)
    expect(whole, "Not all of your results are multiples of `step`. Divide by it first, multiply by it last.")
    side = "below" if value < 0 else "above"
    fraction = value / step - math.floor(value / step)
    up = (got > value).float().mean().item()
    expect(0 < up < 1, f"All results are the same {side} zero: that is no stochastic rounding. Where does u come in?")
    coin = "Up or down like a fair coin: that is right only half-way between the two. How often up, close to the lower?"
    expect(abs(up - 0.5) > 0.02 or abs(fraction - 0.5) < 0.05, coin)
    turned = abs(up - (1 - fraction)) < 0.02 < abs(up - fraction)
    expect(not turned, "Turned round: the closer a value is to the multiple above, the more often it goes there.")
    expect(abs(up - fraction) < 0.02, f"On average your results are off {side} zero: up with what probability?")


# --------------------------------------------------------------------------------------------------- 03.4: next_scale

OVERFLOWS = tuple(step in (0, 7, 8, 21, 40, 44) for step in range(60))


@exercise("03.4", "Step by step the same scale as PyTorch's own GradScaler.")
def next_scale(answer: Any) -> None:
    """`answer(scale, streak, overflowed, interval)` is the scale and the streak after a step."""

    def following(scale: float, streak: int, overflowed: bool) -> list[Any]:
        given = {"scale": scale, "streak": streak, "overflowed": overflowed, "interval": interval}
        return _numbers(answer, "scale", "streak", **given)

    for interval in (3, 5):
        _expect_single_steps(following, interval)
        scale, streak, found = 1024.0, 0, []
        for overflowed in OVERFLOWS:
            scale, streak = following(scale, streak, overflowed)
            found.append(scale)
        off = "Single steps are right, but over 60 steps your scale parts from GradScaler's: look at the streak."
        expect(found == gradscaler_scales(OVERFLOWS, 1024.0, interval), off)


def gradscaler_scales(overflows: Sequence[bool], start: float, interval: int) -> list[float]:
    """Return the scale that torch's own GradScaler has after each of these steps, some of which overflow."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=interval)
    scales = []
    for overflowed in overflows:
        scaler.scale(torch.ones(1))
        weight.grad = torch.tensor([float("inf") if overflowed else 1.0])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _expect_single_steps(following: Callable[[float, int, bool], list[Any]], interval: int) -> None:
    scale, streak = following(1024.0, 1, True)
    expect(scale != 2048, "An overflow means that the scale is too large. You double it.")
    expect(scale == 512, "After an overflow the scale is half of what it was, however long the streak is.")
    expect(streak == 0, "After an overflow the good steps have to be counted from the beginning.")
    scale, streak = following(1024.0, interval - 1, False)
    expect(scale != 1024, "One step too late: with this good step the interval is complete.")
    expect(scale == 2048, "When the interval is complete the scale doubles.")
    expect(streak == 0, "The scale has doubled, so the streak begins anew; yours would double at every step.")
    scale, _ = following(1024.0, interval - 2, False)
    expect(scale == 1024, "One step too early: with this good step the interval is not complete yet.")
    scale, _ = following(1024.0, interval - 1, True)
    expect(scale == 512, "An overflow in the step that would have completed the interval is an overflow all the same.")


# ---------------------------------------------------------------------------------------------------- 03.5: good_step

SCALE, NEAR = 2.0**12, partial(math.isclose, rel_tol=1e-3)


class Left(NamedTuple):
    """The traces of one step: how far masters and weights moved, if it was said to be taken, gradients still there."""

    masters: torch.Tensor
    weights: torch.Tensor
    taken: bool
    weight_grads: bool
    master_grads: bool

    @property
    def norm(self) -> float:
        return self.masters.norm().item()

    def like(self, other: "Left") -> bool:
        moved = zip(self[:2], other[:2], strict=True)
        return self[2:] == other[2:] and all(torch.allclose(*pair, rtol=1e-3, atol=1e-12) for pair in moved)


STEP_MISTAKES: Mistakes = {  # conditions on the learner's steps and the right ones; the first that holds is said
    "The masters do not move: who calls `optimizer.step()`?": lambda got, right: not got.small.masters.any(),
    "The masters move too far: gradients are still scaled when the optimizer, or the clipping, sees them.":
        lambda got, right: got.small.norm > 2 * right.small.norm,
    "With scaled gradients the norm looks 4,096 times as large, so you clip what is small enough. Divide first.":
        lambda got, right: got.small.norm < right.small.norm / 2 and NEAR(got.small.norm, got.large.norm),
    "Gradients are divided, but were they ever multiplied?": lambda got, right: got.small.norm < right.small.norm / 100,
    "Tiny gradients get lost: upcast before you divide by the scale.":
        lambda got, right: not NEAR(got.tiny.norm, right.tiny.norm) and NEAR(got.small.norm, right.small.norm),
    "Large gradients are not clipped: norm 1 at most.": lambda got, right: got.large.norm > 1.01 * right.large.norm,
    "A step with infinite gradients changes the masters: look first.": lambda got, right: got.infinite.masters.any(),
    "Your function says that it took a step in which gradients were infinite.": lambda got, right: got.infinite.taken,
    "Masters move, the fp16 weights do not: the next forward reads them.":
        lambda got, right: not got.small.weights.any(),
    "The weights' gradients are left behind.": lambda got, right: got.small.weight_grads or got.infinite.weight_grads,
    "The masters' gradients are left behind.": lambda got, right: got.small.master_grads or got.infinite.master_grads,
}  # fmt: skip


@exercise(
    "03.5", "Small gradients survive, large ones are clipped, infinite ones change nothing, nothing is left over."
)
def good_step(answer: Any) -> None:
    """`answer(weights, masters, optimizer, loss, scale)` takes one step in fp16, or none, and says which."""
    names = ("weights", "masters", "optimizer", "loss", "scale")
    watched = "You copy into a weight while autograd watches: put it under torch.no_grad()."
    hints, may_change = {"leaf Variable that requires grad": watched}, ("weights", "masters")

    def called(*given: Any) -> bool:
        return call(answer, **by_name(names, given), returns=bool, may_change=may_change, hints=hints)

    got, right = _in_every_situation(called), _in_every_situation(_right_step)
    for message, holds in STEP_MISTAKES.items():
        expect(not holds(got, right), message)
    for name, one in vars(right).items():
        off = f"Not yet: look at a step with {name} gradients. What moved, what is returned, what is left?"
        expect(vars(got)[name].like(one), off)


def _in_every_situation(step: Callable[..., bool]) -> SimpleNamespace:
    """The traces of `step` with small, tiny, large and infinite gradients, and twice in a row."""
    sizes = {"small": 0.03, "tiny": 2.0**-27, "large": 1.5, "infinite": 100.0}
    return SimpleNamespace(**{name: _left(step, size) for name, size in sizes.items()}, repeated=_left(step, 0.03, 2))


def _left(step: Callable[..., bool], size: float, times: int = 1) -> Left:
    """Take `times` steps on two fp16 weights of two numbers each, whose true gradients are `size` · (1, 2, 3, 4)."""
    weights: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2)]
    masters: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(masters, lr=0.5)
    taken = True
    for _ in range(times):
        loss = (torch.cat(weights).float() * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum() * size
        taken = step(weights, masters, optimizer, loss, SCALE)
    moved, copied = (torch.cat(tensors).detach().float() for tensors in (masters, weights))
    there = [any(t.grad is not None and bool(t.grad.any()) for t in tensors) for tensors in (weights, masters)]
    return Left(moved, copied, taken, there[0], there[1])


def _right_step(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    (loss * scale).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad, weight.grad = weight.grad.float() / scale, None
    taken = bool(clip_grad_norm_(masters, 1.0).isfinite())
    if taken:
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)
    optimizer.zero_grad()
    return taken


# --------------------------------------------------------------------------------------------- 03.6: choose_precision

_XL = TrainingRun("gpt2-xl", recompute="full")
CHOICES: tuple[tuple[str, TrainingRun], ...] = (
    ("A100-40GB", _XL.replace(micro_batch=16)), ("A100-40GB", _XL.replace(optimizer="adamw-fused")),
    ("RTX3090-24GB", _XL), ("RTX3090-24GB", _XL.replace(micro_batch=32)),
    ("RTX4080-16GB", _XL.replace(micro_batch=16)), ("V100-32GB", _XL.replace(micro_batch=16)),
    ("V100-32GB", _XL.replace(micro_batch=20)), ("V100-32GB", _XL.replace(micro_batch=48)),
    ("T4-16GB", _XL), ("T4-16GB", TrainingRun("gpt2-medium", 8, 1024, recompute="full")),
    ("T4-16GB", TrainingRun("gpt2-medium", 4, 1024, attention="eager")), ("H100-80GB", _XL.replace(micro_batch=32)),
    ("RTX4080-16GB", TrainingRun("llama3-8b", 1, 1024, recompute="full")),
)  # fmt: skip


def _ranks(card: str) -> list[list[str]]:
    if gpu(card).has_bf16:
        return [["amp-bf16", "bf16-master-fp32grad"], ["bf16-master"], ["bf16"]]
    return [["amp-fp16"], ["fp16-master"]]


def _choose(
    card: str, run: TrainingRun, pick: Callable[..., str] = min,
    ranks: Callable[[str], Sequence[Sequence[str]]] = _ranks,
    memory: Callable[[str], int] = lambda card: gpu(card).memory,
) -> str:  # fmt: skip
    """The pick from the first rank in which anything fits, "" if nothing does."""
    for names in ranks(card):
        peaks = {name: _peak(card, run, name) for name in names}
        fitting = {name: peak for name, peak in peaks.items() if peak <= memory(card)}
        if fitting:
            return pick(fitting, key=fitting.__getitem__)
    return ""


@cache
def _peak(card: str, run: TrainingRun, precision: str) -> int:
    attention = run.attention if gpu(card).has_bf16 else "efficient"
    return estimate(run.replace(precision=precision, attention=attention)).total


CHOICE_MISTAKES: Mistakes = {
    "You take the lowest peak of all. What fits is enough: prefer the precision that adds up more in fp32.":
        partial(_choose, ranks=lambda card: [[n for rank in _ranks(card) for n in rank]]),
    "You take autocast wherever it fits: the lower peak wins.":
        partial(_choose, pick=lambda peaks, key: next(iter(peaks))),
    "In a rank you take the higher peak.": partial(_choose, pick=max),
    "You give up after the first rank: see what fits next.": partial(_choose, ranks=lambda card: _ranks(card)[:1]),
    "You took the number in the card's name for GB. A card sold as 16 GB holds GiB: ask `gpu(card).memory`.":
        partial(_choose, memory=lambda card: GB * int(card.split("-")[1][:2])),
}  # fmt: skip


@exercise("03.6", "The best sums that each card can afford, from a T4 to an H100.")
def choose_precision(answer: Any) -> None:
    """`answer(card, run)` is the best precision in which the run fits the card, or ""."""
    got = [call(answer, card=card, run=run, returns=str) for card, run in CHOICES]
    for (card, run), name in zip(CHOICES, got, strict=True):
        expect("bf16" not in name or gpu(card).has_bf16, f"{card} has no bf16: you choose {name!r} for it.")
        known = any(name in rank for rank in ([""], *_ranks(card)))
        expect(known, f"{name!r} is not among the precisions to choose from for {card}.")
        expect(not name or _peak(card, run, name) <= gpu(card).memory, f"{name!r} does not fit {card} for {run}.")
    otherwise = "There is a better choice by the order of preference, with the kernel of attention that the card has."
    recognized(got, CHOICES, _choose, CHOICE_MISTAKES, otherwise, eq)
