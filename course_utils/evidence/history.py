"""A GPU's allocation history as JSON by columns, and back: what a replay needs of it, and nothing more.

torch's snapshots are pickles of many MB, most of it stacks; shipped, this is some kB for a training step.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..allocator.snapshots import compare_with_gpu
from ..measuring.recorded import newest

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


class Twice(NamedTuple):
    """A training that was recorded without and with expandable segments.

    `snapshot` has the history without; `without` and `expandable` are the most bytes that the GPU reserved.
    """

    snapshot: dict[str, Any]
    without: int
    expandable: int


def recorded_twice() -> dict[str, Twice]:
    """Every training that a GPU recorded under both settings, by its run."""
    found: dict[str, dict[bool, dict[str, Any]]] = {}
    for item in newest("history"):
        run, _, settings = item.task.removeprefix("history of ").rpartition(", ")
        expandable = settings.startswith("expandable")
        found.setdefault(run, {})[expandable] = unpacked(item.parts["history"]["history"])
    return {
        run: Twice(pair[False], *(max(compare_with_gpu(pair[which]).real) for which in (False, True)))
        for run, pair in found.items()
        if len(pair) == 2
    }
