"""Shipped results: simulated runs for platforms that cannot simulate. Exact match or a clear error; nothing is
interpolated.
"""

import gzip
import json
from functools import cache
from importlib.resources import files
from typing import Any

from ..breakdown import MemoryBreakdown
from ..measurement import Allocation, Mark, Measurement, Provenance, Timeline
from ..run import TrainingRun

SCHEMA = 1
FILE = "simulated.json.gz"


def key(run: TrainingRun, steps: int) -> str:
    """What a recording is filed under: the run as code, and the number of steps."""
    return f"{run.code()} steps={steps}"


def find(run: TrainingRun, steps: int, note: str = "") -> Measurement:
    """The recording of exactly this run. Raises ValueError, listing what is recorded, if there is none."""
    recordings = load()
    if key(run, steps) not in recordings:
        listed = "\n  ".join(recordings)
        raise ValueError(
            f"no recording of {key(run, steps)}" + (f" ({note})" if note else "") + f"; recorded are:\n  {listed}"
        )
    return from_json(recordings[key(run, steps)], note)


@cache
def load() -> dict[str, Any]:
    """All shipped recordings by key. Raises ValueError for a file of another schema."""
    packed = files("course_utils").joinpath("recordings", FILE).read_bytes()
    content = json.loads(gzip.decompress(packed))
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{FILE} has schema {content.get('schema')!r}; this version of the course reads {SCHEMA}")
    return content["runs"]


def save(measurements: dict[str, Measurement]) -> bytes:
    """The bytes of a recordings file that holds these measurements by key."""
    content = {"schema": SCHEMA, "runs": {name: to_json(item) for name, item in measurements.items()}}
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)


def to_json(measured: Measurement) -> dict[str, Any]:
    """A measurement as JSON: everything, but of its allocations only those alive at the peak."""
    origin = measured.provenance
    return {
        "provenance": [origin.source, origin.device, origin.torch, origin.date],
        "breakdown": _breakdown_to_json(measured.breakdown),
        "moments": {name: _breakdown_to_json(moment) for name, moment in measured.moments.items()},
        "phase_peaks": {name: _breakdown_to_json(highest) for name, highest in measured.phase_peaks.items()},
        "changes": [[size, kind] for size, kind in measured.timeline.changes],
        "marks": [[mark.event, mark.step, mark.phase] for mark in measured.timeline.marks],
        "peak_event": measured.peak_event,
        "allocations": [
            [a.kind, a.bytes, list(a.shape), a.dtype, a.operation, a.module, a.phase, a.step, a.born, a.died, a.line]
            for a in measured.alive_at(measured.peak_event)
        ],
    }


def from_json(content: dict[str, Any], note: str) -> Measurement:
    """The measurement that `to_json` wrote, marked as recorded."""
    source, _, torch_version, date = content["provenance"]
    allocations = [
        Allocation(kind, size, tuple(shape), *described) for kind, size, shape, *described in content["allocations"]
    ]
    return Measurement(
        MemoryBreakdown(*content["breakdown"]),
        {name: MemoryBreakdown(*moment) for name, moment in content["moments"].items()},
        Timeline([(size, kind) for size, kind in content["changes"]], [Mark(*mark) for mark in content["marks"]]),
        Provenance("recorded", f"a {source} GPU", torch_version, date, note),
        content["peak_event"],
        allocations,
        phase_peaks={name: MemoryBreakdown(*highest) for name, highest in content["phase_peaks"].items()},
    )


def _breakdown_to_json(moment: MemoryBreakdown) -> list[Any]:
    return [{kind: size for kind, size in moment.items() if size}, moment.phase, moment.label]
