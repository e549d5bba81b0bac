"""What the checks of lesson 06 run: right answers, wrong ones that learners give, instruments to tell them apart."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_utils.breakdown import MemoryBreakdown
from course_utils.estimating import estimate
from course_utils.estimating.exact.activations import activation_bytes
from course_utils.gpus import gpu
from course_utils.measurement import Mark, Measurement, Timeline
from course_utils.measuring import measure
from course_utils.run import TrainingRun

from .policies import added_percent, small_gpt

# ------------------------------------------------------------------------------------------------------ 06.3: in groups

GROUPS = ((6, 2), (7, 3), (5, 1), (4, 4))
"""Number of blocks, and how many of them share a checkpoint."""

DROPOUT = 0.5

WIDTH = 16


class Noted(nn.Module):
    """A small block that writes its number into `runs` whenever it runs, with dropout if that is not 0."""

    def __init__(self, number: int, runs: list[int], dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self.runs, self.dropout = number, runs, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(self.number)
        y = torch.tanh(self.linear(x))
        return x + (nn.functional.dropout(y, self.dropout, self.training) if self.dropout else y)


Chain = list[Noted]


def chain(count: int, dropout: float = 0.0) -> Chain:
    """`count` blocks, the same for everybody. They share one list of runs."""
    runs: list[int] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(count)
        return [Noted(number, runs, dropout) for number in range(count)]


@dataclass(frozen=True)
class Ran:
    """What became of one forward and backward: output, gradients, the blocks that ran, in order, and how many tensors
    were kept between the two.
    """

    output: Any
    gradients: list[torch.Tensor | None]
    runs: list[int]
    kept: int


def groups_right(blocks: Chain, x: torch.Tensor, k: int) -> torch.Tensor:
    """The right answer: each group of k through one checkpoint, handed over as an argument."""

    def run(group: Chain, x: torch.Tensor) -> torch.Tensor:
        for block in group:
            x = block(x)
        return x

    for first in range(0, len(blocks), k):
        out = checkpoint(run, blocks[first : first + k], x, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        x = out
    return x


def run_in_groups(blocks: Chain, k: int, answer: Callable[..., Any] = groups_right) -> Ran:
    """Forward and backward through `answer(blocks, x, k)`, watched, with the same random numbers each time."""
    mine, runs = list(blocks), blocks[0].runs
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
    kept = {"inputs": 0}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept["inputs"] += tensor.shape == x.shape
        return tensor

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = answer(blocks, x, k)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.square().sum().backward()
    gradients = [x.grad, *(weight.grad for block in mine for weight in block.parameters())]
    return Ran(output, gradients, runs, kept["inputs"])


def rerun_in_groups(sizes: Iterable[int]) -> list[int]:
    """The blocks in the order in which backward runs them again: the last group first, each from its first block."""
    ends = list(accumulate(sizes))
    starts = [0, *ends[:-1]]
    return [block for first, end in reversed(list(zip(starts, ends, strict=True))) for block in range(first, end)]


# ---------------------------------------------------------------------------------------------- 06.4: percent of a step


def added_right(s: int, h: int, L: int, V: int) -> dict[str, float]:
    """The right answer, in percent: one forward of the blocks, or of their cores, against three of everything."""
    blocks, core = L * (24 * h * h + 4 * s * h), L * 4 * s * h
    step = 3 * (blocks + 2 * h * V)
    return {"full": 100 * blocks / step, "core": 100 * core / step}


# ----------------------------------------------------------------------------------------- 06.5: the cheapest that fits

POLICIES = ("none", "selective-attention", "every-12", "every-6", "every-4", "full")
"""To choose from: whole blocks in stretches of several lengths, the attention core, nothing."""

EAGER = TrainingRun("gpt2-xl", 8, 1024, "bf16-master", attention="eager")
CHEAPEST_CASES = (
    (EAGER, "H200-141GB"),
    (EAGER, "A100-80GB"),
    (EAGER, "A100-40GB"),
    (EAGER, "T4-16GB"),
    (EAGER.replace(micro_batch=16), "A100-80GB"),
    (EAGER.replace(micro_batch=2), "A100-80GB"),
)


def fitting(run: TrainingRun, card: str) -> list[tuple[float, int, str]]:
    """(percent added, peak bytes, policy) for each policy that fits."""
    candidates = [run.replace(recompute=policy) for policy in POLICIES]
    costs = [(added_percent(candidate), estimate(candidate).total, candidate.recompute) for candidate in candidates]
    return [cost for cost in costs if cost[1] <= gpu(card).memory]


def cheapest_right(run: TrainingRun, card: str) -> str | None:
    """The right answer: the first in percent, then in peak."""
    found = fitting(run, card)
    return min(found)[2] if found else None


def _least_memory(run: TrainingRun, card: str) -> str | None:
    found = fitting(run, card)
    return min(found, key=lambda cost: cost[1])[2] if found else None


def _first_in_order(run: TrainingRun, card: str) -> str | None:
    found = fitting(run, card)
    return found[0][2] if found else None


def _whatever_fits(run: TrainingRun, card: str) -> str | None:
    candidates = [run.replace(recompute=policy) for policy in POLICIES]
    return min((added_percent(c), estimate(c).total, c.recompute) for c in candidates)[2]


CHEAPEST_MISTAKES: dict[str, Callable[[TrainingRun, str], str | None]] = {
    "You always take the lowest peak. Where more fits, that recomputes for nothing.": _least_memory,
    "You take the first that fits. Several policies cost the same: among those, the lowest peak was asked for.": (
        _first_in_order
    ),
    "You look at the arithmetic alone: does the policy fit the card?": _whatever_fits,
}
"""What a learner can choose instead, and what to say to it."""


# ------------------------------------------------------------------------------------------------ 06.6: count the teeth

TEETH = {"every-3": 4, "none": 0, "full": 12, "every-6": 2, "every-4": 3}
"""Stretches of GPT-2's 12 blocks that run again under each hidden policy."""

