"""A step's tape cut into pieces, of which those in the middle repeat, and read with a run's numbers.

What one block adds and frees is the same for each, so through equal blocks memory runs along a straight line, of which
only the two ends need to be looked at: a deep model takes no longer than a shallow one.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple

from course_utils.run import TrainingRun
from course_utils.units import round_up

from .network import tell
from .structure import Structure, letters, structure
from .tape import Kept, Record
from .walk import Totals


class Events(NamedTuple):
    """What is made and freed, in order: indices of sizes, ~index where one is freed, and the kinds of memory.

    `left` says what of it is left at the end: kind, index, how often.
    """

    changes: tuple[int, ...]
    kinds: tuple[str, ...]
    left: tuple[tuple[str, int, int], ...]


class Piece(NamedTuple):
    """What happens between two marks: the phase and the place in the network, and the number of its events."""

    place: tuple[str, Any]
    events: int


class Visit(NamedTuple):
    """A piece to be looked at, or, with `times`, to be passed over that often: the product of the numbers named."""

    piece: int
    times: tuple[str, ...] | None = None


class Size(NamedTuple):
    """A formula's letters, and of how many blocks it is meant, if what one stands for goes at once."""

    letters: tuple[str, ...]
    blocks: tuple[str, ...]


class Program(NamedTuple):
    """A structure's pieces, in which order and how often they come, the formulas of their sizes, and the ledger.

    Blocks that do the same share their events, which are read once.
    """

    events: tuple[Events, ...]
    pieces: tuple[Piece, ...]
    visits: tuple[Visit, ...]
    sizes: tuple["Size", ...]
    kept: tuple[tuple[Any, Kept], ...]


class Moment(NamedTuple):
    """Bytes by kind of what forward, loss and backward add at one moment, and their sum."""

    total: int
    parts: Totals


@lru_cache(maxsize=512)
def compiled(shape: Structure) -> Program:
    """The program of a structure."""
    tape = tell(shape)
    sizes: dict[Size, int] = {}
    marks = [(0, ("forward", "stem")), *tape.marks]
    ends = [*(start for start, _ in marks[1:]), len(tape.events)]
    known: dict[Events, int] = {}
    pieces = []
    for (start, place), end in zip(marks, ends, strict=True):
        events = _events(tape.events[start:end], place, _shown(shape), sizes)
        pieces.append(Piece(place, known.setdefault(events, len(known))))
    return Program(
        tuple(known), tuple(pieces), tuple(_schedule(pieces, _shown(shape))), tuple(sizes),
        tuple(tape.ledger.values()),
    )  # fmt: skip


def _events(
    events: list[tuple[Record, int]], place: Any, shown: dict[str, tuple[int, ...]], sizes: dict[Size, int]
) -> Events:
    """The events with their sizes numbered. What was born in a block that stands for many may go at once with what the
    block before has made, as autocast's copies of weights do: then that of all of them goes.
    """
    here = _block(place[1])
    gone = {_origin(record) for record, sign in events if sign < 0 and _block(record.place) != here}
    changes = []
    for record, sign in events:
        blocks = _at_once(record, shown, gone) if sign < 0 and _block(record.place) != here else ()
        number = sizes.setdefault(Size(tuple(record.size.split("·")), blocks), len(sizes))
        changes.append(number if sign > 0 else ~number)
    kinds = tuple(record.settled() for record, _ in events)
    left: Counter[tuple[str, int]] = Counter()
    for change, kind in zip(changes, kinds, strict=True):
        left[kind, change if change >= 0 else ~change] += 1 if change >= 0 else -1
    return Events(tuple(changes), kinds, tuple((*what, count) for what, count in left.items() if count))


Origin = tuple[str, str, bool, "Place"]


def _origin(record: Record) -> Origin:
    """What tensors of different blocks that play the same part have in common, and the block."""
    return record.size, record.phase, record.recomputation > 0, _block(record.place)


def _at_once(record: Record, shown: dict[str, tuple[int, ...]], gone: set[Origin]) -> tuple[str, ...]:
    """What says of how many blocks this goes here, if what the first of them has made goes here too."""
    *what, (family, group, block) = _origin(record)
    if not family:
        return ()
    many = _stands_for_many(family, group, shown) and (*what, (family, 0, block)) in gone
    groups = ("all groups of " + family,) if many else ()
    blocks = _blocks_of((family, group, block), shown) if many or (*what, (family, group, 0)) in gone else ()
    return (*groups, *blocks)


Place = tuple[str, int, int]
"""A block: "block", its group and its number in it; or a piece of the loss: "piece", its number and 0."""

NOWHERE: Place = ("", -1, -1)


def _shown(shape: Structure) -> dict[str, tuple[int, ...]]:
    """How many blocks each group of the tape has, and that its pieces of the loss are one each."""
    return {"block": shape.groups, "piece": (1,) * shape.chunks}


MANY = {"block": 3, "piece": 4}
"""From so many on, the second of a tape's groups, or pieces, stands for all that are not shown.

Pieces are four, as the first two gradients of the head's weights that meet are added in another way than the rest.
"""


def _schedule(pieces: list[Piece], shown: dict[str, tuple[int, ...]]) -> Iterator[Visit]:
    """Every piece once, but what stands for many twice, as the first and the last of them."""
    for (family, group), members in groupby(range(len(pieces)), lambda number: _place(pieces[number])[:2]):
        numbers = list(members)
        yield from _blocks(pieces, numbers, shown)
        if family and _stands_for_many(family, group, shown):
            more = ("groups of " + family,)
            yield from (Visit(number, (*more, *_blocks_of(_place(pieces[number]), shown))) for number in numbers)
            yield from _blocks(pieces, numbers, shown)


