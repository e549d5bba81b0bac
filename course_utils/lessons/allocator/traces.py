"""Lesson 10: small traces to replay, the allocator's reasons at each event, and the counters of a run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from course_utils.allocator.policy import TAKEN, Block, CachingAllocator, DriverCall
from course_utils.allocator.replay import MemorySegment, Playback, Replay, Request, check_replay, replay, requests_of
from course_utils.measurement import Measurement
from course_utils.units import BLOCK, GB, GiB, KiB, MiB, Table, format_bytes

SIZES = {"K": KiB, "": MiB, "M": MiB}
TOKEN = re.compile(r"(?P<name>\w+)=(?P<size>[0-9]*\.?[0-9]+)(?P<unit>[KM]?)|-(?P<freed>\w+)")

RULES = "a=4 b=4 c=4 d=12 e=512K -b f=2 -a -f g=7 -d h=11 i=13"
"""A trace in which each rule of the allocator shows once."""


def trace_of(text: str) -> list[tuple[int, str]]:
    """Events from a text: "a=4 b=512K -a" allocates 4 MiB and 512 KiB and frees the first. ValueError for no trace."""
    events: list[tuple[int, str]] = []
    live: dict[str, int] = {}
    for token in text.split():
        match = TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(f"{token!r} is no event: write a=4 to allocate 4 MiB, b=512K for KiB, -a to free")
        name = match["name"] or match["freed"]
        if (name in live) != bool(match["freed"]):
            raise ValueError(f"{token!r}: {name!r} is {'allocated already' if name in live else 'not allocated'}")
        if match["freed"]:
            events.append((-live.pop(name), name))
        else:
            live[name] = max(1, round(float(match["size"]) * SIZES[match["unit"]]))
            events.append((live[name], name))
    return events


def holes(long_first: bool = False) -> list[tuple[int, str]]:
    """Events of 20 tensors of 4 MiB; the second and fourth of each five, which with `long_first` are allocated last,
    are freed; then a request for 8 MiB.
    """
    names = [f"{'short' if index % 5 in (1, 3) else 'long'}{index}" for index in range(20)]
    order = sorted(names, key=lambda name: name.startswith("short")) if long_first else names
    made = [(4 * MiB, name) for name in order]
    freed = [(-size, name) for size, name in made if name.startswith("short")]
    return [*made, *freed, (8 * MiB, "late")]


def reasons(replayed: Replay) -> list[str]:
    """One sentence for each event that succeeded: the allocator's action and its rule."""
    playback = Playback(replayed.capacity, replayed.choices)
    allocator, told = playback.allocator, list[str]()
    for request in replayed.requests[: len(replayed)]:
        free = {block.address: block.size for run in allocator.segments() for block in run if not block.allocated}
        calls = len(allocator.driver_calls)
        address = playback.perform(request)
        blocks = (block for run in allocator.segments() for block in run)
        block = next(block for block in blocks if block.address <= address < block.end)
        if request.bytes < 0:
            told.append(_freed(request, block, allocator))
            continue
        source = _from_driver(allocator.driver_calls[calls:])
        source = source or f"best fit: a free block of {spelled(free[address])} is there"
        told.append(f"{request.name} asks for {spelled(request.bytes)}; {source}{_rest(block)}.")
    return told


def _from_driver(calls: Sequence[DriverCall]) -> str:
    taken, given_back = (sum(call.bytes for call in calls if TAKEN[call.action] == sign) for sign in (1, -1))
    words = f"{spelled(given_back)} of empty segments go back to the driver, then " if given_back else ""
    return f"{words}no free block holds it, so the driver gives {spelled(taken)}" if taken else ""


def _rest(block: Block) -> str:
    rest, after = block.size - block.requested, block.next
    if rest >= BLOCK:
        return f", which is not split: a rest of {spelled(rest)} is too small for a block of its own"
    if after is not None and after.mapped and not after.allocated:
        return f", and {spelled(after.size)} stay free behind it"
    return ", which it fills"


def _freed(request: Request, block: Block, allocator: CachingAllocator) -> str:
    if block.is_whole_segment:
        return f"{request.name} is freed. Its whole segment is empty now, and is kept: the driver gets nothing back."
    joined = "joined with free neighbors " if block.size - allocator.round_size(-request.bytes) > MiB else ""
    return f"{request.name} is freed: {joined}that is a free block of {spelled(block.size)}. It is kept."


def spelled(size: int) -> str:
    """Bytes in the allocator's own units: "4 MiB", "512 KiB", "1.5 MiB"."""
    units = ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B"))
    unit, name = next((unit, name) for unit, name in units if size >= unit or unit == 1)
    return f"{size / unit:,.4g} {name}"


