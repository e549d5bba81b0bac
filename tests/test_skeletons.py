"""Does `new-lesson` make a lesson that builds and is judged like any other, and what does it refuse?"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from new_lesson import MARK, SKELETONS, Lesson, WrongLesson, lesson, make, marks, run, with_row

from course_utils.cli.maintain import new_lesson_options
from course_utils.interactive.course_files import EXERCISES_WITH, LESSONS, ROOT, numbered
from course_utils.interactive.notebook_runs import read_notebook
from course_utils.teaching import syllabi

NEW = Lesson(f"{max(LESSONS) + 1:02d}", "tides", "High tide")
ASIDE = shutil.ignore_patterns(".*", "__pycache__", "build", "site", "dist", "pyodide", "*.egg-info")
SHARED = ("README.md", "solutions/instructor.md")


def small_tree(folder: Path) -> Path:
    """A course of sources alone, without what was built of them: enough for `new-lesson`."""
    for name in ("notebooks/src", "solutions/src", str(SKELETONS), "course_utils/lessons"):
        shutil.copytree(ROOT / name, folder / name, ignore=ASIDE)
    for name in SHARED:
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a copy of the course, which imports that copy."""
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "300", "COURSE_FULL": "0"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )


def test_a_new_lesson_builds_as_it_stands_and_its_checks_are_judged(tmp_path: Path) -> None:
    root = small_tree(tmp_path)
    shutil.rmtree(root / "course_utils")
    shutil.copytree(ROOT / "course_utils", root / "course_utils", ignore=ASIDE)
    for name in ("conftest.py", "checking.py", "one_lesson.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests")
    shutil.copy(ROOT / "pyproject.toml", root)  # by which the package knows that it is in a clone
    make(root, NEW)
    code = (
        "import sys; from pathlib import Path; from course_utils.authoring.build import build;"
        f"[build(Path('.').resolve(), Path(f'{{f}}/src/{NEW.stem}.py').resolve())"
        " for f in ('notebooks', 'solutions')]"
    )
    done = python(root, "-c", code)
    assert done.returncode == 0, done.stderr
    (known,) = syllabi.lessons(root).values()
    assert (known.title, known.minutes, known.exercises) == ("High tide", 30, {1: 10})
    solved, unsolved = (
        read_notebook(root / name / f"{NEW.stem}.ipynb") for name in ("solutions", "exercises")
    )
    shown = [output.get("data", {}) for cell in solved.cells for output in cell.get("outputs", [])]
    assert any(data.get("text/plain", "").startswith(f"✓ {NEW.number}.1") for data in shown)
    assert "NotSolved" in str(unsolved)
    assert "BEGIN SOLUTION" not in str(unsolved)
    assert "**Why.**" not in str(unsolved)
    lesson = read_notebook(root / "notebooks" / f"{NEW.stem}.ipynb")
    kinds = {cell.metadata.slideshow.slide_type for cell in lesson.cells}
    assert kinds == {"slide", "subslide", "notes", "skip"}
    judged = python(
        root, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_lesson_{NEW.number}_checks.py"
    )
    # three right answers, seven wrong ones
    assert re.search(r"^10 passed", judged.stdout, re.MULTILINE), judged.stdout


@pytest.mark.sweep(0)
def test_what_judges_lessons_asks_a_new_one_for_content_alone(tmp_path: Path) -> None:
    """Minutes: builds a whole course with one more lesson and runs `test --lesson 20` in it."""
    root = tmp_path / "course"
    shutil.copytree(ROOT, root, ignore=ASIDE)
    make(root, NEW)
    built = python(root, "-m", "course_utils", "build", "--here", NEW.number)
    assert built.returncode == 0, built.stderr
    agreed = python(root, "-m", "course_utils", "build", "--here", "--check")
    assert agreed.returncode == 0, agreed.stderr
    sanitized = ("--nbval", "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg")
    done = python(root, "-m", "pytest", "-rf", *sanitized, "--lesson", NEW.number, "tests", "notebooks")
    failed = re.findall(r"^FAILED \S+::(\w+)\S* - (.*)$", done.stdout, re.MULTILINE)
    assert dict(failed).keys() == {
        "test_no_lesson_has_words_of_a_skeleton",
        "test_every_exercise_has_three_hints_that_are_closed_until_opened",
        "test_minutes_are_those_of_the_headers_and_of_the_text",
    }, done.stdout
    assert all("of at least 4 exercises" in said or "places" in said for _, said in failed), failed


def test_every_file_is_made_and_named_with_what_is_left_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = small_tree(tmp_path)
    before = contents(root)
    parser = argparse.ArgumentParser()
    new_lesson_options(parser)
    assert run(parser.parse_args([NEW.number, NEW.name, "--title", NEW.title]), root) == 0
    said = capsys.readouterr().out
    after = contents(root)
    made = {path.relative_to(root).as_posix() for path in after.keys() - before.keys()}
    changed = {path.relative_to(root).as_posix() for path in before if after[path] != before[path]}
    folder = "course_utils/lessons/tides"
    assert made == {
        f"notebooks/src/{NEW.stem}.py",
        f"solutions/src/{NEW.stem}.py",
        f"{folder}/__init__.py",
        f"{folder}/checks.py",
        f"{folder}/quiz.py",
        f"{folder}/quiz.toml",
        f"tests/test_lesson_{NEW.number}_checks.py",
    }
    assert changed == set(SHARED)
    assert all(name in said for name in made | changed)
    assert f"course_utils build {NEW.number}" in said
    own = "".join((root / name).read_text(encoding="utf-8") for name in made)
    assert set(re.findall(r"(?<!\d)20(?!\d)|[Mm]y.lesson", own)) <= {NEW.number}
    assert (root / folder / "__init__.py").read_text(encoding="utf-8").startswith(f'"""Lesson {NEW.number}: ')
    left = marks(root)
    assert {line.partition(":")[0] for line in left} == made - {f"{folder}/__init__.py"} | changed
    rows = (root / "README.md").read_text(encoding="utf-8").splitlines()
    row = next(number for number, line in enumerate(rows, 1) if NEW.stem in line)
    assert any(line.startswith(f"README.md:{row}: what one finds out | 30 | [![Open lesson") for line in left)


