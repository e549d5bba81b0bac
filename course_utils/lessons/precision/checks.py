"""Checks of the exercises of lesson 03, "Mixed precision": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Real
from typing import Any

import torch

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.interactive.feedback import CheckFailed, call, exercise, expect, fail, of_kind
from course_utils.run import TrainingRun

from .experiments import gradscaler_scales
from .labs import CHOICE_MISTAKES, CHOICES, STEP_MISTAKES, Outcome, allowed, best_choice, outcome_of, right_step
from .number_formats import NumberFormat, decode

__all__ = ["choose_precision", "good_step", "limits", "next_scale", "read_bits", "round_at_random"]

# ------------------------------------------------------------------------------------------------------- 03.1: limits

WIDTHS = ((5, 10), (8, 7), (8, 23), (5, 2), (3, 4), (6, 9))
"""Exponent and mantissa bits."""


@exercise("03.1", "Range from the exponent's bits, precision from the mantissa's: you need not remember any format.")
def limits(answer: Any) -> None:
    """`answer(e, m)` is epsilon, the largest finite and the smallest normal number of a format of e and m bits."""
    for e, m in WIDTHS:
        got = call(answer, e=e, m=m, returns=(tuple, list))
        expect(len(got) == 3, f"{len(got)} numbers, where three were asked for: epsilon, largest, smallest normal.")
        epsilon, largest, smallest = (of_kind(value, Real, "One of your three is") for value in got)
        form = NumberFormat("asked", e, m, 4)
        _expect_epsilon(epsilon, m)
        _expect_largest(largest, form)
        _expect_smallest(smallest, form)


def _expect_epsilon(got: float, m: int) -> None:
    expect(
        got != 2.0 ** -(m + 1), "Half of epsilon: that is the largest error of rounding near 1, not the next number."
    )
    expect(got != 2.0 ** -(m - 1), "Twice epsilon. How many different mantissas are there from 1 up to 2?")
    expect(got == 2.0**-m, "Epsilon is off. It depends on the mantissa's bits alone: change the last of them in 1.")


def _expect_largest(got: float, form: NumberFormat) -> None:
    bias, largest = form.bias, form.largest
    mistakes = [
        (
            2.0 ** (bias + 1),
            "That is the first power of two *beyond* the largest number: all mantissa bits are 1, not 2.",
        ),
        (2.0**bias, "That has the largest exponent, but a mantissa of zeros. What makes it larger?"),
        (2 * largest, "Twice too large: did you use the exponent that is set aside for infinity and NaN?"),
        (largest / 2, "Half of it: the largest exponent that is left is 2^e − 2. What is it less the bias?"),
    ]
    for wrong, message in mistakes:
        expect(got != wrong, message)
    expect(
        math.isclose(got, largest, rel_tol=1e-12), "The largest number is off: largest exponent, all mantissa bits 1."
    )


def _expect_smallest(got: float, form: NumberFormat) -> None:
    expect(got != form.smallest, "That is the smallest *subnormal* number. Normal ones have E = 1 at least.")
    expect(got != form.smallest_normal / 2, "That has E = 0, which is for subnormal numbers.")
    expect(got == form.smallest_normal, "The smallest normal number is off: E is 1, and the mantissa is 0.")


# ---------------------------------------------------------------------------------------------------- 03.2: read_bits

READ_FORMATS = (NumberFormat("fp16", 5, 10, 2), NumberFormat("bf16", 8, 7, 2), NumberFormat("small", 3, 2, 1))


@exercise("03.2", "Every pattern of three formats, subnormal, infinite and not a number.")
def read_bits(answer: Any) -> None:
    """`answer(bits, e)` is the number that the text of bits stands for, with e exponent bits."""
    small = READ_FORMATS[-1]
    patterns = [(small, pattern) for pattern in range(2**small.bits)]
    patterns += [(form, pattern) for form in READ_FORMATS[:2] for pattern in range(0, 2**form.bits, 331)]
    normal_first = sorted(patterns, key=lambda one: (_case(*one), one[0].bits, -one[0].fields(one[1])[2]))
    for form, pattern in normal_first:
        got, wanted = _read(answer, form, pattern), decode(form, pattern)
        if not _same(got, wanted):
            _name_the_misreading(got, form, pattern)


def _read(answer: Any, form: NumberFormat, pattern: int) -> float:
    """The learner's number; infinity and NaN are fine here."""
    return float(call(answer, bits=f"{pattern:0{form.bits}b}", e=form.exponent, finite=False))


def _case(form: NumberFormat, pattern: int) -> int:
    _, exponent, _ = form.fields(pattern)
    return 2 if exponent == 2**form.exponent - 1 else 1 if exponent == 0 else 0


def _same(got: float, wanted: float) -> bool:
    if math.isnan(wanted) or math.isnan(got):
        return math.isnan(wanted) and math.isnan(got)
    return got == wanted


