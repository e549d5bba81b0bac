"""Copies of the course: out of a wheel, for learners without solutions, for nbgrader and for Colab; links."""

import json
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course_utils.cli import start
from course_utils.cli.main import main
from course_utils.cli.maintain import TEST_OPTIONS
from course_utils.interactive.course_files import ANSWERS, ROOT, numbered, started_course
from course_utils.teaching import other_platforms
from course_utils.teaching.check_cells import check_cells
from course_utils.teaching.release import release

REPOSITORY = "https://example.org/you/course.git"


# Out of a wheel


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """Files as a wheel may hold them: nobody may write to them, and some are for a clone or a cache."""
    folder = tmp_path / "shipped"
    names = (
        "notebooks/00_start_here.ipynb",
        "exercises/01.ipynb",
        "pyproject.toml",
        "docs/__pycache__/x.pyc",
    )
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        (folder / name).chmod(0o444)
    return folder


def test_what_is_copied_can_be_written_to_and_is_found_from_below(shipped: Path, tmp_path: Path) -> None:
    course = tmp_path / "course"
    start.copy_course(shipped, course)
    copied = {path.relative_to(course).as_posix(): path for path in course.rglob("*") if path.is_file()}
    assert set(copied) == {"notebooks/00_start_here.ipynb", "exercises/01.ipynb", "pytest.ini"}
    assert all(path.stat().st_mode & stat.S_IWUSR for path in copied.values())
    assert started_course(course) == started_course(course / "exercises") == course
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


def test_nothing_is_overwritten_and_a_clone_needs_no_copy(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for copy in (lambda: start.copy_course(shipped, tmp_path), lambda: release(tmp_path)):
        with pytest.raises(ValueError, match="is not empty"):
            copy()
    for command in ("nbgrader", "colab"):
        assert main([command, str(tmp_path)]) == 1
        assert "is not empty" in capsys.readouterr().err
    assert main(["start", str(tmp_path / "course")]) == 1
    assert "This is a clone and already holds the course" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["shipped"]


# For learners


def test_the_learners_copy_has_no_solutions_and_works(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    names = [str(name) for name in release(target)]
    assert "exercises" in names and not {"solutions", ".git", ".venv"} & set(names)
    text = "".join(path.read_text(encoding="utf-8") for path in target.rglob("*.ipynb"))
    assert not any(mark in text for mark in ANSWERS)
    assert not list(target.rglob("src")) and not list(target.rglob("skeletons"))
    in_tests = {path.relative_to(target).as_posix() for path in (target / "tests").iterdir()}
    assert {word for word in TEST_OPTIONS if "/" in word} == in_tests
    linked = re.findall(r"\]\(([^)#:]+)[)#]", (target / "README.md").read_text(encoding="utf-8"))
    assert len(linked) > 5 and not [path for path in linked if not (target / path).exists()]
    command = [sys.executable, "-m", "course_utils", "estimate", "gpt2"]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, check=True)
    assert "optimizer states" in done.stdout


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


# For other platforms


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_nbgrader_gets_every_exercise_with_its_marks_and_no_explanations(tmp_path: Path) -> None:
    written = other_platforms.nbgrader_source(tmp_path / "course")
    assert [path.name for path in written] == [path.name for path in numbered(ROOT / "exercises")]
    for path in written:
        notebook = read(path)
        exercise = read(ROOT / "exercises" / path.name)
        assert nbformat.validator.isvalid(nbformat.from_dict(notebook), version=4)
        marks = {cell["id"]: cell["metadata"].get("nbgrader", {}) for cell in notebook["cells"]}
        assert [cell for cell in marks if marks[cell].get("grade")] == list(check_cells(exercise))
        answers = [cell["id"] for cell in notebook["cells"] if "### BEGIN SOLUTION" in cell["source"]]
        assert [cell for cell in marks if marks[cell].get("solution")] == answers != []
        assert set(marks) == {cell["id"] for cell in exercise["cells"]}
        assert not [cell for cell in notebook["cells"] if cell.get("outputs")]


def test_a_colab_copy_asks_for_a_gpu_and_fetches_the_course_first(tmp_path: Path) -> None:
    copies = other_platforms.colab_copies(tmp_path / "copies", REPOSITORY, "taught")
    originals = [path for name in other_platforms.FOLDERS for path in numbered(ROOT / name)]
    assert [path.name for path in copies] == [path.name for path in originals]
    for path, original in zip(copies, originals, strict=True):
        notebook = read(path)
        assert notebook["metadata"]["accelerator"] == "GPU"
        assert nbformat.validator.isvalid(nbformat.from_dict(notebook), version=4)
        first, *others = code(notebook)
        assert f"--branch taught {REPOSITORY} {{COURSE}}" in first["source"] and "{{" not in first["source"]
        assert f'"{original.parent.name}"' in first["source"] and others == code(read(original))
    with pytest.raises(ValueError, match="is not a repository's address"):
        other_platforms.colab_copies(tmp_path / "more", "a; rm -rf b")


def test_a_first_cell_unpacks_the_course_that_was_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy, *_) = other_platforms.colab_copies(tmp_path / "copies", None)
    first = code(read(copy))[0]["source"].splitlines()
    lines = [line for line in first if not line.lstrip().startswith("!")]
    assert len(first) - len(lines) == 1, "only pip is a command of the shell"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(AssertionError, match="Upload course"):
        exec("\n".join(lines), {})
    (tmp_path / "copies" / "course.zip").rename(tmp_path / "course.zip")
    exec("\n".join(lines), {})
    assert Path.cwd() == tmp_path / "course" / copy.parent.name and sys.path[0] == str(tmp_path / "course")
    assert not (tmp_path / "course" / "solutions").exists()


def test_links_have_the_forms_that_their_places_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    first = "notebooks/00_start_here.ipynb"
    pull = "git-pull?repo=https%3A%2F%2Fexample.org%2Fyou%2Fcourse.git&branch=taught&urlpath=lab%2Ftree%2F"
    hub = other_platforms.link(first, REPOSITORY, "taught", hub="https://hub.example.org/")
    place = "course%2Fnotebooks%2F00_start_here.ipynb"
    assert hub == f"https://hub.example.org/hub/user-redirect/{pull}{place}"
    assert other_platforms.link(first, REPOSITORY, "a/b") == (
        "https://mybinder.org/v2/git/https%3A%2F%2Fexample.org%2Fyou%2Fcourse.git/a%2Fb"
        "?labpath=notebooks%2F00_start_here.ipynb"
    )
    colab_start = "https://colab.research.google.com/github/you/course/blob/main/notebooks/"
    assert main(["links", "--repository", "https://github.com/you/course.git", "--colab"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(numbered(ROOT / "notebooks"))
    assert lines[0] == f"- [00_start_here]({colab_start}00_start_here.ipynb)"
    assert main(["links", "--repository", REPOSITORY, "--colab"]) == 1
    assert "from GitHub" in capsys.readouterr().err
