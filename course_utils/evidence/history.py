"""A GPU's allocation history as JSON by columns, and back: what a replay needs of it, and nothing more.

torch's snapshots are pickles of many MB, most of it stacks; shipped, this is some kB for a training step.
"""

from collections.abc import Mapping
from typing import Any

ACTIONS = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
ENTRY = ("action", "size", "stream", "addr")
SEGMENT = ("device", "total_size", "segment_pool_id")


def packed(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The history of a snapshot's first GPU: a list for each of `ENTRY`, the segments and the settings."""
    entries = [entry for entry in snapshot["device_traces"][0] if entry["action"] in ACTIONS]
    return {
        "allocator_settings": snapshot.get("allocator_settings", {}),
        "segments": [{name: part[name] for name in SEGMENT if name in part} for part in snapshot["segments"]],
        "entries": [[entry.get(name) for entry in entries] for name in ENTRY],
    }


def unpacked(content: Any) -> dict[str, Any]:
    """The snapshot that `packed` read, as far as `compare_with_gpu` needs it. ValueError if it is damaged."""
    try:
        rows = zip(*content["entries"], strict=True)
        trace = [dict(zip(ENTRY, row, strict=True)) for row in rows]
        return {**content, "device_traces": [trace]}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this allocation history is damaged ({type(error).__name__}: {error})") from None
