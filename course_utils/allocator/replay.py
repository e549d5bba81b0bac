"""A training step's allocations sent through the caching allocator: what it reserves, where tensors lie."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from numbers import Integral
from typing import Any, NamedTuple

from ..measurement import Allocation, Mark, Measurement, step_peaks
from ..units import format_bytes, html_table, parse_bytes
from .policy import TAKEN, Block, CachingAllocator, DriverCall, OutOfMemory, releasable_range
from .settings import check_names

EMPTY_CACHE = (0, "empty_cache")
"""The event at which a program gives back to the driver what holds no tensor."""


class Request(NamedTuple):
    """One event: `bytes` allocated (positive) on a stream or freed (negative), under the same `name`."""

    bytes: int
    name: Any
    stream: int = 0


@dataclass(frozen=True)
class MemoryBlock:
    """A block at some event: its address, its bytes, and what lies in it.

    `kind` is the kind of memory, "free" for a free block, "" where the events did not say. `requested` are
    the bytes that were asked for. Of a free block, `releasable` are the addresses between which it could be
    given back.
    """

    address: int
    bytes: int
    kind: str
    requested: int = 0
    name: Any = None
    allocation: Allocation | None = None
    releasable: tuple[int, int] = (0, 0)

    @property
    def is_allocated(self) -> bool:
        """True if it holds a tensor."""
        return self.kind != "free"


@dataclass(frozen=True)
class MemorySegment:
    """An unbroken range of memory that the allocator holds for a stream, and its blocks by address."""

    address: int
    bytes: int
    small: bool
    expandable: bool
    blocks: Sequence[MemoryBlock]
    stream: int = 0

    @property
    def allocated(self) -> int:
        """Bytes of its blocks that hold a tensor."""
        return sum(block.bytes for block in self.blocks if block.is_allocated)


@dataclass(frozen=True, repr=False)
class Replay:
    """The allocator's figures for a run's allocations. Every list has one value for each event, in bytes.

    `requested`: what the tensors asked for; `allocated`: the blocks that hold them
    (torch.cuda.memory_allocated); `reserved`: what was taken from the driver (torch.cuda.memory_reserved);
    `stuck`: free, but in the same segment as something that is allocated; `largest_free`: the largest free
    block. Where the GPU was too small, the lists end before the event that failed, and `failure` is the
    error.
    """

    requests: Sequence[Request] = field(repr=False)
    capacity: int | None
    choices: dict[str, Any]
    requested: Sequence[int]
    allocated: Sequence[int]
    reserved: Sequence[int]
    stuck: Sequence[int]
    largest_free: Sequence[int]
    driver_calls: Sequence[DriverCall]
    retries: int
    failure: OutOfMemory | None = None
    allocations: Sequence[Allocation] = ()
    marks: Sequence[Mark] = ()
    provenance: str = ""
    descending: bool = False

    def __len__(self) -> int:
        return len(self.reserved)

    @property
    def peak_allocated(self) -> int:
        """The most bytes in allocated blocks at once (torch.cuda.max_memory_allocated)."""
        return max(self.allocated, default=0)

    @property
    def peak_reserved(self) -> int:
        """The most bytes reserved at once (torch.cuda.max_memory_reserved)."""
        return max(self.reserved, default=0)

    @property
    def peak_event(self) -> int:
        """The number of events that had happened when the most bytes were allocated."""
        return self.allocated.index(self.peak_allocated) + 1 if self.allocated else 0

    @property
    def fragmentation(self) -> list[float]:
        """`stuck` / `reserved` after each event: the share of the reserved memory that cannot be returned."""
        return [stuck / max(1, reserved) for stuck, reserved in zip(self.stuck, self.reserved, strict=True)]

    @property
    def failed_at(self) -> int | None:
        """The number of the event that found no room (the first event is 1); None if all did."""
        return None if self.failure is None else len(self) + 1

    @property
    def message(self) -> str:
        """The allocator's message when it found no room; "" if it always did."""
        return "" if self.failure is None else str(self.failure)

    def step_peaks(self) -> dict[int, int]:
        """The most bytes in allocated blocks within each step, by its number; needs a measurement's marks."""
        return step_peaks(self.marks, self.allocated)

    def moment(self, event: int) -> str:
        """The place of `event`: "step 2, backward"; "set-up" before the first step, "" without marks."""
        index = bisect_right([mark.event for mark in self.marks], event - 1) - 1
        if index < 0:
            return "set-up" if self.marks else ""
        mark = self.marks[index]
        return f"step {mark.step}, {mark.phase.replace('_', ' ')}"

    def blocks_at(self, event: int | None = None) -> list[MemorySegment]:
        """The segments and their blocks after `event` events (without it: at the peak), by address.

        Raises ValueError for an event that the replay has not reached.
        """
        event = self.peak_event if event is None else event
        if type(event) is not int or not 0 <= event <= len(self):
            raise ValueError(f"event {event!r} does not exist: this replay has events 0 to {len(self)}")
        run = Playback(self.capacity, self.choices, self.descending)
        for request in self.requests[:event]:
            run.perform(request)
        found = []
        for blocks in run.allocator.segments():
            size = sum(block.size for block in blocks)
            described = [self._block(block, run) for block in blocks]
            first = blocks[0]
            pool = first.pool
            found.append(
                MemorySegment(first.address, size, pool.small, first.expandable, described, pool.stream)
            )
        return found

    def _block(self, block: Block, run: "Playback") -> MemoryBlock:
        if not block.allocated:
            return MemoryBlock(block.address, block.size, "free", releasable=releasable_range(block))
        name = run.names[block.address]
        known = self.allocations[name] if self.allocations else None
        kind = known.kind if known else ""
        return MemoryBlock(block.address, block.size, kind, block.requested, name, known)

    def __repr__(self) -> str:
        lines = [f"{name:<28}{value}" for name, value in self._rows()]
        if self.message:
            lines.append(self.message)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        table = html_table(self._rows(), header=False)
        if self.failure is None:
            return table
        return f"{table}<p>{escape(self.message)}</p>"

    def _rows(self) -> list[tuple[str, str]]:
        at = self.peak_event - 1
        if at < 0:
            return [("events", "0")]
        stuck = f"{format_bytes(self.stuck[at], 'GB', 3)} ({100 * self.fragmentation[at]:.1f} %)"
        tensors = sum(request.bytes > 0 for request in self.requests[: len(self)])
        taken = sum(TAKEN[call.action] > 0 for call in self.driver_calls)
        return [
            ("allocated at the peak", format_bytes(self.allocated[at], "GB", 3)),
            ("reserved then", format_bytes(self.reserved[at], "GB", 3)),
            ("stuck in used segments", stuck),
            ("largest free block", format_bytes(self.largest_free[at], "GB", 3)),
            ("most ever reserved", format_bytes(self.peak_reserved, "GB", 3)),
            ("calls for driver memory", f"{taken:,} for {tensors:,} tensors"),
            ("retries", f"{self.retries:,}"),
        ]


