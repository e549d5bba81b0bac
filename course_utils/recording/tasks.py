"""The tasks of `record`, the most important first.

They are training runs for every choice of the course, figures that only hardware shows, and the lessons
themselves.
"""

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from ..estimating import estimate
from ..interactive.course_files import ROOT, numbered
from ..models import PRESETS
from ..planning.twin import fits, unsupported
from ..run import TrainingRun
from ..units import GB, MB
from .published_steps import STEPS as PUBLISHED_STEPS
from .published_steps import TEN, Row, published_rows

FACTS = "facts"  # The task before all others: it names the device, and fails unless torch can use it
STEPS = 2  # Steps of the passes whose memory is recorded; the first has no optimizer states yet

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""An environment variable that torch reads once, when its allocator begins: hence a process of its own."""

NOTEBOOK_KINDS = ("cells", "notebook")  # Kinds of tasks that execute cells

CELLS = ("measure(run)", "measure(step=…)", "live_meter", "demo", "plain torch")
"""Kinds of cells that can run out of memory."""

COMPARISONS = ("recomputation", "precision", "optimizer", "accumulation", "loss")  # Topics of comparisons
MOST_SEQUENCES = 8  # Sequences in a comparison's batch on a card with room enough; a smaller card halves it

TIMES_OUT_OF_MEMORY = 100  # Each kind of cell runs out of memory so often in a row
# A lesson's budget where its own metadata state none, as in `course: {budget_seconds: 90}`
LESSON_SECONDS = 60.0

# Kept for a lesson next to others: on an H200 one took 44 GB
NOTEBOOK = 45 * GB

LIVE_FACTOR = 3.0
"""Times its budget that a lesson may take on a GPU: the budget is for a simulation; here it trains, too."""


@dataclass(frozen=True)
class Task:
    """One thing to record, in a process of its own that may take `seconds`; `environment` is set for it.

    `kind` says how it is done: "run" trains as `run` says, "history" keeps and replays its allocator's
    history, "kernels" runs attention alone for sequences of `seq_len` tokens, "times" compares the variants
    of `topic`, "context", "workspaces" and "scratch" measure what no simulation sees. "cells" runs out of
    memory in cells of the kind `topic`, "notebook" executes the notebook of that path, "published" runs the
    published steps whose rows `topic` names. One that does not train as `run` says `needs` so many bytes;
    one that has to be `alone` shares the GPU with no other.
    """

    name: str
    kind: str
    why: str
    run: TrainingRun | None = None
    seq_len: int = 0
    topic: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 150.0
    needs: int = 0
    alone: bool = False

    @property
    def needs_notebooks(self) -> bool:
        """True if it needs Jupyter's packages and not torch alone."""
        return self.kind in NOTEBOOK_KINDS

    @property
    def room(self) -> int:
        """Bytes of the GPU that are kept for it while others use the rest: what it needs, and its context."""
        return round(1.05 * self.predicted) + self.needs + 600 * MB

    @property
    def predicted(self) -> int:
        """The estimated peak in bytes; 0 for what trains nothing."""
        return estimate(self.run).total if self.run is not None else 0

    def obstacle(self, free: int, capability: tuple[int, int]) -> str:
        """The reason that a GPU with `free` bytes and this compute capability cannot do it, or ""."""
        if self.run is None:
            return ""
        reason = unsupported(self.run, capability)
        if not reason and not fits(self.run, free):
            reason = "does not fit"
        return reason


def run_task(run: TrainingRun, why: str, alone: bool = False) -> Task:
    return Task(f"{run.code()} steps={STEPS}", "run", why, run, alone=alone)


SMALL_ROWS = 6
ON_ONE_GPU = 36 * GB  # Published rows of at most so many bytes are counted one after the other in one task


def published_tasks() -> Iterator[Task]:
    """Published steps of one rank: small ones together, large and shown ones alone. None without the code."""
    if not PUBLISHED_STEPS.exists():
        return
    rows = [row for row in published_rows() if row.family and not row.family.startswith("sharded_models")]
    # Several rows can be of one run: the first is enough. Reversed, as the last one for a key stays.
    first_of_run = {(row.family, json.dumps(row.how)): row for row in reversed(rows)}.values()
    rows = [row for row in rows if row.id in TEN or row in first_of_run]
    large = [row for row in rows if row.id in TEN or row.said.reserved > ON_ONE_GPU]
    small = [row for row in rows if row not in large]
    kinds = sorted({(row.family.partition(".")[0], row.expandable) for row in small})
    for file, expandable in kinds:
        name = f"{file}, expandable" if expandable else file
        of_kind = [row for row in small if row.family.startswith(file) and row.expandable == expandable]
        for number, start in enumerate(range(0, len(of_kind), SMALL_ROWS), start=1):
            yield published_task(f"{name} {number}", of_kind[start : start + SMALL_ROWS])
    for row in large:
        yield published_task(row.id, [row])


