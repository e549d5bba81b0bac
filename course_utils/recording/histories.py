"""A GPU's allocation history as text for a line of JSON, and back: what a replay needs of it, and nothing more.

torch's snapshots are pickles of many MB, most of it stacks; this is some kB for a training step.
"""

import base64
import gzip
import json
from collections.abc import Mapping
from typing import Any

ACTIONS = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
ENTRY = ("action", "size", "stream", "addr")
SEGMENT = ("device", "total_size", "segment_pool_id")


def packed(snapshot: Mapping[str, Any]) -> str:
    """The history of the first GPU in a snapshot as text: JSON by columns, compressed, in base 64."""
    entries = [entry for entry in snapshot["device_traces"][0] if entry["action"] in ACTIONS]
    content = {
        "allocator_settings": snapshot.get("allocator_settings", {}),
        "segments": [{name: part[name] for name in SEGMENT if name in part} for part in snapshot["segments"]],
        "entries": [[entry.get(name) for entry in entries] for name in ENTRY],
    }
    text = json.dumps(content, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """The snapshot that `packed` made text of, as far as `compare_with_gpu` reads it. ValueError for a damaged one."""
    try:
        content = json.loads(gzip.decompress(base64.b64decode(text, validate=True)))
        rows = zip(*content.pop("entries"), strict=True)
        content["device_traces"] = [[dict(zip(ENTRY, row, strict=True)) for row in rows]]
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this allocation history is damaged ({type(error).__name__}: {error})") from None
    return content
