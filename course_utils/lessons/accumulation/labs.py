"""What the checks of lesson 07 run: right answers, wrong ones that learners give, instruments to tell them apart."""

from collections.abc import Callable, Sequence
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import nn

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.run import TrainingRun

from .micro_batches import IGNORED, MicroBatch, by_batches, dropped, every_micro_batch, mean_loss, undivided

# ------------------------------------------------------------------------------------------------------- 07.1: one pass

WORDS = 7
LOOP_CASES = ((10, 4), (8, 4), (3, 4), (5, 1))
"""Micro-batches in a pass, and how many make a group."""

Pass = Callable[[nn.Module, torch.optim.Optimizer, Sequence[MicroBatch], int], Any]


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


def tiny_parts(count: int) -> list[MicroBatch]:
    """Micro-batches of 2 sequences of 3 tokens, the same for everybody."""
    dice = torch.Generator().manual_seed(count)
    drawn = torch.randint(WORDS, (count, 2, 4), generator=dice)
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def walked(one_pass: Pass, count: int, k: int) -> tuple[torch.Tensor, list[str]]:
    """The table after two passes with `one_pass`, as two epochs make, and what the model noted."""
    model = Bigrams()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        one_pass(model, optimizer, tiny_parts(count), k)
    return model.table.detach(), model.events


pass_right: Pass = by_batches
"""The right answer where all micro-batches are equally large: a group's mean is that of their means."""


def common_loop(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch], k: int) -> None:
    """What the exercise shows, with its two bugs."""
    for i, part in enumerate(parts):
        mean_loss(model, part).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()


def _divided_by(
    number: Callable[[int, int, int], int], last: bool = True, clear_each: bool = False, clear: bool = True
) -> Pass:
    """A loop that divides by `number(group size, k, all)`, and whether it steps on a last group that is incomplete."""

    def one_pass(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch], k: int) -> None:
        for first in range(0, len(parts), k):
            group = parts[first : first + k]
            if clear:
                optimizer.zero_grad()
            for part in group:
                if clear_each:
                    optimizer.zero_grad()
                (mean_loss(model, part) / number(len(group), k, len(parts))).backward()
            if last or len(group) == k:
                optimizer.step()

    return one_pass


def _each_divided(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch], k: int) -> None:
    _divided_by(lambda group, _, every: k)(model, optimizer, parts, 1)


def _once(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch], k: int) -> None:
    _divided_by(lambda group, k, every: every)(model, optimizer, parts, len(parts))


def _nothing(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch], k: int) -> None:
    for part in parts:
        (mean_loss(model, part) / k).backward()


LEFT_BEHIND = (
    "The last, incomplete group gets no step of its own: those sequences are never learned from in their epoch."
)
EACH = "You step on every micro-batch: those are small batches, and their path is another one."
LOOP_MISTAKES: dict[str, tuple[Pass, ...]] = {
    "Both bugs are still in: nobody divides, and nobody steps on the last group.": (
        common_loop,
        _divided_by(lambda group, k, every: 1, last=False),
    ),
    "Losses are added up: with a group of k, the gradient is k times too long.": (undivided,),
    LEFT_BEHIND: (dropped, _divided_by(lambda group, k, every: k, last=False)),
    "You divide the last group by k, too. How many micro-batches does it have?": (
        _divided_by(lambda group, k, every: k),
    ),
    "You divide by the number of all micro-batches. The mean is over one group.": (
        _divided_by(lambda group, k, every: every),
    ),
    "zero_grad within a group throws away what has been added up: only its last micro-batch is left.": (
        _divided_by(lambda group, k, every: group, clear_each=True),
        _divided_by(lambda group, k, every: k, clear_each=True),
        _divided_by(lambda group, k, every: 1, clear_each=True),
    ),
    "The gradients of the group before are still in `.grad`: who clears them?": (
        _divided_by(lambda group, k, every: group, clear=False),
    ),
    EACH: (every_micro_batch, _each_divided),
    "You step once for the whole pass. Once for every group was asked for.": (_once,),
    "The parameters have not moved: who calls `optimizer.step()`?": (_nothing,),
}
"""What a learner can write instead, and what to say to it."""

# -------------------------------------------------------------------------------------------------------- 07.2: factors


def factors_right(counts: Sequence[int]) -> list[float]:
    """The right answer: each micro-batch's share of tokens."""
    return [count / sum(counts) for count in counts]


