"""A step's tape cut into pieces, whose middle ones repeat, and read with a run's numbers.

What one block allocates and frees is the same for each, so through equal blocks memory runs along a straight
line: only its two ends have to be looked at, and a deep model takes no longer than a shallow one.
"""

from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from typing import NamedTuple

from ...run import TrainingRun
from ...units import round_up
from .network import tape_of
from .structure import Structure, structure, symbols
from .tape import END, Kept, Place, Storage
from .walk import Totals


class Repeat(IntEnum):
    """Parts of the step that a tape shows once for many."""

    GROUPS = 0
    """The groups of blocks between the first and the last."""
    BLOCKS = 1
    """The blocks of a group between its first and its last."""
    BLOCKS_OF_LAST = 2
    """The same of the last group, which may be smaller."""
    PIECES = 3
    """The pieces of the loss between the second and the last two."""


Repeats = tuple[Repeat, ...]


class Events(NamedTuple):
    """Allocations and frees in order: indices of sizes, ~index where one is freed; and the kinds of memory.

    `left` says what of it is left at the end: kind, index, how often.
    """

    changes: tuple[int, ...]
    kinds: tuple[str, ...]
    left: tuple[tuple[str, int, int], ...]


class Piece(NamedTuple):
    """The events between two marks: the phase, the place in the network, and the number of its events."""

    phase: str
    place: Place
    events: int


class Visit(NamedTuple):
    """A piece to be looked at or, as one of `passed_over`, to be counted for all but the two looked at.

    A group that is passed over has all `blocks` of its own.
    """

    piece: int
    passed_over: Repeats = ()
    blocks: Repeats = ()

    def times(self, counts: dict[Repeat, int]) -> int:
        """The number of times that the piece comes here."""
        between = prod(counts[each] - 2 for each in self.passed_over)
        blocks = prod(counts[each] for each in self.blocks)
        return between * blocks


class Size(NamedTuple):
    """A formula's symbols; with `repeats`, the size of all that one stands for, which are freed at once."""

    symbols: tuple[str, ...]
    repeats: Repeats


class Program(NamedTuple):
    """A structure's pieces, in which order and how often they come, their sizes' formulas, and the ledger.

    Blocks that do the same share their events, which are read once.
    """

    events: tuple[Events, ...]
    pieces: tuple[Piece, ...]
    visits: tuple[Visit, ...]
    sizes: tuple[Size, ...]
    kept: tuple[tuple[Place, Kept], ...]


@lru_cache(maxsize=512)
def compiled(shape: Structure) -> Program:
    """The program of a structure."""
    tape = tape_of(shape)
    sizes: dict[tuple[str, Repeats], int] = {}
    known: dict[Events, int] = {}
    pieces = []
    ends = [*(mark.event for mark in tape.marks[1:]), len(tape.events)]
    for mark, end in zip(tape.marks, ends, strict=True):
        events = _events(tape.events[mark.event : end], mark.place, shape, sizes)
        pieces.append(Piece(mark.phase, mark.place, known.setdefault(events, len(known))))
    visits = tuple(_schedule(pieces, shape))
    formulas = tuple(Size(tuple(size.split("·")), repeats) for size, repeats in sizes)
    return Program(tuple(known), tuple(pieces), visits, formulas, tuple(tape.ledger.values()))


def _events(
    events: list[tuple[Storage, int]], here: Place, shape: Structure, sizes: dict[tuple[str, Repeats], int]
) -> Events:
    """The events with their sizes numbered.

    What was allocated in a block that stands for many may be freed at once with what the block before has
    made, as autocast's copies of weights are: then that of all of them is freed.
    """
    elsewhere = {_origin(storage) for storage, sign in events if sign < 0 and storage.place != here}
    changes = []
    kinds = []
    left: Counter[tuple[str, int]] = Counter()
    for storage, sign in events:
        repeats: Repeats = ()
        if sign < 0 and storage.place != here:
            repeats = _freed_at_once(storage, shape, elsewhere)
        number = sizes.setdefault((storage.size, repeats), len(sizes))
        kind = storage.settled()
        changes.append(number if sign > 0 else ~number)
        kinds.append(kind)
        left[kind, number] += sign
    remaining = tuple((*what, count) for what, count in left.items() if count)
    return Events(tuple(changes), tuple(kinds), remaining)


Origin = tuple[str, str, bool, Place]


def _origin(storage: Storage) -> Origin:
    """The features that equivalent tensors of different blocks share, and the block."""
    return storage.size, storage.phase, storage.recomputation > 0, storage.place


def _freed_at_once(storage: Storage, shape: Structure, freed: set[Origin]) -> Repeats:
    """The number of repetitions that free this here, if the first of them frees here what it made."""
    *what, place = _origin(storage)
    groups: Repeats = ()
    blocks: Repeats = ()
    if (*what, place._replace(group=0)) in freed:
        groups = _group_repeats(place, shape)
    if groups or (*what, place._replace(block=0)) in freed:
        blocks = _block_repeats(place, shape)
    return (*groups, *blocks)


def _group_repeats(place: Place, shape: Structure) -> Repeats:
    """The repetition that a group of blocks, or a piece of the loss, shows.

    It is the second of three groups or four pieces.

    Pieces are four, as the first two gradients of the head's weights that meet are added in another way than
    the rest.
    """
    if place.part == "block" and place.group == 1 and len(shape.groups) == 3:
        return (Repeat.GROUPS,)
    if place.part == "piece" and place.group == 1 and shape.chunks == 4:
        return (Repeat.PIECES,)
    return ()


