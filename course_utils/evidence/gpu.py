"""Tables of what real GPUs recorded: the device's own counters against our figures, times, live lessons.

The simulation was recorded before the measurement, so that nothing could be fitted to the result afterwards.
The closed form is today's.
"""

import ast
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..allocator.snapshots import compare_with_gpu
from ..breakdown import KINDS
from ..estimating import estimate
from ..measuring.files import MEASURED
from ..measuring.recorded import Recording, attempts, newest
from ..models import TransformerConfig
from ..run import TrainingRun
from .history import unpacked
from .published import TEN, Row, published_rows
from .tables import BIAS_HEADINGS, TABLES, Cell, Table, bias_of
from .tasks import EXPANDABLE

NONE_YET = (
    "No recording of this kind from a real GPU exists yet. On a machine with one:"
    " `python3 -m course_utils record --out course_utils/measuring/recordings --minutes 30` (docs/gpu.md)."
)

TITLES = {name: table["title"] for name, table in TABLES.items() if "title" in table}

BOUNDS = ("median", "largest")  # The errors that are bounded
NO_BOUND = (math.inf, math.inf)
WANTED = {
    "closed form": NO_BOUND,
    "simulation": NO_BOUND,
    "simulation and blocks": (0.3, 1.0),
    "reserved": (1.0, math.inf),
}
"""Percent of what the GPU counted: what the median and the largest error may be, as set before any GPU was
asked. "reserved" is the simulation's, of max_memory_reserved; all others are of max_memory_allocated.
"""


