"""Checks of the exercises of lesson 07, "Gradient accumulation": each names the misconception, never the answer."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import nextafter, sqrt
from numbers import Real
from typing import Any

import torch

from course_utils.interactive.feedback import (
    alike,
    by_name,
    call,
    call_for_effect,
    call_or_none,
    exercise,
    expect,
    fail,
    of_kind,
)
from course_utils.run import TrainingRun

from .labs import (
    LOOP_CASES,
    LOOP_MISTAKES,
    NOISE_CASES,
    PLAN_CASES,
    PLAN_MISTAKES,
    RAMP_CASES,
    RATE_CASES,
    Scales,
    common_loop,
    factors_right,
    lengths,
    padded_parts,
    pass_right,
    plan_right,
    ramp_right,
    rate_right,
    scale_right,
    walked,
)

__all__ = ["common_loop", "factors", "noise_scale", "one_pass", "padded_parts", "plan", "ramp", "rate", "trial"]


# ------------------------------------------------------------------------------------------------------- 07.1: one pass


def trial(one_pass: Any, count: int, k: int) -> float:
    """How far two passes with `one_pass` end from where the large batches end, in parts of their way."""
    start, _ = walked(lambda *_: None, count, k)
    right, _ = walked(pass_right, count, k)
    got, _ = walked(one_pass, count, k)
    return ((got - right).norm() / (right - start).norm()).item()


@exercise("07.1", "Divided, no group left over, and one graph at a time.")
def one_pass(answer: Any) -> None:
    """`answer(model, optimizer, parts, k)` steps once for every group of k micro-batches, the last one included."""
    got = [walked(partial(call_for_effect, answer), count, k) for count, k in LOOP_CASES]
    tables = [table for table, _ in got]
    if not _same(tables, pass_right):
        for message, loops in LOOP_MISTAKES.items():
            expect(not any(_same(tables, loop) for loop in loops), message)
        fail("The parameters end elsewhere than with large batches. Go through 3 micro-batches with k = 2 by hand.")
    for _, events in got:
        expect(
            not any(pair == ("forward", "forward") for pair in pairwise(events)),
            "The numbers are right, the memory is not: several micro-batches go forward before one goes backward, and "
            "all their graphs are kept. When can each be let go?",
        )


def _same(tables: Sequence[torch.Tensor], loop: Any) -> bool:
    others = (walked(loop, count, k)[0] for count, k in LOOP_CASES)
    return all(torch.allclose(one, other, atol=1e-10) for one, other in zip(tables, others, strict=True))


# -------------------------------------------------------------------------------------------------------- 07.2: factors

COUNTS = ((16, 128), (100, 100, 100), (5, 10, 25, 60), (7,), (1, 999))

FACTOR_MISTAKES: tuple[tuple[str, Callable[[Sequence[int]], list[float]]], ...] = (
    ("That is 1/k for each: a mean of means, whatever their lengths.", lambda c: [1 / len(c)] * len(c)),
    ("Those are the tokens themselves. What do the weights of a mean add up to?", lambda c: [float(n) for n in c]),
    ("Compared with the longest. The weights of a mean add up to 1.", lambda c: [n / max(c) for n in c]),
    (
        "You divide by the mean number of tokens: k times too much. The weights of a mean add up to 1.",
        lambda c: [n * len(c) / sum(c) for n in c],
    ),
    (
        "You give a shorter micro-batch more weight: each token of it already has more say in its own mean.",
        lambda c: [(1 / n) / sum(1 / m for m in c) for n in c],
    ),
    ("All weights are 1: then the means are added up.", lambda c: [1.0] * len(c)),
    ("Divided by k once too often: shares of tokens are weights already.", lambda c: [n / sum(c) / len(c) for n in c]),
)


@exercise("07.2", "A token is a token, whichever micro-batch it is in.")
def factors(answer: Any) -> None:
    """`answer(counts)` lists by what each micro-batch's mean loss is multiplied before its backward."""
    got = [_numbers(call(answer, counts=list(counts), returns=(list, tuple)), len(counts)) for counts in COUNTS]

    def gives(reference: Callable[[Sequence[int]], list[float]]) -> bool:
        return all(alike(mine, reference(counts)) for mine, counts in zip(got, COUNTS, strict=True))

    if gives(factors_right):
        return
    for message, mistaken in FACTOR_MISTAKES:
        expect(not gives(mistaken), message)
    fail("Some weights are off. Write the mean over all tokens as a sum of means, each times something.")


def _numbers(values: Sequence[Any], count: int) -> list[float]:
    expect(len(values) == count, f"One number for each micro-batch: {count}, not {len(values)}.")
    return [float(of_kind(value, Real, "In your list there is")) for value in values]


# ----------------------------------------------------------------------------------------------------------- 07.3: plan


