"""From a percent-format source to the cells of its notebooks. Nothing is run here and nothing is written."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

from ..errors import unknown
from ..interactive.course_files import (
    ANSWERS,
    CORE,
    EXERCISES_WITH,
    NOT_SOLVED_IMPORT,
    ONLY_IN_SOLUTIONS,
    number_of,
)
from ..interactive.notebook_runs import BuildError

FOLDERS = ("notebooks", "solutions")
"""Folders of sources: `src/` inside each. Those in `solutions` also become exercises."""

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CHECKS_IMPORT = re.compile(r"from course_utils\.lessons\.\w+ import checks")
STEM = re.compile(r"\d\d_[a-z0-9_]+")
PAGES = ("explorer", "demos")
"""Notebooks that are no lessons: without number, exercises and solutions."""

THIS_MACHINE = "this-machine"
"""The tag of cells whose outputs describe the machine that they run on, and are not shipped."""

FOLDED_CODE = "hide-input"
"""The tag of cells whose code only draws: JupyterLab and the website fold it."""

FOLDED_OUTPUT = "hide-output"
"""The tag of cells whose outputs are folded until they run: JupyterLab and the website fold them."""

FRAME = "border-left:6px solid #0072b2;padding:2px 14px"
"""The look of what a lesson begins and ends with: JupyterLab leaves it even if a notebook is not trusted."""

SLIDE_TYPES = ("slide", "subslide", "fragment", "notes", "skip")
"""What nbconvert can make of a cell. A tag of that name in a source decides; else `slide_type` does."""

SECTION = re.compile(r"^##? ", re.MULTILINE)
SHOWN_TEXT = re.compile(r"\*\*Your guess|^\*\*The gap|^\*\*Cheat-sheet line|^\|--", re.MULTILINE)
ONLY_LIVE = re.compile(r"^(predict|quiz|waits_for)\(.*\)\s*\Z", re.MULTILINE)
"""Code that ends in a form to fill in. A slide would show nothing of the form."""

SOLUTION = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION\b[ \t:]*(.*?)[ \t]*\n(?:(?!.*SOLUTION).*\n)*[ \t]*### END SOLUTION[ \t]*$",
    re.M,
)
"""A solution with its marks, each alone on its line: the indentation, and the words in its place."""


class Draft(NamedTuple):
    """One notebook before it is run: where it belongs, its cells without outputs, whether to execute it."""

    target: Path
    notebook: NotebookNode
    execute: bool


def find_sources(root: Path, names: Iterable[str] = ()) -> list[Path]:
    """Every source below `root` in the order of lessons, or of the lessons named ("01", "01_name", a path).

    Raises BuildError for a name that no source has, and for a source whose own name does not fit.
    """
    found = (path for folder in FOLDERS for path in root.glob(f"{folder}/src/*.py"))
    sources = sorted(found, key=lambda path: path.stem)
    for path in sources:
        is_page = path.stem in PAGES and path.parts[-3] == "notebooks"
        if not STEM.fullmatch(path.stem) and not is_page:
            raise BuildError(f"{path.relative_to(root)}: name a source NN_name.py, as in 01_first_lesson.py")
    wanted = [Path(name).stem for name in names]
    known = {part: path.stem for path in sources for part in (path.stem, number_of(path))}
    for name in wanted:
        if name not in known:
            raise BuildError(str(unknown("lesson", name, sorted(set(known.values())))))
    return [path for path in sources if not wanted or {path.stem, number_of(path)} & set(wanted)]


def drafts(root: Path, source: Path) -> list[Draft]:
    """The notebooks that `source` becomes: a lesson is one, a solution is two (itself and its exercise).

    Raises BuildError for markers that do not pair up, and for a solution that leaves nothing to solve.
    """
    cells, settings = _read(source)
    origin = source.relative_to(root)
    if way := frame(root, source):
        title, _, rest = cells[0].source.partition("\n")
        cells[0].source = f"{title}\n\n{way}\n{rest}"
        end = new_markdown_cell(way, id=f"{source.stem}-{len(cells) + 1:02d}")
        cells.append(NotebookNode(end))
    notebook = _notebook(cells, settings, origin)
    if origin.parts[0] != "solutions":
        for cell in cells:
            if any(mark in cell.source for mark in ANSWERS):
                where = f"it belongs in solutions/src/{origin.name}"
                raise BuildError(f"{origin}: cell {cell.id} holds a solution marker; {where}")
            if way:
                cell.metadata.slideshow = NotebookNode(slide_type=slide_type(cell))
        return [Draft(root / "notebooks" / f"{source.stem}.ipynb", notebook, execute=True)]
    for cell in cells:
        cell.source = re.sub(r"^## (\d+) · ", r'<span id="exercise-\1"></span>\n\n\g<0>', cell.source)
    notebook = _notebook(cells, settings, origin)
    exercise = _notebook(_unsolved(origin, cells), settings, origin)
    return [
        Draft(root / "solutions" / f"{source.stem}.ipynb", notebook, execute=True),
        Draft(root / "exercises" / f"{source.stem}.ipynb", exercise, execute=False),
    ]


def frame(root: Path, source: Path) -> str:
    """The lines that a lesson or its exercises begin and end with: their place in the course, the ways on.

    Empty for a page that is no lesson.
    """
    lessons = {number_of(path): path for path in sorted((root / "notebooks" / "src").glob("[0-9]*.py"))}
    number = number_of(source)
    in_lessons = source.parts[-3] == "notebooks"
    if number not in lessons:
        return ""
    order = list(lessons)
    last = max(lessons).lstrip("0")
    here = order.index(number)
    if in_lessons:
        where = [f"**Lesson {number}** of {last}", "core path" if number in CORE else "beyond the core path"]
        solutions = root.glob(f"solutions/src/{EXERCISES_WITH.get(number, number)}_*.py")
        where += [f"[{_exercises(path)}](../exercises/{path.stem}.ipynb)" for path in solutions]
    else:
        where = [f"**Exercises** of [lesson {number}](../notebooks/{lessons[number].stem}.ipynb)"]
    folder = "" if in_lessons else "../notebooks/"
    if here > 0:
        before = lessons[order[here - 1]]
        where.append(f"[← {_title(before)}]({folder}{before.stem}.ipynb)")
    if here + 1 < len(order):
        after = lessons[order[here + 1]]
        where.append(f"[{_title(after)} →]({folder}{after.stem}.ipynb)")
    return f'<div style="{FRAME}">\n\n{" · ".join(where)}\n\n</div>'


def _title(source: Path) -> str:
    """A lesson's number and name, as in the first heading of its source."""
    heading = re.search(r"^# # (\S+) · (.+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    return f"{heading[1]} {heading[2]}" if heading else source.stem


def _exercises(solutions: Path) -> str:
    text = solutions.read_text(encoding="utf-8")
    minutes = re.search(r"^#     minutes: (\d+)$", text, re.MULTILINE)
    count = len(re.findall(r"^# ## \d+ · ", text, re.MULTILINE))
    if minutes is None:
        return f"{count} exercises"
    return f"{count} exercises, {minutes[1]} minutes"


def _read(source: Path) -> tuple[list[NotebookNode], Mapping[str, Any]]:
    """The cells of a source, ids and metadata the same on every machine, and the settings in its header."""
    notebook: Any = jupytext.read(source, fmt="py:percent")
    for position, cell in enumerate(notebook.cells, start=1):
        tags = cell.metadata.get("tags", [])
        cell.id = f"{source.stem}-{position:02d}"
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
        if FOLDED_CODE in tags:
            cell.metadata.jupyter = NotebookNode(source_hidden=True)
        if FOLDED_OUTPUT in tags:
            cell.metadata.jupyter = NotebookNode(outputs_hidden=True)
    if not notebook.cells:
        raise BuildError(f"{source.name}: holds no cell; begin each with a line `# %%` or `# %% [markdown]`")
    return notebook.cells, notebook.metadata.get("course", {})


def slide_type(cell: NotebookNode) -> str:
    """The kind of slide that nbconvert makes of a lesson's cell.

    Sections begin slides. Code, guesses, gaps and the closing go below them. All other text is for the
    speaker.
    """
    tags = cell.metadata.get("tags", ())
    chosen = [kind for kind in SLIDE_TYPES if kind in tags]
    if chosen:
        return chosen[0]
    if cell.cell_type == "code":
        return "skip" if ONLY_LIVE.search(cell.source) or THIS_MACHINE in tags else "subslide"
    if SECTION.search(cell.source):
        return "slide"
    return "subslide" if SHOWN_TEXT.search(cell.source) else "notes"


def _notebook(cells: list[NotebookNode], settings: Mapping[str, Any], origin: Path) -> NotebookNode:
    course = {**settings, "source": origin.as_posix(), "cells_sha256": fingerprint(cells)}
    metadata = {"course": course, "kernelspec": dict(KERNEL), "language_info": {"name": "python"}}
    return new_notebook(cells=cells, metadata=metadata)


def fingerprint(cells: Iterable[NotebookNode]) -> str:
    """SHA-256 of what a person can edit in `cells`: their order, kinds and text; outputs do not count."""
    text = json.dumps([[cell["cell_type"], cell["source"]] for cell in cells], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _unsolved(origin: Path, cells: list[NotebookNode]) -> list[NotebookNode]:
    """The cells of the exercise: solutions taken out, an invitation in their place, NotSolved imported."""
    kept = []
    for cell in cells:
        tags = cell.metadata.get("tags", ())
        if not ONLY_IN_SOLUTIONS.intersection(tags):
            kept.append(deepcopy(cell))
    code = [cell for cell in kept if cell.cell_type == "code"]
    solved = 0
    for cell in code:
        cell.source, count = SOLUTION.subn(_invitation, cell.source)
        solved += count
        if "SOLUTION" in cell.source:
            problem = "has a marker without its partner, or not on its own line"
            raise BuildError(f"{origin}: cell {cell.id} {problem}")
    if not solved:
        advice = "put ### BEGIN SOLUTION and ### END SOLUTION around the answers"
        raise BuildError(f"{origin}: nothing to solve; {advice}")
    lines = code[0].source.splitlines()
    if NOT_SOLVED_IMPORT not in lines:
        places = [place for place, line in enumerate(lines) if CHECKS_IMPORT.match(line)]
        lines.insert(places[0] if places else 0, NOT_SOLVED_IMPORT)
    code[0].source = "\n".join(lines)
    return kept


def _invitation(solution: re.Match[str]) -> str:
    words = solution[2] or "Your turn: replace this line by your answer, then run the cell again."
    return f"{solution[1]}raise NotSolved({json.dumps(words, ensure_ascii=False)})"


def differences(draft: Draft, stored: NotebookNode) -> list[str]:
    """Differences between the notebook on disk and its source, outputs left out: one line for each."""
    expected = [_editable(cell) for cell in draft.notebook.cells]
    found = [_editable(cell) for cell in stored.cells]
    changed = [cell for cell in (*expected, *found) if cell not in expected or cell not in found]
    lines = [f"{name} differs" for name in dict.fromkeys(name for name, *_ in changed)]
    if not lines and expected != found:
        lines.append("the cells are in another order")
    if not lines and draft.notebook.metadata["course"] != stored.metadata.get("course"):
        lines.append("its course settings differ")
    return lines


def _editable(cell: NotebookNode) -> tuple[Any, ...]:
    return (
        cell.get("id", "a cell without an id"),
        cell["cell_type"],
        cell["source"],
        cell["metadata"].get("tags", []),
        cell["metadata"].get("slideshow", {}),
    )
