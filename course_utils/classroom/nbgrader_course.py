"""The exercises as nbgrader's source: `python3 -m course_utils nbgrader FOLDER`. Needs no nbgrader itself.

Solutions keep the course's own marks, `### BEGIN SOLUTION` and `### END SOLUTION`, which are nbgrader's too. Added is
what nbgrader keeps in a cell's metadata: what is to be solved, and which check is worth a point.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..interactive.command_line import Parser
from ..interactive.course_files import ANSWERS, NOT_SOLVED_IMPORT, ONLY_IN_SOLUTIONS, ROOT, numbered
from .grading import check_cells
from .release import refuse_used

SCHEMA = 3
"""nbgrader's own version of its metadata, as nbgrader 0.9.6 writes it."""

CONFIG = '''"""nbgrader's settings for this course. Run nbgrader in this folder, with the course installed."""

c = get_config()  # noqa: F821, nbgrader defines it
c.CourseDirectory.course_id = "where-did-the-memory-go"
c.ClearSolutions.code_stub = {"python": "raise NotSolved('Your turn: replace this line by your answer.')"}
c.ExecutePreprocessor.timeout = 300  # seconds for a cell; lesson 08's exercises start processes
'''


def write(folder: Path, root: Path = ROOT) -> list[Path]:
    """Write nbgrader's settings and one assignment a lesson to `folder`, which must be new; returns the assignments.

    Raises ValueError if something is there already.
    """
    refuse_used(folder)
    assignments = []
    for path in numbered(root / "solutions"):
        target = folder / "source" / path.stem / path.name
        target.parent.mkdir(parents=True)
        text = json.dumps(assignment(json.loads(path.read_text(encoding="utf-8"))), ensure_ascii=False, indent=1)
        target.write_text(text + "\n", encoding="utf-8", newline="\n")
        assignments.append(target)
    (folder / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8", newline="\n")
    return assignments


def assignment(solutions: dict[str, Any]) -> dict[str, Any]:
    """The solutions of a lesson as nbgrader wants them: marked, without outputs and what is for teachers alone."""
    kept = [cell for cell in solutions["cells"] if not ONLY_IN_SOLUTIONS.intersection(cell["metadata"].get("tags", ()))]
    checks = check_cells({**solutions, "cells": kept})
    return {**solutions, "cells": _with_import([_marked(cell, cell["id"] in checks) for cell in kept])}


def _marked(cell: dict[str, Any], is_check: bool) -> dict[str, Any]:
    """The cell without its outputs, and with nbgrader's metadata if it holds a solution or a check."""
    source = "".join(cell["source"])
    cleared = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
    is_solution = cell["cell_type"] == "code" and any(mark in source for mark in ANSWERS)
    marks: dict[str, Any] = {}
    if is_solution or is_check:
        marks = {"schema_version": SCHEMA, "grade_id": cell["id"], "locked": is_check, "task": False}
        marks |= {"solution": is_solution, "grade": is_check} | ({"points": 1} if is_check else {})
    metadata = {**cell["metadata"], **({"nbgrader": marks} if marks else {})}
    return {**cell, **cleared, "source": source, "metadata": metadata}


def _with_import(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells with NotSolved imported in the first that holds code: what nbgrader puts for a solution raises it."""
    first = next(index for index, cell in enumerate(cells) if cell["cell_type"] == "code")
    cells[first] = {**cells[first], "source": f"{NOT_SOLVED_IMPORT}\n{cells[first]['source']}"}
    return cells


def main(arguments: Sequence[str]) -> int:
    """`nbgrader FOLDER`: prints what was written."""
    parser = Parser("nbgrader", "The exercises for nbgrader.")
    parser.add_argument("folder", type=Path, help="a new folder for nbgrader's course")
    options = parser.parse_args(arguments)
    written = write(options.folder)
    print(f"{len(written)} assignments in {options.folder / 'source'}. There: nbgrader generate_assignment NAME")
    return 0
