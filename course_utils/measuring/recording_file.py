"""Recordings as JSON lines: one object a line, appended as it comes.

Only a half-written last line is ever removed. Standard library only: the recorder holds no GPU memory of its
own.
"""

import gzip
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AS = " as "  # Between the name of a GPU and that of the smaller card which it stood for
SIMULATED_GPU = "simulated GPU"  # The device under which simulated runs are recorded

SCHEMA = 1

MEASURED, OUT_OF_MEMORY, REFUSED = "measured", "out of memory", "refused"
FAILED, CRASHED, TIMED_OUT, CUT_SHORT = "failed", "crashed", "timed out", "cut short"
SETTLED = (MEASURED, OUT_OF_MEMORY, REFUSED)
"""Results that a later call leaves alone; the others it tries again, `MOST_TRIES` times in all."""
MOST_TRIES = 3

STATUSES = (*SETTLED, FAILED, CRASHED, TIMED_OUT, CUT_SHORT)

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
    def origin(self) -> tuple[str, str, str]:
        """Device, torch and commit: a later call that shares them leaves this result alone."""
        return self.device, self.content["torch"], self.content["commit"]


def read_lines(path: Path) -> list[Line]:
    """Every result in a file, as `record` writes it or compressed by xz, as shipped, or by gzip.

    ValueError naming file and line for what is not one of this schema's.
    """
    return parse_lines(path, _expanded(path))


def parse_lines(path: Path, content: bytes) -> list[Line]:
    """Every result in the bytes of a file that is not compressed. ValueError as in `read_lines`."""
    numbered = enumerate(content.splitlines(), start=1)
    return [Line(path, number, _checked(raw, f"{path.name}, line {number}")) for number, raw in numbered]


def _checked(raw: bytes, place: str) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        advice = "delete that line, or let `python3 -m course_utils record` do so if it is the last one"
        raise ValueError(f"{place} is not JSON, or was cut off: {advice}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{place} is not a recording: each line must be a JSON object of schema {SCHEMA}")
    for name, kind in FIELDS.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{place} has no usable {name!r}: it holds {content.get(name)!r}")
    if not isinstance(content["device"].get("name"), str):
        raise ValueError(f"{place} does not name its device")
    return content


def repair(path: Path) -> str:
    """Make a file ready for the next line; returns a sentence on what was done, "" if nothing was.

    A last line without its line feed was being written when the machine stopped: a whole one gets its line
    feed, half a one is cut off. A copy that may only be read can be written to afterwards. ValueError, naming
    the line, if another line is broken: then this is not a file to append to.
    """
    if not path.exists():
        return ""
    mode = path.stat().st_mode
    if not mode & stat.S_IWUSR:
        path.chmod(mode | stat.S_IWUSR)
    content = path.read_bytes()
    whole, feed, last = content.rpartition(b"\n")
    parse_lines(path, whole)
    if not last:
        return ""
    try:
        _checked(last, path.name)
    except ValueError:
        os.truncate(path, len(whole) + len(feed))
        return f"The last line of {path.name} was cut off and has been removed; its task is done again."
    with path.open("ab") as file:
        file.write(b"\n")
    return f"The last line of {path.name} had no line feed at its end; it has been added."


def append(path: Path, content: dict[str, Any]) -> None:
    """Add one result, and see it written to the disk: all of it, or what a later call can repair."""
    line = json.dumps({"schema": SCHEMA, **content}, separators=(",", ":"), ensure_ascii=False) + "\n"
    with path.open("ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