def padded_parts(counts: Sequence[int]) -> list[MicroBatch]:
    """Micro-batches with so many real tokens, for a demonstration."""
    longest = max(counts)
    dice = torch.Generator().manual_seed(0)
    drawn = torch.randint(WORDS, (len(counts), 1, longest + 1), generator=dice)
    return [
        (one[:, :-1], one[:, 1:].masked_fill(torch.arange(longest) >= count, IGNORED))
        for one, count in zip(drawn, counts, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------- 07.3: plan

XL = TrainingRun("gpt2-xl", 1, 1024, "bf16-master", recompute="full")
GPT2 = TrainingRun("gpt2", 1, 1024)
PLAN_CASES = (
    (GPT2, "T4-16GB", 102_400),
    (GPT2, "L4-24GB", 409_600),
    (XL, "V100-32GB", 32_768),
    (XL, "T4-16GB", 32_768),
    (GPT2.replace(seq_len=512), "A100-80GB", 12_288),
    (TrainingRun("gpt2-large", 1, 1024), "RTX4090-24GB", 24_576),
)
"""Run, card, tokens a step."""

Plan = tuple[int, int] | None


@cache
def _peak(run: TrainingRun, micro_batch: int, steps: int) -> int:
    return estimate(run.replace(micro_batch=micro_batch, accumulation_steps=steps)).total


def _largest(run: TrainingRun, tokens: int, capacity: int, peak: Callable[[TrainingRun, int, int], int]) -> Plan:
    """The largest divisor of the batch whose peak is within `capacity` bytes."""
    batch = tokens // run.seq_len
    for steps in range(1, batch + 1):
        if batch % steps == 0 and peak(run, batch // steps, steps) <= capacity:
            return batch // steps, steps
    return None


def plan_right(run: TrainingRun, card: str, tokens: int) -> Plan:
    """The right answer."""
    return _largest(run, tokens, gpu(card).memory, _peak)


def _alone(run: TrainingRun, card: str, tokens: int) -> Plan:
    return _largest(run, tokens, gpu(card).memory, lambda run, b, _: _peak(run, b, 1))


def _name_of_the_card(run: TrainingRun, card: str, tokens: int) -> Plan:
    gigabytes = int(card.rsplit("-", 1)[1].removesuffix("GB"))
    return _largest(run, tokens, gigabytes * 10**9, _peak)


def _smallest(run: TrainingRun, card: str, tokens: int) -> Plan:
    batch = tokens // run.seq_len
    return (1, batch) if _peak(run, 1, batch) <= gpu(card).memory else None


def _powers(run: TrainingRun, card: str, tokens: int) -> Plan:
    batch = tokens // run.seq_len
    fitting = [
        2**power
        for power in range(batch.bit_length())
        if batch % 2**power == 0 and _peak(run, 2**power, batch // 2**power) <= gpu(card).memory
    ]
    return (max(fitting), batch // max(fitting)) if fitting else None


def _turned(run: TrainingRun, card: str, tokens: int) -> Plan:
    found = plan_right(run, card, tokens)
    return found and (found[1], found[0])


def _at_once(run: TrainingRun, card: str, tokens: int) -> Plan:
    return tokens // run.seq_len, 1


PLAN_MISTAKES: dict[str, Callable[[TrainingRun, str, int], Plan]] = {
    "You estimate one micro-batch on its own. From the second on, all gradients are there while it runs: "
    "`accumulation_steps`.": _alone,
    "You took the number in the card's name for GB. Its memory is `gpu(card).memory`, in bytes.": _name_of_the_card,
    "You take the smallest micro-batch, and with it the most of them. The fewest were asked for.": _smallest,
    "Powers of two alone? Other numbers divide a batch, too.": _powers,
    "Turned round: the size of a micro-batch comes first, their number second.": _turned,
    "You return the whole batch, whether it fits or not.": _at_once,
}
"""What a learner can plan instead, and what to say to it."""

# ---------------------------------------------------------------------------------------------------- 07.4: noise scale

NOISE_CASES = ((4, 64, 2.0, 96.0), (1, 2, 0.5, 3.0), (8, 512, 7.4, 1.5), (16, 24, 1.0, 1000.0))
"""Small batch, big batch, |G|², tr(Σ)."""


def lengths(small: int, big: int, signal: float, noise: float) -> tuple[float, float]:
    """The mean squared lengths that those give."""
    return signal + noise / small, signal + noise / big


def scale_right(small: int, big: int, short: float, long: float) -> float:
    """The right answer: two equations, two unknowns."""
    signal = (big * long - small * short) / (big - small)
    return (short - long) / (1 / small - 1 / big) / signal


# ----------------------------------------------------------------------------------------------------------- 07.5: ramp

Scales = Sequence[tuple[int, float]]

RAMP_CASES: tuple[tuple[int, Scales], ...] = (
    (1000, ((10, 900.0), (20, 2100.0), (30, 3900.0), (40, 4000.0))),
    (512, ((5, 5000.0), (9, 5100.0))),
    (100, ((1, 250.0), (2, 90.0), (3, 420.0), (4, 150.0))),
    (64, ((7, 10.0), (8, 63.0))),
    (10, ()),
)


def ramp_right(first: int, scales: Scales) -> list[tuple[int, int]]:
    """The right answer: double as long as twice the batch is within the noise scale; never shrink."""
    planned, batch = [(0, first)], first
    for seen, scale in scales:
        before = batch
        while 2 * batch <= scale:
            batch *= 2
        if batch != before:
            planned.append((seen, batch))
    return planned


# ----------------------------------------------------------------------------------------------------------- 07.6: rate

RATE_CASES = (
    (0, 500, 0.1, 32, "sgd"),
    (250, 500, 0.1, 32, "sgd"),
    (500, 500, 0.1, 32, "sgd"),
    (900, 500, 0.1, 32, "sgd"),
    (0, 200, 3e-4, 36, "adam"),
    (50, 200, 3e-4, 36, "adam"),
    (201, 200, 3e-4, 36, "adam"),
    (10, 40, 0.02, 4, "sgd"),
)


def rate_right(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    """The right answer: from the small batch's rate to k or √k times it, then constant."""
    peak = rate * (k if optimizer == "sgd" else sqrt(k))
    return peak if step >= warm else rate + (peak - rate) * step / warm
