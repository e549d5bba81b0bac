"""The lessons executed on a GPU, and memory that ran out on purpose, as tables."""

from ..measuring.recorded import Recording, attempts
from ..measuring.recording_file import MEASURED
from .gpu import nothing
from .tables import Cell, Table

TITLE = "The lessons on a GPU"
KINDS_OF_CELLS = ("notebook", "cells", "demos")


def gpu_live_tables() -> list[Table]:
    """Each notebook with its seconds and what failed; each kind of cell that ran out of memory, and how often."""
    found = [item for kind in KINDS_OF_CELLS for item in attempts(kind)]
    if not found:
        return [nothing("gpu-live", TITLE)]
    lessons = tuple(_lesson(item) for item in found if item.kind == "notebook")
    cells = tuple(_cell(item) for item in found if item.kind != "notebook")
    tables = []
    if lessons:
        headings = ("GPU", "notebook", "passes", "seconds", "live cells", "not live because", "what failed")
        tables.append(Table("gpu-live", TITLE, headings, lessons))
    if cells:
        headings = ("GPU", "what", "result", "times in a row", "what failed")
        tables.append(Table("gpu-cells", "Out of memory on purpose, and the demos", headings, cells))
    return tables


def _lesson(item: Recording) -> tuple[Cell, ...]:
    part = item.parts.get("notebook", {})
    passes = f"all {part['cells']} cells" if item.status == MEASURED else item.status
    why = "; ".join(part.get("not_live", ()))
    name, detail = item.task.removeprefix("live: "), item.line.content.get("detail", "")
    return item.device, name, passes, part.get("seconds", ""), part.get("live", ""), why, detail


def _cell(item: Recording) -> tuple[Cell, ...]:
    times = item.parts.get("cells", {}).get("times", "")
    return item.device, item.task, item.status, times, item.line.content.get("detail", "")
