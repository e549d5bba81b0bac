"""Compare counters published for GPUs with the simulated GPU, which runs each step, rewritten in plain torch.

Each line of a `.jsonl` is a published figure with its configuration and its source, and what we `said` of it,
frozen before it was compared (tests/freeze.py). The module of the same name in tests/published_models has a
function for each family of steps, which returns a `Measurement`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..allocator.replay import Replay, replay
from ..estimating.workspaces import workspaces_of
from ..interactive.course_files import SHIPPED
from ..measurement import Measurement

HERE = Path(__file__).with_name("published_steps")

STEPS = SHIPPED / "tests" / "published_models"
"""The package whose modules run the steps: in the repository, as they only serve to judge."""

FILES = ("single_ops", "language_models", "basics_transformer", "vision_models", "sharded_models", "low_bit")
"""The modules that run steps; each has its rows here in a file of its own name, .jsonl."""

COUNTERS = ("allocated", "reserved", "driver")
"""torch.cuda.max_memory_allocated, max_memory_reserved, and the driver's figure, as nvidia-smi shows it."""

TEN = tuple((HERE / "ten.txt").read_text(encoding="utf-8").split())
"""Ids of the rows that stand for all in docs/evidence.md."""


class Said(NamedTuple):
    """A row's bytes on the simulated GPU: the sum of tensors, the allocator's counter, and reserved."""

    tensors: int
    allocated: int
    reserved: int

    def of(self, row: "Row") -> int:
        """The bytes that answer the row's counter."""
        return self.allocated if row.counter == "allocated" else self.reserved + row.context


NOT_YET = Said(0, 0, 0)


@dataclass(frozen=True)
class Row:
    """One published figure.

    `printed` is the figure as the source has it, `bytes` the same in bytes; `counter` is one of COUNTERS.
    `family` (a module and its function) and `how` say what was trained, `capability` on what (CUDA's compute
    capability), `torch` with which release (of the year, where the source does not say). `moment` is what was
    read: "peak" (the highest point of the last step), "start" (what is there before the first), "end" (what
    is left after the last), "kept" (what forward added). `certain` says that the source leaves nothing open
    that moves the figure. `said` is what the simulated GPU said when it was frozen. `context` is the driver's
    part of a "driver" row in bytes, as the source states it; `expandable` are its segments. `gap` explains a
    difference, `open` is what the source does not say. A row without a `family` is not covered: its `gap`
    says why, and nothing is said of it.
    """

    id: str
    source: str
    gpu: str
    capability: tuple[int, int]
    torch: tuple[int, int]
    counter: str
    printed: str
    bytes: int
    certain: bool
    family: str = ""
    how: dict[str, Any] = field(default_factory=dict)
    said: Said = NOT_YET
    moment: str = "peak"
    context: int = 0
    expandable: bool = False
    gap: str = ""
    open: str = ""


@cache
def published_rows() -> tuple[Row, ...]:
    """Every published figure, in the order of the files."""
    return tuple(row for name in FILES for row in rows_of(name))


def rows_of(name: str) -> Iterator[Row]:
    """The rows of one file, as in "single_ops"."""
    for line in (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        told["capability"] = tuple(told["capability"])
        told["torch"] = tuple(told["torch"])
        told["said"] = Said(*told.get("said", NOT_YET))
        yield Row(**told)


def say(row: Row) -> Said:
    """Run the row's step on the simulated GPU. The published figure is not looked at."""
    measured, replayed = simulated(row)
    if row.moment in ("start", "end"):
        totals = measured.timeline.totals()
        last = -1 if row.moment == "end" else measured.timeline.marks[0].event - 1
        return Said(totals[last], replayed.allocated[last], replayed.reserved[last])
    if row.moment == "kept":
        moments = measured.moments
        kept = moments["end of forward"].total - moments["end of step 1"].total
        return Said(kept, kept, 0)
    peaks = replayed.step_peaks()
    last_step = max(peaks)
    return Said(measured.peak, peaks[last_step], replayed.peak_reserved)


def simulated(row: Row) -> tuple[Measurement, Replay]:
    """The row's step on the simulated GPU, and what the allocator made of it."""
    return _simulated(row.family, row.capability, row.torch, json.dumps(row.how), row.expandable)


@lru_cache(maxsize=1)  # neighboring rows are often of one run
def _simulated(
    family: str, capability: tuple[int, int], torch: tuple[int, int], how: str, expandable: bool
) -> tuple[Measurement, Replay]:
    step = family_of(family)
    measured = step(workspaces_of(capability, torch), **json.loads(how))
    return measured, replay(measured, expandable_segments=expandable)


def family_of(family: str, live: bool = False) -> Callable[..., Any]:
    """The function that runs a family's steps: a Measurement when simulated, or `live` what a GPU counts."""
    module, _, name = family.partition(".")
    if str(STEPS.parent) not in sys.path:
        sys.path.append(str(STEPS.parent))
    vars(import_module(f"{STEPS.name}.running"))["LIVE"] = live
    return getattr(import_module(f"{STEPS.name}.{module}"), name)


def percent(row: Row, said: Said) -> float:
    """The gap as a percentage: simulated over published, minus one."""
    return 100 * (said.of(row) / row.bytes - 1)


def answered_rows() -> list[Row]:
    """The rows whose step has been run: what was said of each is frozen."""
    return [row for row in published_rows() if row.said != NOT_YET]
