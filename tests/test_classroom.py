"""Is a class graded fairly, whatever its notebooks do, and is the learners' copy of the course free of solutions?"""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_utils.classroom import grading
from course_utils.classroom.grading import Graded, Outcome, check_cells, grade, grade_notebook, merged, write_table
from course_utils.classroom.page import class_page
from course_utils.classroom.release import ANSWERS, release
from course_utils.front_door import main
from course_utils.units import GB

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = ROOT / "exercises" / "06_recomputation.ipynb"
SOLUTIONS = ROOT / "solutions" / "06_recomputation.ipynb"


def notebook(path: Path = EXERCISES) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def with_code(added: str) -> dict[str, Any]:
    """Exercises in which the first cell, which imports, goes on with what is `added`."""
    changed = notebook()
    first = next(cell for cell in changed["cells"] if cell["cell_type"] == "code")
    first["source"] = code(first) + "\n" + added
    return changed


RUDE = """
import subprocess, sys
import course_utils.checks.feedback as feedback
feedback.expect = lambda *answers: None
check.cost = lambda answer: print("✓")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(987.25)"])
for _ in range(1000): print("x" * 1_000_000)
x = [bytearray(10**9) for _ in range(100)]
"""
"""Patches the checks, leaves a process behind, prints without end, and asks for 100 GB."""


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graded]:
    """A class whose notebooks do their worst, and one that does not."""
    folder = tmp_path_factory.mktemp("class")
    solved = notebook(SOLUTIONS)
    solved["cells"] = [cell for cell in solved["cells"] if not code(cell).startswith("check.best_interval")]
    for cell in solved["cells"]:
        if code(cell).startswith("check.cost"):
            cell["source"] = "print('✓ trust me')"
    submissions = {"rude": with_code(RUDE), "aborts": with_code("import os\nos.abort()"), "solved": solved}
    for name, content in submissions.items():
        (folder / name).mkdir()
        (folder / name / "06_recomputation.ipynb").write_text(json.dumps(content), encoding="utf-8")
    (folder / "broken.ipynb").write_text("{", encoding="utf-8")
    (folder / "foreign.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": "1"}]}))
    return {Path(one.learner).parts[0]: one for one in grade(folder, seconds=90, memory=8 * GB)}


def states(one: Graded) -> set[str]:
    return {outcome.state for outcome in one.outcomes.values()}


def test_the_solutions_pass_everything_though_their_checks_are_gone_or_tampered_with(graded: dict[str, Graded]) -> None:
    one = graded["solved"]
    count = len(check_cells(notebook()))
    assert count >= 5 and (one.passed, len(one.outcomes), one.problem) == (count, count, "")


def test_a_crash_costs_only_itself(graded: dict[str, Graded]) -> None:
    assert states(graded["aborts"]) == {"not reached"}
    assert "SIGABRT" in graded["aborts"].problem


def test_patches_floods_and_greed_pass_nothing_and_leave_nothing(graded: dict[str, Graded]) -> None:
    assert states(graded["rude"]) == {"not solved"} and not graded["rude"].problem
    left = [p for p in psutil.process_iter(["cmdline"]) if "time.sleep(987.25)" in " ".join(p.info["cmdline"] or [])]
    assert left == []


def test_a_notebook_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "06.ipynb").write_text(json.dumps(with_code("while True: pass")), encoding="utf-8")
    one = grade_notebook(tmp_path / "06.ipynb", "eve", seconds=6)
    assert states(one) == {"not reached"}
    assert one.problem.startswith("ended ") and " s " in one.problem


def test_what_cannot_be_read_is_said(graded: dict[str, Graded]) -> None:
    assert graded["broken"].problem.startswith("cannot be read")
    assert "none of the course's exercises" in graded["foreign"].problem


def test_every_exercise_notebook_has_its_checks() -> None:
    for path in sorted((ROOT / "exercises").glob("[0-9][0-9]_*.ipynb")):
        found = check_cells(notebook(path))
        numbers = [cell["exercise"] for cell in found.values()]
        assert numbers == [f"{path.name[:2]}.{number}" for number in range(1, len(numbers) + 1)]
        assert len(numbers) >= 4


def test_the_courses_own_check_runs_in_the_place_of_the_learners() -> None:
    changed = notebook()
    cells = [cell for cell in changed["cells"] if code(cell).startswith("check.cost")]
    cells[0]["source"] = "print('✓')"
    assert [cell["source"] for cell in merged(changed, notebook()) if cell.get("exercise") == "06.1"] == [
        "check.cost(cost)"
    ]


CLASS = [
    Graded("ada", "06", {"06.1": Outcome("passed"), "06.2": Outcome("not right", "=That <is> off.")}, "", 3.0),
    Graded("bob", "06", {"06.1": Outcome("not reached"), "06.2": Outcome("not reached")}, "ended after 45 s", 45.0),
    Graded("eve", "", {}, "cannot be read: it is empty", 0.0),
]


def test_the_table_has_a_row_for_each_exercise(tmp_path: Path) -> None:
    write_table(CLASS, tmp_path / "grades.csv")
    rows = list(csv.DictReader((tmp_path / "grades.csv").open(encoding="utf-8")))
    assert len(rows) == 5
    assert rows[1] == {
        "learner": "ada", "lesson": "06", "exercise": "06.2", "state": "not right", "said": "'=That <is> off.",
        "problem": "", "seconds": "3",
    }  # fmt: skip


def test_the_page_names_everybody_and_what_was_said() -> None:
    page = class_page(CLASS)
    for words in ("ada", "bob", "eve", "1 of 2", "ended after 45 s", "That &lt;is&gt; off.", "it is empty", "1 ×"):
        assert words in page
    assert "http" not in page


def test_bad_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "--here", str(tmp_path / "none")]) == 1
    assert main(["grade", "--here", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "is no folder" in said and "there is no notebook in" in said


def test_the_learners_copy_has_no_solutions_and_works(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    names = [str(name) for name in release(target)]
    assert "exercises" in names and not {"solutions", "tests", ".git", ".venv"} & set(names)
    text = "".join(path.read_text(encoding="utf-8") for path in target.rglob("*.ipynb"))
    assert not any(mark in text for mark in ANSWERS)
    assert not list(target.rglob("src"))
    command = [sys.executable, "-m", "course_utils", "estimate", "gpt2"]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, check=True)
    assert "optimizer_states" in done.stdout
    with pytest.raises(ValueError, match="is not empty"):
        release(target)


def test_a_solution_in_an_exercise_stops_the_release(tmp_path: Path) -> None:
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "06_x.ipynb").write_text("### BEGIN SOLUTION")
    with pytest.raises(ValueError, match="holds a solution"):
        release(tmp_path / "copy", tmp_path)
    assert not (tmp_path / "copy").exists()


def test_one_notebook_alone_can_be_graded() -> None:
    assert grade_notebook(ROOT / "no such.ipynb", "nobody").problem.startswith("cannot be read")
    assert grading.SECONDS > 0