def _blocks(pieces: list[Piece], numbers: list[int], shown: dict[str, tuple[int, ...]]) -> Iterator[Visit]:
    for place, members in groupby(numbers, lambda number: _place(pieces[number])):
        same = list(members)
        yield from map(Visit, same)
        if place != NOWHERE and _blocks_of(place, shown):
            between = "blocks of last" if place[1] == len(shown["block"]) - 1 else "blocks"
            yield from (Visit(number, (between,)) for number in same)
            yield from map(Visit, same)


def _place(piece: Piece) -> Place:
    return _block(piece.place[1])


def _block(where: Any) -> Place:
    return where if isinstance(where, tuple) else NOWHERE


def _stands_for_many(family: str, group: int, shown: dict[str, tuple[int, ...]]) -> bool:
    return group == 1 and len(shown[family]) == MANY[family]


def _blocks_of(place: Place, shown: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    """What says how often a block comes in one group; nothing if it comes once."""
    family, group, block = place
    if block != 1 or shown[family][group] < 3:
        return ()
    return ("all blocks of last" if group == len(shown[family]) - 1 else "all blocks",)


@lru_cache(maxsize=1024)
def _multiples(layers: int, size: int, pieces: int) -> dict[str, int]:
    """How often what stands for many comes ("all"), and how often less the two times that it is looked at: of `layers`
    blocks in groups of `size`, and of so many `pieces` of the loss.
    """
    count, rest = -(-layers // size), layers % size or size
    every = {
        "groups of block": count - 2, "groups of piece": pieces - 3, "blocks": size - 2, "blocks of last": rest - 2,
    }  # fmt: skip
    return {f"all {name}": number for name, number in every.items()} | {
        name: number - 2 for name, number in every.items()
    }


class Reading:
    """A program read with one run's numbers. Bytes are relative to what stands before the step."""

    def __init__(self, run: TrainingRun) -> None:
        self.program = compiled(structure(run))
        numbers = letters(run)
        multiples = _multiples(run.model.layers, run.blocks_per_checkpoint or 1, numbers["pieces"])
        sizes = [
            round_up(prod([numbers[letter] for letter in size.letters]))
            * prod([multiples[name] for name in size.blocks])
            for size in self.program.sizes
        ]
        self.signed = [*sizes, *(-size for size in reversed(sizes))]  # so that ~index finds the negative
        curves = [list(accumulate(map(self.signed.__getitem__, events.changes))) for events in self.program.events]
        self.curves = [curves[piece.events] for piece in self.program.pieces]
        nets, tops = [curve[-1] if curve else 0 for curve in curves], [max(curve, default=0) for curve in curves]
        self.nets = [nets[piece.events] for piece in self.program.pieces]
        self.tops = [tops[piece.events] for piece in self.program.pieces]
        self.times = [prod(multiples[name] for name in visit.times or ()) for visit in self.program.visits]

    def highest(self) -> tuple[int, int]:
        """The largest total, and the number of the visit that has it."""
        now, top, best = 0, 0, 0
        for number, (visit, times) in enumerate(zip(self.program.visits, self.times, strict=True)):
            piece = visit.piece
            if visit.times is None and now + self.tops[piece] > top:
                top, best = now + self.tops[piece], number
            now += times * self.nets[piece]
        return top, best

    def at_top_of(self, number: int) -> Moment:
        """What is there when most is there in a visit."""
        curve = self.curves[self.program.visits[number].piece]
        return self._after(number, curve.index(max(curve)) + 1 if curve and max(curve) > 0 else 0)

    def before(self, number: int) -> Moment:
        """What is there when a visit begins."""
        return self._after(number, 0)

    @property
    def last_group(self) -> int:
        """The number of the last group of blocks."""
        return max(_place(piece)[1] for piece in self.program.pieces if _place(piece)[0] == "block")

    def place(self, number: int) -> tuple[str, Any]:
        """The phase and the place of a visit."""
        return self.program.pieces[self.program.visits[number].piece].place

    def visits(self) -> list[int]:
        """The numbers of the pieces that are looked at, in order."""
        return [number for number, visit in enumerate(self.program.visits) if visit.times is None]

    def _after(self, number: int, events: int) -> Moment:
        parts: Totals = {}
        for visit, times in zip(self.program.visits[:number], self.times, strict=False):
            for kind, size, count in self._events(visit).left:
                parts[kind] = parts.get(kind, 0) + times * count * self.signed[size]
        here = self._events(self.program.visits[number])
        for change, kind in zip(here.changes[:events], here.kinds, strict=False):
            parts[kind] = parts.get(kind, 0) + self.signed[change]
        return Moment(sum(parts.values()), parts)

    def _events(self, visit: Visit) -> Events:
        return self.program.events[self.program.pieces[visit.piece].events]


def named(place: tuple[str, Any], last_group: int) -> tuple[str, str]:
    """The phase and the name of a place of the tape."""
    phase, where = place
    if phase in ("forward", "loss"):
        return phase, phase
    names = {"loss": "loss's backward", "head": "head's backward", "stem": "embedding's backward"}
    if not isinstance(where, tuple):
        return "backward", names[where]
    if where[0] == "piece":
        return "backward", names["loss"]
    which = "last" if where[1] == last_group else "first" if where[1] == 0 else "middle"
    return "backward", f"{which} block's backward"
