"""Lesson 10: small traces to replay, what the allocator does at each event, and the counters of a run side by side."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from course_utils.allocator.policy import CachingAllocator
from course_utils.allocator.replay import MemorySegment, Playback, Replay, Request, check_replay, replay, requests_of
from course_utils.measurement import Measurement
from course_utils.units import GB, GiB, KiB, MiB, aligned, format_bytes

Event = tuple[int, str]
"""Bytes, positive to allocate and negative to free, and the tensor's name."""

SIZES = {"K": KiB, "": MiB, "M": MiB}
TOKEN = re.compile(r"(?P<name>\w+)=(?P<size>[0-9]*\.?[0-9]+)(?P<unit>[KM]?)|-(?P<freed>\w+)")

RULES = "a=4 b=4 c=4 d=12 e=512K -b f=2 -a -f g=7 -d h=11 i=13"
"""A trace in which each rule of the allocator shows once."""


def trace_of(text: str) -> list[Event]:
    """The events that a text spells: "a=4 b=512K -a" allocates 4 MiB and 512 KiB, then frees the first.

    Raises ValueError, in words, for what is no event, for a name that is taken and for one that is not there.
    """
    events: list[Event] = []
    live: dict[str, int] = {}
    for token in text.split():
        match = TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(f"{token!r} is no event: write a=4 to allocate 4 MiB, b=512K for KiB, -a to free")
        if match["freed"]:
            if match["freed"] not in live:
                raise ValueError(f"{token!r} frees {match['freed']!r}, which is not allocated")
            events.append((-live.pop(match["freed"]), match["freed"]))
            continue
        name, size = match["name"], round(float(match["size"]) * SIZES[match["unit"]])
        if name in live or size < 1:
            raise ValueError(f"{token!r}: {'that name is taken' if name in live else 'a tensor has at least a byte'}")
        live[name] = size
        events.append((size, name))
    return events


def holes(long_first: bool = False) -> list[Event]:
    """Twenty tensors of 4 MiB, of which the eight short-lived ones are freed; then a request for 8 MiB.

    As a step makes them, of each five the second and fourth are short-lived. With `long_first` all long-lived ones are
    allocated before the first short-lived one.
    """
    short = [index % 5 in (1, 3) for index in range(20)]
    order = sorted(range(20), key=lambda index: short[index]) if long_first else list(range(20))
    made = [(4 * MiB, f"{'short' if short[index] else 'long'}{index}") for index in order]
    freed = [(-size, name) for size, name in made if name.startswith("short")]
    return [*made, *freed, (8 * MiB, "late")]


# ------------------------------------------------------------------------------------------ what it does, in words


def reasons(replayed: Replay) -> list[str]:
    """For each event that succeeded: what the allocator did, and by which rule."""
    check_replay(replayed)
    playback = Playback(CachingAllocator(replayed.capacity, **replayed.choices))
    allocator, told = playback.allocator, list[str]()
    for request in replayed.requests[: len(replayed)]:
        free = {block.address: block.size for run in allocator.segments() for block in run if not block.allocated}
        calls, before = len(allocator.driver_calls), allocator.reserved
        address = playback.perform(request)
        if request.bytes < 0:
            told.append(_freed(request, address, allocator))
            continue
        taken = allocator.block_size(address)
        source = (
            _from_driver(allocator, calls, before) or f"best fit: a free block of {spelled(free[address])} is there"
        )
        told.append(f"{request.name} asks for {spelled(request.bytes)}; {source}{_rest(address, taken, allocator)}.")
    return told


def _from_driver(allocator: CachingAllocator, calls: int, before: int) -> str:
    """What was asked of the driver since there were `calls` calls and `before` bytes reserved; "" for nothing."""
    new = allocator.driver_calls[calls:]
    given_back = sum(call.bytes for call in new if call.action.endswith(("free", "unmap")))
    words = f"{spelled(given_back)} of empty segments go back to the driver, then " if given_back else ""
    taken = allocator.reserved - before + given_back
    return f"{words}no free block holds it, so the driver gives {spelled(taken)}" if new else ""


