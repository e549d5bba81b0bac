"""A walk: allocations and frees in order. Its highest point is the peak, by kind of memory."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...units import round_up


class Change(NamedTuple):
    """Signed bytes of one kind of memory."""

    kind: str
    bytes: int


Walk = list[tuple[str, int]]
"""Changes in order, or plain pairs like them where there are very many."""

Totals = dict[str, int]
"""Bytes by kind of memory."""


def highest(walk: Sequence[tuple[str, int]]) -> Totals:
    """Bytes by kind, relative to the start, at the highest point of a walk."""
    return highest_and_net(walk)[0]


def highest_and_net(walk: Sequence[tuple[str, int]]) -> tuple[Totals, Totals]:
    """Bytes by kind at the first highest point of a walk, and those that all of it adds.

    At the highest point there are none if that is its start.
    """
    heights = list(accumulate(size for _, size in walk))
    top = max(heights, default=0)
    ends = heights.index(top) + 1 if top > 0 else 0
    best = net(walk[:ends])
    whole = dict(best)
    for kind, size in walk[ends:]:
        whole[kind] = whole.get(kind, 0) + size
    return best, whole


def net(walk: Iterable[tuple[str, int]]) -> Totals:
    """Bytes by kind that a whole walk adds."""
    totals: Totals = {}
    for kind, size in walk:
        totals[kind] = totals.get(kind, 0) + size
    return totals


def plus(first: Totals, second: Totals) -> Totals:
    """Two tables of bytes by kind, added up."""
    return {kind: first.get(kind, 0) + second.get(kind, 0) for kind in {**first, **second}}


def make(size: int, kind: str = "temporaries") -> Change:
    """A tensor of `size` bytes is allocated."""
    return Change(kind, round_up(size))


def free(size: int, kind: str = "temporaries") -> Change:
    """A tensor of `size` bytes is freed."""
    return Change(kind, -round_up(size))
