"""Published results about large batches, for lesson 07 and the errata: rates, a critical batch, a batch ramp."""

from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple


class Published(NamedTuple):
    """A row of Goyal et al. 2017, table 2(a): ResNet-50 on ImageNet, top-1 error in percent, mean and deviation."""

    batch: int
    rate: str
    error: float
    spread: float


GOYAL = (
    Published(256, "0.05", 23.92, 0.10),
    Published(256, "0.10", 23.60, 0.12),
    Published(256, "0.20", 23.68, 0.09),
    Published(8192, "0.05·32", 24.27, 0.08),
    Published(8192, "0.10·32", 23.74, 0.09),
    Published(8192, "0.20·32", 24.05, 0.18),
    Published(8192, "0.10", 41.67, 0.10),
    Published(8192, "0.10·√32", 26.22, 0.03),
)
"""Five trainings each. (Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, arXiv 1706.02677.)"""

GOYAL_CAPTION = 23.68  # The error at rate 0.1 and batch 256 by the caption


def published(batch: int, rate: str) -> Published:
    """The row for a batch and a rate as the table spells it."""
    return next(row for row in GOYAL if (row.batch, row.rate) == (batch, rate))


class CriticalBatch(NamedTuple):
    """The critical batch as a power law of the loss: `scale` tokens / loss^(1/`exponent`)."""

    scale: float
    exponent: float


KAPLAN = CriticalBatch(2e8, 0.21)
"""Kaplan et al. 2020, eq. 1.4 (arXiv 2001.08361): Transformers on WebText2, loss in nats per token."""

MINIMAX_LOSSES = {2.22: 16_000_000, 1.98: 32_000_000, 1.77: 64_000_000, 1.58: 128_000_000}
"""MiniMax-01's own power law, by loss: critical batch in tokens. (MiniMax 2025, figure 13.)"""


def critical_batch(loss: float) -> float:
    """Tokens in Kaplan et al.'s critical batch at this loss."""
    return KAPLAN.scale / loss ** (1 / KAPLAN.exponent)


def exponent_between(batches: Mapping[float, float]) -> float:
    """α of the power law through the largest and the smallest loss of `batches`, which maps loss to tokens."""
    high, low = max(batches), min(batches)
    return log(high / low) / log(batches[low] / batches[high])


RAMP = ((0, 16_000_000), (69_000_000_000, 32_000_000), (790_000_000_000, 64_000_000), (4_700_000_000_000, 128_000_000))
"""MiniMax-01's batch ramp: (tokens seen, tokens in a batch from then on). (MiniMax 2025, arXiv 2501.08313.)"""

Ramp = Sequence[tuple[int, int]]


def batch_at(ramp: Ramp, seen: int) -> int:
    """Tokens in a batch when `seen` tokens have been seen."""
    return [size for start, size in ramp if start <= seen][-1]


def ramp_steps(ramp: Ramp, total: int) -> float:
    """Optimizer steps until `total` tokens have been seen."""
    ends = [start for start, _ in ramp[1:]] + [total]
    return sum(max(0, min(end, total) - start) / size for (start, size), end in zip(ramp, ends, strict=True))


def staircase(ramp: Ramp, total: int, first: int) -> tuple[list[float], list[float]]:
    """The ramp as a line from `first` to `total` tokens: x in billions of tokens seen, y in millions a batch."""
    xs, ys = [first / 1e9], [batch_at(ramp, first) / 1e6]
    for start, size in ramp[1:]:
        if first < start < total:
            xs += [start / 1e9, start / 1e9]
            ys += [ys[-1], size / 1e6]
    return [*xs, total / 1e9], [*ys, ys[-1]]