def replay(
    source: Measurement | Iterable[tuple[int, Any]],
    capacity: int | str | None = None,
    *,
    descending: bool = False,
    **choices: Any,
) -> Replay:
    """Send every allocation and free of `source` through a `CachingAllocator` and note what happens.

    `source` is a measurement that knows all its allocations, as `measure(run, "simulated")` does, or events:
    (bytes, name) pairs, positive to allocate and negative to free under one name, and (0, "empty_cache").
    `capacity` is the GPU's memory for tensors, in bytes or as in "60 MB"; the others are those of
    `AllocatorSettings`: `replay(measured, gpu("V100-32GB").memory, expandable_segments=True)`. With
    `descending` each segment lies below those before it, as CUDA's driver places most: torch before 2.13
    tells equal free blocks apart by their addresses (pytorch's pull request 183591 ended that). A GPU that is
    too small ends the replay: see `failed_at` and `message`. Raises ValueError for a measurement that has
    kept only part of its allocations, for events that free what is not there, and for an unknown choice;
    TypeError for anything else.
    """
    check_names(choices)
    capacity = None if capacity is None else parse_bytes(capacity)
    allocations: Sequence[Allocation] = ()
    marks = list[Mark]()
    provenance = ""
    if isinstance(source, Measurement):
        requests = requests_of(source)
        allocations = source.allocations
        marks = list(source.timeline.marks)
        provenance = str(source.provenance)
    else:
        requests = _checked(source)
    run = Playback(capacity, choices, descending)
    failure = None
    try:
        for request in requests:
            run.perform(request)
            run.note()
    except OutOfMemory as error:
        failure = error
    return Replay(
        requests=requests,
        capacity=capacity,
        choices=choices,
        **run.curves,
        driver_calls=run.allocator.driver_calls,
        retries=run.allocator.retries,
        failure=failure,
        allocations=allocations,
        marks=marks,
        provenance=provenance,
        descending=descending,
    )