def _block_repeats(place: Place, shape: Structure) -> Repeats:
    """The repetition that a block shows within its group: the second of three."""
    if place.part != "block" or place.block != 1 or shape.groups[place.group] < 3:
        return ()
    if place.group == len(shape.groups) - 1:
        return (Repeat.BLOCKS_OF_LAST,)
    return (Repeat.BLOCKS,)


def _schedule(pieces: list[Piece], shape: Structure) -> Iterator[Visit]:
    """Every piece once, but what stands for many twice, as the first and the last of them."""
    for _, members in groupby(range(len(pieces)), lambda number: pieces[number].place[:2]):
        numbers = list(members)
        group = list(_schedule_blocks(pieces, numbers, shape))
        yield from group
        if repeats := _group_repeats(pieces[numbers[0]].place, shape):
            for number in numbers:
                yield Visit(number, repeats, _block_repeats(pieces[number].place, shape))
            yield from group


def _schedule_blocks(pieces: list[Piece], numbers: list[int], shape: Structure) -> Iterator[Visit]:
    for place, members in groupby(numbers, lambda number: pieces[number].place):
        same = list(members)
        yield from map(Visit, same)
        if repeats := _block_repeats(place, shape):
            for number in same:
                yield Visit(number, repeats)
            yield from map(Visit, same)


@lru_cache(maxsize=1024)
def _counts(layers: int, size: int, pieces: int) -> dict[Repeat, int]:
    """The number that the tape shows one for, of `layers` blocks in groups of `size` and of `pieces` of the
    loss.
    """
    groups = -(-layers // size)
    rest = layers % size or size
    return {
        Repeat.GROUPS: groups - 2,
        Repeat.BLOCKS: size - 2,
        Repeat.BLOCKS_OF_LAST: rest - 2,
        Repeat.PIECES: pieces - 3,
    }


class Reading:
    """A program read with one run's numbers. Bytes are relative to what persists between steps."""

    def __init__(self, run: TrainingRun) -> None:
        self.program = compiled(structure(run))
        numbers = symbols(run)
        counts = _counts(run.model.layers, run.blocks_per_checkpoint or 1, numbers["pieces"])
        sizes = [round_up(prod([numbers[symbol] for symbol in size.symbols])) for size in self.program.sizes]
        for number, size in enumerate(self.program.sizes):
            for repeat in size.repeats:
                sizes[number] *= counts[repeat]
        self.signed = [*sizes, *(-size for size in reversed(sizes))]  # so that ~index finds the negative
        self.curves = [
            list(accumulate(map(self.signed.__getitem__, each.changes))) for each in self.program.events
        ]
        self.pieces = [self.program.pieces[visit.piece] for visit in self.program.visits]
        self.times = [visit.times(counts) if visit.passed_over else 1 for visit in self.program.visits]
        self.last_group = max(
            piece.place.group for piece in self.program.pieces if piece.place.part == "block"
        )

    def highest(self) -> tuple[int, int]:
        """The largest total, and the number of the visit that has it."""
        nets = [curve[-1] if curve else 0 for curve in self.curves]
        tops = [max(curve, default=0) for curve in self.curves]
        now = 0
        top = 0
        best = 0
        visited = zip(self.program.visits, self.pieces, self.times, strict=True)
        # What is passed over lies on a straight line between two pieces that are looked at, so it is no peak.
        for number, (visit, piece, times) in enumerate(visited):
            if not visit.passed_over and now + tops[piece.events] > top:
                top = now + tops[piece.events]
                best = number
            now += times * nets[piece.events]
        return top, best

    def at_top_of(self, number: int) -> Totals:
        """Bytes by kind at the highest point of a visit."""
        curve = self.curves[self.pieces[number].events]
        top = max(curve, default=0)
        events = curve.index(top) + 1 if top > 0 else 0
        return self._after(number, events)

    def before(self, number: int) -> Totals:
        """Bytes by kind when a visit begins."""
        return self._after(number, 0)

    def name(self, number: int) -> tuple[str, str]:
        """The phase and the name of a visit."""
        return named(self.pieces[number].phase, self.pieces[number].place, self.last_group)

    def visits(self) -> list[int]:
        """The numbers of the visits that are looked at, in order."""
        found = []
        for number, visit in enumerate(self.program.visits):
            if not visit.passed_over and self.pieces[number].place != END:
                found.append(number)
        return found

    def _after(self, number: int, events: int) -> Totals:
        parts: Totals = {}
        # Equal pieces share their events: count how often each came, then add up what each leaves behind.
        often = dict.fromkeys((piece.events for piece in self.pieces[:number]), 0)
        for piece, times in zip(self.pieces[:number], self.times, strict=False):
            often[piece.events] += times
        for same, times in often.items():
            for kind, size, count in self.program.events[same].left:
                parts[kind] = parts.get(kind, 0) + times * count * self.signed[size]
        here = self.program.events[self.pieces[number].events]
        for change, kind in zip(here.changes[:events], here.kinds, strict=False):
            parts[kind] = parts.get(kind, 0) + self.signed[change]
        return parts


def named(phase: str, place: Place, last_group: int) -> tuple[str, str]:
    """The phase and the name of a moment of the tape."""
    if phase in ("forward", "loss"):
        return phase, phase
    if place.part == "block":
        if place.group == last_group:
            which = "last"
        elif place.group == 0:
            which = "first"
        else:
            which = "middle"
        return "backward", f"backward of the {which} block"
    layer = {"stem": "embedding", "end": "embedding", "piece": "loss"}.get(place.part, place.part)
    return "backward", f"backward of the {layer}"
