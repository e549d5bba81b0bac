"""Lesson 12: small traces to replay, and the allocator's reason at each event."""

import re
from collections.abc import Sequence

from ...allocator.policy import TAKEN, Block, CachingAllocator, DriverCall
from ...allocator.replay import Playback, Replay, Request
from ...units import BLOCK, GiB, KiB, MiB

SIZES = {"K": KiB, "": MiB, "M": MiB}
TOKEN = re.compile(r"(?P<name>\w+)=(?P<size>[0-9]*\.?[0-9]+)(?P<unit>[KM]?)|-(?P<freed>\w+)")
# A trace: each rule of the allocator shows once.
RULES = "a=4 b=4 c=4 d=12 e=512K -b f=2 -a -f g=7 -d h=11 i=13"


def trace_of(text: str) -> list[tuple[int, str]]:
    """Events from a text: "a=4 b=512K -a" allocates 4 MiB and 512 KiB and frees the first.

    Raises ValueError for a text that is no trace.
    """
    events = list[tuple[int, str]]()
    live = dict[str, int]()
    for token in text.split():
        match = TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(
                f"{token!r} is not an event: write a=4 to allocate 4 MiB, b=512K for KiB, -a to free"
            )
        name = match["name"] or match["freed"]
        if (name in live) != bool(match["freed"]):
            state = "allocated already" if name in live else "not allocated"
            raise ValueError(f"{token!r}: {name!r} is {state}")
        if match["freed"]:
            events.append((-live.pop(name), name))
        else:
            live[name] = max(1, round(float(match["size"]) * SIZES[match["unit"]]))
            events.append((live[name], name))
    return events


def reasons(replayed: Replay) -> list[str]:
    """One sentence for each event that succeeded: the allocator's action and its rule."""
    playback = Playback(replayed.capacity, replayed.choices)
    allocator = playback.allocator
    told = list[str]()
    for request in replayed.requests[: len(replayed)]:
        # Before the request: the free blocks, and how often the driver was called.
        blocks = [block for run in allocator.segments() for block in run]
        free = {block.address: block.size for block in blocks if not block.allocated}
        calls = len(allocator.driver_calls)
        address = playback.perform(request)
        blocks = [block for run in allocator.segments() for block in run]
        block = next(block for block in blocks if block.address <= address < block.end)
        if request.bytes < 0:
            told.append(_freed(request, block, allocator))
            continue
        source = _from_driver(allocator.driver_calls[calls:])
        source = source or f"best fit: a free block of {spelled(free[address])} is there"
        told.append(f"{request.name} asks for {spelled(request.bytes)}; {source}{_rest(block)}.")
    return told


def _from_driver(calls: Sequence[DriverCall]) -> str:
    """The memory that the driver gave for a request, and took back for it; "" where it was not called."""
    taken = sum(call.bytes for call in calls if TAKEN[call.action] == 1)
    given_back = sum(call.bytes for call in calls if TAKEN[call.action] == -1)
    if not taken:
        return ""
    words = f"no free block holds it, so the driver gives {spelled(taken)}"
    if given_back:
        words = f"{spelled(given_back)} of empty segments go back to the driver, then {words}"
    return words


def _rest(block: Block) -> str:
    rest = block.size - block.requested
    after = block.next
    if rest >= BLOCK:
        return f", which is not split: a rest of {spelled(rest)} is too small for a block of its own"
    if after is not None and after.mapped and not after.allocated:
        return f", and {spelled(after.size)} stay free behind it"
    return ", which it fills"


def _freed(request: Request, block: Block, allocator: CachingAllocator) -> str:
    if block.is_whole_segment:
        return (
            f"{request.name} is freed. "
            "Its whole segment is empty now, and is kept: the driver gets nothing back."
        )
    grown = block.size - allocator.round_size(-request.bytes)
    joined = " and joined with free neighbors" if grown > MiB else ""
    return f"{request.name} is freed{joined}: now a block of {spelled(block.size)} is free, and is kept."


def spelled(size: int) -> str:
    """Bytes in the allocator's own units: "4 MiB", "512 KiB", "1.5 MiB"."""
    units = ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B"))
    unit, name = next((unit, name) for unit, name in units if size >= unit or unit == 1)
    return f"{size / unit:,.4g} {name}"