def _rest(address: int, taken: int, allocator: CachingAllocator) -> str:
    """What became of the part of a block that the request does not need."""
    run = next(run for run in allocator.segments() if any(block.address == address for block in run))
    block = next(block for block in run if block.address == address)
    after = next((other for other in run if other.address == address + taken), None)
    if block.requested < taken - 511:
        return f", which is not split: a rest of {spelled(taken - block.requested)} is too small for a block of its own"
    if after is not None and not after.allocated:
        return f", of which {spelled(after.size)} stay free behind it"
    return ", which it fills"


def _freed(request: Request, address: int, allocator: CachingAllocator) -> str:
    """Where the memory of a tensor is after it was freed."""
    run = next(run for run in allocator.segments() if run[0].address <= address < run[-1].end)
    block = next(block for block in run if block.address <= address < block.end)
    if block.is_whole_segment:
        return f"{request.name} is freed. Its whole segment is empty now, and is kept: the driver gets nothing back."
    joined = "joined with free neighbors " if block.size - allocator.round_size(-request.bytes) > MiB else ""
    return f"{request.name} is freed: {joined}that is a free block of {spelled(block.size)}. It is kept."


def spelled(size: int) -> str:
    """Bytes in the allocator's own units: "4 MiB", "512 KiB", "1.5 MiB"."""
    unit, name = next(((unit, name) for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if size >= unit),
                      (1, "B"))  # fmt: skip
    return f"{size / unit:,.4g} {name}"


# ------------------------------------------------------------------------------------------- holes of a real step


def times(count: int) -> str:
    """ "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def hole_keepers(replayed: Replay, event: int | None = None, count: int = 3) -> list[str]:
    """The `count` segments with the most free memory beside tensors after `event` (at the end without it), in words.

    Each line says what is free, and which tensors keep it from the driver: kind, bytes, the largest one and its step.
    """
    check_replay(replayed)
    segments = replayed.blocks_at(len(replayed) if event is None else event)
    used = [segment for segment in segments if segment.allocated]
    return [_kept(segment) for segment in sorted(used, key=lambda one: one.allocated - one.bytes)[:count]]


def _kept(segment: MemorySegment) -> str:
    tensors = sorted((block for block in segment.blocks if block.is_allocated), key=lambda block: -block.bytes)
    largest, free = tensors[0], segment.bytes - segment.allocated
    known = largest.allocation
    made = f" ({known.module}, there since step {known.step})" if known else ""
    beside = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    return (
        f"{format_bytes(free, 'GB', 2)} of {format_bytes(segment.bytes, 'GB', 2)} free beside {beside}, "
        f"the largest {format_bytes(largest.bytes, 'GB', 2)} of {largest.kind.replace('_', ' ') or 'tensors'}{made}"
    )


def states_first(measured: Measurement) -> list[tuple[int, int]]:
    """The events of a run as if its optimizer had made its states before the first step, and else as they were."""
    requests, states = requests_of(measured), []
    for number, item in enumerate(measured.allocations):
        if item.kind == "optimizer_states" and item.died is None:
            states.append(number)
    early = set(states)
    moved = [(request.bytes, request.name) for request in requests if request.name in early]
    return [*moved, *((request.bytes, request.name) for request in requests if request.name not in early)]


# ------------------------------------------------------------------------------------------------------ many runs


@dataclass(frozen=True)
class Process:
    """Several runs, one after the other, in one process with one allocator.

    `spans` says for each run, by its label, from which event to which it went: `replayed.allocated[first:last]`.
    """

    replayed: Replay
    spans: Mapping[str, tuple[int, int]] = field(repr=False)


def in_one_process(runs: Mapping[str, Measurement]) -> Process:
    """The runs in order, each one's tensors freed when it ends, through one allocator that keeps its cache."""
    events: list[tuple[int, object]] = []
    spans: dict[str, tuple[int, int]] = {}
    for label, measured in runs.items():
        first = len(events)
        live: dict[int, int] = {}
        for size, name in requests_of(measured):
            live[name] = live.get(name, 0) + size
            events.append((size, (label, name)))
        spans[label] = (first, len(events))
        events += [(-size, (label, name)) for name, size in live.items() if size]
    return Process(replay(events), spans)


