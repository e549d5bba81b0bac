"""The allocator's events of scripts that a GPU executed, up to the end of step 2 (`count_script.py`)."""

import json
import lzma
from pathlib import Path
from typing import Any

from course_utils.allocator.policy import TAKEN
from course_utils.allocator.replay import EMPTY_CACHE

FOLDER = Path(__file__).resolve().parent / "recorded" / "histories"
NAMES = sorted(path.name.removesuffix(".json.xz") for path in FOLDER.glob("*.json.xz"))


def entries_of(name: str) -> list[dict[str, Any]]:
    """The entries of a history, as in torch's snapshots."""
    columns = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    rows = zip(columns["action"], columns["addr"], columns["size"], strict=True)
    return [{"action": action, "addr": addr, "size": size, "stream": 0} for action, addr, size in rows]


def snapshot_of(name: str) -> dict[str, Any]:
    """A history as a snapshot: with one segment as large as all that the GPU holds at its end."""
    entries = entries_of(name)
    held = sum(TAKEN.get(entry["action"], 0) * entry["size"] for entry in entries)
    return {"device_traces": [entries], "segments": [{"device": 0, "total_size": held}]}


def events_of(name: str) -> list[tuple[int, Any]]:
    """A history as events that `replay` takes: sizes, and a name for each allocation."""
    events: list[tuple[int, Any]] = []
    names: dict[int, int] = {}
    for entry in entries_of(name):
        if entry["action"] == "alloc":
            names[entry["addr"]] = len(events)
            events.append((entry["size"], len(events)))
        elif entry["action"] == "free_completed":
            events.append((-entry["size"], names.pop(entry["addr"])))
        elif entry["action"] == "segment_free" and events[-1] != EMPTY_CACHE:
            events.append(EMPTY_CACHE)
    return events


def most_reserved(name: str) -> int:
    """The most bytes that the GPU's allocator had reserved in a history."""
    reserved = most = 0
    for entry in entries_of(name):
        reserved += TAKEN.get(entry["action"], 0) * entry["size"]
        most = max(most, reserved)
    return most
