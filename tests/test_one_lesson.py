"""Does `test --lesson` choose what judges that lesson, and leave out what does not?"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from one_lesson import EVERY_LESSON, IN_ONE_CASE, OneLesson, scope

from course_utils.interactive.course_files import LESSONS, ROOT, numbered

TESTS = ROOT / "tests"


def read_by(number: str) -> set[str]:
    """The files of tests and notebooks that pytest would read for a lesson."""
    lesson = OneLesson(number)
    paths = [
        *TESTS.glob("test_*.py"),
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "solutions").glob("*.ipynb"),
    ]
    return {str(path.relative_to(ROOT)) for path in paths if not lesson.pytest_ignore_collect(path)}


EVERY = {f"tests/{name}.py" for name in EVERY_LESSON}


@pytest.mark.parametrize(
    ("number", "own"),
    [
        (
            "05",
            {
                "tests/test_lesson_05_checks.py",
                "tests/test_lessons_activations.py",
                "notebooks/05_activations.ipynb",
            },
        ),
        ("2", {"tests/test_lesson_02_checks.py", "tests/test_lessons_adam.py", "notebooks/02_adam.ipynb"}),
        ("09", {"tests/test_lessons_accumulation.py", "notebooks/09_large_batches.ipynb"}),
        ("00", {"notebooks/00_start_here.ipynb"}),
    ],
)
def test_files_of_a_lesson_are_read_and_no_others(number: str, own: set[str]) -> None:
    assert read_by(number) == EVERY | own


def test_folders_are_entered() -> None:
    assert OneLesson("05").pytest_ignore_collect(TESTS) is None


@pytest.mark.parametrize("number", LESSONS)
def test_each_lesson_has_tests_of_its_checks(number: int) -> None:
    assert f"tests/test_lesson_{number:02d}_checks.py" in read_by(str(number))


def item(name: str) -> Any:
    return SimpleNamespace(name=name, path=TESTS / "test_quizzes.py", originalname=name.partition("[")[0])


def test_cases_of_a_lesson_are_told_by_its_number() -> None:
    lesson = OneLesson("05")
    for case in ("[05]", "[5]", "[05.2]", "[05_activations]", "[notebooks/05_activations.ipynb]", "[05-x]"):
        assert lesson.is_case(item(f"test_x{case}")), case
    for case in ("[15]", "[50]", "[06.5]", "[2.05]", "[(5, 0)]", "[notebooks/15_new.ipynb]", "[7]", ""):
        assert not lesson.is_case(item(f"test_x{case}")), case
    assert lesson.is_case(item(IN_ONE_CASE[0]))
    assert OneLesson("09").is_case(item("test_x[09_large]"))
    assert not OneLesson("08").is_case(item("test_x[09_large]"))


def test_others_are_deselected_in_the_files_of_every_lesson_alone() -> None:
    mine = item("test_x[05]")
    other = item("test_x[06]")
    own: Any = SimpleNamespace(name="test_y", path=TESTS / "test_lesson_05_checks.py")
    items = [mine, other, own]
    left_out = []
    config: Any = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    )
    OneLesson("05").pytest_collection_modifyitems(config, items)
    assert items == [mine, own] and left_out == [other]


def test_an_exercise_stays_on_one_worker_and_so_do_a_notebook_and_a_file_without() -> None:
    checks = "tests/test_lesson_05_checks.py"
    assert scope(f"{checks}::TestAnswers::test_x[05.1-right-1]") == scope(
        f"{checks}::TestAnswers::test_y[05.1-wrong-2]"
    )
    assert scope(f"{checks}::TestAnswers::test_x[05.1-right-1]") != scope(
        f"{checks}::TestAnswers::test_x[05.2-right-1]"
    )
    assert scope("notebooks/05_activations.ipynb::Cell 0") == scope("notebooks/05_activations.ipynb::Cell 1")
    quizzes = scope("tests/test_quizzes.py::test_y")
    assert scope("tests/test_quizzes.py::test_x[05]") == quizzes
    assert scope(f"{checks}::z") != quizzes


def test_what_a_lessons_tests_leave_out_is_not_loaded_and_nbformat_works_without() -> None:
    code = "import tests.light_imports, nbformat, sys; nbformat.validate(nbformat.v4.new_notebook())"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(sys.modules['rfc3987_syntax'])"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "None\n", done.stderr


def test_what_judges_all_lessons_in_one_case_is_there() -> None:
    text = "".join((TESTS / f"{name}.py").read_text(encoding="utf-8") for name in EVERY_LESSON)
    assert [name for name in IN_ONE_CASE if f"def {name}(" not in text] == []


def test_every_file_that_goes_through_the_lessons_is_among_them() -> None:
    """Others of that kind take minutes or judge no lesson's words; each is left out for a reason."""
    elsewhere = {
        "test_browser",
        "test_site",
        "test_site_live",
        "test_figure_page",
        "test_recordings",
        "test_searching",
        "test_build",
        "test_other_platforms",
        "test_progress",
        "test_one_lesson",
        "test_wheel",
        "test_quality",
        "test_lessons_calculators",
        "test_repository",
    }
    found = set()
    for path in TESTS.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "numbered(" in text or "committed_notebooks(" in text:
            found.add(path.stem)
    assert found - elsewhere <= {*EVERY_LESSON}, "judges lessons: add it to EVERY_LESSON"


@pytest.mark.parametrize("number", ["99", "adam", "5b", ""])
def test_an_unknown_lesson_is_refused_with_those_that_are_known(number: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"unknown lesson .*00, 01, 02"):
        OneLesson(number)


def test_every_notebook_of_a_lesson_can_be_asked_for() -> None:
    assert {OneLesson(path.name.partition("_")[0]).notebook for path in numbered(ROOT / "notebooks")} == set(
        numbered(ROOT / "notebooks")
    )


def test_a_path_of_another_place_is_ignored() -> None:
    assert OneLesson("05").pytest_ignore_collect(Path("/elsewhere/test_lesson_06_checks.py"))
