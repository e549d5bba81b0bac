"""torch's memory snapshots: a GPU's history replayed through our allocator, and replays written for torch.

A snapshot is what `torch.cuda.memory._dump_snapshot(path)` writes after `_record_memory_history()`, and what
https://pytorch.org/memory_viz and `torch.cuda._memory_viz` read.
"""

import io
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..measurement import Allocation, Measurement
from ..units import GB, MiB, format_bytes, parse_bytes, plus_minus
from .policy import TAKEN, CachingAllocator
from .replay import MemoryBlock, MemorySegment, Playback, Replay, Request, check_replay, replay
from .settings import settings

GIVEN_BACK = ("segment_free", "segment_unmap")
DEFAULT_POOL = (0, 0)

MOST = GB  # bytes of a file that a browser still opens


@dataclass(frozen=True, repr=False)
class Agreement:
    """A GPU's history and its replay: `real` and `replayed` bytes reserved after each allocation and free."""

    real: Sequence[int] = field(repr=False)
    replayed: Sequence[int] = field(repr=False)
    allocations: int

    @property
    def differences(self) -> list[int]:
        """Replayed minus real, in bytes, after each allocation and free."""
        return [ours - theirs for ours, theirs in zip(self.replayed, self.real, strict=True)]

    @property
    def exact(self) -> bool:
        """True if the replay reserved the same bytes at every moment."""
        return not any(self.differences)

    @property
    def largest_difference(self) -> int:
        """The difference that is farthest from zero, in bytes, with its sign."""
        return max(self.differences, key=abs, default=0)

    @property
    def first_difference(self) -> int | None:
        """After how many allocations and frees the two first differ; None if they never do."""
        return next((number for number, gap in enumerate(self.differences, start=1) if gap), None)

    def __repr__(self) -> str:
        peak = max(self.real, default=0)
        ours = max(self.replayed, default=0)
        compared = f"{len(self.real):,} moments, {self.allocations:,} allocations"
        peaks = f"most reserved {format_bytes(peak, 'GB', 3)}, replayed {format_bytes(ours, 'GB', 3)}"
        if self.exact:
            return f"equal at every one of {compared}; {peaks}"
        gap = f"differs by up to {plus_minus(self.largest_difference)} B, first at {self.first_difference:,}"
        return f"{gap} of {compared}; {peaks}"


def compare_with_gpu(snapshot: Mapping[str, Any], device: int = 0) -> Agreement:
    """Replay the history in a snapshot under the settings that it names, and compare what is reserved.

    The history must begin before the first tensor: call `_record_memory_history(max_entries=…)` first, with
    room for all entries. Where the GPU gave memory back (`empty_cache()`, or a failed allocation), so does
    the replay. Raises ValueError for a history that is missing or cut off, and for memory pools of CUDA
    graphs.

    Of equal free blocks torch 2.11 uses the one at the lowest address, and torch 2.13 one of the oldest
    segment. So segments lie where the driver placed them or in the order in which they came: the order that
    differs less.
    """
    history, held = _history(snapshot, device)
    choices = _choices(snapshot)
    placed = _follow(history, held, choices, as_placed=True)
    if placed.exact:
        return placed
    in_order = _follow(history, held, choices, as_placed=False)
    return min(placed, in_order, key=lambda agreement: sum(gap != 0 for gap in agreement.differences))


def _follow(history: list[dict[str, Any]], held: int, choices: dict[str, Any], as_placed: bool) -> Agreement:
    """Do what the GPU's allocator did."""
    allocator = CachingAllocator(**choices)
    live = dict[Any, int]()
    offered: list[tuple[int, int]] = []  # segments that the GPU took for the allocation that follows
    real = list[int]()
    replayed = list[int]()
    reserved = 0
    allocations = 0
    before = ""
    for entry in history:
        action = entry["action"]
        address = entry.get("addr")
        if action in TAKEN:
            reserved += TAKEN[action] * entry["size"]
            if as_placed and action == "segment_alloc" and address is not None:  # older recordings have none
                offered.append((entry["size"], address))
            if action in GIVEN_BACK and before not in GIVEN_BACK:
                allocator.empty_cache()
        elif action in ("alloc", "free_completed"):
            if action == "alloc":
                allocations += 1
                allocator.offered = offered
                live[address] = allocator.malloc(entry["size"], entry["stream"])
            elif address in live:
                allocator.free(live.pop(address))
            else:
                raise ValueError(_cut_off(f"it frees address {address}, whose allocation it does not hold"))
            offered = []
            real.append(reserved)
            replayed.append(allocator.reserved)
        before = action
    if reserved != held:
        raise ValueError(_cut_off(f"it accounts for {reserved:,} of the {held:,} bytes that the GPU holds"))
    return Agreement(real, replayed, allocations)


def _cut_off(evidence: str) -> str:
    return (
        f"this history does not start with the program's first allocation: {evidence}. Call "
        "torch.cuda.memory._record_memory_history(max_entries=1_000_000) before the first tensor is made."
    )