@pytest.mark.parametrize(
    ("number", "name", "title", "words"),
    [
        ("14", "tides", "", "Number 14 is taken by 14_model_and_pipeline_parallelism.py: free are 07, "),
        ("8", "tides", "", "Number 8 is taken by 08_gradient_accumulation.py"),
        ("99", "tides", "", "Number 99 is not free: free are 07, 13, 15, 17, 20."),
        ("one", "tides", "", "Number one is not free"),
        (NEW.number, "High Tide", "", "use small letters and underscores, as in my_lesson"),
        (NEW.number, "2_tides", "", "use small letters"),
        (NEW.number, "class", "", "use small letters"),
        (NEW.number, "../tides", "", "use small letters"),
        (NEW.number, "lora", "", "The name 'lora' is taken by lora"),
        (NEW.number, "shared", "", "is taken by shared"),
        (NEW.number, "who_is_right", "", "is taken by 18_who_is_right.py"),
        (NEW.number, "tides", "High | low", "The title 'High | low' has to be one line"),
        (NEW.number, "tides", "x" * 61, "up to 60 characters"),
    ],
)
def test_what_is_taken_or_malformed_is_refused_in_one_sentence(
    number: str, name: str, title: str, words: str
) -> None:
    with pytest.raises(WrongLesson) as refused:
        lesson(ROOT, number, name, title)
    assert words in str(refused.value) and str(refused.value).count(". ") == 0


def test_a_title_comes_from_the_name_if_none_is_given() -> None:
    assert lesson(ROOT, NEW.number, "high_tide") == Lesson(NEW.number, "high_tide", "High tide")


@pytest.mark.parametrize("spoil", ["file", "README.md", "solutions/instructor.md"])
def test_nothing_is_written_where_something_is_in_the_way(tmp_path: Path, spoil: str) -> None:
    root = small_tree(tmp_path)
    if spoil == "file":
        (root / "tests" / f"test_lesson_{NEW.number}_checks.py").write_text("mine")
    else:
        (root / spoil).write_text("## Other\n")
    before = contents(root)
    with pytest.raises(WrongLesson, match=r"overwritten|no table of lessons|no lesson's notes"):
        make(root, NEW)
    assert contents(root) == before


def test_a_lesson_between_two_others_stands_between_them(tmp_path: Path) -> None:
    root = small_tree(tmp_path)
    make(root, lesson(root, "13", "tides", "High tide"))
    rows = re.findall(r"^\| \[(\d\d) ", (root / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    notes = (root / "solutions" / "instructor.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## Lesson (\d\d) · ", notes, re.MULTILINE)
    assert rows == sorted(rows) and parts == sorted(parts) and "13" in rows and "13" in parts


def test_a_row_is_like_the_last_one_with_badges_too() -> None:
    old = (
        "| [14 Fit?](notebooks/14_fit.ipynb) | how it fits "
        "| [![Try](b.svg)](https://x/notebooks/14_fit.ipynb) | 60 |"
    )
    new = (
        f"| [{NEW.number} High tide](notebooks/{NEW.stem}.ipynb) | {MARK}: what one finds out "
        f"| [![Try](b.svg)](https://x/notebooks/{NEW.stem}.ipynb) | 30 |"
    )
    assert with_row(f"a\n{old}\n\nb\n", NEW).splitlines()[2] == new


def test_no_lesson_has_words_of_a_skeleton() -> None:
    left = marks()
    assert not left, f"{len(left)} places of a new lesson are yours to fill:\n" + "\n".join(left)


def test_every_skeleton_is_used() -> None:
    used = {*NEW.files().values(), "20_my_notes.txt"} - {""}
    files = {path.name for path in (ROOT / SKELETONS).iterdir() if path.is_file()}
    assert files == {*used, ".ruff.toml"}


def test_lessons_are_what_the_folders_say() -> None:
    folders = {path.parent.name for path in (ROOT / "course_utils" / "lessons").glob("*/__init__.py")}
    assert set(LESSONS.values()) == folders - {"shared"}
    numbers = sorted({int(path.name[:2]) for path in numbered(ROOT / "notebooks")} - {0})
    assert sorted({*LESSONS, *map(int, EXERCISES_WITH)}) == numbers
    for number, folder in LESSONS.items():
        (solution,) = (ROOT / "solutions" / "src").glob(f"{number:02d}_*.py")
        assert f"course_utils.lessons.{folder} import checks" in solution.read_text(encoding="utf-8")


def test_how_to_write_a_lesson_is_one_page() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    part = text.partition("\n## A new lesson\n")[2].partition("\n## ")[0]
    assert 200 < len(part.split()) < 600
    for words in ("course_utils new-lesson 20 my_lesson", "docs/skeletons", f"`{MARK}`", "test --lesson 20"):
        assert words in part
