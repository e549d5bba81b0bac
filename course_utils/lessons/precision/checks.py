"""Checks of lesson 03, "Mixed precision": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn

from ...interactive.feedback import (
    Mistakes,
    alike,
    call,
    call_for_effect,
    exercise,
    expect,
    of_kind,
    recognized,
)
from ..shared.judging import alive_during, same, seeded

# what an error of torch's says, and what is said instead
WATCHED = {
    "leaf Variable that requires grad": "You copy into a weight while autograd watches: use torch.no_grad()."
}

# --------------------------------------------------------------------------------------------------
# 03.1: limits
WIDTHS = ((5, 10), (8, 7), (8, 23), (5, 2), (3, 4), (6, 9))  # exponent and mantissa bits


def _limits(e: int, m: int) -> tuple[float, float, float]:
    bias = 2 ** (e - 1) - 1
    return 2.0**-m, (2 - 2.0**-m) * 2.0**bias, 2.0 ** (1 - bias)


LIMITS = {  # in the order of the answer, and what is said if it is off
    "epsilon": "It depends only on the mantissa's bits: take 1 and change the last of them.",
    "largest number": "Take the largest exponent, all mantissa bits 1. Is the bias right?",
    "smallest normal number": "Take the smallest exponent that is not set aside. Is the bias right?",
}
# a limit, how many times as large it is by mistake, and what is said then
LIMIT_MISTAKES: Sequence[tuple[str, Callable[[int], float], str]] = (
    ("epsilon", lambda m: 1 / 2, "Half of epsilon is the largest error of rounding near 1."),
    ("largest number", lambda m: 2 / (2 - 2.0**-m), "It is the first power of two *beyond* the largest."),
    ("largest number", lambda m: 1 / (2 - 2.0**-m), "It has a mantissa of zeros. What makes it larger?"),
    ("largest number", lambda m: 2, "It has the exponent that is set aside for infinity and NaN."),
    (
        "smallest normal number",
        lambda m: 2.0**-m,
        "That is the smallest *subnormal*. Normal is E = 1 or more.",
    ),
    ("smallest normal number", lambda m: 1 / 2, "It has E = 0, which is for subnormal numbers."),
)


@exercise(
    "03.1", "Range from the exponent's bits, precision from the mantissa's: you need not remember any format."
)
def limits(answer: Any) -> None:
    """`answer(e, m)` is epsilon, the largest finite and the smallest normal number of e and m bits."""
    for e, m in WIDTHS:
        got = call(answer, e=e, m=m, returns=(tuple, list))
        expect(len(got) == 3, f"You return {len(got)} values, where 3 are needed: {', '.join(LIMITS)}.")
        for name, value, right in zip(LIMITS, got, _limits(e, m), strict=True):
            number = of_kind(value, Real, f"Your {name} is")
            off = f"Your {name} is off for e = {e}, m = {m}."
            for mistaken, times, message in LIMIT_MISTAKES:
                expect(name != mistaken or number != times(m) * right, f"{off} {message}")
            expect(number == right, f"{off} {LIMITS[name]}")


# --------------------------------------------------------------------------------------------------
# 03.2: round_at_random
ROUNDED = ((0.3, 1.0), (1.001, 2.0**-7), (-0.7, 0.5), (0.9, 0.25))  # values and steps
U = (torch.arange(1000) + 0.5) / 1000  # every u there is, so that a share needs no luck


def _share_up(value: float, step: float) -> float:
    """The right share of results above the value: its distance from the multiple below, in steps."""
    return value / step % 1


NOT_NEXT = "Your results are not the multiples of `step` next to a value. Divide by it first, multiply last."
ROUND_MISTAKES: Mistakes = {
    "You round like a fair coin, which is right only half-way. How often up, close to the lower multiple?": (
        lambda value, step: 0.5
    ),
    "Reversed: the closer a value is to the multiple above, the more often it goes there.": (
        lambda value, step: 1 - _share_up(value, step)
    ),
    "All results below zero are the same. Truncation goes up there: what is the multiple below?": (
        lambda value, step: 1.0 if value < 0 else _share_up(value, step)
    ),
}


@exercise("03.2", "Always one of the two neighbors, and right on average, below zero too.")
def round_at_random(answer: Any) -> None:
    """`answer(values, step, u)` rounds to multiples of step, up or down by u, without bias."""
    asked = partial(call, answer, returns=torch.Tensor)
    shares = []
    for value, step in ROUNDED:
        values = torch.full(U.shape, value)
        one_u = asked(values=values, step=step, u=torch.full(U.shape, 0.4))
        own = "Equal values with equal u give different results: all randomness must come from u."
        expect(one_u.unique().numel() == 1, own)
        got = asked(values=values, step=step, u=U)
        up = got.double() / step - math.floor(value / step)
        expect((up * (1 - up)).abs().max() < 1e-4, NOT_NEXT)  # each is 0 or 1
        shares.append(up.mean().item())
    still = "All results of a value are the same, so nothing is stochastic. Where does u come in?"
    expect(any(0.001 < share < 0.999 for share in shares), still)
    otherwise = "On average your results are off: with what probability up?"
    recognized(shares, ROUNDED, _share_up, ROUND_MISTAKES, otherwise, partial(alike, tolerance=0.02))
    multiples = torch.tensor([2.0, -3.0, 0.0])
    got = asked(values=multiples, step=0.5, u=torch.tensor([0.0, 0.999, 0.5]))
    stay = "A multiple of `step` has to stay as it is, also where u is 0."
    expect(got.tolist() == multiples.tolist(), stay)


# --------------------------------------------------------------------------------------------------
# 03.3: exact_step
SHAPES = [(64,)] * 64 + [(3, 7), (1,), (2, 1, 30)]
BITS = (0x7F800000, -0x800000, -(2**31), 1, 0x3F7FFFFF, 0x4048F5C3, -0x7FFF8000, -0x40000001, 0x3F808000)
EXTREMES = torch.tensor(BITS, dtype=torch.int32).view(torch.float32)  # infinite, −0, subnormal, with a carry
# what is said of a weight and a rest that do not hold a master
NO_HALVES = (
    "A weight or a rest is not its half of fp32's master. "
    "Is the master made of both, and are the bits of both written after `update`?"
)
ROUNDED_UP = "Some weights were rounded up, but not their rests. Cut masters off, or let rests be negative."
NEGATIVE_REST = "Where a rest is negative, the upper half is wrong. What does int32 add to a negative int16?"


def _descended(master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return master - 0.01 * gradient.float()


def _extreme(master: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return EXTREMES.repeat(master.numel())[: master.numel()].view(master.shape)


# new masters of old ones and gradients, step by step; the last step shows whether extreme ones were kept
NEW_MASTERS = (_descended, _descended, _extreme, lambda master, _: master)


@exercise("03.3", "Bit by bit the masters of fp32, in 4 bytes per parameter, one at a time.")
def exact_step(answer: Any) -> None:
    """`answer(weights, rests, update)` updates fp32 masters that are kept as bf16 weights and int16 rests."""
    with seeded():
        weights = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
        gradients = [torch.randn(shape).bfloat16() for shape in SHAPES]
    rests = [torch.zeros(shape, dtype=torch.int16) for shape in SHAPES]
    masters = [weight.detach().float() for weight in weights]
    for new in NEW_MASTERS:
        masters = [new(*pair) for pair in zip(masters, gradients, strict=True)]
        old = [rest.clone() for rest in rests]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        _take_step(answer, weights, rests, new)
        lost = "All rests are still 0 after a step: what bf16 cannot hold is lost."
        expect(any(rest.any() for rest in rests), lost)
        for tensors in zip(weights, rests, masters, old, strict=True):
            _expect_halves(*tensors)


def _take_step(
    answer: Any, weights: list[nn.Parameter], rests: list[torch.Tensor], new: Callable[..., torch.Tensor]
) -> None:
    """Take the learner's step in place, one master at a time, with an `update` that makes `new` masters."""
    called: list[int] = []

    def update(master: Any, gradient: Any) -> None:
        fp32 = isinstance(master, torch.Tensor) and master.dtype == torch.float32
        expect(fp32, "`update` adds in fp32. Hand it a float32 tensor; yours is something else.")
        called.append(1)
        master.detach().copy_(new(master.detach(), gradient))

    known = [*weights, *rests, *(weight.grad for weight in weights if weight.grad is not None)]
    memory = [tensor.data_ptr() for tensor in (*weights, *rests)]
    lists = ([*weights], [*rests])
    seen = alive_during(partial(call_for_effect, answer, *lists, update, hints=WATCHED), known)
    expect(len(called) == len(weights), "`update` is not called once for every weight.")
    in_place = memory == [tensor.data_ptr() for one in lists for tensor in one]
    expect(in_place, "A weight or a rest is a new tensor: write into the memory that it has.")
    expect(seen.end == 0, "Something is left after the step. Keep only weights and rests.")
    one_by_one = "Several masters exist at once. Make one, use it, store it, and only then begin the next."
    expect(seen.peak < sum(4 * weight.numel() for weight in weights) / 2, one_by_one)