HIDDEN = TrainingRun("gpt2", 2, 256, "amp-bf16")


def hidden_runs() -> list[TrainingRun]:
    """The runs behind the hidden measurements."""
    return [HIDDEN.replace(recompute=policy) for policy in TEETH]


@cache
def measured(policy: str) -> Measurement:
    """One of them, simulated, without its tensors' names."""
    return replace(measure(HIDDEN.replace(recompute=policy), source="simulated"), allocations=())


# ------------------------------------------------------------------------------------------------- 06.7: two secrets

KNOWN = TrainingRun(small_gpt(), 1, 128, "bf16-master")
"""All but the two secrets: micro-batch and policy."""

SECRETS: dict[int, tuple[int, str]] = {
    1: (12, "every-2"),
    2: (2, "none"),
    3: (24, "full"),
    4: (20, "every-3"),
    5: (5, "none"),
    6: (7, "full"),
}
"""Micro-batch and policy of each case. Neither the peak nor what forward keeps puts the policies in order."""

SECRET_POLICIES = ("none", "full", "every-2", "every-3")


def secret_runs() -> list[TrainingRun]:
    """The runs behind the cases."""
    return [KNOWN.replace(micro_batch=b, recompute=policy) for b, policy in SECRETS.values()]


@cache
def case(number: int) -> Measurement:
    """What is known of a case: how its activations rise and fall, and nothing else."""
    return activations_alone(measure(secret_runs()[number - 1], source="simulated"))


def activations_alone(measurement: Measurement) -> Measurement:
    """The measurement with the events of its activations and without all others, its peak theirs."""
    changes, before = [], [0]
    for size, kind in measurement.timeline.changes:
        if kind == "activations":
            changes.append((size, kind))
        before.append(len(changes))
    marks = [Mark(before[mark.event], mark.step, mark.phase) for mark in measurement.timeline.marks]
    line = Timeline(changes, marks)
    totals = line.totals()
    highest = MemoryBreakdown({"activations": max(totals)}, "", "the most activations at once")
    peak = totals.index(max(totals)) + 1
    return replace(
        measurement, breakdown=highest, moments={}, timeline=line, peak_event=peak, allocations=(), phase_peaks={}
    )


def kept_by_forward(measurement: Measurement) -> int:
    """Bytes of activations when the last step's forward is through."""
    starts = {mark.phase: mark.event for mark in measurement.timeline.marks}
    return measurement.timeline.curves()["activations"][starts["loss"] - 1]


def batch_if(policy: str, measurement: Measurement) -> int:
    """The micro-batch that the case would have under this policy, by what its forward keeps."""
    return max(1, round(kept_by_forward(measurement) / activation_bytes(KNOWN.replace(recompute=policy))))
