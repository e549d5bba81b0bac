"""Recordings as JSON lines: one object per line, appended as it comes; a line is whole, or it is not there.

Standard library only: the recorder holds no GPU memory of its own.
"""

import gzip
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AS = " as "  # Between the name of a GPU and that of the smaller card which it stood for
SIMULATED_GPU = "simulated GPU"  # The device under which simulated runs are recorded

SCHEMA = 1

MEASURED, OUT_OF_MEMORY, REFUSED = "measured", "out of memory", "refused"
FAILED, CRASHED, TIMED_OUT = "failed", "crashed", "timed out"
SETTLED = (MEASURED, OUT_OF_MEMORY, REFUSED)
"""Results that a later call leaves alone; the others it tries again."""

FIELDS: dict[str, type] = {
    "task": str,
    "kind": str,
    "status": str,
    "torch": str,
    "date": str,
    "commit": str,
    "steps": int,
    "device": dict,
    "parts": dict,
}

FOLDER = Path(__file__).with_name("recordings")  # `*.json.xz` of simulations, `*.jsonl.xz` of real GPUs
NO_XZ = "shipped recordings need lzma, but this Python was built without it: use another Python"


def unpacked(name: str) -> dict[str, Any]:
    """The content of a shipped `.json.xz`. ValueError for another schema, or where Python lacks lzma."""
    content = json.loads(_expanded(FOLDER / name))
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{name} has schema {content.get('schema')!r}; this version of the course reads {SCHEMA}"
        )
    return content


def text_of(content: dict[str, Any]) -> bytes:
    """JSON with this content and the schema; shipped as `.json.xz`."""
    return json.dumps({"schema": SCHEMA, **content}, separators=(",", ":")).encode()


def _expanded(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(content)
    if path.suffix != ".xz":
        return content
    try:
        import lzma
    except ImportError:
        raise ValueError(NO_XZ) from None
    return lzma.decompress(content)


@dataclass(frozen=True)
class Line:
    """One result in a file of recordings; `content` is the JSON object."""

    file: Path
    number: int
    content: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file.name}, line {self.number}"

    @property
    def device(self) -> str:
        return self.content["device"]["name"]

    @property
    def origin(self) -> tuple[str, str]:
        """Device and torch: a later call that shares them leaves this result alone."""
        return self.device, self.content["torch"]


def read_lines(path: Path) -> list[Line]:
    """Every result in a file, as `record` writes it or compressed by xz, as shipped, or by gzip.

    ValueError naming file and line for what is not one of this schema's.
    """
    numbered = enumerate(_expanded(path).splitlines(), start=1)
    return [Line(path, number, _checked(raw, f"{path.name}, line {number}")) for number, raw in numbered]


def _checked(raw: bytes, place: str) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{place} is not JSON, or was cut off: delete that line") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{place} is not a recording: each line must be a JSON object of schema {SCHEMA}")
    for name, kind in FIELDS.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{place} has no usable {name!r}: it holds {content.get(name)!r}")
    if not isinstance(content["device"].get("name"), str):
        raise ValueError(f"{place} does not name its device")
    return content


def append(path: Path, content: dict[str, Any]) -> None:
    """Add one result and see it written to the disk. If that fails, nothing of it stays (OSError)."""
    line = json.dumps({"schema": SCHEMA, **content}, separators=(",", ":"), ensure_ascii=False) + "\n"
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # a full disk, Ctrl-C
        with suppress(OSError):
            os.truncate(path, before)
        raise


def repair(path: Path) -> None:
    """Cut off a last line that was not written whole, as when the machine stopped; its task is done again."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