def _expect_halves(weight: torch.Tensor, rest: torch.Tensor, master: torch.Tensor, old: torch.Tensor) -> None:
    """Raise CheckFailed unless weight and rest hold the bits of their master; `old` was the rest before.

    A weight may be cut off, with a rest that has no sign, or rounded, with a rest that may be negative.
    """
    upper = weight.detach().view(torch.int16).int() << 16
    bits = master.view(torch.int32)
    wrong = (bits != upper + (rest.int() & 0xFFFF)) & (bits != upper + rest.int())
    expect((old[wrong] < 0).all(), NO_HALVES)
    expect(not wrong.any() or torch.equal(upper[~wrong], bits[~wrong] & ~0xFFFF), ROUNDED_UP)
    expect(not wrong.any(), NEGATIVE_REST)


# --------------------------------------------------------------------------------------------------
# 03.4: good_step
SCALE = 2.0**12
RATE = 0.5
SLOPES = torch.arange(1.0, 5.0)
ONE_INFINITE = "You step although one gradient is infinite: check every number of every weight."
# true gradients, and what is said if the masters are off; in the plain step, `_plain_mistake` finds it
SITUATIONS = (
    (0.03 * SLOPES, ""),
    (2.0**-27 * SLOPES, "Tiny gradients get lost in fp16: upcast before you divide by the scale."),
    (1.5 * SLOPES, "Large gradients are not clipped to a norm of 1, all of them together."),
    (100 * SLOPES, "The optimizer steps with infinite gradients: check first. Zeros are gradients, too."),
    (torch.tensor([300, 0.06, 0.09, 0.12]), ONE_INFINITE),
    (torch.tensor([0.03, 0.06, 0.09, 1200]), ONE_INFINITE),
    (
        torch.tensor([0.03, 0.06, math.nan, 0.12]),
        "You step although a gradient is NaN, which is not finite either.",
    ),
)
STEPS = "The check takes seven steps. The first one loads torch's optimizers, which can take ten seconds."


