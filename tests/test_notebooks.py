"""The contract that every committed notebook keeps, and proof that the contract notices when one does not."""

from collections.abc import Callable
from pathlib import Path

import pytest
from contract import code_cells, faults
from nbformat import NotebookNode
from nbformat.v4 import new_output

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.interactive.notebook_runs import read_notebook

LESSONS = committed_notebooks(ROOT, "notebooks")
SOLUTIONS = committed_notebooks(ROOT, "solutions")
EXERCISES = committed_notebooks(ROOT, "exercises")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_are_lessons_exercises_and_solutions() -> None:
    assert LESSONS and [path.name for path in EXERCISES] == [path.name for path in SOLUTIONS] != []


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=name)
def test_notebook_keeps_the_contract(path: Path) -> None:
    assert faults(read_notebook(path), path) == []


@pytest.mark.parametrize("path", EXERCISES, ids=name)
def test_exercise_has_gaps_and_no_outputs(path: Path) -> None:
    notebook = read_notebook(path)
    source = (ROOT / "solutions/src" / path.with_suffix(".py").name).read_text(encoding="utf-8")
    text = "\n".join(cell.source for cell in notebook.cells)
    assert text.count("raise NotSolved(") == source.count("### BEGIN SOLUTION") > 0
    assert "SOLUTION" not in text
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


def shows(kind: str, **output: object) -> Callable[[NotebookNode], None]:
    """Give the first code cell one more output."""
    return lambda notebook: code_cells(notebook)[0].outputs.append(new_output(kind, **output))


def ignore_outputs(notebook: NotebookNode) -> None:
    for cell in code_cells(notebook):
        cell.metadata.tags = ["nbval-ignore-output"]


MEASURED = "peak, measured: 3 GB (simulated GPU · torch 2.12)"
FIGURE = {"image/png": "a/home/me/", "text/plain": "<Figure>"}

SPOILED: dict[str, Callable[[NotebookNode], object]] = {
    "is no valid notebook": lambda notebook: code_cells(notebook)[0].update(outputs=3),
    "has ids that are not": lambda notebook: notebook.cells[3].update(id="ab12"),
    "was not executed once": lambda notebook: code_cells(notebook)[0].update(execution_count=None),
    "writes to stderr: careful": shows("stream", name="stderr", text="careful"),
    "ends in KeyError": shows("error", ename="KeyError", evalue="x"),
    "a machine's path: /home/me/x.py": shows("stream", text="see /home/me/x.py"),
    "a simulated GPU measured": shows("stream", text=MEASURED),
    "no sentence: '<Figure>'": shows("display_data", data=FIGURE),
    "code cells uncompared": ignore_outputs,
}


@pytest.mark.parametrize("fault", SPOILED)
def test_contract_notices(fault: str) -> None:
    path = ROOT / "notebooks" / "05_activations.ipynb"
    notebook = read_notebook(path)
    SPOILED[fault](notebook)
    found = faults(notebook, path)
    assert any(fault in line for line in found), found
