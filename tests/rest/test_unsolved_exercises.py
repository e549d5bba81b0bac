"""Unsolved exercises, executed: cells that check end in one line of NotSolved; none fails otherwise."""

import re
from pathlib import Path

import pytest
from contract import code_cells

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.interactive.notebook_runs import read_notebook, run

CHECK_CALL = re.compile(r"^\s*check\.\w+\(", re.MULTILINE)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("path", committed_notebooks(ROOT, "exercises"), ids=lambda path: path.stem)
def test_unsolved_exercise_invites_once_for_each_check(path: Path) -> None:
    notebook = run(read_notebook(path), path.parent, allow_errors=True)
    checks = {cell.id for cell in code_cells(notebook) if CHECK_CALL.search(cell.source)}
    failed = set()
    for cell in code_cells(notebook):
        for error in (output for output in cell.outputs if output.output_type == "error"):
            assert error.ename == "NotSolved" and len(error.traceback) == 1
            assert "\n" not in error.traceback[0]
            failed.add(cell.id)
    assert checks and checks <= failed
