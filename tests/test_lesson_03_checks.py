"""Checks of lesson 03: right answers of every style pass, and each planted wrong answer gets its hint."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers
from torch.nn.utils import clip_grad_norm_

# --------------------------------------------------------------------------------------------------
# 03.1: limits


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
        (other(0, lambda e, m: 1 + 2.0**-m), "Your epsilon is off for e = 5, m = 10. It depends"),
        (other(1, lambda e, m: 65504.0), "Your largest number is off for e = 8, m = 7"),
        (other(1, lambda e, m: (2 - 2.0**-m) * 2.0**127), "Your bias is 127"),
        (
            lambda e, m: (2.0**-m, right_limits(e, m)[2], right_limits(e, m)[1]),
            "The order is epsilon, largest",
        ),
        (other(1, lambda e, m: 2 * right_limits(e, m)[1]), "set aside for infinity"),
        (other(1, lambda e, m: 2.0 ** (2 ** (e - 1))), "*beyond* the largest"),
        (other(1, lambda e, m: 2.0 ** (2 ** (e - 1) - 1)), "a mantissa of zeros"),
        (other(2, lambda e, m: 2.0 ** -(2 ** (e - 1) - 1)), "E = 0, which is for subnormal"),
        (other(2, lambda e, m: right_limits(e, m)[2] * 2.0**-m), "smallest *subnormal*"),
        (other(2, lambda e, m: 2.0**-14), "Your smallest normal number is off"),
        (lambda e, m: (2.0**-m, right_limits(e, m)[1]), "2 values, where 3"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 03.2: round_at_random


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


def below_or_equal(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    below = torch.floor(values / step)
    return step * (below + (u <= values / step - below))


def dice_of_its_own(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    u = torch.rand(values.shape, generator=torch.Generator().manual_seed(3))
    return by_floor(values, step, u)


ROUND_AT_RANDOM = Answers(
    right=[
        by_floor,
        coin(lambda fraction: fraction),
        lambda values, step, u: step * torch.ceil(values / step - u),
        lambda values, step, u: torch.from_numpy(numpy.floor(values.numpy() / step + u.numpy()) * step),
    ],
    wrong=[
        (lambda values, step, u: torch.round(values / step) * step, "All results above zero are the same"),
        (lambda values, step, u: torch.floor(values / step + u), "Your results count steps"),
        (lambda values, step, u: values + (u - 0.5) * step, "Not all of your results are multiples"),
        (
            lambda values, step, u: torch.round(values / step + u) * step,
            "On average your results are off above zero",
        ),
        (coin(lambda fraction: 0.5), "like a fair coin"),
        (coin(lambda fraction: 1 - fraction), "Reversed: the closer"),
        (coin(lambda fraction: fraction, torch.trunc), "Truncation goes up there"),
        (coin(lambda fraction: fraction**2), "On average your results are off"),
        (lambda values, step, u: by_floor(values, step, torch.rand_like(values)), "u is all the randomness"),
        (moves_multiples, "A multiple of `step` has to stay as it is"),
        (below_or_equal, "also where u is 0"),
        (dice_of_its_own, "Another u gives the same result"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 03.3: exact_step


def halves(*mistakes: str, kept: list[torch.Tensor] = []) -> Any:  # noqa: B006
    """A step on masters in two halves, right by default, with one mistake or another."""

    def answer(weights: Any, rests: Any, update: Any) -> None:
        masters = []
        for weight, rest in zip(weights, rests, strict=True):
            upper = weight.detach().view(torch.int16)
            lower = rest.int() if "sign" in mistakes else rest.int() & 0xFFFF
            bits = (upper.int() << (0 if "not shifted" in mistakes else 16)) + lower
            master = weight.detach().float() if "without rest" in mistakes else bits.view(torch.float32)
            gradient = rest if "no gradient" in mistakes else weight.grad
            update(master.bfloat16() if "in bf16" in mistakes else master, gradient)
            masters.append((upper, rest, master.view(torch.int32)))
            if "all at once" not in mistakes:
                store(*masters.pop(), weight)
            if "keeps" in mistakes:
                kept.append(master)
        for upper, rest, bits in masters:
            store(upper, rest, bits, None)

    def store(upper: Any, rest: Any, bits: Any, weight: Any) -> None:
        if "rounds" in mistakes:
            weight.data.copy_(bits.view(torch.float32))
        elif "not stored" not in mistakes:
            upper.copy_(bits >> 16)
        if "difference" in mistakes:
            rest.copy_(bits.view(torch.float32) - upper.view(torch.bfloat16).float())
        elif "no rest" not in mistakes:
            rest.copy_(bits)

    return answer


def rounded_halves(weights: Any, rests: Any, update: Any) -> None:
    """Right as well: weights are rounded, and the rest is negative where they are rounded up."""
    for weight, rest in zip(weights, rests, strict=True):
        upper = weight.data.view(torch.int16)
        bits = upper.to(torch.int32) * 65536 + rest
        update(bits.view(torch.float32), weight.grad)
        rest.copy_(bits)
        upper.copy_((bits - rest) >> 16)


@torch.no_grad()
def halves_of_bytes(weights: Any, rests: Any, update: Any) -> list[Any]:
    """Right as well: a master is two int16 next to each other."""
    for place, weight in enumerate(weights):
        pairs = torch.stack([rests[place], weight.view(torch.int16)], dim=-1)
        master = pairs.view(torch.float32).squeeze(-1)
        update(master, weight.grad.float())
        rests[place].copy_(pairs[..., 0])
        weight.copy_(pairs[..., 1].view(torch.bfloat16))
    return rests


@torch.no_grad()
def cut_floats(weights: Any, rests: Any, update: Any) -> None:
    """Right as well: the weight gets a float whose lower bits are already 0, so nothing is rounded."""
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.copy_((bits & -65536).view(torch.float32))
        rest.copy_(bits & 0xFFFF)


@torch.no_grad()
def new_memory(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.data = (bits >> 16).short().view(torch.bfloat16)
        rest.copy_(bits)


def new_lists(weights: Any, rests: Any, update: Any) -> None:
    for place, weight in enumerate(weights):
        master = weight.detach().float()
        update(master, weight.grad)
        weights[place], rests[place] = master.bfloat16(), (master.view(torch.int32) & 0xFFFF).short()


def watched_halves(weights: Any, rests: Any, update: Any) -> None:
    for weight, _ in zip(weights, rests, strict=True):
        master = weight.detach().float()
        update(master, weight.grad)
        weight.copy_(master)


@torch.no_grad()
def as_numbers(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.to(torch.int32) << 16 | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)


@torch.no_grad()
def stored_as_numbers(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.copy_(bits >> 16)
        rest.copy_(bits)


@torch.no_grad()
def other_halves(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.view(torch.int16).copy_(bits)
        rest.copy_(bits >> 16)


@torch.no_grad()
def by_slices(weights: Any, rests: Any, update: Any) -> None:
    """Right as well: slices of everything are assigned to."""
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.view(torch.int16)[:] = (bits >> 16).to(torch.int16)
        rest[:] = (bits & 0xFFFF).to(torch.int16)


EXACT_STEP = Answers(
    right=[halves(), rounded_halves, halves_of_bytes, cut_floats, by_slices],
    wrong=[
        (halves("sign"), "Where a rest is negative, the upper half is wrong"),
        (halves("rounds"), "Some weights were rounded up, but not their rests"),
        (halves("no rest"), "All rests are still 0 after a step"),
        (halves("difference"), "All rests are still 0 after a step"),
        (halves("without rest"), "You hand over the weight without its rest"),
        (halves("not shifted"), "compare its bits with"),
        (halves("in bf16"), "Hand it a float32 tensor"),
        (halves("no gradient"), "another gradient than the weight's own"),
        (halves("not stored"), "A weight has not changed"),
        (as_numbers, "You convert a weight to an integer"),
        (stored_as_numbers, "A weight holds its bits as a number"),
        (other_halves, "A weight is not its new master's upper half"),
        (halves("all at once"), "Several masters exist at once"),
        (halves("keeps"), "Something is left after the step"),
        (new_lists, "A weight or a rest is a new tensor"),
        (new_memory, "write into the memory that it has"),
        (watched_halves, "use torch.no_grad()"),
        (lambda weights, rests, update: None, "not called once for every weight"),
        (
            lambda weights, rests, update: [halves()(weights, rests, update) for _ in range(2)],
            "Call it once for each",
        ),
        (
            lambda weights, rests, update: update(weights[0].detach().float().view(-1, 1), weights[0].grad),
            "of the weight's shape",
        ),
    ],
)

# --------------------------------------------------------------------------------------------------
# 03.4: good_step


def step_with(*mistakes: str, factor: float = 1.0) -> Any:
    """A training step, right by default, with one mistake or another."""

    def answer(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> Any:
        (loss if "not scaled" in mistakes else loss * scale).backward()
        divisor = 1.0 if {"divides last", "never divides"} & {*mistakes} else scale / factor
        for weight, master in zip(weights, masters, strict=True):
            wide = weight.grad.float() / divisor
            narrow = (weight.grad / divisor).float()
            master.grad = narrow if "divides in fp16" in mistakes else wide
            weight.grad = weight.grad if "leaves weights'" in mistakes else None
        checked = masters
        if "looks at the last" in mistakes:
            checked = masters[-1:]
        if "looks at the first" in mistakes:
            checked = masters[:1]
        finite = all(bool(master.grad.isfinite().all()) for master in checked)
        if "looks for any" in mistakes:
            finite = finite or all(bool(master.grad.isfinite().any()) for master in masters)
        if "looks for infinity" in mistakes:
            finite = finite or not any(bool(master.grad.isinf().any()) for master in masters)
        if "steps on zeros" in mistakes and not finite:
            for master in masters:
                master.grad = torch.zeros_like(master)
        for group in [[master] for master in masters] if "clips each" in mistakes else [masters]:
            clip_grad_norm_(group, math.inf if "no clipping" in mistakes else 1.0)
        if "divides last" in mistakes:
            for master in masters:
                master.grad /= scale
        if (finite or {"does not look", "steps on zeros"} & {*mistakes}) and "no step" not in mistakes:
            optimizer.step()
        if (finite and "no copy" not in mistakes) or "copies infinities" in mistakes:
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    copied = master * (2 if "copies twice" in mistakes else 1)
                    weight.copy_(copied if finite else torch.full_like(master, math.inf))
        if "leaves masters'" not in mistakes:
            for master in masters:
                master.grad = None
        return "says always" in mistakes or (finite and "says never" not in mistakes)

    return answer


def with_fp32_weights(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> Any:
    taken = step_with()(weights, masters, optimizer, loss, scale)
    for weight, master in zip(weights, masters, strict=True):
        weight.data = master.data
    return taken


def clips_scaled(
    weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float, none: bool = True
) -> bool:
    """Right as well: clips scaled gradients at the scale. Without `none`, it leaves zeros as gradients."""
    loss.mul(scale).backward()
    for place in range(len(weights)):
        masters[place].grad = weights[place].grad.to(torch.float32)
        weights[place].grad = None
    taken = torch.isfinite(clip_grad_norm_(masters, scale)).item()
    for master in masters:
        master.grad.mul_(1 / scale)
    if taken:
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)
    optimizer.zero_grad(set_to_none=none)
    return bool(taken)


def zeroes_weights(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    taken = step_with("leaves weights'")(weights, masters, optimizer, loss, scale)
    for weight in weights:
        weight.grad.zero_()
    return taken


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
        (step_with("divides last"), "so small ones are clipped too. Divide first."),
        (step_with("divides in fp16"), "Tiny gradients get lost"),
        (step_with("no clipping"), "Large gradients are not clipped"),
        (step_with("clips each"), "Large gradients are not clipped"),
        (step_with("does not look"), "A step with infinite gradients changes the masters"),
        (step_with("copies infinities"), "look at a step with infinite gradients"),
        (step_with("looks at the last"), "You step although one gradient is infinite"),
        (step_with("looks at the first"), "You step although one gradient is infinite"),
        (step_with("looks for any"), "You step although one gradient is infinite"),
        (step_with("looks for infinity"), "You step although a gradient is NaN"),
        (step_with("steps on zeros"), "Zeros are gradients, too"),
        (with_fp32_weights, "no longer fp16"),
        (step_with("says always"), "but your function says that it took a step"),
        (step_with("says never"), "look at a step with small gradients"),
        (step_with("no copy"), "the fp16 weights do not. The next forward"),
        (step_with("copies twice"), "look at a step with small gradients"),
        (step_with("leaves weights'"), "Gradients are left behind"),
        (step_with("leaves masters'"), "Gradients are left behind"),
        (partial(clips_scaled, none=False), "Gradients of zeros are left behind"),
        (zeroes_weights, "How many bytes does a zero take?"),
        (step_with(factor=0.75), "look at a step with small gradients"),
        (copies_with_autograd, "use torch.no_grad()"),
    ],
)

ANSWERS = {f"03.{n}": one for n, one in enumerate((LIMITS, ROUND_AT_RANDOM, EXACT_STEP, GOOD_STEP), 1)}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