@exercise("07.3", "As few micro-batches as the card allows, gradients included.")
def plan(answer: Any) -> None:
    """`answer(run, card, tokens)` is (micro-batch, accumulation steps), the fewest steps that fit, or None."""
    got = [_planned(answer, *case) for case in PLAN_CASES]
    right = [plan_right(*case) for case in PLAN_CASES]
    if got == right:
        return
    for message, mistaken in PLAN_MISTAKES.items():
        expect(got != [mistaken(*case) for case in PLAN_CASES], message)
    for found, wanted, (run, card, tokens) in zip(got, right, PLAN_CASES, strict=True):
        where = f"{run.model.name} on the {card} with {tokens:,} tokens a step"
        expect((found is None) == (wanted is None), _fits(where, wanted is not None))
        if found is not None:
            made = found[0] * found[1] * run.seq_len
            expect(made == tokens, f"{where}: yours come to {made:,} tokens a step.")
    fail("Some plan does not fit, or another needs fewer micro-batches. Try every number that divides the batch.")


def _planned(answer: Any, run: TrainingRun, card: str, tokens: int) -> tuple[int, int] | None:
    found = call_or_none(answer, run=run, card=card, tokens=tokens, returns=tuple)
    if found is None:
        return None
    expect(len(found) == 2, "Return a pair: sequences in a micro-batch, and how many.")
    first, second = (of_kind(value, int, "In your pair there is") for value in found)
    return first, second


def _fits(where: str, something: bool) -> str:
    if something:
        return f"{where}: you find nothing, but something fits."
    return f"{where}: nothing fits, not even one sequence at a time. Return None there."


# ---------------------------------------------------------------------------------------------------- 07.4: noise scale

NOISE_MISTAKES: tuple[tuple[str, Callable[[int, int, float, float], float]], ...] = (
    ("Turned round: that is signal over noise.", lambda b, B, p, q: 1 / scale_right(b, B, p, q)),
    ("That is the ratio of the two lengths. In each of them are signal *and* noise.", lambda b, B, p, q: p / q),
    ("That is tr(Σ), the noise of one sequence. Compared with what?", lambda b, B, p, q: (p - q) / (1 / b - 1 / B)),
    ("That is |G|². How does the noise compare with it?", lambda b, B, p, q: (B * q - b * p) / (B - b)),
    (
        "You take the big batch's length for |G|²: it still has a little noise in it.",
        lambda b, B, p, q: (p - q) / (1 / b - 1 / B) / q,
    ),
    (
        "You take all that the small batch has more for b times its noise: the big one has some of it, too.",
        lambda b, B, p, q: b * (p - q) / ((B * q - b * p) / (B - b)),
    ),
    (
        "The lengths are squared already.",
        lambda b, B, p, q: (p * p - q * q) / (1 / b - 1 / B) / ((B * q * q - b * p * p) / (B - b)),
    ),
    (
        "You took roots first. The two equations hold for squared lengths.",
        lambda b, B, p, q: (sqrt(p) - sqrt(q)) / (1 / b - 1 / B) / ((B * sqrt(q) - b * sqrt(p)) / (B - b)),
    ),
)


@exercise("07.4", "Two batch sizes, two equations, and the noise scale for nothing.")
def noise_scale(answer: Any) -> None:
    """`answer(small, big, short, long)` is tr(Σ)/|G|², from the mean |gradient|² of two batch sizes."""
    cases = [(small, big, *lengths(small, big, *truth)) for small, big, *truth in NOISE_CASES]
    names = ("small", "big", "length_small", "length_big")
    got = [call(answer, **by_name(names, case)) for case in cases]
    if alike(got, (scale_right(*case) for case in cases)):
        return
    for message, mistaken in NOISE_MISTAKES:
        expect(not alike(got, (mistaken(*case) for case in cases)), message)
    fail("The scale is off. Write |G|² + tr(Σ)/B for both batches, and solve for the two unknowns.")


# ----------------------------------------------------------------------------------------------------------- 07.5: ramp


def _once_only(first: int, scales: Scales) -> list[tuple[int, int]]:
    planned, batch = [(0, first)], first
    for seen, scale in scales:
        if 2 * batch <= scale:
            batch *= 2
            planned.append((seen, batch))
    return planned


def _strictly(first: int, scales: Scales) -> list[tuple[int, int]]:
    return ramp_right(first, [(seen, nextafter(scale, 0)) for seen, scale in scales])


def _up_and_down(first: int, scales: Scales) -> list[tuple[int, int]]:
    planned = [(0, first)]
    for seen, scale in scales:
        batch = first
        while 2 * batch <= scale:
            batch *= 2
        if batch != planned[-1][1]:
            planned.append((seen, batch))
    return planned


def _exact(first: int, scales: Scales) -> list[tuple[int, int]]:
    planned = [(0, first)]
    for seen, scale in scales:
        if scale > planned[-1][1]:
            planned.append((seen, int(scale)))
    return planned


def _beyond(first: int, scales: Scales) -> list[tuple[int, int]]:
    planned, batch = [(0, first)], first
    for seen, scale in scales:
        before = batch
        while batch < scale:
            batch *= 2
        if batch != before:
            planned.append((seen, batch))
    return planned


