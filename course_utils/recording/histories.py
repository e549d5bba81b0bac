"""A GPU's allocation history as a line of JSON can hold it, and back: what a replay needs of it, and nothing more.

torch's snapshots are pickles of many MB, most of it stacks; this is some kB for a training step.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..allocator.snapshots import TAKEN

CODES = {"alloc": "a", "free_completed": "f"} | {
    "segment_alloc": "S", "segment_free": "s", "segment_map": "M", "segment_unmap": "m"
}  # fmt: skip
"""A letter for each action that a replay follows; every other entry is left out."""

ACTIONS = {code: action for action, code in CODES.items()}


def packed(snapshot: Mapping[str, Any], device: int = 0) -> str:
    """The history of one GPU in a snapshot as text: JSON, compressed, in base 64. ValueError if it holds none."""
    traces = snapshot["device_traces"]
    if not 0 <= device < len(traces) or not traces[device]:
        raise ValueError(f"this snapshot holds no history of GPU {device}")
    entries = [entry for entry in traces[device] if entry["action"] in CODES]
    content = {
        "settings": dict(snapshot.get("allocator_settings", {})),
        "segments": [
            (part["total_size"], list(part.get("segment_pool_id", (0, 0))))
            for part in snapshot["segments"]
            if part["device"] == device
        ],
        "actions": "".join(CODES[entry["action"]] for entry in entries),
        "bytes": [entry["size"] for entry in entries],
        "streams": _numbered([entry.get("stream", 0) for entry in entries]),
        "names": _names(entries),
        "addresses": [entry.get("addr") for entry in entries if entry["action"] in TAKEN],
    }
    text = json.dumps(content, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """The snapshot that `packed` made text of, as far as `compare_with_gpu` reads it. ValueError for a damaged one."""
    try:
        content = json.loads(gzip.decompress(base64.b64decode(text, validate=True)))
        columns = (content["actions"], content["bytes"], content["streams"], _with_addresses(content))
        trace = [
            {"action": ACTIONS[code], "size": size, "stream": stream, "addr": address}
            for code, size, stream, address in zip(*columns, strict=True)
        ]
        settings, segments = content["settings"], content["segments"]
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this allocation history is damaged ({type(error).__name__}: {error})") from None
    held = [{"device": 0, "total_size": size, "segment_pool_id": tuple(pool)} for size, pool in segments]
    return {"segments": held, "device_traces": [trace], "allocator_settings": settings}


def _numbered(values: Sequence[Any]) -> list[int]:
    """Each different value as a small number, in the order in which they come."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _names(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """The address of each allocation and free, numbered; 0 for an action on the driver, which has its address apart."""
    numbers: dict[int, int] = {}
    return [0 if entry["action"] in TAKEN else numbers.setdefault(entry["addr"], len(numbers) + 1) for entry in entries]


def _with_addresses(content: Mapping[str, Any]) -> list[int | None]:
    """The names, with a segment's address for an action on the driver; None where an older recording has none."""
    driver = [ACTIONS[code] in TAKEN for code in content["actions"]]
    addresses = content.get("addresses", [None] * sum(driver))
    if len(addresses) != sum(driver):
        raise ValueError(f"{len(addresses)} addresses for {sum(driver)} actions on the driver")
    following = iter(addresses)
    return [next(following) if is_driver else name for is_driver, name in zip(driver, content["names"], strict=True)]
