"""`start` without a wheel: what it refuses and leaves behind, and how a started course is found again."""

import argparse
import stat
from pathlib import Path

import pytest

from course_utils.cli import start
from course_utils.cli.environment import SetupError
from course_utils.interactive.course_files import started_course


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """Files as a wheel may hold them: nobody may write to them, and some are for a clone or a cache."""
    folder = tmp_path / "shipped"
    names = (
        "notebooks/00_start_here.ipynb",
        "exercises/01.ipynb",
        "README.md",
        "pyproject.toml",
        "docs/__pycache__/x.pyc",
    )
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        (folder / name).chmod(0o444)
    return folder


def test_a_clone_needs_no_copy(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    start.options(parser)
    with pytest.raises(SetupError, match=r"This is a clone.*run `python3 -m course_utils lab`"):
        start.run(parser.parse_args([str(tmp_path / "course")]))
    assert not (tmp_path / "course").exists()


def test_what_is_copied_can_be_written_to_and_is_found_from_below(shipped: Path, tmp_path: Path) -> None:
    course = tmp_path / "course"
    start.copy_course(shipped, course)
    copied = {path.relative_to(course).as_posix(): path for path in course.rglob("*") if path.is_file()}
    assert set(copied) == {"notebooks/00_start_here.ipynb", "exercises/01.ipynb", "README.md", "pytest.ini"}
    assert all(path.stat().st_mode & stat.S_IWUSR for path in copied.values())
    (course / "exercises" / "mine").mkdir()
    assert started_course(course) == started_course(course / "exercises" / "mine") == course
    assert started_course(tmp_path) is None


def test_a_copy_that_fails_leaves_nothing(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: Path, target: Path) -> None:
        if source.name.startswith("00"):
            raise OSError(28, "No space left on device")
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(start.shutil, "copyfile", copy)
    with pytest.raises(OSError, match="No space left"):
        start.copy_course(shipped, tmp_path / "course")
    assert not (tmp_path / "course").exists()


def test_nothing_is_overwritten(shipped: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        start.copy_course(shipped, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "shipped"]
