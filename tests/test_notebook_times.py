"""The time of each lesson is listed, and a lesson over its budget fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

TESTS = Path(__file__).resolve().parent
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg")
PARALLEL = ("-n", "2", "--dist", "loadfile")


def lesson(*sources: str, text: str = "", **course: object) -> nbformat.NotebookNode:
    """A notebook of executed cells, the last of which has printed `text`."""
    cells = [
        new_code_cell(source, id=f"cell-{count}", execution_count=count)
        for count, source in enumerate(sources, start=1)
    ]
    cells[-1].outputs = [new_output("stream", name="stdout", text=text)] if text else []
    return new_notebook(cells=cells, metadata={"course": course})


def run_pytest(folder: Path, *options: str, slack: str = "2") -> tuple[int, str]:
    """The exit status and the words of pytest over `folder`, with this course's own conftest."""
    (folder / "tests").mkdir()
    for name in ("conftest.py", "nbval_sanitize.cfg"):
        shutil.copy(TESTS / name, folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "COURSE_BUDGET_SLACK": slack, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-m", "pytest", *NBVAL, *options, "-p", "no:cacheprovider", "tests", "notebooks"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def notebooks(tmp_path: Path) -> Path:
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "notebooks"


def test_lessons_are_timed_and_those_over_budget_fail(notebooks: Path) -> None:
    wait = "import time; time.sleep({})"  # far apart: a kernel's start counts, and takes a second or two
    nbformat.write(lesson(wait.format(6.2), "x = 1", budget_seconds=0.5), notebooks / "01_slow.ipynb")
    nbformat.write(lesson(wait.format(1.2), budget_seconds=30), notebooks / "02_granted.ipynb")
    nbformat.write(lesson("1 / 0"), notebooks / "03_first.edited-2026-11-21-1030.ipynb")
    code, said = run_pytest(notebooks.parent, *PARALLEL)
    assert code == 1, said
    assert "1 failed, 2 passed" in said
    assert "01_slow.ipynb takes more than 1 s (2 times its budget)" in said
    table = said.partition("slowest notebooks")[2].splitlines()
    assert [line.split()[-1] for line in table[1:3]] == ["notebooks/01_slow.ipynb", "notebooks/02_granted.ipynb"]
    assert float(table[2].split()[0]) >= 1.2


def test_slow_machines_may_grant_more(notebooks: Path) -> None:
    nbformat.write(lesson("import time; time.sleep(1.2)", budget_seconds=0.5), notebooks / "01_slow.ipynb")
    code, said = run_pytest(notebooks.parent, slack="60")
    assert code == 0, said


def test_kernels_find_a_fresh_machine_and_torch_versions_may_differ(notebooks: Path) -> None:
    ask = "import os; print(os.environ['COURSE_SOURCE'])"
    fresh = "from course_utils.teaching import stored_guesses; print(stored_guesses(), 'torch 2.13.0+cpu')"
    nbformat.write(lesson(ask, text="simulated\n"), notebooks / "01_source.ipynb")
    nbformat.write(lesson(fresh, text="{} torch 2.11.0+cu130\n"), notebooks / "02_home.ipynb")
    code, said = run_pytest(notebooks.parent)
    assert code == 0, said


def test_bytes_are_always_compared(notebooks: Path) -> None:
    nbformat.write(lesson("print('134.45 GB')", text="134.46 GB\n"), notebooks / "01_bytes.ipynb")
    code, said = run_pytest(notebooks.parent)
    assert code == 1, said
    assert "Cell outputs differ" in said
