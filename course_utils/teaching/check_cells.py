"""The checks of an exercise notebook, and the cells that run when a learner's copy of it is graded."""

import json
import re
from pathlib import Path
from typing import Any

from ..interactive.course_files import LESSONS, ROOT, numbered
from ..interactive.progress import HEADING

CHECK = re.compile(r"check\.\w+\(")
TITLE = re.compile(r"^# Exercises (\w+) ·", re.MULTILINE)

Cells = list[dict[str, str]]
"""Cells that run: each has its "source", and its "exercise" where it is a check of the course."""


def check_cells(notebook: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The cells of an exercise notebook that call a check, by id, with their exercise's number ("06.1")."""
    lesson = str(notebook["cells"][0]["id"])[:2]
    found = {}
    exercise = ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = HEADING.search(source)
            if heading:
                exercise = f"{lesson}.{heading[1]}"
        if cell["cell_type"] == "code" and CHECK.match(source):
            found[cell["id"]] = {"source": source, "exercise": exercise}
    return found


def cells_to_run(path: Path) -> tuple[Cells, str]:
    """The cells to run of a notebook that was handed in, and a remark. ValueError for any other file."""
    text = path.read_bytes()
    if not text.strip():
        raise ValueError("is empty")
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"is not a notebook, or is damaged ({type(error).__name__})") from error
    checks = _checks_in("\n".join(sources))
    lesson = checks[0]["exercise"][:2]
    title = TITLE.search(prose)
    remark = ""
    if title and title[1] != lesson:
        remark = f"its title says {title[1]}, as an older version of the course: graded as lesson {lesson}"
    return _with_checks(sources, checks), remark


def _checks_in(text: str) -> Cells:
    """The checks of the exercises whose checks a text calls most often.

    Nothing else is always there: programs that save notebooks change ids, and lessons have had other numbers.
    """
    best = 0
    found: Cells = []
    for path in numbered(ROOT / "exercises"):
        checks = check_cells(json.loads(path.read_text(encoding="utf-8"))).values()
        folder = LESSONS[int(path.name[:2])]
        imported = f"from course_utils.lessons.{folder} import checks as check\n"
        likeness = sum(_call(check) in text for check in checks) + (imported in text)
        if likeness > best:
            best = likeness
            found = [{**check, "source": imported + check["source"]} for check in checks]
    if not found:
        raise ValueError("has none of the course's exercises")
    return found


def _call(check: dict[str, str]) -> str:
    """ "check.mlp(" for a check cell."""
    found = CHECK.search(check["source"])
    return found[0] if found else ""


def _with_checks(sources: list[str], checks: Cells) -> Cells:
    """The learner's cells with the course's checks, each after the last cell that calls it, or at the end.

    A cell that does nothing but call a check is left out: the check would run twice.
    """
    lines = {check["source"].partition("\n")[2].strip() for check in checks}
    last = dict.fromkeys(map(_call, checks), len(sources))
    for index, source in enumerate(sources):
        last.update({call: index for call in last if call in source})
    cells: Cells = []
    for index, source in enumerate([*sources, ""]):
        if source.strip() not in lines:
            cells.append({"source": source})
        cells += [check for check in checks if last[_call(check)] == index]
    return cells
