"""Shipped results: real GPUs' recordings, and simulated runs for platforms that cannot simulate.

A run is found by an exact match only. `python tests/ship_recordings.py` writes `simulated.json.xz`; `record`
on a GPU, and xz, write each `*.jsonl.xz`.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import quantiles
from typing import Any

from ..measurement import Measurement, Provenance
from ..run import TrainingRun
from .files import (
    AS,
    FOLDER,
    MEASURED,
    SETTLED,
    SIMULATED_GPU,
    Line,
    from_json,
    read_lines,
    text_of,
    to_json,
    unpacked,
)

FILE = "simulated.json.xz"

COMPARISONS = ("recomputation", "precision", "optimizer", "accumulation", "loss")
"""Topics of recorded times: variants of one run, next to each other."""


@dataclass(frozen=True)
class Recording:
    """One result from a real GPU, as `record` wrote it; a run's `task` is its code and number of steps."""

    line: Line
    task: str
    kind: str
    device: str
    date: str
    status: str
    parts: dict[str, Any]

    def measurement(self, note: str = "") -> Measurement:
        """A run's recording as `measure` returns it. ValueError if damaged, no run, or out of memory."""
        content = self.line.content
        if self.status != MEASURED:
            why = self.parts.get("out_of_memory", {}).get("message") or content.get("detail", "")
            raise ValueError(f"{self.task} on {self.device}, {self.date}: {self.status}. {why}".rstrip())
        try:
            measured = from_json({"provenance": ["", "", "", ""], **self.parts["measured"]}, note)
            counted = self.parts["counters"]
            counters = {name: counted[name] for name in ("allocated", "reserved")}
            if "driver" in counted:  # it is missing where other tasks were on the GPU
                counters["driver"] = counted["driver"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.line.place} is damaged: {type(error).__name__}: {error}") from error
        return replace(measured, provenance=replace(self.provenance, note=note), counters=counters)

    @property
    def provenance(self) -> Provenance:
        """The GPU, the torch version and the date."""
        return Provenance("recorded", self.device, self.line.content["torch"], self.date)

    @property
    def busy(self) -> str:
        """A sentence about what else ran during the recording; "" if nothing did."""
        others = self.line.content.get("jobs", 1) - 1
        if not others:
            return ""
        return (
            f"No other task used the GPU, but up to {others} others used the CPU."
            " Steps that start many short kernels, or compute on the CPU between them,"
            " may be slower than they are alone."
        )

    def __str__(self) -> str:
        return f"{self.task}: {self.status}, {self.provenance}"


def recordings(device: str | None = None) -> tuple[Recording, ...]:
    """Every result from a real GPU that is shipped, or those of the GPUs whose name contains `device`.

    A GPU that imitated a smaller card is meant only where `device` says so, as in "H200 as T4-16GB".
    """
    wanted = (device or "").lower()
    found = (recording for recording in _gpu_recordings() if wanted in recording.device.lower())
    return tuple(item for item in found if AS in wanted or AS not in item.device)


def newest(kind: str) -> tuple[Recording, ...]:
    """The newest measured result of each task of a kind on each GPU, without imitations of smaller cards."""
    return _newest_each(item for item in recordings() if item.kind == kind and item.status == MEASURED)


def attempts(kind: str) -> tuple[Recording, ...]:
    """The newest result of each task of a kind, however it ended, with imitations of smaller cards."""
    return _newest_each(item for item in _gpu_recordings() if item.kind == kind)


def _newest_each(items: Iterable[Recording]) -> tuple[Recording, ...]:
    by_date = sorted(items, key=lambda item: item.date)
    newest_each = {(item.device, item.task): item for item in by_date}  # the last of a key stays
    return tuple(newest_each.values())


def key(run: TrainingRun, steps: int) -> str:
    """The name of a recording: the run as code, and the number of steps."""
    return f"{run.code()} steps={steps}"


def find(run: TrainingRun, steps: int, note: str = "", device: str | None = None) -> Measurement:
    """The recording of exactly this run from the GPU whose name contains `device`.

    "simulated GPU" stands for a simulation. Without `device` a real GPU comes before a simulation. Raises
    ValueError, listing what is recorded, if there is no such recording, and naming the GPUs if there are
    several.
    """
    name = key(run, steps)
    real = [item for item in recordings(device) if item.task == name and item.status in SETTLED]
    devices = sorted({recording.device for recording in real})
    if len(devices) > 1:
        raise ValueError(
            f"{name} is recorded on {', '.join(devices)}: choose one, as in device={devices[0]!r}"
        )
    if real:
        return _newest_each(real)[0].measurement(note)
    simulated = load()
    if name in simulated and device in (None, SIMULATED_GPU):
        return from_json(simulated[name], note)
    listed = "\n  ".join([*simulated, *(str(item) for item in _gpu_recordings() if item.kind == "run")])
    where = ""
    if device not in (None, SIMULATED_GPU):
        where = f" on {device}"
    elif note:
        where = f" ({note})"
    raise ValueError(f"no recording of {name}{where}; recorded are:\n  {listed}")


@cache
def _gpu_recordings() -> tuple[Recording, ...]:
    return read_folder(FOLDER)


def read_folder(folder: Path) -> tuple[Recording, ...]:
    """Every result in a folder's `*.jsonl`, plain or compressed. ValueError names a damaged line."""
    paths = sorted(folder.glob("*.jsonl*"))
    return tuple(read_recording(line) for path in paths for line in read_lines(path))


def read_recording(line: Line) -> Recording:
    content = {name: line.content[name] for name in ("task", "kind", "date", "status", "parts")}
    return Recording(line, device=line.device, **content)


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and number of repeated measurements, in their unit. ValueError for none."""
    if len(values) > 1:
        low, middle, high = quantiles(values, n=4, method="inclusive")
    else:
        low, middle, high = 3 * values  # `quantiles` refuses a single one
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4), "n": len(values)}


@cache
def load() -> dict[str, Any]:
    return unpacked(FILE)["runs"]


def save(measurements: dict[str, Measurement], whole: Container[str] = ()) -> bytes:
    """The text of a file of these measurements by key; those in `whole` can be replayed."""
    return text_of({"runs": {name: to_json(item, name in whole) for name, item in measurements.items()}})