def _history(snapshot: Mapping[str, Any], device: int) -> tuple[list[dict[str, Any]], int]:
    """Every entry of the GPU's history, and the bytes that it holds now."""
    if snapshot.get("left_out"):
        raise ValueError(
            f"this snapshot is incomplete, so its history cannot be replayed: {snapshot['left_out']}"
        )
    traces = snapshot["device_traces"]
    if not 0 <= device < len(traces) or not traces[device]:
        raise ValueError(
            f"this snapshot holds no history of GPU {device}:"
            " call torch.cuda.memory._record_memory_history() first"
        )
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    for segment in segments:
        pool = tuple(segment.get("segment_pool_id", DEFAULT_POOL))
        if pool != DEFAULT_POOL:
            raise ValueError(
                f"this snapshot has a memory pool of its own {pool}, as CUDA graphs make; it is not replayed"
            )
    return traces[device], sum(segment["total_size"] for segment in segments)


def _choices(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under which the GPU's allocator ran: the text that was set, or the values in force."""
    told = snapshot.get("allocator_settings", {})
    if told.get("PYTORCH_CUDA_ALLOC_CONF"):
        return settings(told["PYTORCH_CUDA_ALLOC_CONF"])
    chosen: dict[str, Any] = {"expandable_segments": told.get("expandable_segments", False)}
    limit = told.get("max_split_size", -1)
    if 0 < limit < 1 << 44:  # torch writes its "no limit" as -1, or as nearly all addresses
        chosen["max_split_size_mb"] = limit // MiB
    return chosen


def read_snapshot(path: str | Path) -> dict[str, Any]:
    """The snapshot in a file, as a dictionary. Raises ValueError for anything that is not one.

    A pickle can run anything, this one nothing: whatever is not a plain container, number or text is refused.
    """
    path = Path(path)
    try:
        content = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path.name!r} to read a snapshot from") from None
    except Exception as error:
        # A damaged pickle can fail in any way: with IndexError, KeyError, UnicodeDecodeError, …
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path.name} is not a memory snapshot, or it is damaged ({problem})") from None
    parts: list[Any] = [None]
    if isinstance(content, dict):
        parts = [content.get("segments"), content.get("device_traces")]
    if not all(isinstance(part, list) for part in parts):
        raise ValueError(
            f"{path.name} holds no memory snapshot: that has two lists, 'segments' and 'device_traces'"
        )
    return content


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles what needs no import, and so runs no code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it asks for {module_name}.{global_name}, which a memory snapshot never needs."
            " The file was not opened"
        )


Frames = Callable[[Allocation | None, Any], list[dict[str, Any]]]


def snapshot_of(replayed: Replay, since: int = 0, least: int | str = 0) -> dict[str, Any]:
    """A snapshot such as `torch.cuda.memory._snapshot()` returns, of a replay.

    It is the state at the end, and the history. The history begins with step `since`, and lacks tensors of
    fewer than `least` bytes (512, or "1 MB") that come and go in it; "left_out" says how many. In the place
    of Python's stack, each entry has the tensor's operation and module, its kind and phase, and the line of
    code. Raises ValueError for a step that the replay does not have.
    """
    start = _begin(replayed, since)
    small = _passing(replayed.requests[: len(replayed)], start, parse_bytes(least))
    found = snapshot_from(replayed, start, small)
    if start or small:
        counts = f"{start:,} before step {since}, {len(small):,} of tensors below {least} that came and went"
        found["left_out"] = f"Left out of {len(replayed):,} allocations and frees: {counts}."
    return found


def snapshot_from(replayed: Replay, start: int, left_out: Collection[int] = ()) -> dict[str, Any]:
    """The state at the end of a replay, and its history after `start` events, without those in `left_out`."""
    settings_text = ",".join(
        f"{name}:{value}" for name, value in replayed.choices.items() if value is not None
    )
    frames = _shared_frames()
    return {
        "segments": [_segment(segment, frames) for segment in replayed.blocks_at(len(replayed))],
        "device_traces": [list(_entries(replayed, start, left_out, frames))],
        "external_annotations": [],
        "allocator_settings": {
            "expandable_segments": bool(replayed.choices.get("expandable_segments", False)),
            "PYTORCH_CUDA_ALLOC_CONF": settings_text,
        },
    }


def save_snapshot(
    replayed: Replay | Measurement, path: str | Path, since: int = 0, least: int | str = 0
) -> Path:
    """Write `snapshot_of(replayed, since, least)` to `path`, print what it leaves out, and return that path.

    A measurement is replayed first, on a GPU with room for all. Raises ValueError unless the path ends in
    .pickle, for more than 1 GB, which crashes browsers, and for a measurement that `replay` refuses;
    TypeError for anything else.
    """
    if isinstance(replayed, Measurement):
        replayed = replay(replayed)
    check_replay(replayed)
    if Path(path).suffix != ".pickle":
        raise ValueError(f"{Path(path).name!r}: torch's viewer takes snapshots whose names end in .pickle")
    snapshot = snapshot_of(replayed, since, least)
    path = write_snapshot(snapshot, path)
    if "left_out" in snapshot:
        print(snapshot["left_out"])
    return path