@dataclass(frozen=True)
class RunOnGpu:
    """One run on a GPU, in bytes: `said` by each of `WANTED`, and `counted` by the GPU.

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
    parts = item.parts
    simulated = parts["simulated"]
    counters = parts["counters"]
    at_peak = simulated["breakdown"][0]
    found = estimate(run_of(item.task.removesuffix(" steps=2")))
    # cuBLAS's workspaces are those of the torch that recorded
    by_kind = {kind: size for kind, size in found.items() if size} | {
        "workspaces": at_peak.get("workspaces", 0)
    }
    said = {
        "closed form": sum(by_kind.values()),
        "simulation": sum(at_peak.values()),
        "simulation and blocks": simulated["allocated"],  # in blocks, as the allocator's policy has them
        "reserved": simulated["reserved"],
    }
    counted = dict.fromkeys(said, counters["allocated"])
    counted["reserved"] = counters["reserved"]
    kinds = {"tracked": parts["measured"]["breakdown"][0], "closed form": by_kind, "simulation": at_peak}
    phases = {}
    for name, highest in simulated["phase_peaks"].items():
        if name in counters["phases"]:
            phases[name] = (counters["phases"][name], sum(highest[0].values()))
    return RunOnGpu(item, said, counted, kinds, phases)


def run_of(code: str) -> TrainingRun:
    """The run that this line of code makes, read and not executed. Raises ValueError for any other code."""
    return _made(ast.parse(code, mode="eval").body)


def _made(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig}[node.func.id]
        named = {one.arg: _made(one.value) for one in node.keywords if one.arg}
        return kind(*map(_made, node.args), **named)
    return ast.literal_eval(node)


def gpu_tables() -> list[Table]:
    """Errors by kind of memory, by phase and run by run."""
    runs = runs_on_gpus()
    if not runs:
        return []
    return [_summary(runs), _by_kind(runs), _by_phase(runs), _each(runs)]


def devices(items: Sequence[Recording]) -> str:
    names = {f"{item.device}, torch {item.line.content['torch']}, {item.date}" for item in items}
    return "; ".join(sorted(names))


def _summary(runs: Sequence[RunOnGpu]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for by, bounds in WANTED.items():
        covered = [run for run in runs if by in run.said]
        errors = [run.percent(by) for run in covered]
        found = (statistics.median(map(abs, errors)), max(map(abs, errors)))
        exact = sum(run.said[by] == run.counted[by] for run in covered)
        bias = bias_of(run.said[by] / run.counted[by] for run in covered)
        named = zip(BOUNDS, bounds, strict=True)
        wanted = ", ".join(f"{name} {bound} %" for name, bound in named if bound < math.inf)
        kept = verdict(found, bounds) if wanted else ""
        rows.append((by, len(covered), exact, *bias, *found, wanted, kept))
    headings = ("peak by", "runs", "to the byte", *BIAS_HEADINGS, "median, %", "largest, %", "wanted", "kept")
    notes = (
        (
            "In percent of what the GPU counted in the last step, without the tracker: max_memory_reserved in"
            " the last row, max_memory_allocated in the others. All but the closed form, which is today's,"
            " were written down before the run."
        ),
        (
            "Every row includes cuBLAS's workspaces. The allocator's blocks can be larger than their tensors."
            " The closed form and the simulation count tensors only."
        ),
    )
    source = devices([run.recording for run in runs])
    return Table("gpu", TITLES["gpu"], headings, tuple(rows), notes, source)


def verdict(found: tuple[float, float], wanted: tuple[float, float]) -> str:
    """ "yes", or which of the two bounds, median and largest, is not kept."""
    broken = [name for name, one, bound in zip(BOUNDS, found, wanted, strict=True) if one > bound]
    if broken:
        return "no: " + " and ".join(broken)
    return "yes"


def _by_kind(runs: Sequence[RunOnGpu]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    # workspaces are no tensors of the program's: nothing tracks them
    tracked = [kind for kind in KINDS if kind != "workspaces"]
    for kind in tracked:
        for by in ("closed form", "simulation"):
            gaps = [run.kinds[by].get(kind, 0) - run.kinds["tracked"].get(kind, 0) for run in runs]
            shares = [100 * gap / run.allocated for gap, run in zip(gaps, runs, strict=True)]
            exact = sum(gap == 0 for gap in gaps)
            below = sum(gap < 0 for gap in gaps)
            rows.append((kind, by, exact, below, statistics.median(shares), min(shares), max(shares)))
    headings = ("kind of memory", "by", "exact", "below the truth", "median, % of peak", "lowest", "highest")
    where = f"at the peak of {len(runs)} runs"
    note = f"Predicted minus tracked on the GPU, {where}, in percent of the counted peak."
    title = "Signed error of each kind of memory, on a GPU"
    return Table("gpu_by_kind", title, headings, tuple(rows), (note,))


def _by_phase(runs: Sequence[RunOnGpu]) -> Table:
    """Bytes that the GPU counted in each phase beyond the simulated tensors: a missing term would show."""
    rows: list[tuple[Cell, ...]] = []
    phases = dict.fromkeys(name for run in runs for name in run.phases)  # in order, each once
    for phase in phases:
        both = (run.phases[phase] for run in runs if phase in run.phases)
        beyond = [counted - simulated for counted, simulated in both]
        rows.append((phase, len(beyond), round(statistics.median(beyond)), min(beyond), max(beyond)))
    headings = ("phase", "runs", "median, bytes", "least", "most")
    notes = (
        "Counted minus simulated peak of each phase: blocks, the kernels' scratch, and an unexplained rest.",
        (
            "zero_grad only frees. The GPU's peak is from before it frees the first gradient,"
            " the simulation's from after."
        ),
    )
    return Table("gpu_by_phase", "What a GPU counts beyond the tensors", headings, tuple(rows), notes)


def _each(runs: Sequence[RunOnGpu]) -> Table:
    by = "simulation and blocks"
    rows: list[tuple[Cell, ...]] = []
    for run in sorted(runs, key=lambda run: -abs(run.percent(by))):
        name = run.recording.task.removesuffix(" steps=2")
        errors = [run.percent(one) if one in run.said else "" for one in WANTED]
        rows.append((name, run.allocated, *errors, run.allocated - run.said[by]))
    headings = ("run", "counted, bytes", *(f"{one}, %" for one in WANTED), "left, bytes")
    return Table("gpu_runs", "Each recorded run, the largest error first", headings, tuple(rows))


# What no simulation sees


def gpu_hardware_tables() -> list[Table]:
    """Bytes of a GPU that are in no tensor: its context, cuBLAS's workspaces, and kernels' scratch."""
    rows: list[tuple[Cell, ...]] = []
    for item in newest("context"):
        rows.append((item.device, "context, before the first tensor", item.parts["context"]["context"]))
    for item in newest("workspaces"):
        together = item.parts["workspaces"]["together"]
        rows.append((item.device, "cuBLAS's workspaces, of both threads", together))
    for item in newest("scratch"):
        for one in item.parts["scratch"]["operations"]:
            if one.get("scratch"):
                rows.append((item.device, f"scratch: {one['operation']}", one["scratch"]))
    if not rows:
        return []
    headings = ("GPU", "what", "bytes")
    notes = ("Operations at GPT-2's sizes; those without scratch are left out.",)
    source = devices(newest("scratch"))
    return [Table("gpu-hardware", TITLES["gpu-hardware"], headings, tuple(rows), notes, source)]


# The allocator's model


def gpu_allocator_tables() -> list[Table]:
    """The table of histories, replayed now: moments at which the replay reserves as the GPU did, the gap.

    "steps equal" are the training steps at whose ends counter, history and replay say the same. Raises
    ValueError for a damaged history.
    """
    rows: list[tuple[Cell, ...]] = []
    exact: dict[str, list[bool]] = {}  # by settings: whether each history is equal throughout
    for item in newest("history"):
        part = item.parts["history"]
        found = compare_with_gpu(unpacked(part["history"]))
        name = item.task.removeprefix("history of ").rpartition(", ")[0]
        settings = "expandable segments" if item.line.content["environment"] == EXPANDABLE else "default"
        moments = len(found.real)
        equal = sum(not gap for gap in found.differences)
        exact.setdefault(settings, []).append(equal == moments)
        steps = [now == found.real[at - 1] == found.replayed[at - 1] for at, now in part["steps"]]
        steps_equal = f"{sum(steps)} of {len(steps)}"
        most = max(found.real, default=0)
        rows.append((name, settings, moments, equal, steps_equal, most, found.largest_difference))
    if not rows:
        return []
    headings = ("run", "settings", "moments", "equal", "steps equal", "most reserved", "largest difference")
    notes = [f"{name}: {sum(one)} of {len(one)} histories equal throughout" for name, one in exact.items()]
    source = devices(newest("history"))
    return [Table("gpu-allocator", TITLES["gpu-allocator"], headings, tuple(rows), tuple(notes), source)]


# Published steps


def gpu_published_tables() -> list[Table]:
    """Each published step that was run on a GPU here: published, simulated for this card, counted by it.

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
            elif part.startswith("counted "):
                rows.append(_published_row(known[name], counted, item.parts[f"said {name}"]))
    if not rows:
        return []
    rows.sort(key=lambda row: (row[0] not in TEN, -abs(float(row[-2]))))
    off = [abs(float(row[-2])) for row in rows]
    exact = sum(one == 0 for one in off)
    notes = (
        (
            f"{len(rows)} steps. For {exact} of them the simulation equals the card's count to the byte."
            f" Median error {statistics.median(off):.3f} %, largest {max(off):.2f} %."
        ),
        (
            "BERT's steps are simulated as on torch 1.10, without cuBLAS's workspaces."
            " Vision transformers have a convolution, and torch's code does not say how much cuDNN takes"
            " for it."
        ),
        *failed,
    )
    source = devices(newest("published"))
    title = TITLES["gpu-published"]
    return [Table("gpu-published", title, PUBLISHED_HEADINGS, tuple(rows), notes, source)]