def _name_the_misreading(got: float, form: NumberFormat, pattern: int) -> None:
    sign, exponent, mantissa = form.fields(pattern)
    wanted, case = decode(form, pattern), _case(form, pattern)
    shown = f"{sign} {exponent:0{form.exponent}b} {mantissa:0{form.mantissa}b}"
    expect(got != -wanted or wanted == 0, f"The sign of {shown} is turned round, or forgotten: 1 means minus.")
    if case == 2:
        fail(f"{shown}: all exponent bits are 1, so it is no number any more. Infinity with a mantissa of 0, else NaN.")
    if case == 1:
        whole = 2.0**-form.bias * (1 + mantissa / 2**form.mantissa)
        expect(
            abs(got) not in (whole, 2 * whole),
            f"{shown}: with all exponent bits 0 there is no hidden 1 in front of the mantissa.",
        )
        expect(
            abs(got) != abs(wanted) / 2,
            f"{shown}: half of it. Subnormal numbers share the exponent of the *smallest normal* ones.",
        )
        fail(f"{shown} is subnormal, and your value is off: what is its exponent, and is there a hidden 1?")
    without_one = 2.0 ** (exponent - form.bias) * mantissa / 2**form.mantissa
    expect(abs(got) != without_one, f"{shown}: a normal number has a hidden 1 in front of its mantissa.")
    ratio = got / wanted
    power = ratio > 0 and math.log2(ratio).is_integer()
    expect(not power, f"{shown} is off by a power of two: is the bias 2^(e−1) − 1?")
    part = (abs(ratio) * (2**form.mantissa + mantissa) - 2**form.mantissa) / mantissa if mantissa else 0
    expect(part <= 0 or not math.log2(part).is_integer(), f"{shown}: its mantissa is off. Is M divided by 2^m?")
    fail(f"{shown}: your value is off. Cut the text into 1, e and m bits, and read each of them as a binary number.")


# ---------------------------------------------------------------------------------------------- 03.3: round_at_random


@exercise("03.3", "Always one of the two neighbors, and right on average, below zero too.")
def round_at_random(answer: Any) -> None:
    """`answer(values, step, u)` rounds to multiples of step, up or down by u, without bias."""
    dice = torch.Generator().manual_seed(0)
    for value, step in ((0.3, 1.0), (1.001, 2.0**-7), (-0.7, 0.5), (0.9, 0.25)):
        values = torch.full((40_000,), value)
        u = torch.rand(values.shape, generator=dice)
        got = call(answer, values=values.clone(), step=step, u=u.clone(), returns=torch.Tensor)
        expect(got.shape == values.shape, f"Your result has the shape {tuple(got.shape)}; the values' was asked for.")
        _expect_multiples(got, value, step)
        _expect_no_bias(got, value, step)
        again = call(answer, values=values.clone(), step=step, u=u.clone(), returns=torch.Tensor)
        expect(torch.equal(got, again), "The same u, another result: u is all the randomness that you may use.")
    exact = call(answer, values=torch.tensor([2.0, -3.0, 0.0]), step=0.5, u=torch.tensor([0.0, 0.999, 0.5]),
                 returns=torch.Tensor)  # fmt: skip
    expect(exact.tolist() == [2.0, -3.0, 0.0], "A value that is a multiple already has to stay as it is.")


def _expect_multiples(got: torch.Tensor, value: float, step: float) -> None:
    units = got / step
    counted = step < 0.1 and bool(((got - value / step).abs() <= 1).all())
    expect(not counted, "Your results count steps. The multiples themselves were asked for: multiply at the end.")
    expect(
        bool((units - units.round()).abs().max() < 1e-4),
        "Not all of your results are multiples of `step`. Divide by it first, multiply by it last.",
    )
    below = math.floor(value / step) * step
    near = ((got - below).abs() < 1e-6) | ((got - below - step).abs() < 1e-6)
    expect(bool(near.all()), "Some results are neither the multiple below nor the one above.")


def _expect_no_bias(got: torch.Tensor, value: float, step: float) -> None:
    side = "below" if value < 0 else "above"
    fraction = value / step - math.floor(value / step)
    up = (got > value).float().mean().item()
    expect(0 < up < 1, f"All results are the same {side} zero: that is no stochastic rounding. Where does u come in?")
    expect(abs(up - 0.5) > 0.02 or abs(fraction - 0.5) < 0.05, "Up or down like a fair coin: that is right on average "
           "only half-way between the two. How often up, for a value close to the lower one?")  # fmt: skip
    turned = abs(up - (1 - fraction)) < 0.02 < abs(up - fraction)
    expect(not turned, "Turned round: the closer a value is to the multiple above, the more often it goes there.")
    expect(abs(up - fraction) < 0.02, f"On average your results are off {side} zero: up with what probability?")


# --------------------------------------------------------------------------------------------------- 03.4: next_scale

OVERFLOWS = tuple(step in (0, 7, 8, 21, 40, 44) for step in range(60))


