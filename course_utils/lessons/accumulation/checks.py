"""Checks of the exercises of lessons 07 and 07b: each names the misconception, never the answer."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import nextafter, sqrt
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from course_utils.interactive.feedback import (
    Mistakes,
    alike,
    by_name,
    call,
    call_for_effect,
    exercise,
    expect,
    fail,
    of_kind,
    recognized,
)

from .changes import CAUSES, changed
from .micro_batches import Loop, by_batches, dropped, grouped, undivided

# ------------------------------------------------------------------------------------------------------- 07.1: one pass

WORDS = 7
LOOP_CASES = ((10, 4), (8, 4), (3, 4), (5, 1))  # micro-batches in a pass, and how many make a group


class Bigrams(nn.Module):
    """A model with one table, in fp64, that notes when it goes forward and when backward reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, WORDS * WORDS, dtype=torch.float64).reshape(WORDS, WORDS))
        self.events: list[str] = []
        self.table.register_hook(lambda _: self.events.append("backward"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.events.append("forward")
        return self.table[tokens]


def walked(one_pass: Loop, count: int, k: int) -> tuple[torch.Tensor, list[str]]:
    """The table after two passes, as two epochs make, and what the model noted."""
    model = Bigrams()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    drawn = torch.randint(WORDS, (count, 2, 4), generator=torch.Generator().manual_seed(count))
    for _ in range(2):
        one_pass(model, optimizer, [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn], k)
    return model.table.detach(), model.events


def trial(one_pass: Any, count: int, k: int) -> float:
    """Distance between the ends of two passes with `one_pass` and with large batches, in parts of the latter's way."""
    start, right, got = (walked(loop, count, k)[0] for loop in (lambda *_: None, by_batches, one_pass))
    return ((got - right).norm() / (right - start).norm()).item()


ONE, ONE_KTH, ONE_GROUPTH = lambda *_: 1, lambda part, group, k, count: 1 / k, lambda part, group, *_: 1 / len(group)
LOOP_MISTAKES: dict[str, tuple[Loop, ...]] = {  # loops that a learner can write instead, by the hint that they get
    "Both bugs are still in: nobody divides, and nobody steps on the last group.":
        (grouped(ONE, last=False, clear="after step"), grouped(ONE, last=False)),
    "Losses are added up: with a group of k, the gradient is k times too long.": (undivided,),
    "The last, incomplete group gets no step of its own.": (dropped, grouped(ONE_KTH, last=False)),
    "You divide the last group by k, too. How many micro-batches does it have?": (grouped(ONE_KTH),),
    "You divide by all of them. The mean is over one group.": (grouped(lambda part, group, k, count: 1 / count),),
    "zero_grad within a group throws away what has been added up: only its last micro-batch is left.":
        tuple(grouped(weigh, clear="before each") for weigh in (ONE, ONE_KTH, ONE_GROUPTH)),
    "The gradients of the group before are still in `.grad`: who clears them?": (grouped(ONE_GROUPTH, clear="never"),),
    "You step on every micro-batch: those are small batches, and their path is another one.":
        tuple(grouped(weigh, size=lambda k, count: 1) for weigh in (ONE, ONE_KTH)),
    "You step once for the whole pass, not for every group.": (grouped(ONE_GROUPTH, size=lambda k, count: count),),
    "The parameters have not moved: who calls `optimizer.step()`?": (lambda *_: None,),
}  # fmt: skip


@exercise("07.1", "Divided, no group left over, and one graph at a time.")
def one_pass(answer: Any) -> None:
    """`answer(model, optimizer, parts, k)` steps once for every group of k micro-batches, the last one included."""
    got = [walked(partial(call_for_effect, answer), count, k) for count, k in LOOP_CASES]

    def same(loop: Loop) -> bool:
        tables = [walked(loop, count, k)[0] for count, k in LOOP_CASES]
        return all(torch.allclose(one, other, atol=1e-10) for (one, _), other in zip(got, tables, strict=True))

    if not same(by_batches):  # right where all micro-batches are equally large
        for message, loops in LOOP_MISTAKES.items():
            expect(not any(map(same, loops)), message)
        fail("The parameters end elsewhere than with large batches. Go through 3 micro-batches with k = 2 by hand.")
    in_turns = all(("forward", "forward") not in pairwise(events) for _, events in got)
    expect(in_turns, "The numbers are right, the memory is not: several go forward before one goes backward.")


# -------------------------------------------------------------------------------------------------------- 07.2: factors

COUNTS = ((16, 128), (100, 100, 100), (5, 10, 25, 60), (7,), (1, 999))
FACTOR_MISTAKES: Mistakes = {
    "That is 1/k for each: a mean of means, whatever their lengths.": lambda *c: [1 / len(c)] * len(c),
    "Those are the tokens themselves. What do the weights of a mean add up to?": lambda *c: c,
    "Compared with the longest. The weights of a mean add up to 1.": lambda *c: [n / max(c) for n in c],
    "You divide by the mean number of tokens: k times too much.": lambda *c: [n * len(c) / sum(c) for n in c],
    "You give a shorter micro-batch more weight: each token of it already has more say in its own mean.":
        lambda *c: [(1 / n) / sum(1 / m for m in c) for n in c],
    "All weights are 1: then the means are added up.": lambda *c: [1.0] * len(c),
    "Divided by k once too often: shares of tokens are weights already.": lambda *c: [n / sum(c) / len(c) for n in c],
}  # fmt: skip


@exercise("07.2", "A token is a token, whichever micro-batch it is in.")
def factors(answer: Any) -> None:
    """`answer(counts)` lists by what each micro-batch's mean loss is multiplied before its backward."""
    got = [_numbers(call(answer, counts=list(counts), returns=(list, tuple)), len(counts)) for counts in COUNTS]
    otherwise = "Some weights are off. Write the mean over all tokens as a sum of means, each times something."
    same = lambda got, wanted: all(map(alike, got, wanted))  # noqa: E731
    recognized(got, COUNTS, lambda *c: [n / sum(c) for n in c], FACTOR_MISTAKES, otherwise, same)


def _numbers(values: Sequence[Any], count: int) -> list[float]:
    expect(len(values) == count, f"One number for each micro-batch: {count}, not {len(values)}.")
    return [float(of_kind(value, Real, "In your list there is")) for value in values]


# ---------------------------------------------------------------------------------------------------------- 07.3: cause

CHANGES = tuple((name, {"k": k, "sequences": n}) for name in CAUSES for k, n in ((4, 8), (3, 12)))
CAUSE_MISTAKES: tuple[tuple[set[str], set[str], str], ...] = (  # causes, those that were named, the misconception
    ({"nothing"}, {*CAUSES}, "You name a cause where the peaks are equal, tensor by tensor."),
    ({"batch"}, {*CAUSES}, "Look at the shapes: have tensors come, or has each one grown?"),
    ({"logits"}, {*CAUSES}, "You miss what came in another format: which dtype does the model compute in?"),
    ({"validation"}, {*CAUSES}, "In which steps was it made? A step's own graph is gone when the next one begins."),
    ({*CAUSES}, {"validation", "logits"}, "You find logits or a validation everywhere. What is made in this step, in "
     "the model's own format, has come, too."),
)  # fmt: skip


@exercise("07.3", "Ten changes, and their authors know what they cost.")
def cause(answer: Any) -> None:
    """`answer(found)` is the name of what changed, by the difference of two measurements."""
    got = [call(answer, changed(name, **sizes), returns=str) for name, sizes in CHANGES]
    unknown = {*got} - {*CAUSES}
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of {', '.join(CAUSES)}.")
    expect(len(set(got)) > 1, "The same cause for every change: what do you look at?")
    wrong = [(name, mine) for (name, _), mine in zip(CHANGES, got, strict=True) if mine != name]
    for causes, named, message in CAUSE_MISTAKES if wrong else ():
        expect(not all(name in causes and mine in named for name, mine in wrong), message)
    for name, mine in wrong:
        first = changed(name).rows[0].change
        fail(f"A change whose largest row says {first!r} is not {mine!r}. What is the first row of each cause?")


# ---------------------------------------------------------------------------------------------------- 07.4: noise scale


class Noise(NamedTuple):
    """The squared length of the true gradient, `signal` = |G|², and of one sequence's noise, `noise` = tr(Σ)."""

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        return self.noise / self.signal

    def squared_length(self, batch: float) -> float:
        """E|G_B|², the mean squared length of a batch's gradient."""
        return self.signal + self.noise / batch


def from_two(small: int, big: int, small_length: float, big_length: float) -> Noise:
    """Both figures from mean |G_B|² of two batches, small and big (McCandlish et al. 2018, A.1)."""
    signal = (big * big_length - small * small_length) / (big - small)
    return Noise(signal, (small_length - big_length) / (1 / small - 1 / big))


NOISE_CASES = tuple(  # small batch, big batch, and the mean squared lengths of their gradients
    (small, big, truth.squared_length(small), truth.squared_length(big))
    for small, big, truth in (
        (4, 64, Noise(2.0, 96.0)), (1, 2, Noise(0.5, 3.0)), (8, 512, Noise(7.4, 1.5)), (16, 24, Noise(1.0, 1000.0))
    )
)  # fmt: skip
NOISE_MISTAKES: Mistakes = {
    "Turned round: that is signal over noise.": lambda *case: 1 / from_two(*case).scale,
    "That is the ratio of the two lengths. In each of them are signal *and* noise.": lambda b, B, p, q: p / q,
    "That is tr(Σ), the noise of one sequence. Compared with what?": lambda *case: from_two(*case).noise,
    "That is |G|². How does the noise compare with it?": lambda *case: from_two(*case).signal,
    "The big batch for |G|²? It still has a little noise.": lambda b, B, p, q: from_two(b, B, p, q).noise / q,
    "You take all that the small batch has more for b times its noise: the big one has some of it, too.":
        lambda b, B, p, q: b * (p - q) / from_two(b, B, p, q).signal,
    "The lengths are squared already.": lambda b, B, p, q: from_two(b, B, p * p, q * q).scale,
    "You took roots first.": lambda b, B, p, q: from_two(b, B, sqrt(p), sqrt(q)).scale,
}  # fmt: skip


@exercise("07.4", "Two batch sizes, two equations, and the noise scale for nothing.")
def noise_scale(answer: Any) -> None:
    """`answer(small, big, short, long)` is tr(Σ)/|G|², from the mean |gradient|² of two batch sizes."""
    got = [call(answer, **by_name(("small", "big", "length_small", "length_big"), case)) for case in NOISE_CASES]
    otherwise = "The scale is off. Write |G|² + tr(Σ)/B for both batches, and solve for the two unknowns."
    recognized(got, NOISE_CASES, lambda *case: from_two(*case).scale, NOISE_MISTAKES, otherwise)


# ----------------------------------------------------------------------------------------------------------- 07.5: ramp

Scales = Sequence[tuple[int, float]]
Ramp = list[tuple[int, int]]

RAMP_CASES: tuple[tuple[int, Scales], ...] = (
    (1000, ((10, 900.0), (20, 2100.0), (30, 3900.0), (40, 4000.0))), (512, ((5, 5000.0), (9, 5100.0))),
    (100, ((1, 250.0), (2, 90.0), (3, 420.0), (4, 150.0))), (64, ((7, 10.0), (8, 63.0))), (10, ()),
)  # fmt: skip


def _doubled(batch: int, scale: float) -> int:
    while 2 * batch <= scale:
        batch *= 2
    return batch


def _ramp(first: int, scales: Scales, grown: Callable[[int, float], int] = _doubled, every: bool = False) -> Ramp:
    """(tokens seen, batch) for the beginning and each change, or `every` measurement; `grown` is the next batch."""
    planned, batch = [(0, first)], first
    for seen, scale in scales:
        before, batch = batch, grown(batch, scale)
        if every or batch != before:
            planned.append((seen, batch))
    return planned


def _once(batch: int, scale: float) -> int:
    return batch * 2 if 2 * batch <= scale else batch


RAMP_MISTAKES: Mistakes = {
    "You double once at most. The scale may have grown fourfold.": lambda *case: _ramp(*case, grown=_once),
    "Where twice the batch is exactly the noise scale, it is still worth it.":
        lambda *case: _ramp(*case, grown=lambda batch, scale: _doubled(batch, nextafter(scale, 0))),
    "Your batch shrinks where a noisy measurement is low. It should never shrink.":
        lambda first, scales: _ramp(first, scales, lambda _, scale: _doubled(first, scale)),
    "You take the scale itself for the batch. It should grow by doubling.":
        lambda *case: _ramp(*case, grown=lambda batch, scale: max(batch, int(scale))),
    "You double beyond the noise scale: twice the batch has to be within it *before* you double.":
        lambda *case: _ramp(*case, grown=lambda batch, scale: _doubled(batch, nextafter(2 * scale, 0))),
    "You list every measurement. Only changes were asked for.": lambda *case: _ramp(*case, every=True),
    "You add a pair for each doubling. A measurement at which the batch changes makes one pair.":
        lambda first, scales: _ramp(first, [one for one in scales for _ in range(64)], _once),
    "The beginning is missing: (0, first).": lambda *case: _ramp(*case)[1:],
    "Your ramp begins at the first measurement. It begins before any token is seen.":
        lambda first, scales: [(scales[0][0] if scales else 0, first), *_ramp(first, scales)[1:]],
}  # fmt: skip


@exercise("07.5", "The batch doubles when it is worth it, and never before.")
def ramp(answer: Any) -> None:
    """`answer(first, scales)` lists (tokens seen, batch) for the beginning and for each change."""
    returned = [call(answer, first=first, scales=list(scales), returns=(list, tuple)) for first, scales in RAMP_CASES]
    otherwise = "Some ramp is off. At each measurement: how often can you double before the batch exceeds the scale?"
    recognized([_pairs(found) for found in returned], RAMP_CASES, _ramp, RAMP_MISTAKES, otherwise, operator.eq)


def _pairs(found: Sequence[Any]) -> list[tuple[float, ...]]:
    in_pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in found)
    expect(in_pairs, "Return a list of pairs: tokens seen, and the batch from then on.")
    return [tuple(of_kind(value, Real, "In one of your pairs there is") for value in pair) for pair in found]


# ----------------------------------------------------------------------------------------------------------- 07.6: rate

RATE_CASES = (
    *((step, 500, 0.1, 32, "sgd") for step in (0, 250, 500, 900)),
    *((step, 200, 3e-4, 36, "adam") for step in (0, 50, 201)),
    (10, 40, 0.02, 4, "sgd"),
)


def scaled(rate: float, k: float, optimizer: str = "sgd") -> float:
    """The rate for a batch k times larger: k·rate for "sgd" (Goyal et al. 2017), √k·rate for "adam" (Granziol 2022)."""
    return rate * {"sgd": k, "adam": sqrt(k)}[optimizer]


def warm_up(t: float, steps: float, peak: float, start: float = 0.0) -> float:
    """The rate of step t: from `start` straight up to `peak` at step `steps`, then flat (Goyal et al. 2017, 2.2)."""
    return peak if t >= steps else start + (peak - start) * t / steps


def rate_right(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    return warm_up(step, warm, scaled(rate, k, optimizer), rate)


RATE_MISTAKES: Mistakes = {
    "You scale by k for Adam, too. Its rule is another one.": lambda t, w, r, k, o: rate_right(t, w, r, k, "sgd"),
    "You scale by √k for SGD, too. There the rule is linear.": lambda t, w, r, k, o: rate_right(t, w, r, k, "adam"),
    "The two rules are exchanged.": lambda t, w, r, k, o: rate_right(t, w, r, k, "adam" if o == "sgd" else "sgd"),
    "You start from zero, not from the small batch's rate.": lambda t, w, r, k, o: warm_up(t, w, scaled(r, k, o)),
    "There is no warm-up: your rate is at its peak from the first step.": lambda t, w, r, k, o: scaled(r, k, o),
    "Your rate grows on when the warm-up is over.": lambda t, w, r, k, o: r + (scaled(r, k, o) - r) * t / w,
    "Your rate falls back to the small batch's.": lambda t, w, *rest: rate_right(t, w, *rest) if t < w else rest[0],
    "Your rate never changes: k plays no part.": lambda t, w, r, k, o: r,
}  # fmt: skip


@exercise("07.6", "Linear or √k, and gently at first.")
def rate(answer: Any) -> None:
    """`answer(step, warm, rate, k, optimizer)` is the learning rate of a step for a batch k times as large."""
    got = [call(answer, **by_name(("step", "warm", "rate", "k", "optimizer"), case)) for case in RATE_CASES]
    if recognized(got, RATE_CASES, rate_right, RATE_MISTAKES):
        return
    larger = any(mine > 1.001 * case[2] for mine, case in zip(got, RATE_CASES, strict=True))
    expect(larger, "A larger batch asks for a larger rate, not a smaller one.")
    fail("Some rate is off: what is it at step 0, what from step `warm` on, and what halfway between?")
