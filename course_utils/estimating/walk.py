"""A walk: what is made and freed, change by change; its highest point tells when most is there, and of what."""

from collections.abc import Iterable
from typing import NamedTuple

from ..units import round_up


class Change(NamedTuple):
    """Signed bytes of one kind of memory."""

    kind: str
    bytes: int


Walk = list[Change]
Totals = dict[str, int]


def highest(walk: Iterable[Change]) -> Totals:
    """Bytes by kind, relative to the start, where a walk stands highest."""
    now: Totals = {}
    best: Totals = {}
    total = top = 0
    for kind, size in walk:
        now[kind] = now.get(kind, 0) + size
        total += size
        if total > top:
            top, best = total, dict(now)
    return best


def net(walk: Iterable[Change]) -> Totals:
    """Bytes by kind that a whole walk adds."""
    totals: Totals = {}
    for kind, size in walk:
        totals[kind] = totals.get(kind, 0) + size
    return totals


def make(size: int, kind: str = "temporaries") -> Change:
    """A tensor of `size` bytes appears."""
    return Change(kind, round_up(size))


def free(size: int, kind: str = "temporaries") -> Change:
    """A tensor of `size` bytes goes."""
    return Change(kind, -round_up(size))