@exercise("03.4", "Step by step the same scale as PyTorch's own GradScaler.")
def next_scale(answer: Any) -> None:
    """`answer(scale, streak, overflowed, interval)` is the scale and the streak after a step."""
    for interval in (3, 5):
        _expect_single_steps(answer, interval)
        scale, streak, found = 1024.0, 0, []
        for overflowed in OVERFLOWS:
            scale, streak = _next(answer, scale, streak, overflowed, interval)
            found.append(scale)
        expect(
            found == gradscaler_scales(OVERFLOWS, 1024.0, interval),
            "Single steps are right, but over 60 steps your scale parts from GradScaler's: look at the streak.",
        )


def _next(answer: Any, scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
    got = call(answer, scale=scale, streak=streak, overflowed=overflowed, interval=interval, returns=(tuple, list))
    expect(len(got) == 2, f"{len(got)} values, where two were asked for: the scale and the streak.")
    return of_kind(got[0], Real, "Your scale is"), of_kind(got[1], Real, "Your streak is")


def _expect_single_steps(answer: Any, interval: int) -> None:
    scale, streak = _next(answer, 1024.0, 1, True, interval)
    expect(scale != 2048, "An overflow means that the scale is too large. You double it.")
    expect(scale == 512, "After an overflow the scale is half of what it was, however long the streak is.")
    expect(streak == 0, "After an overflow the good steps have to be counted from the beginning.")
    scale, streak = _next(answer, 1024.0, 0, False, interval)
    expect(scale == 1024, "A good step changes the scale only where it completes the interval.")
    expect(streak == 1, "A good step makes the streak longer by one, and you were given the streak before it.")
    scale, streak = _next(answer, 1024.0, interval - 1, False, interval)
    expect(scale != 1024, "One step too late: with this good step the interval is complete.")
    expect(scale == 2048, "When the interval is complete the scale doubles.")
    expect(streak == 0, "The scale has doubled, so the streak begins anew; yours would double at every step.")
    scale, _ = _next(answer, 1024.0, interval - 2, False, interval)
    expect(scale == 1024, "One step too early: with this good step the interval is not complete yet.")
    scale, _ = _next(answer, 1024.0, interval - 1, True, interval)
    expect(scale == 512, "An overflow in the step that would have completed the interval is an overflow all the same.")


# ---------------------------------------------------------------------------------------------------- 03.5: good_step


@exercise(
    "03.5", "Small gradients survive, large ones are clipped, infinite ones change nothing, nothing is left over."
)
def good_step(answer: Any) -> None:
    """`answer(weights, masters, optimizer, loss, scale)` takes one step in fp16, or none, and says which."""
    taught = _outcome(answer)
    right = outcome_of(right_step)
    for message, differs in STEP_MISTAKES:
        expect(not differs(taught, right), message)


def _outcome(answer: Any) -> Outcome:
    def called(*arguments: Any) -> Any:
        names = ("weights", "masters", "optimizer", "loss", "scale")
        given = dict(zip(names, arguments, strict=True))
        return call(answer, **given, returns=bool, may_change=("weights", "masters"))

    try:
        return outcome_of(called)
    except CheckFailed as problem:
        if "leaf Variable that requires grad" in str(problem):
            raise CheckFailed(
                "You copy into a weight while autograd watches: put it under torch.no_grad()."
            ) from problem
        raise


# --------------------------------------------------------------------------------------------- 03.6: choose_precision


@exercise("03.6", "The best sums that each card can afford, from a T4 to an H100.")
def choose_precision(answer: Any) -> None:
    """`answer(card, run)` is the best precision in which the run fits the card, or ""."""
    got = [call(answer, card=card, run=run, returns=str) for card, run in CHOICES]
    for (card, run), name in zip(CHOICES, got, strict=True):
        known = [*(choice for rank in allowed(card) for choice in rank), ""]
        bf16 = "bf16" in name and not gpu(card).has_bf16
        expect(not bf16, f"{card} has no bf16: you choose {name!r} for it.")
        expect(name in known, f"{name!r} is not among the precisions to choose from for {card}.")
        expect(not name or _peak(card, run, name) <= gpu(card).memory, f"{name!r} does not fit {card} for {run}.")
    wanted = [_wanted(index) for index in range(len(CHOICES))]
    _recognize(got, wanted)
    for (card, run), name, right in zip(CHOICES, got, wanted, strict=True):
        expect(name == right, f"For {run} on {card} there is a better choice than {name!r} by the order of preference.")


def _peak(card: str, run: TrainingRun, name: str) -> int:
    attention = run.attention if gpu(card).has_bf16 else "efficient"
    return estimate(run.replace(precision=name, attention=attention)).total


@cache
def _wanted(index: int) -> str:
    return best_choice(*CHOICES[index])


def _recognize(got: Sequence[str], wanted: Sequence[str]) -> None:
    if list(got) == list(wanted):
        return
    choice: Callable[[str, TrainingRun], str]
    for message, choice in CHOICE_MISTAKES.items():
        expect(list(got) != [choice(card, run) for card, run in CHOICES], message)
