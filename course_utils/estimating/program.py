"""A step's tape cut into pieces, of which those in the middle repeat, and read with a run's numbers.

What one block adds and frees is the same for each, so through equal blocks memory runs along a straight line, of which
only the two ends need to be looked at: a deep model takes no longer than a shallow one.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ..run import TrainingRun
from ..units import round_up
from .network import tell
from .structure import Structure, letters, structure
from .tape import Kept, Record, Tape

Totals = dict[str, int]


class Piece(NamedTuple):
    """Events between two marks. `changes` are indices of sizes, ~index where one is freed; `kinds` go with them."""

    place: tuple[str, object]
    changes: tuple[int, ...]
    kinds: tuple[str, ...]


class Program(NamedTuple):
    """A structure's pieces in order, the formulas of its sizes, and what autograd keeps of each place."""

    pieces: tuple[Piece, ...]
    sizes: tuple[tuple[str, ...], ...]
    kept: tuple[tuple[object, Kept], ...]


class Moment(NamedTuple):
    """A high point: where it is, how much is there, and of what kinds."""

    place: tuple[str, object]
    total: int
    parts: Totals


@lru_cache(maxsize=512)
def compiled(shape: Structure) -> Program:
    """The program of a structure."""
    tape = tell(shape)
    names = sorted({record.size for record, _ in tape.events})
    index = {name: number for number, name in enumerate(names)}
    marks = [(0, ("forward", "stem")), *tape.marks]
    pieces = tuple(
        _piece(place, tape.events[start:end], index)
        for (start, place), (end, _) in zip(marks, [*marks[1:], (len(tape.events), "")], strict=True)
    )
    return Program(_shared(pieces), tuple(tuple(name.split("·")) for name in names), _kept(tape))


def _piece(place: object, events: list[tuple[Record, int]], index: dict[str, int]) -> Piece:
    named = (place, "") if isinstance(place, str) else place
    changes = tuple(index[record.size] if sign > 0 else ~index[record.size] for record, sign in events)
    return Piece(named, changes, tuple(record.settled() for record, _ in events))  # type: ignore[arg-type]


def _shared(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The same tuples for pieces with the same events, so that they are read once."""
    known: dict[tuple[object, object], Piece] = {}
    return tuple(
        Piece(piece.place, *known.setdefault((piece.changes, piece.kinds), piece)[1:]) for piece in pieces
    )


def _kept(tape: Tape) -> tuple[tuple[object, Kept], ...]:
    return tuple((place, kept) for place, kept in tape.ledger.values())
