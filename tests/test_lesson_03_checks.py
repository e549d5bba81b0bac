"""The checks of lesson 03: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers
from torch.nn.utils import clip_grad_norm_

from course_utils import TrainingRun, estimate, gpu

# ------------------------------------------------------------------------------------------------------- 03.1: limits


def right_limits(e: int, m: int) -> tuple[float, float, float]:
    bias = 2 ** (e - 1) - 1
    return 2.0**-m, (2 - 2.0**-m) * 2.0**bias, 2.0 ** (1 - bias)


def limits_in_torch(e: int, m: int) -> Any:
    known = {(5, 10): torch.float16, (8, 7): torch.bfloat16, (8, 23): torch.float32}
    if (e, m) not in known:
        return numpy.array(right_limits(e, m))
    found = torch.finfo(known[e, m])
    return found.eps, found.max, found.smallest_normal


def other(place: int, formula: Callable[[int, int], float]) -> Any:
    """The right answer, with another formula for one of its three numbers."""
    return lambda e, m: [formula(e, m) if n == place else one for n, one in enumerate(right_limits(e, m))]


LIMITS = Answers(
    right=[right_limits, limits_in_torch, lambda e, m: list(right_limits(e, m))],
    wrong=[
        (other(0, lambda e, m: 2.0 ** -(m + 1)), "Half of epsilon"),
        (other(0, lambda e, m: 2.0 ** (1 - m)), "Twice epsilon"),
        (other(0, lambda e, m: 1 + 2.0**-m), "Epsilon is off"),
        (other(1, lambda e, m: 65504.0), "The largest number is off"),
        (other(1, lambda e, m: 2 * right_limits(e, m)[1]), "set aside for infinity"),
        (other(1, lambda e, m: 2.0 ** (2 ** (e - 1))), "*beyond* the largest"),
        (other(1, lambda e, m: 2.0 ** (2 ** (e - 1) - 1)), "a mantissa of zeros"),
        (other(2, lambda e, m: 2.0 ** -(2 ** (e - 1) - 1)), "E = 0, which is for subnormal"),
        (other(2, lambda e, m: right_limits(e, m)[2] * 2.0**-m), "smallest *subnormal*"),
        (other(2, lambda e, m: 2.0**-14), "The smallest normal number is off"),
        (lambda e, m: (2.0**-m, right_limits(e, m)[1]), "2 values, where 3"),
    ],
)

# ---------------------------------------------------------------------------------------------------- 03.2: read_bits


def reader(
    bias_shift: int = 0, hidden: float = 1.0, subnormal_shift: int = 1, subnormal_hidden: float = 0.0,
    signed: bool = True, special: str = "right", unit: int | None = None, exponent_bits: int | None = None,
) -> Callable[[str, int], float]:  # fmt: skip
    """A reader of bits, right by default, with one thing or another changed."""

    def read(bits: str, e: int) -> float:
        e = exponent_bits or e
        m, bias = len(bits) - 1 - e, 2 ** (e - 1) - 1 + bias_shift
        sign = -1.0 if signed and bits[0] == "1" else 1.0
        exponent, mantissa = int(bits[1 : 1 + e], 2), int(bits[1 + e :], 2) / (unit or 2**m)
        if special != "none" and exponent == 2**e - 1:
            return math.nan if mantissa and special == "right" else sign * math.inf
        if exponent == 0:
            return sign * 2.0 ** (subnormal_shift - bias) * (subnormal_hidden + mantissa)
        return sign * 2.0 ** (exponent - bias) * (hidden + mantissa)

    return read


READ_BITS = Answers(
    right=[reader(), *(lambda bits, e, kind=kind: kind(reader()(bits, e)) for kind in (torch.tensor, numpy.float64))],
    wrong=[
        (reader(signed=False), "The sign of"),
        (reader(hidden=0.0), "a normal number has a hidden 1"),
        (reader(bias_shift=1), "off by a power of two"),
        (reader(unit=1), "Is M divided by 2^m?"),
        (reader(exponent_bits=4), "Cut the text into 1, e and m bits"),
        (reader(subnormal_shift=0), "half of it. Subnormal numbers share the exponent"),
        (reader(subnormal_hidden=1.0), "there is no hidden 1 in front"),
        (reader(subnormal_shift=3), "your value is off. Cut the text"),
        (reader(special="none"), "it is no number any more"),
        (reader(special="infinity"), "it is no number any more"),
    ],
)

# ---------------------------------------------------------------------------------------------- 03.3: round_at_random


def by_floor(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return torch.floor(values / step + u) * step


def coin(chance: Callable[[torch.Tensor], Any], whole: Any = torch.floor) -> Any:
    """Up with a chance that depends on how far the value is above the whole number below."""

    def answer(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
        below = whole(values / step)
        return step * (below + (u < chance(values / step - below)))

    return answer


def moves_multiples(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return torch.where(values == torch.round(values / step) * step, values + step, by_floor(values, step, u))


ROUND_AT_RANDOM = Answers(
    right=[
        by_floor,
        coin(lambda fraction: fraction),
        lambda values, step, u: step * torch.ceil(values / step - u),
        lambda values, step, u: torch.from_numpy(numpy.floor(values.numpy() / step + u.numpy()) * step),
    ],
    wrong=[
        (lambda values, step, u: torch.round(values / step) * step, "All results are the same above zero"),
        (lambda values, step, u: torch.floor(values / step + u), "Your results count steps"),
        (lambda values, step, u: values + (u - 0.5) * step, "Not all of your results are multiples"),
        (lambda values, step, u: torch.round(values / step + u) * step, "On average your results are off above zero"),
        (coin(lambda fraction: 0.5), "like a fair coin"),
        (coin(lambda fraction: 1 - fraction), "Turned round"),
        (coin(lambda fraction: fraction, torch.trunc), "All results are the same below zero"),
        (coin(lambda fraction: fraction**2), "On average your results are off"),
        (lambda values, step, u: by_floor(values, step, torch.rand_like(values)), "u is all the randomness"),
        (moves_multiples, "a multiple already"),
    ],
)

# --------------------------------------------------------------------------------------------------- 03.4: next_scale


def scaler(up: float = 2, down: float = 0.5, late: int = 0, keep: bool = False, forget: bool = True) -> Any:
    """Loss scaling by one rule, right by default."""

    def answer(scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
        if overflowed:
            return scale * down, streak if keep else 0
        if streak + 1 >= interval + late:
            return scale * up, 0 if forget else streak + 1
        return scale, streak + 1

    return answer


def scale_by_arithmetic(scale: float, streak: int, overflowed: bool, interval: int) -> list[float]:
    streak = (streak + 1) * (not overflowed)
    full = streak >= interval
    return [scale * (0.5 if overflowed else 2.0 if full else 1.0), 0 if full else streak]


def growth_first(scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
    if streak + 1 == interval:
        return scale * 2, 0
    return (scale / 2, 0) if overflowed else (scale, streak + 1)


def forgets_long_streaks(scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
    new, count = scaler()(scale, streak, overflowed, interval)
    return new, min(count, 1)


NEXT_SCALE = Answers(
    right=[scaler(), scale_by_arithmetic],
    wrong=[
        (scaler(down=2), "You double it"),
        (scaler(down=0.25), "half of what it was"),
        (scaler(keep=True), "counted from the beginning"),
        (scaler(late=1), "One step too late"),
        (scaler(late=-1), "One step too early"),
        (scaler(up=4), "the scale doubles"),
        (scaler(forget=False), "yours would double at every step"),
        (growth_first, "an overflow all the same"),
        (forgets_long_streaks, "over 60 steps your scale parts from GradScaler's"),
        (lambda scale, streak, overflowed, interval: (scale,), "1 values, where 2"),
    ],
)

# ---------------------------------------------------------------------------------------------------- 03.5: good_step


def step_with(*mistakes: str, factor: float = 1.0) -> Any:
    """A training step, right by default, with one mistake or another."""

    def answer(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> Any:
        (loss if "not scaled" in mistakes else loss * scale).backward()
        divisor = 1.0 if {"divides last", "never divides"} & {*mistakes} else scale / factor
        for weight, master in zip(weights, masters, strict=True):
            wide, narrow = weight.grad.float() / divisor, (weight.grad / divisor).float()
            master.grad = narrow if "divides in fp16" in mistakes else wide
            weight.grad = weight.grad if "leaves weights'" in mistakes else None
        finite = all(bool(master.grad.isfinite().all()) for master in masters)
        for group in [[master] for master in masters] if "clips each" in mistakes else [masters]:
            clip_grad_norm_(group, math.inf if "no clipping" in mistakes else 1.0)
        for master in masters if "divides last" in mistakes else ():
            master.grad /= scale
        if (finite or "does not look" in mistakes) and "no step" not in mistakes:
            optimizer.step()
        if (finite and "no copy" not in mistakes) or "copies infinities" in mistakes:
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    copied = master * (2 if "copies twice" in mistakes else 1)
                    weight.copy_(copied if finite else torch.full_like(master, math.inf))
        for master in () if "leaves masters'" in mistakes else masters:
            master.grad = None
        return ("says always" in mistakes) or (finite and "says never" not in mistakes)

    return answer


def clips_scaled(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    """Right as well: clips the scaled gradients at the scale, zeros are left in place of gradients."""
    loss.mul(scale).backward()
    for place in range(len(weights)):
        masters[place].grad = weights[place].grad.to(torch.float32)
        weights[place].grad.zero_()
    taken = torch.isfinite(clip_grad_norm_(masters, scale)).item()
    for master in masters:
        master.grad.mul_(1 / scale)
    if taken:
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)
    optimizer.zero_grad(set_to_none=False)
    return bool(taken)


def second_step_fails(known: list[Any] = [], **given: Any) -> bool:  # noqa: B006
    """Goes wrong whenever it sees the same optimizer again."""
    known.append(given["optimizer"])
    return step_with(factor=known.count(given["optimizer"]))(**given)


def copies_with_autograd(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)
    return True


GOOD_STEP = Answers(
    right=[step_with(), clips_scaled, lambda **given: numpy.bool_(clips_scaled(**given))],
    wrong=[
        (step_with("no step"), "who calls `optimizer.step()`"),
        (step_with("never divides"), "still scaled when the optimizer"),
        (step_with("not scaled"), "were they ever multiplied"),
        (step_with("divides last"), "so you clip what is small enough. Divide first."),
        (step_with("divides in fp16"), "Tiny gradients get lost"),
        (step_with("no clipping"), "Large gradients are not clipped"),
        (step_with("clips each"), "Large gradients are not clipped"),
        (step_with("does not look"), "A step with infinite gradients changes the masters"),
        (step_with("copies infinities"), "look at a step with infinite gradients"),
        (step_with("says always"), "says that it took a step in which"),
        (step_with("says never"), "look at a step with small gradients"),
        (step_with("no copy"), "the fp16 weights do not: the next forward"),
        (step_with("copies twice"), "look at a step with small gradients"),
        (step_with("leaves weights'"), "The weights' gradients are left behind"),
        (step_with("leaves masters'"), "The masters' gradients are left behind"),
        (step_with(factor=0.75), "look at a step with small gradients"),
        (second_step_fails, "look at a step with repeated gradients"),
        (copies_with_autograd, "put it under torch.no_grad()"),
    ],
)

# --------------------------------------------------------------------------------------------- 03.6: choose_precision


def chooser(
    pick: Any = min, memory: Callable[[str], float] = lambda card: gpu(card).memory, ranks: int = 3,
    together: bool = False, none: Any = "",
) -> Any:  # fmt: skip
    """A choice by ranks, right by default."""

    def answer(card: str, run: TrainingRun) -> Any:
        choices = [["amp-bf16", "bf16-master-fp32grad"], ["bf16-master"], ["bf16"]]
        if not gpu(card).has_bf16:
            choices, run = [["amp-fp16"], ["fp16-master"]], run.replace(precision="amp-fp16", attention="efficient")
        for names in [[name for rank in choices for name in rank]] if together else choices[:ranks]:
            peaks = {name: estimate(run.replace(precision=name)).total for name in names}
            fitting = {name: peak for name, peak in peaks.items() if peak <= memory(card)}
            if fitting:
                return pick(fitting, key=fitting.__getitem__)
        return none

    return answer


def in_flat_order(card: str, run: TrainingRun) -> str:
    """One sorted list of (rank, peak, name)."""
    bf16 = {"amp-bf16": 1, "bf16-master-fp32grad": 1, "bf16-master": 2, "bf16": 3}
    ranks = bf16 if gpu(card).has_bf16 else {"amp-fp16": 1, "fp16-master": 2}
    attention = run.attention if gpu(card).has_bf16 else "efficient"
    peaks = {name: estimate(run.replace(precision=name, attention=attention)).total for name in ranks}
    order = sorted((rank, peaks[name], name) for name, rank in ranks.items())
    return next((name for _, peak, name in order if not peak > gpu(card).memory), "")


CHOOSE_PRECISION = Answers(
    right=[chooser(), in_flat_order, lambda card, run: numpy.str_(in_flat_order(card, run))],
    wrong=[
        (chooser(together=True), "You take the lowest peak of all"),
        (chooser(pick=lambda peaks, key: next(iter(peaks))), "You take autocast wherever it fits"),
        (chooser(pick=max), "you take the higher peak"),
        (chooser(ranks=1), "You give up after the first rank"),
        (chooser(memory=lambda card: int(card[-4:-2]) * 10**9), "the number in the card's name for GB"),
        (chooser(ranks=2), "There is a better choice"),
        (chooser(none="bf16"), "has no bf16: you choose 'bf16'"),
        (chooser(memory=lambda card: math.inf), "does not fit"),
        (lambda card, run: "fp32", "not among the precisions"),
    ],
)

ANSWERS = {f"03.{n}": one for n, one in enumerate(
    (LIMITS, READ_BITS, ROUND_AT_RANDOM, NEXT_SCALE, GOOD_STEP, CHOOSE_PRECISION), 1
)}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