def published_task(name: str, rows: Sequence[Row]) -> Task:
    """One process counts these rows, whose segments are alike; it needs what the largest reserves."""
    needs = max(row.said.reserved for row in rows)
    topic = ",".join(row.id for row in rows)
    environment = EXPANDABLE if rows[0].expandable else {}
    return Task(
        f"published: {name}",
        "published",
        "counted elsewhere",
        topic=topic,
        needs=needs,
        environment=environment,
        seconds=300.0,
    )


def history_task(run: TrainingRun, environment: Mapping[str, str]) -> Task:
    settings = ",".join(environment.values()) or "default settings"
    name = f"history of {run.code()}, {settings}"
    return Task(name, "history", "the allocator's model", run, environment=environment)


def recording_list() -> tuple[Task, ...]:
    """Everything to be recorded, the most important first; a GPU does what fits it."""
    found: dict[str, Task] = {}
    for task in everything():
        found.setdefault(task.name, task)  # where it is named first
    return tuple(found.values())


GPT2 = TrainingRun("gpt2", 8, 1024)
XL = TrainingRun("gpt2-xl", 32, 1024)
MIXTRAL_BLOCK = dataclasses.replace(PRESETS["mixtral-8x7b"], name="mixtral-8x7b, one block", layers=1)
STARTS = {
    "GPT-2": GPT2,
    "GPT-2 on a T4": TrainingRun("gpt2", 8, 1024, "amp-fp16", attention="efficient"),  # older GPUs, too
    "GPT-2 medium": TrainingRun("gpt2-medium", 8, 1024),
    "GPT-2 XL": XL,
    "the puzzle": XL.replace(precision="bf16-master", recompute="full", optimizer="adamw-foreach"),
    "Llama 1B": TrainingRun("llama3.2-1b", 4, 1024),
    "Llama 8B": TrainingRun("llama3-8b", 1, 2048),
    "one block of Mixtral": TrainingRun(MIXTRAL_BLOCK, 1, 1024),
}
"""The runs that those of runs.toml start from, by name."""


def training_runs(group: str) -> Iterator[Task]:
    """The training runs of a group of runs.toml, in order. KeyError for an unknown group or start."""
    return (run_task(run, **told) for run, told in _rows(group))


def _rows(group: str) -> Iterator[tuple[TrainingRun, dict[str, Any]]]:
    """Each run of a group, and what else is said of it: `why` it is there, and if it has to be `alone`."""
    groups = tomllib.loads(Path(__file__).with_name("runs.toml").read_text(encoding="utf-8"))
    for row in groups[group]:
        told = {name: row.pop(name) for name in ("why", "alone") if name in row}
        start = STARTS[row.pop("of")]
        changes = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        yield start.replace(**changes), told


def everything() -> Iterator[Task]:
    """All tasks in their order, some of them twice."""
    # What tells most, in about three minutes
    yield Task("workspaces", "workspaces", "cuBLAS's workspaces")
    yield from training_runs("first")
    yield history_task(history_runs()[0], {})
    yield from training_runs("fits")
    # What else the lessons show first, and what GPUs elsewhere have counted
    yield Task("context", "context", "what the driver takes before the first tensor", alone=True)
    yield Task("scratch", "scratch", "what kernels allocate for themselves")
    published = list(published_tasks())
    yield from (task for task in published if task.name.partition(": ")[2] in TEN)
    yield from training_runs("lessons")
    # Times that only a GPU's clock can give
    for topic in COMPARISONS:
        yield Task(f"times of {topic}", "times", "times with their spread", topic=topic, alone=True)
    yield from map(kernels_task, (512, 1024, 2048, 4096, 8192, 16384))
    # Running out of memory on purpose
    for kind in CELLS:
        name = f"out of memory in a cell with {kind}"
        why = f"out of memory {TIMES_OUT_OF_MEMORY} times in a row"
        yield Task(name, "cells", why, topic=kind, seconds=400.0, needs=2 * GB)
    yield from training_runs("quick")
    # The allocator's histories, the lessons, the smaller published steps
    for environment in ({}, EXPANDABLE):
        for recorded in history_runs():
            yield history_task(recorded, environment)
    yield from lessons("notebooks")
    yield from published
    yield from lessons("solutions")
    yield from training_runs("rest")