PUBLISHED_HEADINGS = (
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


def _published_row(
    row: Row, counted: dict[str, tuple[int, int]], said: dict[str, tuple[int, int]]
) -> tuple[Cell, ...]:
    """The cells under `PUBLISHED_HEADINGS`, from bytes allocated and reserved by moment."""
    moment = row.moment if row.moment in counted else "peak"
    allocated, reserved = counted[moment]
    said_allocated, said_reserved = said[moment]
    return (
        row.id,
        row.gpu.partition(" (")[0],
        row.printed,
        row.counter,
        said_allocated,
        allocated,
        reserved,
        _error_percent(said_allocated, allocated),
        _error_percent(said_reserved, reserved),
    )


def _error_percent(said: int, counted: int) -> float:
    """The error in percent of what was counted; 0 where nothing was."""
    return 100 * (said / counted - 1) if counted else 0.0


# Times


def gpu_times_tables() -> list[Table]:
    """Each comparison's variants on each GPU: median and quartiles of a step, repetitions, ratio to first."""
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
            median = step["median"]
            first = first or median
            quartiles = f"{step['q1']:,.2f} to {step['q3']:,.2f}"
            rows.append((*named, f"{median:,.2f}", quartiles, step["n"], f"{median / first:.3f}"))
    if not rows:
        return []
    headings = ("GPU", "comparison", "variant", "median, ms", "quartiles, ms", "repetitions", "to the first")
    notes = tuple(dict.fromkeys(item.busy for item in found if item.busy))
    return [Table("gpu-times", TITLES["gpu-times"], headings, tuple(rows), notes, devices(found))]


# Lessons executed live


def gpu_live_tables() -> list[Table]:
    """Each notebook with its seconds and what failed; each kind of cell that ran out of memory, how often."""
    tables = []
    found = attempts("notebook")
    notes: tuple[str, ...] = ()
    if any(item.busy for item in found):
        notes = ("Other lessons and runs took memory of the same card at the same time.",)
    lessons = tuple(_lesson(item) for item in found)
    if lessons:
        headings = ("GPU", "notebook", "passes", "seconds", "live cells", "not live because", "what failed")
        tables.append(Table("gpu-live", TITLES["gpu-live"], headings, lessons, notes))
    cells = tuple(_cell(item) for item in (*attempts("cells"), *attempts("demos")))
    if cells:
        headings = ("GPU", "what", "result", "times in a row", "what failed")
        tables.append(Table("gpu-cells", "Out of memory on purpose, and the demos", headings, cells))
    return tables


def _lesson(item: Recording) -> tuple[Cell, ...]:
    part = item.parts.get("notebook", {})  # none where it took too long
    return (
        item.device,
        item.task.removeprefix("live: "),
        f"all {part['cells']} cells" if item.status == MEASURED else item.status,
        part.get("seconds", ""),
        part.get("live", ""),
        "; ".join(part.get("not_live", ())),
        item.line.content["detail"],
    )


def _cell(item: Recording) -> tuple[Cell, ...]:
    times = item.parts.get("cells", {}).get("times", "")
    return item.device, item.task, item.status, times, item.line.content["detail"]


def _tables(name: str, made: Callable[[], list[Table]]) -> list[Table]:
    tables = []
    for table in made() or [Table(name, TITLES[name], (), (), (NONE_YET,))]:
        if table.source:
            table = replace(table, notes=(f"Recorded on {table.source}.", *table.notes))
        tables.append(table)
    return tables


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