def write_snapshot(snapshot: Mapping[str, Any], path: str | Path) -> Path:
    """Write a snapshot to `path`, and return that. ValueError for more than 1 GB, which crashes browsers."""
    path = Path(path)
    content = pickle.dumps(snapshot, protocol=4)  # torch's viewer shows nothing for 5
    if len(content) > MOST:
        small = "leave out earlier steps and small tensors, as in since=2, least='1 MB'"
        raise ValueError(
            f"{path.name} would take {format_bytes(len(content))}, and above 1 GB browsers crash: {small}"
        )
    path.write_bytes(content)
    return path


def _begin(replayed: Replay, since: int) -> int:
    """The number of events before step `since`."""
    begins = {mark.step: mark.event for mark in reversed(replayed.marks) if mark.event < len(replayed)}
    if since not in {0, *begins}:
        there = f"has steps {min(begins)} to {max(begins)}" if begins else "knows no steps"
        raise ValueError(f"since={since!r}: this replay {there}, and 0 is from the beginning")
    return begins[since] if since else 0


def _passing(requests: Sequence[Request], start: int, least: int) -> set[int]:
    """The numbers of the events, from `start` on, of tensors below `least` bytes that come and go there."""
    born = dict[Any, int]()
    found = set[int]()
    for number, request in enumerate(requests[start:], start):
        if request.bytes > 0:
            born[request.name] = number
        elif request.name in born and -request.bytes < least:
            found |= {born[request.name], number}
    return found


def _segment(segment: MemorySegment, frames: Frames) -> dict[str, Any]:
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.bytes,
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": DEFAULT_POOL,
        "is_expandable": segment.expandable,
        "allocated_size": segment.allocated,
        "active_size": segment.allocated,
        "requested_size": sum(block.requested for block in segment.blocks),
        "frames": [],
        "blocks": [_block(block, frames) for block in segment.blocks],
    }


def _block(block: MemoryBlock, frames: Frames) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.bytes,
        "requested_size": block.requested,
        "state": "active_allocated" if block.is_allocated else "inactive",
        "frames": frames(block.allocation, block.name) if block.is_allocated else [],
    }


def _entries(
    replayed: Replay, start: int, small: Collection[int], frames: Frames
) -> Iterator[dict[str, Any]]:
    """Entries after `start` events, except those in `small`; segments from the driver are all included."""
    playback = Playback(replayed.capacity, replayed.choices, replayed.descending)
    clock = count()
    calls = playback.allocator.driver_calls
    for number, request in enumerate(replayed.requests[: len(replayed)]):
        done = len(calls)
        address = playback.perform(request)
        if number < start:
            continue
        allocation = replayed.allocations[request.name] if replayed.allocations and request.bytes else None
        known = {"stream": request.stream, "frames": frames(allocation, request.name), "user_metadata": ""}
        entries = [(call.action, call.address, call.bytes) for call in calls[done:]]
        if number not in small:
            entries += [(action, address, abs(request.bytes)) for action in _actions(request)]
        for action, place, size in entries:
            yield {"action": action, "addr": place, "size": size, **known, "time_us": next(clock)}
    if replayed.failure is not None:
        free = replayed.failure.capacity - replayed.failure.reserved
        oom = {"action": "oom", "device_free": free, "size": replayed.failure.requested}
        yield oom | {"stream": 0, "frames": [], "user_metadata": "", "time_us": next(clock)}


def _actions(request: Request) -> tuple[str, ...]:
    """The entries that torch writes for an event besides the driver's: none where the cache is emptied."""
    if request.bytes > 0:
        return ("alloc",)
    if request.bytes < 0:
        return ("free_requested", "free_completed")
    return ()


def _shared_frames() -> Frames:
    """A function that gives a tensor's origin in the form of a stack; equal ones are one list, saved once."""
    made: dict[Any, list[dict[str, Any]]] = {}

    def frames(allocation: Allocation | None, name: Any) -> list[dict[str, Any]]:
        if allocation is None:
            places = [(str(name), "event", 0)]
        else:
            when = f"step {allocation.step} {allocation.phase}".strip()
            places = [(allocation.operation, allocation.module or "network", 0), (allocation.kind, when, 0)]
            if line := re.match(r"(.+?):(\d+)(?:  (.*))?$", allocation.line, re.DOTALL):
                places.append((line[3] or "", line[1], int(line[2])))
        stack = [{"name": name, "filename": filename, "line": line} for name, filename, line in places]
        return made.setdefault(tuple(places), stack)

    return frames
