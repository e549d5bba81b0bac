"""Is a class graded fairly, whatever its notebooks do, and is the learners' copy free of solutions?"""

import csv
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import pytest

from course_utils.classroom import grading
from course_utils.classroom.collecting import collected, learner_of
from course_utils.classroom.graded_process import Limits
from course_utils.classroom.grading import check_cells, grade, grade_notebook, merged, reference_of
from course_utils.classroom.grading_results import Graded, Outcome, class_page, write_table
from course_utils.classroom.release import release
from course_utils.cli.main import main
from course_utils.cli.maintain import TEST_OPTIONS
from course_utils.interactive.course_files import ANSWERS
from course_utils.units import GB

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = ROOT / "exercises" / "03_mixed_precision.ipynb"
SOLUTIONS = ROOT / "solutions" / "03_mixed_precision.ipynb"


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
import course_utils.interactive.feedback as feedback
feedback.expect = lambda *answers: None
check.limits = lambda answer: print("✓")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(987.25)"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(987.25)"], start_new_session=True)
import os
for file in range(3, 64):
    try: os.write(file, b'[{"state": {}}]\\n{"exercise": 1}\\n')
    except OSError: pass
for _ in range(100): print("x" * 1_000_000)
x = [bytes(10**9) for _ in range(100)]
"""
"""Patches the checks, leaves processes behind, writes nonsense to the results, prints without end, asks for
100 GB.
"""


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graded]:
    """A class whose notebooks do their worst, and one that does not."""
    folder = tmp_path_factory.mktemp("class")
    solved = notebook(SOLUTIONS)
    solved["cells"] = [cell for cell in solved["cells"] if not code(cell).startswith("check.round_at_random")]
    for cell in solved["cells"]:
        if code(cell).startswith("check.limits"):
            cell["source"] = "print('✓ trust me')"
    ends = {"aborts": "os.abort()", "leaves": "os._exit(0)"}
    submissions = {"rude": with_code(RUDE), "solved": solved}
    submissions |= {name: with_code(f"import os\n{end}") for name, end in ends.items()}
    for name, content in submissions.items():
        (folder / name).mkdir()
        (folder / name / EXERCISES.name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "broken.ipynb").write_text("{", encoding="utf-8")
    (folder / "deep.ipynb").write_text("[" * 100_000, encoding="utf-8")
    (folder / "foreign.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": "1"}]}))
    return {Path(one.learner).parts[0]: one for one in grade(folder, Limits(seconds=600, memory=8 * GB))}


def states(one: Graded) -> set[str]:
    return {outcome.state for outcome in one.outcomes.values()}


def test_the_solutions_pass_everything_though_their_checks_are_gone_or_tampered_with(
    graded: dict[str, Graded],
) -> None:
    one = graded["solved"]
    count = len(check_cells(notebook()))
    assert count >= 4 and (one.passed, len(one.outcomes), one.problem) == (count, count, "")


def test_a_crash_costs_only_itself(graded: dict[str, Graded]) -> None:
    assert states(graded["aborts"]) == {"not reached"}
    assert "SIGABRT" in graded["aborts"].problem
    assert states(graded["leaves"]) == {"not reached"} and "before its last check" in graded["leaves"].problem


def test_patches_floods_and_greed_pass_nothing_and_leave_nothing(graded: dict[str, Graded]) -> None:
    assert states(graded["rude"]) == {"not solved"} and not graded["rude"].problem
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    left = [line for line in lines if "time.sleep(987.25)" in line]
    assert left == [] or (not sys.platform.startswith("linux") and len(left) == 1)


def test_a_notebook_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "03.ipynb").write_text(json.dumps(with_code("while True: pass")), encoding="utf-8")
    one = grade_notebook(tmp_path / "03.ipynb", "eve", Limits(seconds=6))
    assert states(one) == {"not reached"}
    assert one.problem.startswith("ended ") and " s " in one.problem


def test_what_cannot_be_read_is_said(graded: dict[str, Graded]) -> None:
    assert grade_notebook(ROOT / "no such.ipynb", "nobody").problem.startswith("cannot be read")
    assert "none of the course's exercises" in graded["foreign"].problem
    assert all(graded[name].problem.startswith("cannot be read") for name in ("broken", "deep"))


def test_every_exercise_notebook_has_its_checks() -> None:
    for path in sorted((ROOT / "exercises").glob("[0-9][0-9]_*.ipynb")):
        found = check_cells(notebook(path))
        numbers = [cell["exercise"] for cell in found.values()]
        assert numbers == [f"{path.name[:2]}.{number}" for number in range(1, len(numbers) + 1)]
        # a task that no program can judge
        unchecked = path.read_text(encoding="utf-8").count('"## Unchecked · ')
        assert len(numbers) + unchecked >= 4 and unchecked <= 1


CLASS = [
    Graded(
        "ada", "06", {"06.1": Outcome("passed"), "06.2": Outcome("not right", "=That <is> off.")}, "", 3.0
    ),
    Graded(
        "bob",
        "06",
        {"06.1": Outcome("not reached"), "06.2": Outcome("not reached")},
        "ended after 45 s",
        45.0,
    ),
    Graded("eve", "", {}, "cannot be read: it is empty", 0.0),
]


def test_the_table_has_a_row_for_each_exercise(tmp_path: Path) -> None:
    write_table(CLASS, tmp_path / "grades.csv")
    rows = list(csv.DictReader((tmp_path / "grades.csv").open(encoding="utf-8")))
    assert len(rows) == 5
    assert rows[1] == {
        "learner": "ada",
        "lesson": "06",
        "exercise": "06.2",
        "state": "not right",
        "said": "'=That <is> off.",
        "problem": "",
        "seconds": "3",
        "file": "",
        "counts": "yes",
    }


def test_the_page_names_everybody_and_what_was_said() -> None:
    page = class_page(CLASS)
    for words in ("ada", "bob", "eve", "1 of 2", "1 ×"):
        assert words in page
    for words in ("ended after 45 s", "That &lt;is&gt; off.", "it is empty"):
        assert words in page
    assert "http" not in page and "width=device-width" in page


def test_bad_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "--here", str(tmp_path / "none")]) == 1
    assert main(["grade", "--here", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "is neither a folder nor a .zip" in said and "there is no notebook in" in said


def test_the_learners_copy_has_no_solutions_and_works(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    names = [str(name) for name in release(target)]
    assert "exercises" in names and not {"solutions", ".git", ".venv"} & set(names)
    text = "".join(path.read_text(encoding="utf-8") for path in target.rglob("*.ipynb"))
    assert not any(mark in text for mark in ANSWERS)
    assert not list(target.rglob("src")) and not list(target.rglob("skeletons"))
    assert (target / "conftest.py").exists()
    in_tests = {path.relative_to(target).as_posix() for path in (target / "tests").iterdir()}
    assert {word for word in TEST_OPTIONS if "/" in word} == in_tests
    linked = re.findall(r"\]\(([^)#:]+)[)#]", (target / "README.md").read_text(encoding="utf-8"))
    assert len(linked) > 5 and not [path for path in linked if not (target / path).exists()]
    command = [sys.executable, "-m", "course_utils", "estimate", "gpt2"]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, check=True)
    assert "optimizer states" in done.stdout
    with pytest.raises(ValueError, match="is not empty"):
        release(target)


@pytest.mark.parametrize(
    ("file", "target", "problem"),
    [("docs/index.md", "docs/copy", "is inside"), ("exercises/06_x.ipynb", "copy", "holds a solution")],
)
def test_a_release_that_would_harm_is_refused(file: str, target: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("### BEGIN SOLUTION")
    with pytest.raises(ValueError, match=problem):
        release(tmp_path / target, tmp_path)
    assert not (tmp_path / target).exists()


NAMES = {
    "ada/06_recomputation.ipynb": "ada",
    "ada/06_recomputation/06_recomputation.ipynb": "ada",
    "06_recomputation/ada/work.ipynb": "ada",
    "Lesson 6/ada.ipynb": "ada",
    "Ada Lovelace_271828_assignsubmission_file_/06_recomputation.ipynb": "Ada Lovelace",
    "Ada Lovelace_271828_assignsubmission_file_/homework/06.ipynb": "Ada Lovelace",
    "lovelaceada_1815_1852_06_recomputation.ipynb": "lovelaceada",
    "lovelaceada_LATE_1815_1852_06_recomputation-1.ipynb": "lovelaceada",
    "ada.ipynb": "ada",
}


@pytest.mark.parametrize(("name", "learner"), NAMES.items())
def test_learners_are_found_in_the_layouts_that_courses_use(name: str, learner: str) -> None:
    assert learner_of(PurePosixPath(name)) == learner


def archive(contents: dict[str, str]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as opened:
        for name, content in contents.items():
            opened.writestr(name, content)
    return held.getvalue()


def test_archives_are_unpacked_wherever_they_are_and_nothing_leaves_its_place(tmp_path: Path) -> None:
    names = ("ada/06.ipynb", "bob/06.ipynb", "../../eve/06.ipynb", "__MACOSX/._06.ipynb", "ada/notes.txt")
    (tmp_path / "all.zip").write_bytes(archive(dict.fromkeys((f"all/{name}" for name in names), "{}")))
    found = collected(tmp_path / "all.zip", tmp_path / "scratch")
    assert [one.learner for one in found] == ["..", "ada", "bob"]
    assert all(one.path.resolve().is_relative_to((tmp_path / "scratch").resolve()) for one in found)


def test_a_broken_archive_costs_only_its_own_notebook(tmp_path: Path) -> None:
    good = archive({"ada.ipynb": "{} " * 99, "bob.ipynb": "[] " * 99})
    (tmp_path / "all.zip").write_bytes(good.replace(b"{} {} ", b"{} [] ", 1))
    problems = {one.learner: one.problem for one in grade(tmp_path / "all.zip")}
    assert "Bad CRC" in problems["ada"] and "none of" not in problems["ada"] and "CRC" not in problems["bob"]


def test_of_two_notebooks_the_newer_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def graded_at_once(path: Path, learner: str, most: object) -> Graded:
        return Graded(learner, "06", {}, "", 1.5)

    monkeypatch.setattr(grading, "grade_notebook", graded_at_once)
    (tmp_path / "ada").mkdir(parents=True)
    for age, name in enumerate(("ada/second try", "ada/first", "bob")):
        path = tmp_path / f"{name}.ipynb"
        path.write_text(name)
        os.utime(path, (1e9 - age, 1e9 - age))
    graded = grade(tmp_path)
    counts = {one.file: one.counts for one in graded}
    assert counts == {"ada/first.ipynb": False, "ada/second try.ipynb": True, "bob.ipynb": True}
    page = class_page(graded)
    assert page.count("ada/first.ipynb") == 1 and "Not counted" in page


def test_a_notebook_that_lost_its_ids_is_known_by_its_checks() -> None:
    lost = notebook(SOLUTIONS)
    for cell in lost["cells"]:
        del cell["id"]
    assert reference_of(lost)["cells"] == notebook()["cells"]
    exercises = [cell["exercise"] for cell in merged(lost, notebook()) if "exercise" in cell]
    assert exercises == [cell["exercise"] for cell in check_cells(notebook()).values()]
    for cell, whole in zip(lost["cells"], notebook(SOLUTIONS)["cells"], strict=True):
        cell["metadata"]["id"] = whole["id"]  # as Colab writes them
    assert merged(lost, notebook()) == merged(notebook(SOLUTIONS), notebook())