def check_replay(replayed: Any) -> None:
    """Raises TypeError, saying what to write, unless this is what `replay` returns."""
    if isinstance(replayed, Replay):
        return
    how = {
        "Measurement": "replay it first: replayed = replay(measured)",
        "TrainingRun": "measure and replay it first: replayed = replay(measure(run))",
    }
    kind = type(replayed).__name__
    known = how.get(kind, "give what replay(measured) returns")
    raise TypeError(f"this takes a replay, and was given a {kind}: {known}")


class Playback:
    """An allocator on its way through the events, the name at each address, and the curves so far."""

    def __init__(self, capacity: int | None, choices: Mapping[str, Any], descending: bool = False) -> None:
        self.allocator = CachingAllocator(capacity, descending=descending, **choices)
        self.addresses: dict[Any, int] = {}
        self.names: dict[int, Any] = {}
        self.curves: dict[str, list[int]] = {
            name: [] for name in ("requested", "allocated", "reserved", "stuck", "largest_free")
        }

    def perform(self, request: Request) -> int:
        """Allocate or free; returns the address, 0 where the cache is emptied."""
        if request.bytes == 0:
            self.allocator.empty_cache()
            return 0
        if request.bytes > 0:
            address = self.allocator.malloc(request.bytes, request.stream)
            self.addresses[request.name] = address
            self.names[address] = request.name
            return address
        address = self.addresses.pop(request.name)
        del self.names[address]
        self.allocator.free(address)
        return address

    def note(self) -> None:
        """Add the state after an event to the curves."""
        for name, curve in self.curves.items():
            curve.append(getattr(self.allocator, name))


def requests_of(measured: Measurement) -> list[Request]:
    """Every event with its allocation's number. Raises ValueError unless a measurement kept all of them."""
    events = _events_of(measured)
    missing = events.count(None)
    if missing:
        raise ValueError(
            f"this measurement ({measured.provenance}) does not say which allocation begins or ends at"
            f" {missing:,} of its {len(events):,} events, so they cannot be replayed. Recorded measurements"
            " keep only what was alive at the peak: measure the run with source='simulated' (or 'live') and"
            " replay that."
        )
    return [event for event in events if event is not None]


def can_be_replayed(measured: Measurement) -> bool:
    """True if a measurement kept all its allocations."""
    return None not in _events_of(measured)


def _events_of(measured: Measurement) -> list[Request | None]:
    """Every event with its allocation's number; None where no allocation that was kept begins or ends."""
    events: list[Request | None] = [None] * len(measured.timeline)
    changes = measured.timeline.changes
    for number, item in enumerate(measured.allocations):
        for event, size in ((item.born, item.bytes), (item.died, -item.bytes)):
            if event is not None and event < len(events) and changes[event][0] == size:
                events[event] = Request(size, number, item.stream)
    return events


def _checked(events: Any) -> list[Request]:
    """The events, if they can be replayed. Raises TypeError and ValueError, saying what to give instead."""
    if not isinstance(events, Iterable) or isinstance(events, (str, bytes, Mapping)):
        how = "a measurement, such as measure(run), or (bytes, name) pairs"
        raise TypeError(f"replay takes what a step allocated, and was given a {type(events).__name__}: {how}")
    requests: list[Request] = []
    live: dict[Any, int] = {}
    for number, event in enumerate(events, start=1):
        if not isinstance(event, Sequence) or len(event) != 2 or not isinstance(event[0], Integral):
            raise TypeError(
                f"{event!r} is not an event, a pair of whole bytes and a name such as (1024, 'weights')"
            )
        size = int(event[0])
        name = event[1]
        requests.append(Request(size, name))
        if (size, name) == EMPTY_CACHE:
            continue
        if size > 0:
            if name in live:
                raise ValueError(
                    f"event {number} allocates {name!r}, which is allocated already: free it first"
                )
            live[name] = size
            continue
        allocated = live.pop(name, 0)
        if size == 0 or size != -allocated:
            raise ValueError(
                f"event {number} is ({size}, {name!r}):"
                f" a free is minus the bytes that {name!r} was allocated with"
            )
    return requests