def times(count: int) -> str:
    """ "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def hole_keepers(replayed: Replay, count: int = 3) -> list[str]:
    """A line for each of the segments with the most free memory next to tensors at the end, with its largest tensor."""
    used = [segment for segment in replayed.blocks_at(len(replayed)) if segment.allocated]
    return [_kept(segment) for segment in sorted(used, key=lambda one: one.allocated - one.bytes)[:count]]


def _kept(segment: MemorySegment) -> str:
    tensors = sorted((block for block in segment.blocks if block.is_allocated), key=lambda block: -block.bytes)
    largest, free = tensors[0], segment.bytes - segment.allocated
    known = largest.allocation
    made = f" ({known.module}, there since step {known.step})" if known else ""
    others = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    return (
        f"{format_bytes(free, 'GB', 2)} of {format_bytes(segment.bytes, 'GB', 2)} free next to {others}, "
        f"the largest {format_bytes(largest.bytes, 'GB', 2)} of {largest.kind.replace('_', ' ') or 'tensors'}{made}"
    )


def states_first(measured: Measurement) -> list[tuple[int, int]]:
    """The events of a run, those of its optimizer's states moved before all others."""
    items = enumerate(measured.allocations)
    states = {number for number, item in items if item.kind == "optimizer_states" and item.died is None}
    requests = [(request.bytes, request.name) for request in requests_of(measured)]
    return sorted(requests, key=lambda request: request[1] not in states)


@dataclass(frozen=True)
class Process:
    """Several runs in one process; `spans` has each one's (first, last), for `replayed.allocated[first:last]`."""

    replayed: Replay
    spans: Mapping[str, tuple[int, int]] = field(repr=False)


def in_one_process(runs: Mapping[str, Measurement]) -> Process:
    """The runs in order, each one's tensors freed when it ends, through one allocator that keeps its cache."""
    events: list[tuple[int, object]] = []
    spans: dict[str, tuple[int, int]] = {}
    for label, measured in runs.items():
        first = len(events)
        live: dict[int, int] = {}
        for size, name, _ in requests_of(measured):
            live[name] = live.get(name, 0) + size
            events.append((size, (label, name)))
        spans[label] = (first, len(events))
        events += [(-size, (label, name)) for name, size in live.items() if size]
    return Process(replay(events), spans)


def counters(replayed: Replay, moments: Mapping[str, int]) -> Table:
    """The counters at each moment, given as name to number of events: two of them replayed, two unknown here."""

    def shown(curve: Sequence[int]) -> list[str]:
        return [format_bytes(curve[event - 1], "GB", 2) for event in moments.values()]

    unknown = ["only a GPU can say"] * len(moments)
    rows = [
        ("counter", "read it by", *moments),
        ("allocated", "torch.cuda.memory_allocated()", *shown(replayed.allocated)),
        ("reserved", "torch.cuda.memory_reserved()", *shown(replayed.reserved)),
        ("the driver's figure", "torch.cuda.mem_get_info(), nvidia-smi", *unknown),
        ("the context", "the driver's figure before the first tensor", *unknown),
    ]
    return Table(rows, words=2)


def beyond_simulation() -> str:
    """Context and workspaces as recorded on real GPUs; a sentence where nothing is recorded."""
    from course_utils.measuring.recorded import newest

    parts = (("context", "context"), ("workspaces", "together"))
    found = sorted((item.device, kind, item.parts[kind][part]) for kind, part in parts for item in newest(kind))
    return "\n".join(f"{device}, {name}: {format_bytes(size)}" for device, name, size in found) or (
        "No recording of a real GPU is shipped yet, so this course has no figure for the context or for\n"
        "cuBLAS's workspaces, and invents none. On a machine with a GPU this measures them:\n"
        "python3 -m course_utils record"
    )


def live_counters(measured: Measurement) -> str:
    """The GPU's own counters if this was measured on one; else a sentence that says why there are none."""
    if not measured.counters:
        return f"No GPU counted anything here: this is {measured.provenance}."
    rows = (f"{name}: {format_bytes(size, 'GB', 3)}" for name, size in measured.counters.items())
    return "\n".join([*rows, str(measured.provenance)])


def curves(replayed: Replay, points: int = 400) -> dict[str, tuple[list[float], list[float]]]:
    """Reserved and allocated GB for `lines`: the highest value of each of about `points` stretches."""
    check_replay(replayed)
    step = max(1, -(-len(replayed) // points))
    starts = range(0, len(replayed), step)

    def highest(curve: Sequence[int]) -> list[float]:
        return [max(curve[start : start + step]) / GB for start in starts]

    at = [float(min(start + step, len(replayed))) for start in starts]
    return {"reserved": (at, highest(replayed.reserved)), "allocated": (at, highest(replayed.allocated))}
