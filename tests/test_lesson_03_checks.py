"""The checks of lesson 03: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import Check, passes, said
from torch.nn.utils import clip_grad_norm_

from course_utils import TrainingRun
from course_utils.checks import lesson_03
from course_utils.checks.lesson_03_labs import CHOICE_MISTAKES, allowed, best_choice, right_step

ALL = (
    lesson_03.limits,
    lesson_03.read_bits,
    lesson_03.round_at_random,
    lesson_03.next_scale,
    lesson_03.good_step,
    lesson_03.choose_precision,
)


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_answers_that_are_no_functions_get_a_hint(check: Check) -> None:
    assert "without parentheses" in said(check, 3)
    assert "does every path end in `return`?" in said(check, lambda *_, **__: None)


# ------------------------------------------------------------------------------------------------------- 03.1: limits


def right_limits(e: int, m: int) -> tuple[float, float, float]:
    bias = 2 ** (e - 1) - 1
    return 2.0**-m, (2 - 2.0**-m) * 2.0**bias, 2.0 ** (1 - bias)


def limits_by_sums(e: int, m: int) -> list[float]:
    mantissa = sum(2.0**-k for k in range(m + 1))
    return [math.ldexp(1, -m), mantissa * 2.0 ** (2**e - 2 - (2 ** (e - 1) - 1)), math.ldexp(1, 2 - 2 ** (e - 1))]


@pytest.mark.parametrize("answer", [right_limits, limits_by_sums])
def test_limits_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_03.limits, answer, capsys, "03.1")


def with_changes(epsilon: float = 1, largest: float = 1, smallest: float = 1) -> Any:
    """The right answer, each of its numbers multiplied."""

    def answer(e: int, m: int) -> tuple[float, ...]:
        factors = (epsilon, largest, smallest)
        return tuple(value * factor for value, factor in zip(right_limits(e, m), factors, strict=True))

    return answer


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (with_changes(epsilon=0.5), "Half of epsilon"),
        (with_changes(epsilon=2), "Twice epsilon"),
        (with_changes(epsilon=3), "Epsilon is off"),
        (with_changes(largest=2), "set aside for infinity"),
        (with_changes(largest=0.5), "the largest exponent that is left"),
        (with_changes(smallest=0.5), "E = 0, which is for subnormal"),
        (with_changes(smallest=4), "The smallest normal number is off"),
        (lambda e, m: (2.0**-m, 2.0 ** (2 ** (e - 1)), right_limits(e, m)[2]), "*beyond* the largest"),
        (lambda e, m: (2.0**-m, 2.0 ** (2 ** (e - 1) - 1), right_limits(e, m)[2]), "a mantissa of zeros"),
        (lambda e, m: (2.0**-m, 65504.0, 2.0**-14), "The largest number is off"),
        (lambda e, m: (2.0**-m, right_limits(e, m)[1], right_limits(e, m)[2] * 2.0**-m), "smallest *subnormal*"),
        (lambda e, m: (2.0**-m, right_limits(e, m)[1]), "2 numbers, where three"),
        (lambda e, m: 2.0**-m, "where a tuple or a list is asked for"),
        (lambda e, m: ("a", 1.0, 1.0), "One of your three is a text"),
    ],
)
def test_limits_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_03.limits, answer)


# ---------------------------------------------------------------------------------------------------- 03.2: read_bits


def reader(
    bias_shift: int = 0, hidden: float = 1.0, subnormal_shift: int = 1, subnormal_hidden: float = 0.0,
    signed: bool = True, special: bool = True, scale: float = 1.0,
) -> Callable[[str, int], float]:  # fmt: skip
    """A reader of bits, right by default, with one thing or another changed."""

    def read(bits: str, e: int) -> float:
        m, bias = len(bits) - 1 - e, 2 ** (e - 1) - 1 + bias_shift
        sign = -1.0 if signed and bits[0] == "1" else 1.0
        exponent, mantissa = int(bits[1 : 1 + e], 2), int(bits[1 + e :], 2)
        if special and exponent == 2**e - 1:
            return math.nan if mantissa else sign * math.inf
        if exponent == 0:
            return sign * 2.0 ** (subnormal_shift - bias) * (subnormal_hidden + mantissa / 2**m)
        return scale * sign * 2.0 ** (exponent - bias) * (hidden + mantissa / 2**m)

    return read


def reader_of_digits(bits: str, e: int) -> Any:
    digits = [int(bit) for bit in bits]
    exponent = sum(bit << place for place, bit in enumerate(reversed(digits[1 : 1 + e])))
    mantissa = sum(bit / 2**place for place, bit in enumerate(digits[1 + e :], 1))
    value: Any = torch.tensor(mantissa, dtype=torch.float64)
    if exponent == 2**e - 1:
        value = math.inf if mantissa == 0 else math.nan
    else:
        value = ((exponent > 0) + mantissa) * 2.0 ** (max(exponent, 1) - 2 ** (e - 1) + 1)
    return -value if digits[0] else value


@pytest.mark.parametrize("answer", [reader(), reader_of_digits, lambda bits, e: torch.tensor(reader()(bits, e))])
def test_read_bits_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_03.read_bits, answer, capsys, "03.2")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (reader(signed=False), "The sign of"),
        (reader(hidden=0.0), "a normal number has a hidden 1"),
        (reader(bias_shift=1), "off by a power of two"),
        (reader(scale=3.0), "Cut the text into 1, e and m bits"),
        (reader(subnormal_shift=0), "half of it. Subnormal numbers share the exponent"),
        (reader(subnormal_shift=0, subnormal_hidden=1.0), "there is no hidden 1 in front"),
        (reader(subnormal_shift=3), "is subnormal, and your value is off"),
        (reader(special=False), "it is no number any more"),
        (lambda bits, e: bits, "returned a text"),
        (lambda bits, e: True, "returned True or False"),
        (lambda bits: 1.0, "should take (bits, e)"),
    ],
)
def test_read_bits_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_03.read_bits, answer)


# ---------------------------------------------------------------------------------------------- 03.3: round_at_random


def by_floor(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return torch.floor(values / step + u) * step


def by_coin(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    below = torch.floor(values / step)
    return step * torch.where(u < values / step - below, below + 1, below)


def by_ceiling(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return step * torch.ceil(values / step - u)


def moves_multiples(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return torch.where(values == torch.round(values / step) * step, values + step, by_floor(values, step, u))


@pytest.mark.parametrize("answer", [by_floor, by_coin, by_ceiling])
def test_round_at_random_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_03.round_at_random, answer, capsys, "03.3")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda values, step, u: torch.round(values / step) * step, "All results are the same"),
        (lambda values, step, u: torch.floor(values / step + u), "Your results count steps"),
        (lambda values, step, u: values + (u - 0.5) * step, "Not all of your results are multiples"),
        (lambda values, step, u: torch.round(values / step + u) * step, "On average your results are off"),
        (lambda values, step, u: torch.floor(values / step + 2 * u) * step, "neither the multiple below nor"),
        (lambda values, step, u: (torch.floor(values / step) + (u < 0.5)) * step, "like a fair coin"),
        (lambda values, step, u: step * (torch.floor(values / step) + (u > values / step % 1)), "Turned round"),
        (moves_multiples, "a multiple already"),
        (lambda values, step, u: torch.floor(values / step + u)[:5] * step, "has the shape"),
        (lambda values, step, u: torch.floor(values / step + u * 0.8 + 0.1) * step, "On average your results are off"),
        (lambda values, step, u: 0.0, "where a Tensor is asked for"),
    ],
)
def test_round_at_random_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_03.round_at_random, answer)


# --------------------------------------------------------------------------------------------------- 03.4: next_scale


def right_scale(scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
    if overflowed:
        return scale / 2, 0
    return (scale * 2, 0) if streak + 1 == interval else (scale, streak + 1)


def scale_by_arithmetic(scale: float, streak: int, overflowed: bool, interval: int) -> list[float]:
    streak = (streak + 1) * (not overflowed)
    full = streak >= interval
    return [scale * (0.5 if overflowed else 2.0 if full else 1.0), 0 if full else streak]


@pytest.mark.parametrize("answer", [right_scale, scale_by_arithmetic])
def test_next_scale_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_03.next_scale, answer, capsys, "03.4")


def scaler(up: float = 2, down: float = 0.5, late: int = 0, keep: bool = False, forget: bool = True) -> Any:
    def answer(scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
        if overflowed:
            return scale * down, streak if keep else 0
        if streak + 1 >= interval + late:
            return scale * up, 0 if forget else streak + 1
        return scale, streak + 1

    return answer


def growth_first(scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
    if streak + 1 == interval:
        return scale * 2, 0
    return (scale / 2, 0) if overflowed else (scale, streak + 1)


def forgets_long_streaks(scale: float, streak: int, overflowed: bool, interval: int) -> tuple[float, int]:
    new, count = right_scale(scale, streak, overflowed, interval)
    return new, min(count, 1)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (scaler(down=2), "You double it"),
        (scaler(down=0.25), "half of what it was"),
        (scaler(keep=True), "counted from the beginning"),
        (scaler(late=1), "One step too late"),
        (scaler(late=-1), "One step too early"),
        (scaler(up=4), "the scale doubles"),
        (scaler(forget=False), "yours would double at every step"),
        (growth_first, "an overflow all the same"),
        (
            lambda scale, streak, overflowed, interval: (scale * (0.5 if overflowed else 2), 0),
            "A good step changes the",
        ),
        (lambda scale, streak, overflowed, interval: (scale / (1 + overflowed), 0), "makes the streak longer by one"),
        (forgets_long_streaks, "over 60 steps your scale parts from GradScaler's"),
        (lambda scale, streak, overflowed, interval: (scale,), "1 values, where two"),
        (lambda scale, streak, overflowed, interval: scale, "where a tuple or a list is asked for"),
    ],
)
def test_next_scale_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_03.next_scale, answer)


# ---------------------------------------------------------------------------------------------------- 03.5: good_step


def step_with(
    scaled: bool = True, upcast_first: bool = True, unscale: str = "before", clip: str = "all", look: bool = True,
    copy: str = "right", clear_weights: bool = True, clear_masters: bool = True, says: str = "right", step: bool = True,
) -> Any:  # fmt: skip
    """A training step, right by default, with one mistake or another."""

    def answer(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> Any:
        (loss * scale if scaled else loss).backward()
        for weight, master in zip(weights, masters, strict=True):
            factor = scale if unscale == "before" else 1.0
            master.grad = weight.grad.float() / factor if upcast_first else (weight.grad / factor).float()
            weight.grad = None if clear_weights else weight.grad
        finite = all(bool(master.grad.isfinite().all()) for master in masters)
        if clip == "all":
            clip_grad_norm_(masters, 1.0)
        elif clip == "each":
            for master in masters:
                clip_grad_norm_([master], 1.0)
        if unscale == "after":
            for master in masters:
                master.grad /= scale
        if (finite or not look) and step:
            optimizer.step()
        if copy != "none" and (finite or copy == "always infinite"):
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master if copy == "right" or finite else torch.full_like(master, math.inf))
                    weight.mul_(2 if copy == "doubled" else 1)
        for master in masters if clear_masters else ():
            master.grad = None
        return {"right": finite, "always": True, "never": False}[says]

    return answer


def tidy_step(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    """Another style: grads by torch.autograd.grad, the norm by hand."""
    found = torch.autograd.grad(loss * scale, weights)
    gradients = [gradient.float() / scale for gradient in found]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    if not norm.isfinite():
        return False
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient / max(1.0, norm.item())
    optimizer.step()
    optimizer.zero_grad()
    for weight, master in zip(weights, masters, strict=True):
        weight.data = master.detach().half()
    return True


@pytest.mark.parametrize("answer", [right_step, step_with(), tidy_step])
def test_good_step_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_03.good_step, answer, capsys, "03.5")


def buggy_step(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    """As the exercise shows it."""
    (loss * scale).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad = (weight.grad / scale).float()
    clip_grad_norm_(masters, 1.0)
    optimizer.step()
    for weight in weights:
        weight.grad = None
    return True


def second_step_fails() -> Any:
    calls = [0]

    def answer(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
        calls[0] += 1
        return right_step(weights, masters, optimizer, loss * (2 if calls[0] == 6 else 1), scale)

    return answer


def copies_with_autograd(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)
    return True


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (buggy_step, "Tiny gradients get lost"),
        (step_with(step=False), "who calls `optimizer.step()`"),
        (step_with(unscale="never", clip="none"), "still scaled when the optimizer"),
        (step_with(unscale="never"), "still scaled when the optimizer"),
        (step_with(scaled=False), "were they ever multiplied"),
        (step_with(unscale="after"), "were they ever multiplied"),
        (step_with(upcast_first=False), "Tiny gradients get lost"),
        (step_with(clip="none"), "Large gradients are not clipped"),
        (step_with(clip="each"), "Large gradients are not clipped"),
        (step_with(look=False), "A step with infinite gradients changes the masters"),
        (step_with(copy="always infinite"), "the fp16 weights do not."),
        (step_with(says="always"), "says that it took a step in which"),
        (step_with(says="never"), "says that a good step was not taken"),
        (step_with(copy="none"), "the fp16 weights do not: the next forward"),
        (step_with(copy="doubled"), "not what the masters round to"),
        (step_with(clear_weights=False), "The weights' gradients are left behind"),
        (step_with(clear_masters=False), "The masters' gradients are left behind"),
        (second_step_fails(), "The first step is right, the second is not"),
        (copies_with_autograd, "put it under torch.no_grad()"),
        (lambda weights, masters, optimizer, loss, scale: "yes", "where True or False is asked for"),
    ],
)
def test_good_step_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_03.good_step, answer)


# --------------------------------------------------------------------------------------------- 03.6: choose_precision


def test_choose_precision_takes_the_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_03.choose_precision, best_choice, capsys, "03.6")


@pytest.mark.parametrize("message", CHOICE_MISTAKES, ids=lambda message: message[:30])
def test_choose_precision_recognizes_wrong_ideas(message: str) -> None:
    choice = CHOICE_MISTAKES[message]
    assert said(lesson_03.choose_precision, choice) == message


def never_fits(card: str, run: TrainingRun) -> str:
    return ""


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda card, run: "bf16", "V100-32GB has no bf16: you choose 'bf16'"),
        (lambda card, run: allowed(card)[0][0], "does not fit"),
        (lambda card, run: "fp32", "not among the precisions"),
        (never_fits, "there is a better choice than ''"),
        (lambda card, run: None, "does every path end in `return`?"),
    ],
)
def test_choose_precision_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_03.choose_precision, answer)
