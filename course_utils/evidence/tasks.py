"""The tasks of `record`, the most important first: runs, figures that only hardware shows, lessons."""

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..estimating import estimate
from ..interactive.course_files import ROOT, budget, numbered, scripts
from ..measuring.recorded import COMPARISONS
from ..models import PRESETS
from ..planning.twin import fits, unsupported
from ..run import TrainingRun
from ..units import GB, MB
from .published import STEPS as PUBLISHED_STEPS
from .published import TEN, Row, published_rows

STEPS = 2  # Steps of the passes whose memory is recorded; the first has no optimizer states yet

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""An environment variable that torch reads once, when its allocator begins: hence a process of its own."""

MOST_SEQUENCES = 8  # Sequences in a comparison's batch on a card with room enough; a smaller card halves it

NOTEBOOK = 45 * GB  # Kept for a lesson next to others: on an H200 one took 44 GB
CONTEXT = 600 * MB  # Kept for the CUDA context of each process

LIVE_FACTOR = 8.0
"""Times its budget that a lesson may take on a GPU: the budget is for a simulation; here it trains, too."""


@dataclass(frozen=True)
class Task:
    """One thing to record, in a process of its own that may take `seconds`; `environment` is set for it.

    `kind` says how it is done: "run" trains as `run` says, "history" keeps its allocator's history, "kernels"
    times attention alone for sequences of so many tokens as `topic` says, "times" compares the variants of
    `topic`, "context", "workspaces" and "scratch" measure what no simulation sees, "notebook" executes the
    notebook of that path, "script" the growing script of that name, "published" runs the published steps
    whose ids `topic` names. One that does not train as `run` says `needs` so many bytes; one that has to be
    `alone` shares the machine with no other.
    """

    name: str
    kind: str
    why: str
    run: TrainingRun | None = None
    topic: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 150.0
    needs: int = 0
    alone: bool = False

    @property
    def predicted(self) -> int:
        """The estimated peak in bytes; 0 for what trains nothing."""
        return estimate(self.run).total if self.run is not None else 0

    @property
    def room(self) -> int:
        """Bytes of the GPU that are kept for it while others use the rest."""
        return round(1.05 * self.predicted) + self.needs + CONTEXT

    def obstacle(self, free: int, capability: tuple[int, int]) -> str:
        """The reason that a GPU with `free` bytes and this compute capability cannot do it, or ""."""
        if self.run is None:
            return ""
        reason = unsupported(self.run, capability)
        if not reason and not fits(self.run, free):
            reason = "does not fit"
        return reason


def recording_list() -> tuple[Task, ...]:
    """Everything to be recorded, each once, where it is named first."""
    found: dict[str, Task] = {}
    for task in _everything():
        found.setdefault(task.name, task)
    return tuple(found.values())


def _everything() -> Iterator[Task]:
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
    yield from (task for task in published if task.topic in TEN)
    yield from training_runs("lessons")
    for path in scripts():
        yield Task(
            f"script: {path.name}", "script", "the growing script", topic=path.name, needs=16 * GB, alone=True
        )
    # Times that only a GPU's clock can give
    for topic in COMPARISONS:
        yield Task(f"times of {topic}", "times", "times with their spread", topic=topic, alone=True)
    for seq_len in (512, 1024, 2048, 4096, 8192, 16384):
        name = f"attention alone at s={seq_len}"
        yield Task(name, "kernels", "kernels by sequence length", topic=str(seq_len), alone=True)
    yield from training_runs("quick")
    # The allocator's histories, the lessons, the smaller published steps
    for environment in ({}, EXPANDABLE):
        for recorded in history_runs():
            yield history_task(recorded, environment)
    yield from lessons("notebooks")
    yield from published
    yield from lessons("solutions")
    yield from training_runs("rest")


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
    for run, why, alone in _rows(group):
        yield Task(f"{run.code()} steps={STEPS}", "run", why, run, alone=alone)


def history_runs() -> tuple[TrainingRun, ...]:
    """The runs whose allocator histories are kept, under default settings and with expandable segments."""
    return tuple(run for run, _, _ in _rows("histories"))


def _rows(group: str) -> Iterator[tuple[TrainingRun, str, bool]]:
    """Each run of a group, why it is there, and if it has to be alone."""
    groups = tomllib.loads(Path(__file__).with_name("runs.toml").read_text(encoding="utf-8"))
    for row in groups[group]:
        why = row.pop("why", "")
        alone = row.pop("alone", False)
        start = STARTS[row.pop("of")]
        changes = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        yield start.replace(**changes), why, alone


def history_task(run: TrainingRun, environment: Mapping[str, str]) -> Task:
    settings = ",".join(environment.values()) or "default settings"
    name = f"history of {run.code()}, {settings}"
    return Task(name, "history", "the allocator's model", run, environment=environment)


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
            yield _published_task(f"{name} {number}", of_kind[start : start + SMALL_ROWS])
    for row in large:
        yield _published_task(row.id, [row])


def _published_task(name: str, rows: Sequence[Row]) -> Task:
    """One process counts these rows, whose segments are alike; it needs what the largest reserves."""
    return Task(
        f"published: {name}",
        "published",
        "counted elsewhere",
        topic=",".join(row.id for row in rows),
        needs=max(row.said.reserved for row in rows),
        environment=EXPANDABLE if rows[0].expandable else {},
        seconds=300.0,
    )


def lessons(folder: str) -> Iterator[Task]:
    """Every notebook of a folder with the GPU as its source; none where the package lies alone."""
    for path in numbered(ROOT / folder):
        topic = f"{folder}/{path.name}"
        seconds = LIVE_FACTOR * budget(path)
        yield Task(
            f"live: {topic}", "notebook", "the lesson, live", topic=topic, seconds=seconds, needs=NOTEBOOK
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
