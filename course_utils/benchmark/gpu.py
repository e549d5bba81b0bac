"""Tables of what real GPUs recorded: estimate and simulation against the device's own counters, times, live
lessons.

Estimate and simulation were recorded with the measurement, so that nothing could be fitted to the result
afterwards.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..allocator.snapshots import compare_with_gpu
from ..breakdown import KINDS
from ..measuring.recorded import Recording, attempts, newest
from ..measuring.recording_file import MEASURED
from ..recording.histories import unpacked
from ..recording.published import TEN, published_rows
from ..recording.tasks import EXPANDABLE
from .tables import BIAS_HEADINGS, TABLES, Cell, Table, bias_of

NONE_YET = (
    "No recording of this kind from a real GPU exists yet. On a machine with one: `python3 -m course_utils "
    "record --out course_utils/measuring/recordings --minutes 30` (docs/gpu.md)."
)

TITLES = {name: table["title"] for name, table in TABLES.items() if "title" in table}

NO_BOUND = (math.inf, math.inf)
WANTED = {
    "closed form": NO_BOUND,
    "estimate": (0.3, 1.0),
    "simulation": NO_BOUND,
    "simulation and blocks": (0.3, 1.0),
    "reserved": (1.0, math.inf),
}
"""Percent of what the GPU counted: what the median and the largest error may be, as set before any GPU was
asked. "reserved" is the simulation's, of max_memory_reserved; all others are of max_memory_allocated.
"""


@dataclass(frozen=True)
class RunOnGpu:
    """One run on a GPU, in bytes: what was `said` before by each of `WANTED`, and what the GPU then
    `counted`.

    `kinds` are the three breakdowns by kind at their peaks: tracked on the GPU, estimated, simulated.
    `phases` is the peak in each phase: counted and simulated.
    """

    recording: Recording
    said: dict[str, int]
    counted: dict[str, int]
    kinds: dict[str, dict[str, int]]
    phases: dict[str, tuple[int, int]]

    @property
    def allocated(self) -> int:
        """The GPU's own peak, max_memory_allocated."""
        return self.counted["simulation"]

    def percent(self, by: str) -> float:
        """The error by one of `WANTED`, in percent of what was counted."""
        return 100 * (self.said[by] / self.counted[by] - 1)


def runs_on_gpus() -> list[RunOnGpu]:
    """Every recorded run that was simulated, the newest of each on each GPU."""
    return [run_on_gpu(item) for item in newest("run") if "breakdown" in item.parts["simulated"]]


def run_on_gpu(item: Recording) -> RunOnGpu:
    """One recording as the table reads it."""
    parts, simulated, counters = item.parts, item.parts["simulated"], item.parts["counters"]
    at_peak = simulated["breakdown"][0]
    said = {
        "estimate": parts["estimate"]["total"],
        "simulation": sum(at_peak.values()),
        "simulation and blocks": simulated["allocated"],  # in blocks, as the allocator's policy has them
        "reserved": simulated["reserved"],
    }
    if "formula" in parts:
        said["closed form"] = parts["formula"]["total"] + at_peak.get("workspaces", 0)
    counted = {by: counters["reserved" if by == "reserved" else "allocated"] for by in said}
    kinds = {
        "tracked": parts["measured"]["breakdown"][0],
        "estimate": parts["estimate"]["by_kind"],
        "simulation": at_peak,
    }
    phases = {
        name: (counters["phases"][name], sum(highest[0].values()))
        for name, highest in simulated["phase_peaks"].items()
        if name in counters["phases"]
    }
    return RunOnGpu(item, said, counted, kinds, phases)


def gpu_tables() -> list[Table]:
    """Errors by kind of memory, by phase and run by run."""
    runs = runs_on_gpus()
    return [_summary(runs), _by_kind(runs), _by_phase(runs), _each(runs)] if runs else []


def devices(items: Sequence[Recording]) -> str:
    return "; ".join(
        sorted({f"{item.device}, torch {item.line.content['torch']}, {item.date}" for item in items})
    )


