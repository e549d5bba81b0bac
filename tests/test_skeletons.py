"""Does `new-lesson` make every file of a lesson, and what does it refuse? tests/rest builds such a lesson."""

import argparse
import re
import shutil
from pathlib import Path

import pytest
from new_lesson import SKELETONS, Lesson, marks, run

from course_utils.cli.maintain import new_lesson_options
from course_utils.interactive.course_files import EXERCISES_WITH, LESSONS, ROOT, numbered

NEW = Lesson("13", "tides", "High tide")
"""A lesson between two others."""

SHARED = ("README.md", "solutions/instructor.md")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of sources alone, without what was built of them: enough for `new-lesson`."""
    without_caches = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("notebooks/src", "solutions/src", str(SKELETONS), "course_utils/lessons"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=without_caches)
    for name in SHARED:
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests").mkdir()
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_every_file_is_made_and_named_with_what_is_left_to_say(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(root)
    parser = argparse.ArgumentParser()
    new_lesson_options(parser)
    assert run(parser.parse_args([NEW.number, NEW.name, "--title", NEW.title]), root) == 0
    said = capsys.readouterr().out
    after = contents(root)
    made = after.keys() - before.keys()
    folder = "course_utils/lessons/tides"
    assert made == {
        f"notebooks/src/{NEW.stem}.py",
        f"solutions/src/{NEW.stem}.py",
        f"{folder}/__init__.py",
        f"{folder}/checks.py",
        f"{folder}/quiz.py",
        f"{folder}/quiz.toml",
        f"tests/test_lesson_{NEW.number}.py",
    }
    assert {path for path in before if after[path] != before[path]} == set(SHARED)
    assert all(name in said for name in (*made, *SHARED))
    own = "".join(after[name] for name in made)
    assert set(re.findall(r"(?<!\d)20(?!\d)|[Mm]y.lesson", own)) <= {NEW.number}
    marked = {line.partition(":")[0] for line in marks(root)}
    assert marked == {*made, *SHARED} - {f"{folder}/__init__.py"}
    rows = re.findall(r"^\| \[(\d\d) ", after["README.md"], re.MULTILINE)
    parts = re.findall(r"^## Lesson (\d\d) · ", after["solutions/instructor.md"], re.MULTILINE)
    assert rows == sorted(rows) and parts == sorted(parts) and "13" in rows and "13" in parts


def test_no_lesson_has_words_of_a_skeleton() -> None:
    left = marks()
    assert not left, f"{len(left)} places of a new lesson are yours to fill:\n" + "\n".join(left)


def test_lessons_are_what_the_folders_say() -> None:
    folders = {path.parent.name for path in (ROOT / "course_utils" / "lessons").glob("*/__init__.py")}
    assert set(LESSONS.values()) == folders - {"shared"}
    numbers = sorted({int(path.name[:2]) for path in numbered(ROOT / "notebooks")} - {0})
    assert sorted({*LESSONS, *map(int, EXERCISES_WITH)}) == numbers
    for number, folder in LESSONS.items():
        [solution] = (ROOT / "solutions" / "src").glob(f"{number:02d}_*.py")
        assert f"course_utils.lessons.{folder} import checks" in solution.read_text(encoding="utf-8")