def _each_doubling(first: int, scales: Scales) -> list[tuple[int, int]]:
    planned, batch = [(0, first)], first
    for seen, scale in scales:
        while 2 * batch <= scale:
            batch *= 2
            planned.append((seen, batch))
    return planned


def _from_the_first(first: int, scales: Scales) -> list[tuple[int, int]]:
    begin = scales[0][0] if scales else 0
    return [(begin, first), *ramp_right(first, scales)[1:]]


def _every_line(first: int, scales: Scales) -> list[tuple[int, int]]:
    planned = [(0, first)]
    for index in range(len(scales)):
        planned.append((scales[index][0], ramp_right(first, scales[: index + 1])[-1][1]))
    return planned


RAMP_MISTAKES: tuple[tuple[str, Callable[[int, Scales], list[tuple[int, int]]]], ...] = (
    ("You double once at most. The scale may have grown fourfold since the last look.", _once_only),
    ("Where twice the batch is exactly the noise scale, it is still worth it.", _strictly),
    ("Your batch shrinks where a noisy measurement is low. It should never shrink.", _up_and_down),
    ("You take the scale itself for the batch. It should grow by doubling.", _exact),
    ("You double beyond the noise scale: twice the batch has to be within it *before* you double.", _beyond),
    ("You list every measurement. Only changes were asked for.", _every_line),
    ("You add a pair for each doubling. A measurement at which the batch changes makes one pair.", _each_doubling),
    ("The beginning is missing: (0, first).", lambda first, scales: ramp_right(first, scales)[1:]),
    ("Your ramp begins at the first measurement. It begins before any token is seen.", _from_the_first),
)


@exercise("07.5", "The batch doubles when it is worth it, and never before.")
def ramp(answer: Any) -> None:
    """`answer(first, scales)` lists (tokens seen, batch) for the beginning and for each change."""
    got = [
        _pairs(call(answer, first=first, scales=list(scales), returns=(list, tuple))) for first, scales in RAMP_CASES
    ]
    if got == [ramp_right(*case) for case in RAMP_CASES]:
        return
    for message, mistaken in RAMP_MISTAKES:
        expect(got != [mistaken(*case) for case in RAMP_CASES], message)
    fail("Some ramp is off. At each measurement: how often can you double before the batch exceeds the scale?")


def _pairs(found: Sequence[Any]) -> list[tuple[float, ...]]:
    expect(
        all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in found),
        "Return a list of pairs: tokens seen, and the batch from then on.",
    )
    return [tuple(of_kind(value, Real, "In one of your pairs there is") for value in pair) for pair in found]


# ----------------------------------------------------------------------------------------------------------- 07.6: rate

RateOf = Callable[[int, int, float, int, str], float]


def _from_zero(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    peak = rate_right(warm, warm, rate, k, optimizer)
    return peak * min(1, step / warm)


def _without_warm_up(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    return rate_right(warm, warm, rate, k, optimizer)


def _for_ever(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    peak = rate_right(warm, warm, rate, k, optimizer)
    return rate + (peak - rate) * step / warm


def _back(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    return rate_right(step, warm, rate, k, optimizer) if step < warm else rate


RATE_MISTAKES: tuple[tuple[str, RateOf], ...] = (
    ("You scale by k for Adam, too. For adaptive optimizers the rule is another one.",
     lambda t, w, r, k, o: rate_right(t, w, r, k, "sgd")),
    ("You scale by √k for SGD, too. There the rule is linear.", lambda t, w, r, k, o: rate_right(t, w, r, k, "adam")),
    ("The two rules are exchanged.", lambda t, w, r, k, o: rate_right(t, w, r, k, "adam" if o == "sgd" else "sgd")),
    ("You start from zero. Here the warm-up starts from the small batch's rate.", _from_zero),
    ("There is no warm-up: your rate is at its peak from the first step.", _without_warm_up),
    ("Your rate grows on when the warm-up is over.", _for_ever),
    ("After the warm-up your rate falls back to the small batch's.", _back),
    ("Your rate never changes: k plays no part.", lambda t, w, r, k, o: r),
)  # fmt: skip


@exercise("07.6", "Linear or √k, and gently at first.")
def rate(answer: Any) -> None:
    """`answer(step, warm, rate, k, optimizer)` is the learning rate of a step for a batch k times as large."""
    names = ("step", "warm", "rate", "k", "optimizer")
    got = [call(answer, **by_name(names, case)) for case in RATE_CASES]
    if alike(got, (rate_right(*case) for case in RATE_CASES)):
        return
    for message, mistaken in RATE_MISTAKES:
        expect(not alike(got, (mistaken(*case) for case in RATE_CASES)), message)
    larger = any(mine > 1.001 * case[2] for mine, case in zip(got, RATE_CASES, strict=True))
    expect(larger, "A larger batch asks for a larger rate, not a smaller one.")
    fail("Some rate is off: what is it at step 0, what from step `warm` on, and what halfway between?")