def _summary(runs: Sequence[RunOnGpu]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for by, bounds in WANTED.items():
        covered = [run for run in runs if by in run.said]
        errors = [run.percent(by) for run in covered]
        found = (statistics.median(map(abs, errors)), max(map(abs, errors)))
        exact = sum(run.said[by] == run.counted[by] for run in covered)
        bias = bias_of(run.said[by] / run.counted[by] for run in covered)
        named = zip(("median", "largest"), bounds, strict=True)
        wanted = ", ".join(f"{name} {bound} %" for name, bound in named if bound < math.inf)
        rows.append((by, len(covered), exact, *bias, *found, wanted, wanted and verdict(found, bounds)))
    headings = ("peak by", "runs", "to the byte", *BIAS_HEADINGS, "median, %", "largest, %", "wanted", "kept")
    notes = (
        (
            "Predicted before the run, in percent of what the GPU counted in the last step, without the"
            " tracker: max_memory_reserved in the last row, max_memory_allocated in the others."
        ),
        (
            "Every row includes cuBLAS's workspaces. The allocator's blocks can be larger than their tensors."
            " The estimate counts tensors only: where it misses its bound, blocks are the reason."
        ),
    )
    return Table("gpu", TITLES["gpu"], headings, tuple(rows), notes, devices([run.recording for run in runs]))


def verdict(found: tuple[float, float], wanted: tuple[float, float]) -> str:
    """ "yes", or which of the two bounds, median and largest, is not kept."""
    broken = [
        name for name, one, bound in zip(("median", "largest"), found, wanted, strict=True) if one > bound
    ]
    return "no: " + " and ".join(broken) if broken else "yes"


def _by_kind(runs: Sequence[RunOnGpu]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    # no tensor of the program's: nothing tracks them
    for kind in (kind for kind in KINDS if kind != "workspaces"):
        for by in ("estimate", "simulation"):
            gaps = [run.kinds[by].get(kind, 0) - run.kinds["tracked"].get(kind, 0) for run in runs]
            shares = [100 * gap / run.allocated for gap, run in zip(gaps, runs, strict=True)]
            counts = sum(not gap for gap in gaps), sum(gap < 0 for gap in gaps)
            rows.append((kind, by, *counts, statistics.median(shares), min(shares), max(shares)))
    headings = ("kind of memory", "by", "exact", "below the truth", "median, % of peak", "lowest", "highest")
    note = (
        f"Predicted minus tracked on the GPU, at the peak of {len(runs)} runs, in percent of the counted"
        " peak."
    )
    return Table(
        "gpu_by_kind", "Signed error of each kind of memory, on a GPU", headings, tuple(rows), (note,)
    )


def _by_phase(runs: Sequence[RunOnGpu]) -> Table:
    """Bytes that the GPU counted in each phase beyond the simulated tensors: an unnamed
    term would show here.
    """
    rows: list[tuple[Cell, ...]] = []
    for phase in dict.fromkeys(name for run in runs for name in run.phases):
        both = (run.phases[phase] for run in runs if phase in run.phases)
        beyond = [counted - simulated for counted, simulated in both]
        rows.append((phase, len(beyond), round(statistics.median(beyond)), min(beyond), max(beyond)))
    headings = ("phase", "runs", "median, bytes", "least", "most")
    notes = (
        "Counted minus simulated peak of each phase: blocks, the kernels' scratch, and an unexplained rest.",
        (
            "zero_grad only frees. The GPU's peak is from before it frees the first gradient, the"
            " simulation's from after."
        ),
    )
    return Table("gpu_by_phase", "What a GPU counts beyond the tensors", headings, tuple(rows), notes)


def _each(runs: Sequence[RunOnGpu]) -> Table:
    by = "simulation and blocks"
    rows = tuple(
        (
            run.recording.task.removesuffix(" steps=2"),
            run.allocated,
            *(run.percent(one) if one in run.said else "" for one in WANTED),
            run.allocated - run.said[by],
        )
        for run in sorted(runs, key=lambda run: -abs(run.percent(by)))
    )
    headings = ("run", "counted, bytes", *(f"{one}, %" for one in WANTED), "left, bytes")
    return Table("gpu_runs", "Each recorded run, the largest error first", headings, rows)


# What no simulation sees


def gpu_hardware_tables() -> list[Table]:
    """Bytes of a GPU that are in no tensor: its context, cuBLAS's workspaces, and what kernels take while
    they run.
    """
    rows: list[tuple[Cell, ...]] = []
    for item in newest("context"):
        rows.append((item.device, "context, before the first tensor", item.parts["context"]["context"]))
    for item in newest("workspaces"):
        rows.append(
            (item.device, "cuBLAS's workspaces, of both threads", item.parts["workspaces"]["together"])
        )
    for item in newest("scratch"):
        found = item.parts["scratch"]["operations"]
        rows += [
            (item.device, f"scratch: {one['operation']}", one["scratch"])
            for one in found
            if one.get("scratch")
        ]
    headings = ("GPU", "what", "bytes")
    notes = ("Operations at GPT-2's sizes; those without scratch are left out.",)
    source = devices(newest("scratch"))
    return (
        [Table("gpu-hardware", TITLES["gpu-hardware"], headings, tuple(rows), notes, source)] if rows else []
    )


# The allocator's model


def gpu_allocator_tables() -> list[Table]:
    """The table of histories, replayed now: at how many moments the replay reserves as the GPU did, and the
    gap.

    "steps equal" are the training steps at whose ends counter, history and replay say the same. Raises
    ValueError for a damaged history.
    """
    rows: list[tuple[Cell, ...]] = []
    for item in newest("history"):
        found = compare_with_gpu(unpacked(item.parts["history"]["history"]))
        name = item.task.removeprefix("history of ").rpartition(", ")[0]
        settings = "expandable segments" if item.line.content["environment"] == EXPANDABLE else "default"
        equal = sum(not gap for gap in found.differences)
        steps = [
            now == found.real[at - 1] == found.replayed[at - 1] for at, now in item.parts["history"]["steps"]
        ]
        most = max(found.real, default=0)
        gap = found.largest_difference
        rows.append((name, settings, len(found.real), equal, f"{sum(steps)} of {len(steps)}", most, gap))
    if not rows:
        return []
    headings = ("run", "settings", "moments", "equal", "steps equal", "most reserved", "largest difference")
    exact = {settings: [row[2] == row[3] for row in rows if row[1] == settings] for _, settings, *_ in rows}
    notes = tuple(
        f"{name}: {sum(one)} of {len(one)} histories equal throughout" for name, one in exact.items()
    )
    source = devices(newest("history"))
    return [Table("gpu-allocator", TITLES["gpu-allocator"], headings, tuple(rows), notes, source)]


# Published steps


def gpu_published_tables() -> list[Table]:
    """Each published step that was run on a GPU here: published, simulated for this card, and what this card
    counted.

    By moment, as the row has it (the peak, for what forward kept); published figures are of other cards and
    releases of torch.
    """
    rows: list[tuple[Cell, ...]] = []
    failed: list[str] = []
    known = {row.id: row for row in published_rows()}
    for item in newest("published"):
        for part, counted in item.parts.items():
            name = part.removeprefix("counted ")
            if "error" in counted:
                failed.append(f"Not counted: {name}. {counted['error']}.")
            if name == part or "error" in counted:
                continue
            row = known[name]
            said = item.parts[f"said {name}"]
            moment = row.moment if row.moment in counted else "peak"
            here, simulated = (found[moment] for found in (counted, said))
            error = [
                100 * (ours / theirs - 1) if theirs else 0.0
                for ours, theirs in zip(simulated, here, strict=True)
            ]
            rows.append(
                (name, row.gpu.partition(" (")[0], row.printed, row.counter, simulated[0], *here, *error)
            )
    if not rows:
        return []
    rows.sort(key=lambda row: (row[0] not in TEN, -abs(float(row[-2]))))
    off = [abs(float(row[-2])) for row in rows]
    headings = (
        "step",
        "published on",
        "published",
        "counter",
        "simulated here",
        "allocated here",
        "reserved here",
        "allocated, %",
        "reserved, %",
    )
    exact = sum(not one for one in off)
    middle = statistics.median(off)
    most = max(off)
    notes = (
        (
            f"{len(rows)} steps. For {exact} of them the simulation equals the card's count to the byte. "
            f"Median error {middle:.3f} %, largest {most:.2f} %."
        ),
        (
            "BERT's steps are simulated as on torch 1.10, without cuBLAS's workspaces. Vision transformers"
            " have a convolution, and torch's code does not say how much cuDNN takes for it."
        ),
    )
    notes = (*notes, *failed)
    source = devices(newest("published"))
    return [Table("gpu-published", TITLES["gpu-published"], headings, tuple(rows), notes, source)]


# Times


def gpu_times_tables() -> list[Table]:
    """Each comparison's variants on each GPU: median and quartiles of a step, repetitions, ratio to the
    first.
    """
    found = newest("times")
    rows: list[tuple[Cell, ...]] = []
    for item in found:
        first = 0.0
        for variant in item.parts["times"]["variants"]:
            named = (item.device, item.task.removeprefix("times of "), variant["label"])
            if "refused" in variant:
                rows.append((*named, variant["refused"], "", "", ""))
                continue
            step = variant["step_ms"]
            first = first or step["median"]
            quartiles = f"{step['q1']:,.2f} to {step['q3']:,.2f}"
            rows.append(
                (*named, f"{step['median']:,.2f}", quartiles, step["n"], f"{step['median'] / first:.3f}")
            )
    headings = ("GPU", "comparison", "variant", "median, ms", "quartiles, ms", "repetitions", "to the first")
    notes = tuple(dict.fromkeys(filter(None, (item.busy for item in found))))
    return (
        [Table("gpu-times", TITLES["gpu-times"], headings, tuple(rows), notes, devices(found))]
        if rows
        else []
    )


# Lessons executed live


def gpu_live_tables() -> list[Table]:
    """Each notebook with its seconds and what failed; each kind of cell that ran out of memory, and how
    often.
    """
    tables = []
    found = attempts("notebook")
    told = "Other lessons and runs took memory of the same card at the same time."
    notes = (told,) * any(item.busy for item in found)
    if lessons := tuple(map(_lesson, found)):
        headings = ("GPU", "notebook", "passes", "seconds", "live cells", "not live because", "what failed")
        tables.append(Table("gpu-live", TITLES["gpu-live"], headings, lessons, notes))
    if cells := tuple(map(_cell, (*attempts("cells"), *attempts("demos")))):
        headings = ("GPU", "what", "result", "times in a row", "what failed")
        tables.append(Table("gpu-cells", "Out of memory on purpose, and the demos", headings, cells))
    return tables


def _lesson(item: Recording) -> tuple[Cell, ...]:
    part = item.parts.get("notebook", {})  # none where it took too long
    passes = f"all {part['cells']} cells" if item.status == MEASURED else item.status
    found = (part.get("seconds", ""), part.get("live", ""), "; ".join(part.get("not_live", ())))
    return item.device, item.task.removeprefix("live: "), passes, *found, item.line.content["detail"]


def _cell(item: Recording) -> tuple[Cell, ...]:
    times = item.parts.get("cells", {}).get("times", "")
    return item.device, item.task, item.status, times, item.line.content["detail"]


def _tables(name: str, made: Callable[[], list[Table]], *_: object) -> list[Table]:
    tables = made() or [Table(name, TITLES[name], (), (), (NONE_YET,))]
    return [
        replace(one, notes=(f"Recorded on {one.source}.", *one.notes)) if one.source else one
        for one in tables
    ]


MAKERS = (
    gpu_tables,
    gpu_published_tables,
    gpu_hardware_tables,
    gpu_allocator_tables,
    gpu_times_tables,
    gpu_live_tables,
)
GPU_TABLES = {name: partial(_tables, name, made) for name, made in zip(TITLES, MAKERS, strict=True)}
"""The tables that are made from recordings of real GPUs; one that says so where nothing is recorded yet."""
