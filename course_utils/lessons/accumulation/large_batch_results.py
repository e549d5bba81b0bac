"""Published results about large batches, for lesson 09 and the errata: error rates, and a batch ramp."""

from collections.abc import Sequence
from typing import NamedTuple


class Published(NamedTuple):
    """A row of Goyal et al. 2017, table 2(a): ResNet-50 on ImageNet, top-1 error and spread in percent."""

    batch: int
    rate: str
    error: float
    spread: float


# five trainings each (Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, arXiv 1706.02677)
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
GOYAL_CAPTION = 23.68  # The error at rate 0.1 and batch 256 by the caption
RAMP = (
    (0, 16_000_000),
    (69_000_000_000, 32_000_000),
    (790_000_000_000, 64_000_000),
    (4_700_000_000_000, 128_000_000),
)
"""MiniMax-01's batch ramp: (tokens seen, tokens in a batch from then on). MiniMax 2025, arXiv 2501.08313."""


def published(batch: int, rate: str) -> Published:
    """The row for a batch and a rate as the table spells it."""
    return next(row for row in GOYAL if (row.batch, row.rate) == (batch, rate))


def batch_at(ramp: Sequence[tuple[int, int]], seen: int) -> int:
    """Tokens in a batch when `seen` tokens have been seen."""
    return [size for start, size in ramp if start <= seen][-1]