# ---------------------------------------------------------------------------------------------------- the counters


@dataclass(frozen=True, repr=False)
class Counters:
    """What each counter says at some moments of a run: `rows` holds (counter, how to read it, a text a moment)."""

    moments: Sequence[str]
    rows: Sequence[tuple[str, str, Sequence[str]]]

    def _table(self) -> Iterator[tuple[str, ...]]:
        yield ("counter", "read it by", *self.moments)
        for counter, how, shown in self.rows:
            yield (counter, how, *shown)

    def __repr__(self) -> str:
        return aligned(self._table(), words=2 + len(self.moments))

    def _repr_html_(self) -> str:
        head, *body = self._table()
        rows = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
        for counter, how, *shown in body:
            cells = [f"<td style='text-align:left'>{escape(counter)}</td>"]
            cells += [f"<td style='text-align:left'><code>{escape(how)}</code></td>"]
            rows.append(f"<tr>{''.join([*cells, *(f'<td>{escape(text)}</td>' for text in shown)])}</tr>")
        return f"<table>{''.join(rows)}</table>"


ONLY_A_GPU = "only a GPU can say"


def counters(replayed: Replay, moments: Mapping[str, int]) -> Counters:
    """What the counters say at each moment, given as name to number of events: two of them replayed, two unknown here.

    Raises TypeError for what is no replay, ValueError for an event that the replay has not reached.
    """
    check_replay(replayed)
    for name, event in moments.items():
        if not 1 <= event <= len(replayed):
            raise ValueError(f"{name!r} is event {event}: this replay has events 1 to {len(replayed)}")

    def shown(curve: Sequence[int]) -> list[str]:
        return [format_bytes(curve[event - 1], "GB", 2) for event in moments.values()]

    unknown = [ONLY_A_GPU] * len(moments)
    return Counters(
        list(moments),
        [
            ("allocated", "torch.cuda.memory_allocated()", shown(replayed.allocated)),
            ("reserved", "torch.cuda.memory_reserved()", shown(replayed.reserved)),
            ("the driver's figure", "torch.cuda.mem_get_info(), nvidia-smi", unknown),
            ("the context", "the driver's figure before the first tensor", unknown),
        ],
    )


def beyond_simulation() -> str:
    """What is known, from recordings of real GPUs, of the context and the workspaces; plain words where nothing is."""
    from course_utils.measuring.recorded import MEASURED, TERMS, hardware_terms, recordings

    devices = sorted({item.device for item in recordings() if item.kind in TERMS and item.status == MEASURED})
    if not devices:
        return (
            "No recording of a real GPU is shipped yet, so this course has no figure for the context or for\n"
            "cuBLAS's workspaces, and invents none. On a machine with a GPU this measures them:\n"
            "python3 -m course_utils record"
        )
    lines = []
    for device in devices:
        terms = hardware_terms(device)
        lines += [f"{device}, {name}: {format_bytes(terms[name])}" for name in TERMS if name in terms]
    return "\n".join(lines)


def live_counters(measured: Measurement) -> str:
    """The GPU's own counters if this was measured on one; else, in words, why there are none."""
    if not measured.counters:
        return f"No GPU counted anything here: this is {measured.provenance}."
    told = {"allocated": "max_memory_allocated", "reserved": "max_memory_reserved", "driver": "the driver"}
    rows = [f"{told[name]}: {format_bytes(size, 'GB', 3)}" for name, size in measured.counters.items() if name in told]
    return "\n".join([*rows, str(measured.provenance)])


def curves(replayed: Replay, points: int = 400) -> dict[str, tuple[list[float], list[float]]]:
    """What was reserved and allocated, in GB, for `lines`: the highest of each of about `points` stretches."""
    check_replay(replayed)
    step = max(1, -(-len(replayed) // points))
    starts = range(0, len(replayed), step)

    def highest(curve: Sequence[int]) -> list[float]:
        return [max(curve[start : start + step]) / GB for start in starts]

    at = [float(min(start + step, len(replayed))) for start in starts]
    return {"reserved": (at, highest(replayed.reserved)), "allocated": (at, highest(replayed.allocated))}
