"""How right on a real GPU: estimate and simulation beside what the device itself counted, over all recorded runs.

Everything is read from recordings: the estimate and the simulation in them were made with the measurement, by code
that its line names, so that nothing could be fitted to the result afterwards.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..breakdown import KINDS
from ..measuring.recorded import Recording, newest
from .tables import Cell, Table

COMMAND = "python3 -m course_utils record --out course_utils/measuring/recordings --minutes 30"

NONE_YET = f"No recording of this kind from a real GPU exists yet. On a machine with one: `{COMMAND}` (docs/gpu.md)."

WANTED = {"estimate": (1.0, 2.0), "simulation": (None, None), "simulation and named terms": (0.5, 1.5)}
"""Per cent of the allocated peak: what the median and the largest error may be. The simulation alone promises none."""


@dataclass(frozen=True)
class RunOnGpu:
    """One run on a GPU, in bytes: what the device counted, what was said before, and what is known of the rest.

    `terms` are named: "blocks" is what the allocator's policy takes beyond the tensors, "workspaces" cuBLAS's, as
    recorded on this GPU. `kinds` are the three breakdowns by kind at their peaks: tracked on the GPU, estimated,
    simulated. `phases` is the peak in each phase: counted and simulated.
    """

    recording: Recording
    counted: int
    estimated: int
    simulated: int
    terms: dict[str, int]
    kinds: dict[str, dict[str, int]]
    phases: dict[str, tuple[int, int]]

    def said(self, by: str) -> int:
        """The peak in bytes by one of `WANTED`."""
        known = {"estimate": self.estimated, "simulation": self.simulated}
        return known[by] if by in known else self.simulated + sum(self.terms.values())

    def percent(self, by: str) -> float:
        """What was said over what was counted, less one, in percent."""
        return 100 * (self.said(by) / self.counted - 1)


def runs_on_gpus() -> list[RunOnGpu]:
    """Every recorded run that has all three figures, the newest of each on each GPU."""
    workspaces = {item.device: item.parts["workspaces"]["together"] for item in newest("workspaces")}
    return [
        run_on_gpu(item, workspaces.get(item.device, 0))
        for item in newest("run")
        if {"counters", "estimate", "measured"} <= item.parts.keys() and "breakdown" in item.parts.get("simulated", {})
    ]


def run_on_gpu(item: Recording, workspaces: int) -> RunOnGpu:
    """One recording as the table reads it; `workspaces` is what cuBLAS keeps on that GPU, in bytes."""
    parts, simulated = item.parts, item.parts["simulated"]
    tensors = sum(simulated["breakdown"][0].values())
    counted_phases = parts["counters"]["phases"]
    simulated_phases = {name: sum(highest[0].values()) for name, highest in simulated["phase_peaks"].items()}
    return RunOnGpu(
        item, parts["counters"]["allocated"], parts["estimate"]["total"], tensors,
        {"blocks": simulated.get("allocated", tensors) - tensors, "workspaces": workspaces},
        {
            "tracked": parts["measured"]["breakdown"][0],
            "estimate": parts["estimate"]["by_kind"],
            "simulation": simulated["breakdown"][0],
        },
        {name: (counted_phases[name], size) for name, size in simulated_phases.items() if name in counted_phases},
    )  # fmt: skip


def gpu_tables() -> list[Table]:
    """How far off, by kind of memory, by phase and run by run; one table that says so where nothing is recorded."""
    runs = runs_on_gpus()
    if not runs:
        return [nothing("gpu", "Estimate and simulation against the GPU's own counters")]
    return [_summary(runs), _by_kind(runs), _by_phase(runs), _each(runs)]


def nothing(name: str, title: str) -> Table:
    """A table that says that nothing is recorded yet, and by which command it will be."""
    return Table(name, title, (), (), (NONE_YET,))


def devices(items: Sequence[Recording]) -> str:
    """Where recordings are from, once each: GPU, torch, day."""
    return "; ".join(sorted({f"{item.device}, torch {item.line.content['torch']}, {item.date}" for item in items}))


def _summary(runs: Sequence[RunOnGpu]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for by, (median, most) in WANTED.items():
        off = sorted(abs(run.percent(by)) for run in runs)
        signed = statistics.median(run.percent(by) for run in runs)
        wanted = "" if median is None else f"median {median} %, largest {most} %"
        kept = "" if median is None or most is None else verdict(statistics.median(off), off[-1], median, most)
        rows.append((by, len(runs), signed, statistics.median(off), off[-1], wanted, kept))
    headings = ("peak by", "runs", "signed median, %", "median, %", "largest, %", "wanted", "kept")
    notes = (
        "In percent of max_memory_allocated of the last step, counted without the tracker.",
        "Named terms: blocks (the allocator's policy, replayed) and cuBLAS's workspaces (recorded on the same GPU).",
    )
    source = devices([run.recording for run in runs])
    return Table("gpu", "Estimate and simulation against the GPU's own counters", headings, tuple(rows), notes, source)


def verdict(median: float, most: float, median_wanted: float, most_wanted: float) -> str:
    """ "yes", or which of the two bounds is not kept."""
    broken = [name for name, over in (("median", median > median_wanted), ("largest", most > most_wanted)) if over]
    return "no: " + " and ".join(broken) if broken else "yes"


def _by_kind(runs: Sequence[RunOnGpu]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for kind in KINDS:
        for by in ("estimate", "simulation"):
            gaps = [run.kinds[by].get(kind, 0) - run.kinds["tracked"].get(kind, 0) for run in runs]
            shares = [100 * gap / run.counted for gap, run in zip(gaps, runs, strict=True)]
            exact = sum(not gap for gap in gaps)
            rows.append((kind, by, exact, statistics.median(shares), min(shares), max(shares)))
    headings = ("kind of memory", "by", "exact", "median, % of peak", "lowest", "highest")
    note = f"Said minus tracked on the GPU, at the peak, over {len(runs)} runs, in percent of the counted peak."
    return Table("gpu_by_kind", "Signed error of each kind of memory, on a GPU", headings, tuple(rows), (note,))


def _by_phase(runs: Sequence[RunOnGpu]) -> Table:
    """What the GPU counted in each phase beyond the simulated tensors: where a term that nobody named would show."""
    rows: list[tuple[Cell, ...]] = []
    for phase in dict.fromkeys(name for run in runs for name in run.phases):
        beyond = [
            counted - simulated for counted, simulated in (run.phases[phase] for run in runs if phase in run.phases)
        ]
        rows.append((phase, len(beyond), round(statistics.median(beyond)), min(beyond), max(beyond)))
    headings = ("phase", "runs", "median, bytes", "least", "most")
    note = "Counted minus simulated peak of each phase: blocks, workspaces, kernels' scratch, and what has no name yet."
    return Table("gpu_by_phase", "What a GPU counts beyond the tensors", headings, tuple(rows), (note,))


def _each(runs: Sequence[RunOnGpu]) -> Table:
    furthest = sorted(runs, key=lambda run: -abs(run.percent("simulation and named terms")))
    rows = tuple(
        (
            run.recording.task, run.recording.device, run.counted, run.percent("estimate"), run.percent("simulation"),
            run.percent("simulation and named terms"), run.counted - run.said("simulation and named terms"),
        )
        for run in furthest
    )  # fmt: skip
    headings = ("run", "GPU", "counted, bytes", "estimate, %", "simulation, %", "with terms, %", "left, bytes")
    return Table("gpu_runs", "Each recorded run, the furthest off first", headings, rows)
