"""Measurements in files: a recorder's JSON lines, shipped recordings, and what a learner saves.

A recorder appends one object per line, as it comes: a line is whole, or it is not there. Nothing here is
pickled, so nothing could run. Standard library only: the recorder holds no GPU memory of its own.
"""

import gzip
import json
import os
import zlib
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..breakdown import MemoryBreakdown
from ..measurement import Allocation, HostMemory, Mark, Measurement, Messages, Provenance, RunPart, Timeline

AS = " as "  # Between the name of a GPU and that of the smaller card which it stood for
SIMULATED_GPU = "simulated GPU"  # The device under which simulated runs are recorded

SCHEMA = 1

MEASURED, OUT_OF_MEMORY, REFUSED = "measured", "out of memory", "refused"
FAILED, CRASHED, TIMED_OUT = "failed", "crashed", "timed out"
SETTLED = (MEASURED, OUT_OF_MEMORY, REFUSED)
"""Results that a later call leaves alone; the others it tries again."""

LINE_FIELDS: dict[str, type] = {
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

POINTS = 300
"""A thinned measurement keeps about so many moments of the timeline."""

MOST_ALLOCATIONS = 150
"""A thinned measurement keeps so many of the allocations at the peak."""

ALLOCATION_FIELDS = tuple(field.name for field in fields(Allocation))
"""As a recording keeps them; the last one, the stream, only where it is not 0."""

KEY = "measurement"

SAVED_AS = {"simulated": "a simulated GPU", "cpu": "a CPU"}

WHOLE_NUMBERS = dict.fromkeys(("bytes", "step", "born", "stream"), int)
# the other fields are text
TYPES = WHOLE_NUMBERS | {"shape": list, "died": (int, type(None))}


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
    for name, kind in LINE_FIELDS.items():
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


def to_json(measured: Measurement, whole: bool = False) -> dict[str, Any]:
    """A measurement as JSON; unless it is to be `whole`, only with the allocations alive at the peak."""
    origin = measured.provenance
    kept = measured.allocations if whole else measured.alive_at(measured.peak_event)
    return {
        "provenance": [origin.source, origin.device, origin.torch, origin.date],
        "breakdown": _breakdown_to_json(measured.breakdown),
        "moments": {name: _breakdown_to_json(moment) for name, moment in measured.moments.items()},
        "phase_peaks": {name: _breakdown_to_json(highest) for name, highest in measured.phase_peaks.items()},
        "changes": [[size, kind] for size, kind in measured.timeline.changes],
        "marks": [[mark.event, mark.step, mark.phase] for mark in measured.timeline.marks],
        "peak_event": measured.peak_event,
        "allocations": [_allocation_to_json(item) for item in kept],
    }


def _allocation_to_json(item: Allocation) -> list[Any]:
    names = ALLOCATION_FIELDS if item.stream else ALLOCATION_FIELDS[:-1]
    return [getattr(item, name) for name in names]


def from_json(content: dict[str, Any], note: str) -> Measurement:
    source, _, torch_version, date = content["provenance"]
    allocations = [Allocation(*values) for values in content["allocations"]]  # older recordings have no line
    allocations = [replace(item, shape=tuple(item.shape)) for item in allocations]
    changes = [(size, kind) for size, kind in content["changes"]]
    marks = [Mark(*mark) for mark in content["marks"]]
    return Measurement(
        breakdown=MemoryBreakdown(*content["breakdown"]),
        moments={name: MemoryBreakdown(*moment) for name, moment in content["moments"].items()},
        timeline=Timeline(changes, marks),
        provenance=Provenance("recorded", f"a {source} GPU", torch_version, date, note),
        peak_event=content["peak_event"],
        allocations=allocations,
        phase_peaks={name: MemoryBreakdown(*highest) for name, highest in content["phase_peaks"].items()},
        losses=content.get("losses", ()),
        counters=content.get("counters", {}),
        not_predicted=content.get("not_predicted", {}),
        messages=tuple(Messages(**each) for each in content.get("messages", ())),
        parts=tuple(_part_from_json(part) for part in content.get("parts", ())),
        host=HostMemory(**content["host"]) if content.get("host") else None,
    )


def _part_from_json(part: dict[str, Any]) -> RunPart:
    return RunPart(**part | {"breakdown": MemoryBreakdown(*part["breakdown"])})


def _breakdown_to_json(moment: MemoryBreakdown) -> list[Any]:
    return [{kind: size for kind, size in moment.items() if size}, moment.phase, moment.label]


def thinned(measured: Measurement, points: int = POINTS) -> Measurement:
    """The measurement with a timeline of about `points` moments, and its largest allocations at the peak.

    Kept are the peak, the beginning of each phase and the highest moment of each stretch between; at each of
    them every kind has its true bytes. What led from one to the next becomes one change for each kind, what
    was freed first.
    """
    kept = _moments_kept(measured, points)
    changes = list[tuple[int, str]]()
    ends = [0]  # how many changes there are at each moment that is kept
    for before, moment in pairwise(kept):
        sums: Counter[str] = Counter()
        for size, kind in measured.timeline.changes[before:moment]:
            sums[kind] += size
        changes += sorted((size, kind) for kind, size in sums.items() if size)
        ends.append(len(changes))

    def new_event(event: int) -> int:
        return ends[bisect_right(kept, event) - 1]

    peak = new_event(measured.peak_event)
    marks = [Mark(new_event(mark.event), mark.step, mark.phase) for mark in measured.timeline.marks]
    allocations = []
    for item in measured.largest(MOST_ALLOCATIONS):
        died = None if item.died is None else max(new_event(item.died), peak)
        allocations.append(replace(item, born=min(new_event(item.born), peak - 1), died=died))
    return replace(measured, timeline=Timeline(changes, marks), peak_event=peak, allocations=allocations)


def _moments_kept(measured: Measurement, points: int) -> list[int]:
    """Event counts: 0, peak, end, the beginnings of phases, and the highest of each of `points` stretches."""
    totals = measured.timeline.totals()
    stretch = max(1, -(-len(totals) // points))
    highest = {
        1 + max(range(start, min(start + stretch, len(totals))), key=totals.__getitem__)
        for start in range(0, len(totals), stretch)
    }
    begins = {mark.event for mark in measured.timeline.marks}
    return sorted(highest | begins | {0, measured.peak_event, len(totals)})


def everything_to_json(measured: Measurement) -> dict[str, Any]:
    """All of a measurement as JSON."""
    more = {
        "note": measured.provenance.note,
        "losses": list(measured.losses),
        "counters": dict(measured.counters),
        "messages": [vars(each) for each in measured.messages],
        "not_predicted": dict(measured.not_predicted),
        "parts": [vars(part) | {"breakdown": _breakdown_to_json(part.breakdown)} for part in measured.parts],
        "host": vars(measured.host) if measured.host else None,
    }
    return to_json(measured, whole=True) | more


def everything_from_json(content: dict[str, Any]) -> Measurement:
    """The measurement that `everything_to_json` was given, with the source that it had."""
    source, device, torch_version, date = content["provenance"]
    origin = Provenance(source, device, torch_version, date, content["note"])
    return replace(from_json(content, ""), provenance=origin)


def save_measurement(measured: Measurement, path: str | Path) -> Path:
    """Write a measurement with all its allocations to `path` and return that path.

    A file of an earlier measurement is replaced. Raises ValueError, and writes nothing, where any other file
    is at `path`; TypeError for what is no measurement.
    """
    if not isinstance(measured, Measurement):
        raise TypeError(f"only a measurement can be saved here, but this is a {type(measured).__name__}")
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to save a measurement in")
    if path.exists():
        try:
            _content(path)
        except ValueError as error:
            raise ValueError(
                f"nothing was written: {error}. Choose another name, or delete that file"
            ) from None
    # an earlier file stays whole until this one is
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_bytes(gzip.compress(text_of({KEY: everything_to_json(measured)}), mtime=0))
    partial.replace(path)
    return path


def read_measurement(path: str | Path) -> Measurement:
    """The measurement in a file that `save_measurement` wrote; its source is "recorded", with device and
    date.

    Raises ValueError for a file that is missing, damaged, of another schema, or anything else.
    """
    path = Path(path)
    content = _content(path)
    try:
        for row in content["allocations"]:
            _check_allocation(row)
        found = everything_from_json(content)
        origin = found.provenance
        device = SAVED_AS.get(origin.source, origin.device)
        found = replace(found, provenance=replace(origin, source="recorded", device=device))
        # what these two add up has to be numbers
        found.timeline.curves()
        found.largest()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is damaged ({type(error).__name__}: {error}): measure and save again"
        ) from None
    return found


def _check_allocation(row: list[Any]) -> None:
    """Raise TypeError or ValueError for what is no allocation; the last field, the stream, may be missing."""
    names = ALLOCATION_FIELDS[: max(len(row), len(ALLOCATION_FIELDS) - 1)]
    for name, value in zip(names, row, strict=True):
        if not isinstance(value, TYPES.get(name, str)):
            raise TypeError(f"{value!r} is not the {name} of an allocation")


def _content(path: Path) -> dict[str, Any]:
    """The content of a measurement file. ValueError for any other, with a sentence that has no full stop."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist or is not a file")
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except (EOFError, OSError, RecursionError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path.name} holds no measurement, or it is damaged ({type(error).__name__})"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get(KEY), dict):
        raise ValueError(f"{path.name} holds no measurement: save one with save_measurement(measured, path)")
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path.name} has schema {content.get('schema')!r}, this course reads {SCHEMA}: save it again"
        )
    return content[KEY]