def history_runs() -> tuple[TrainingRun, ...]:
    """The runs whose allocator histories are kept, under default settings and with expandable segments."""
    return tuple(run for run, _ in _rows("histories"))


def lessons(folder: str) -> Iterator[Task]:
    """Every notebook of a folder with the GPU as its source; none where the package lies alone."""
    for path in numbered(ROOT / folder):
        name = f"{folder}/{path.name}"
        seconds = LIVE_FACTOR * budget(path)
        yield Task(
            f"live: {name}", "notebook", "the lesson, live", topic=name, seconds=seconds, needs=NOTEBOOK
        )


def budget(notebook: Path) -> float:
    """The seconds that a notebook's metadata grant it."""
    metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
    return float(metadata.get("course", {}).get("budget_seconds", LESSON_SECONDS))


def kernels_task(seq_len: int) -> Task:
    name = f"attention alone at s={seq_len}"
    return Task(name, "kernels", "kernels by sequence length", seq_len=seq_len, alone=True)


def rehearsal_list() -> tuple[Task, ...]:
    """Small tasks that a CPU can do in seconds, to try the machinery: they pass through the same code."""
    gpt = TrainingRun("tiny-gpt", 2, 64, "fp32", attention="eager")
    llama = TrainingRun("tiny-llama", 1, 64, "fp32", attention="eager", clip_grad_norm=1.0)
    runs = (
        gpt,
        gpt.replace(recompute="full"),
        llama,
        llama.replace(optimizer="adamw-loop", accumulation_steps=2),
    )
    return (
        *(run_task(run, "a rehearsal") for run in runs),
        Task("workspaces", "workspaces", "a rehearsal"),
        Task("attention alone at s=64", "kernels", "a rehearsal", seq_len=64),
        *(Task(f"times of {topic}", "times", "a rehearsal", topic=topic) for topic in COMPARISONS),
        history_task(gpt, {}),
        history_task(gpt, EXPANDABLE),
        *(task for task in lessons("notebooks") if "/00_" in task.topic),
    )


# Comparisons: variants of one run, timed one after the other in one process


def variants(topic: str, batch: int) -> dict[str, TrainingRun]:
    """The runs of a comparison by label, for a batch of so many sequences."""
    small = TrainingRun("gpt2", batch, 1024)
    medium = TrainingRun("gpt2-medium", batch, 1024)
    fused = small.replace(attention="efficient")  # the one fused kernel that takes fp32, too
    if topic == "recomputation":
        return {name: medium.replace(recompute=name) for name in ("none", "selective", "offload", "full")}
    if topic == "precision":
        return {name: fused.replace(precision=name) for name in ("fp32", "tf32", "amp-bf16", "amp-fp16")}
    if topic == "optimizer":
        return {name: medium.replace(optimizer=f"adamw-{name}") for name in ("loop", "foreach", "fused")}
    if topic == "loss":
        pieces = {"1 piece": 1, "8 pieces": 8, "32 pieces": 32}
        return {name: small.replace(loss_chunks=chunks) for name, chunks in pieces.items()}
    counts = {"one batch": 1} | {f"{count} micro-batches": count for count in (2, 4, 8) if count <= batch}
    return {name: small.replace(micro_batch=batch // n, accumulation_steps=n) for name, n in counts.items()}


def sized(topic: str, free: int, capability: tuple[int, int]) -> dict[str, TrainingRun | str]:
    """The variants of a comparison for a GPU with `free` bytes; a reason for each that it cannot compute.

    An older card gets fp16 and the efficient kernel, as `twin` has it, except where precisions are compared.
    Raises ValueError for a card on which not even a single sequence fits.
    """
    batch = MOST_SEQUENCES
    while batch:
        runs = {label: _supported(topic, run, capability) for label, run in variants(topic, batch).items()}
        if all(fits(run, free) for run in runs.values() if isinstance(run, TrainingRun)):
            return runs
        batch //= 2
    raise ValueError(
        f"the comparison of {topic} does not fit {free:,} bytes, not even one sequence at a time"
    )


def _supported(topic: str, run: TrainingRun, capability: tuple[int, int]) -> TrainingRun | str:
    reason = unsupported(run, capability)
    if reason and topic != "precision":
        run = run.replace(precision="amp-fp16", attention="efficient")
        reason = unsupported(run, capability)
    return reason or run


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and number of repeated measurements, in their unit. ValueError for none."""
    if len(values) > 1:
        low, middle, high = quantiles(values, n=4, method="inclusive")
    else:
        low, middle, high = 3 * values  # `quantiles` refuses a single one
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4), "n": len(values)}
