"""The contract that every committed notebook keeps."""

from pathlib import Path
from statistics import mean

import pytest
from contract import code_cells, faults

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.interactive.course_files import LESSON_SECONDS, budget
from course_utils.interactive.notebook_runs import read_notebook

LESSONS = committed_notebooks(ROOT, "notebooks")
SOLUTIONS = committed_notebooks(ROOT, "solutions")
EXERCISES = committed_notebooks(ROOT, "exercises")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=name)
def test_notebook_keeps_the_contract(path: Path) -> None:
    assert faults(read_notebook(path), path) == []


def test_lessons_may_take_25_cpu_seconds_on_average() -> None:
    assert mean(budget(path) for path in LESSONS) <= LESSON_SECONDS == 25


@pytest.mark.parametrize("path", EXERCISES, ids=name)
def test_exercise_has_gaps_and_no_outputs(path: Path) -> None:
    notebook = read_notebook(path)
    source = (ROOT / "solutions/src" / path.with_suffix(".py").name).read_text(encoding="utf-8")
    text = "\n".join(cell.source for cell in notebook.cells)
    assert text.count("raise NotSolved(") == source.count("### BEGIN SOLUTION") > 0
    assert "SOLUTION" not in text
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))
