"""Cells out of a lesson's source, executed: what a lesson shows is tested as it is shown."""

from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import jupytext

from course_utils import plus_minus
from course_utils.interactive.guesses import waits_for

SOURCES = Path(__file__).resolve().parent.parent / "notebooks" / "src"


@cache
def cells(source: Path) -> list[str]:
    """The code cells of a lesson's source."""
    notebook: Any = jupytext.read(source, fmt="py:percent")
    return [cell["source"] for cell in notebook.cells if cell["cell_type"] == "code"]


@cache
def names_from_cells(lesson: str, *parts: str) -> dict[str, Any]:
    """The names that these code cells define: of each part of code, the one cell that contains it. They run
    in the order given, and what they print is dropped.
    """
    [source] = SOURCES.glob(f"{lesson}_*.py")
    names: dict[str, Any] = {"waits_for": waits_for, "plus_minus": plus_minus}  # which lessons import early
    with redirect_stdout(StringIO()):
        for part in parts:
            [cell] = [cell for cell in cells(source) if part in cell]
            exec(cell, names)
    return names


def printed_with(lesson: str, old: str, new: str, *before: str) -> str:
    """Return what a cell prints if a learner writes `new` for `old`; cells with `before` execute first."""
    [source] = SOURCES.glob(f"{lesson}_*.py")
    names = dict(names_from_cells(lesson, *before))
    [cell] = [cell for cell in cells(source) if old in cell]
    said = StringIO()
    with redirect_stdout(said):
        exec(cell.replace(old, new), names)
    return said.getvalue()