@exercise(
    "03.4",
    "Small gradients survive, large ones are clipped, infinite ones change nothing, nothing is left over.",
    first=STEPS,
)
def good_step(answer: Any) -> None:
    """`answer(weights, masters, optimizer, loss, scale)` takes one step in fp16, or none, and says which."""
    for gradients, message in SITUATIONS:
        _expect_step(answer, gradients, message)


def _expect_step(answer: Any, gradients: torch.Tensor, message: str) -> None:
    """Take one step of two fp16 weights of two numbers, all 0 at first, with these true gradients."""
    weights = [nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2)]
    masters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(masters, lr=RATE)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    loss = (torch.cat([*weights]).float() * gradients).sum()
    asked = partial(call, answer, returns=bool, may_change=("weights", "masters"), hints=WATCHED)
    taken = asked(weights=weights, masters=masters, optimizer=optimizer, loss=loss, scale=SCALE)

    moved, copied = (torch.cat([*tensors]).detach() for tensors in (masters, weights))
    finite = bool((gradients * SCALE).half().isfinite().all())
    wanted = -RATE * gradients / gradients.norm().clamp(min=1) if finite else torch.zeros(4)
    right = torch.allclose(moved, wanted, rtol=1e-3, atol=0) and len(steps) == finite
    expect(right, message or _plain_mistake(moved, wanted))
    expect(taken == finite, f"Your function says that it took {'a' if taken else 'no'} step. Did it?")
    updated = copied.dtype == torch.float16 and same([copied], [moved], 1e-3)
    expect(updated, "The fp16 weights do not get the masters' numbers. The next forward reads the weights.")
    left = "Gradients are left behind, of weights or of masters. How many bytes does a zero take?"
    expect(all(one.grad is None for one in (*weights, *masters)), left)


def _plain_mistake(moved: torch.Tensor, wanted: torch.Tensor) -> str:
    if not moved.any():
        return "The masters do not move: who calls `optimizer.step()`?"
    if moved.norm() > wanted.norm():
        return (
            "The masters move too far: are gradients still scaled when the optimizer, or clipping, sees them?"
        )
    return "The masters move too little: is the loss multiplied by the scale? Do you divide before you clip?"
