"""Notebooks under the course's own conftest: times are listed, outputs compared, by pytest in a process."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from course_utils.cli.maintain import TEST_OPTIONS

TESTS = Path(__file__).resolve().parent


def lesson(*sources: str, text: str = "", **course: object) -> nbformat.NotebookNode:
    """A notebook of executed cells, the last of which has printed `text`."""
    cells = [
        new_code_cell(source, id=f"cell-{count}", execution_count=count)
        for count, source in enumerate(sources, start=1)
    ]
    cells[-1].outputs = [new_output("stream", name="stdout", text=text)] if text else []
    return new_notebook(cells=cells, metadata={"course": course})


ASK = "import os; print(os.environ['COURSE_SOURCE'])"
FRESH = (
    "from course_utils.interactive.guesses import stored_guesses; print(stored_guesses(), 'torch 2.13.0+cpu')"
)
NOTEBOOKS = {
    "01_slow": lesson("import time; time.sleep(1.2)", "x = 1", budget_seconds=0.5),
    "02_granted": lesson("x = 1", budget_seconds=1000),
    "03_source": lesson(ASK, text="simulated\n"),
    "04_home": lesson(FRESH, text="{} torch 2.11.0+cu130\n"),
    "05_bytes": lesson("print('134.45 GB')", text="134.46 GB\n"),
    "06_first.edited-2026-11-21-1030": lesson("1 / 0"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints over these notebooks, with this course's own conftest and options."""
    folder = tmp_path_factory.mktemp("course")
    for name in ("tests", "notebooks"):
        (folder / name).mkdir()
    for name in ("conftest.py", "tests/nbval_sanitize.cfg"):
        shutil.copy(TESTS.parent / name, folder / name)
    for name, notebook in NOTEBOOKS.items():
        nbformat.write(notebook, folder / "notebooks" / f"{name}.ipynb")
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    options = [*TEST_OPTIONS, "-n", "0", "-p", "no:cacheprovider"]  # one process is enough
    command = [sys.executable, "-m", "pytest", *options, "tests", "notebooks"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_lessons_are_timed_and_none_fails_for_its_time(said: str) -> None:
    rows = [line.split() for line in said.partition("slowest notebooks")[2].splitlines() if ".ipynb" in line][
        :5
    ]
    assert sorted(row[5] for row in rows) == [f"notebooks/{name}.ipynb" for name in list(NOTEBOOKS)[:5]]
    seconds = [float(row[0]) for row in rows]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0
    words = {row[5]: row[6:] for row in rows}
    assert words["notebooks/01_slow.ipynb"] == ["over", "its", "budget"]
    assert not words["notebooks/02_granted.ipynb"]


def test_only_other_bytes_fail_though_torch_versions_may_differ_and_copies_are_left_out(said: str) -> None:
    """Each kernel finds a fresh machine: no guess is there, and the GPU is simulated."""
    assert re.search(r"1 failed, 5 passed", said), said
    assert "05_bytes.ipynb::Cell 0" in said and "Cell outputs differ" in said


def test_plain_nbval_finds_a_machine_that_nobody_has_used(tmp_path: Path) -> None:
    """Without the course's options: its conftest is what keeps a learner's guess and variables out."""
    for name in ("notebooks", "tests"):
        (tmp_path / name).mkdir()
    shutil.copy(TESTS / "nbval_sanitize.cfg", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    asked = lesson(
        f"{ASK.removesuffix(')')}, os.environ['OMP_NUM_THREADS'])", FRESH, text="{} torch 2.11.0+cu130\n"
    )
    asked.cells[0].outputs = [new_output("stream", name="stdout", text="simulated 1\n")]
    asked.metadata["kernelspec"] = {
        "name": "a-kernel-of-nobody",
        "display_name": "Nobody",
        "language": "python",
    }
    nbformat.write(asked, tmp_path / "notebooks" / "01_asked.ipynb")
    guess = {"guess": "01.mine", "value": 1.0, "unit": "GB", "day": "2026-11-26"}
    (tmp_path / "progress.jsonl").write_text(f"{json.dumps(guess)}\n")
    (tmp_path / "start.py").write_text("print('Good morning')\n")
    own = {"COURSE_SOURCE": "recorded", "COURSE_HOME": str(tmp_path), "OMP_NUM_THREADS": "7"}
    environment = (
        os.environ | own | {"PYTHONPATH": str(TESTS.parent), "PYTHONSTARTUP": str(tmp_path / "start.py")}
    )

    def told(*options: str) -> str:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *options,
            "notebooks/01_asked.ipynb",
        ]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    sanitized = f"--nbval-sanitize-with={tmp_path / 'tests' / 'nbval_sanitize.cfg'}"
    assert "2 failed" in told("--nbval", "--nbval-current-env", sanitized), "what is without it"
    shutil.copy(TESTS.parent / "conftest.py", tmp_path)
    assert "2 passed" in told("--nbval") and "2 passed" in told("--nbval-lax")
