"""The build: one source, three notebooks, no drift, no learner's work lost."""

import re
import shutil
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest

from course_utils.authoring.build import (
    ROOT,
    build,
    build_all,
    check,
    committed_notebooks,
    is_edited,
    renew_text,
    save_edited,
)
from course_utils.authoring.sources import drafts, find_sources
from course_utils.interactive.notebook_runs import BuildError, read_notebook, run

LESSON = """
# ---
# jupyter:
#   course: {minutes: 20, cpu_seconds: 30}
# ---

# %% [markdown]
# # A lesson
# **The gap** is small.

# %% tags=["hide-input"]
import os

print(os.environ["COURSE_SOURCE"])

# %% tags=["nbval-ignore-output"]
6 * 7

# %% tags=["this-machine"]
print("this one")
"""

SOLUTION = '''
# %% [markdown]
# # An exercise

# %%
from course_utils.interactive.feedback import call, expect


# %%
def double(size: int) -> int:
    """Twice `size`."""
    ### BEGIN SOLUTION Return twice the size, in bytes.
    twice = size * 2
    return twice
    ### END SOLUTION


# %%
expect(call(double, 4) == 8, "Twice, not half.")

# %% [markdown] tags=["explanation"]
# Why this is right.

# %% tags=["solution"]
double(21)
'''


def write_source(root: Path, folder: str, text: str, name: str = "01_first") -> Path:
    source = root / folder / "src" / f"{name}.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")
    return source


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of one lesson and one exercise, built by the command."""
    root = tmp_path_factory.mktemp("course")
    write_source(root, "notebooks", LESSON)
    write_source(root, "solutions", SOLUTION)
    assert build_all(root) == 0
    return root


def test_a_lesson_is_executed_with_the_simulated_gpu_and_an_exercise_has_a_gap(course: Path) -> None:
    notebook = read_notebook(course / "notebooks/01_first.ipynb")
    text, drawing, number, machine, end = notebook.cells
    assert drawing.outputs[0].text == "simulated\n" and number.outputs[0].data == {"text/plain": "42"}
    assert drawing.metadata.jupyter == {"source_hidden": True} and "jupyter" not in number.metadata
    assert machine.outputs == [], "what describes the builder's machine is forgotten"
    kinds = [cell.metadata.slideshow.slide_type for cell in notebook.cells]
    assert kinds == ["slide", "subslide", "subslide", "skip", "notes"]
    assert [text.id, end.id] == ["01_first-01", "01_first-05"]
    assert set(notebook.metadata) == {"course", "kernelspec", "language_info"}
    assert notebook.metadata.course.items() >= {"minutes": 20, "cpu_seconds": 30}.items()

    exercise = read_notebook(course / "exercises/01_first.ipynb")
    solution = read_notebook(course / "solutions/01_first.ipynb")
    gap = '    """Twice `size`."""\n    raise NotSolved("Return twice the size, in bytes.")'
    assert exercise.cells[2].source.endswith(gap)
    first_line = exercise.cells[1].source.splitlines()[0]
    assert first_line == "from course_utils.interactive.feedback import NotSolved"
    assert "return twice" in solution.cells[2].source and "NotSolved" not in solution.cells[1].source
    assert solution.cells[5].outputs[0].data["text/plain"] == "42"
    assert [cell.id for cell in exercise.cells] == [f"01_first-0{number}" for number in (1, 2, 3, 4, 7)]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in exercise.cells)


def test_building_again_changes_nothing(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_all(course, only_check=True) == 0 and "agrees" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in committed_notebooks(course)}
    assert len(before) == 3 and build_all(course) == 0
    assert {path: path.read_bytes() for path in committed_notebooks(course)} == before


def test_committed_notebooks_agree_with_their_sources() -> None:
    assert find_sources(ROOT), "no sources found"
    assert check(ROOT) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("6 * 7", "6 * 8", "01_first-03 differs"),
        ("nbval-ignore-output", "raises-exception", "01_first-03 differs"),
    ],
)
def test_check_reports_a_source_that_has_moved_on(
    course: Path, tmp_path: Path, old: str, new: str, says: str
) -> None:
    target = tmp_path / "notebooks/01_first.ipynb"
    write_source(tmp_path, "notebooks", LESSON.replace(old, new))
    target.write_bytes((course / "notebooks/01_first.ipynb").read_bytes())
    stray = tmp_path / "solutions/07_other.ipynb"
    stray.parent.mkdir()
    stray.write_bytes(target.read_bytes())
    write_source(tmp_path, "solutions", SOLUTION)
    lines = check(tmp_path)
    assert any(says in line for line in lines), lines
    assert f"{Path('solutions/01_first.ipynb')} has not been built" in lines
    assert f"{Path('solutions/07_other.ipynb')} has no source" in lines


# A learner's work


def test_text_alone_is_renewed_without_running_anything(course: Path, tmp_path: Path) -> None:
    """By a build of any lesson. Code that has moved on, and a learner's work, are left as they are."""
    shutil.copytree(course, tmp_path, dirs_exist_ok=True)
    lesson = tmp_path / "notebooks" / "01_first.ipynb"
    before = read_notebook(lesson)
    write_source(tmp_path, "notebooks", LESSON.replace("# # A lesson", "# # A lesson, told anew"))
    renew_text(tmp_path)
    after = read_notebook(lesson)
    assert after.cells[0].source.startswith("# A lesson, told anew") and check(tmp_path) == []
    assert after.cells[1:] == before.cells[1:] and after.cells[1].outputs and not is_edited(lesson)
    written = lesson.read_bytes()
    other_code = LESSON.replace("# # A lesson", "# # Another").replace("6 * 7", "6 * 8")
    write_source(tmp_path, "notebooks", other_code)
    renew_text(tmp_path)
    assert lesson.read_bytes() == written and len(check(tmp_path)) == 2
    after.cells[0].source = "# Mine"
    nbformat.write(after, lesson)
    write_source(tmp_path, "notebooks", LESSON.replace("# # A lesson", "# # Another"))
    renew_text(tmp_path)
    assert read_notebook(lesson).cells[0].source == "# Mine"


def test_running_a_notebook_is_no_edit(course: Path, tmp_path: Path) -> None:
    notebook = read_notebook(course / "notebooks/01_first.ipynb")
    notebook.cells[1].outputs = []
    notebook.cells[1].execution_count = 17
    notebook.metadata.language_info.version = "3.14.0"
    nbformat.write(notebook, tmp_path / "01_first.ipynb")
    assert save_edited(tmp_path / "01_first.ipynb") is None


def test_learners_work_is_kept_under_its_date_and_the_build_says_where(
    course: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    solved = read_notebook(course / "exercises/01_first.ipynb")
    solved.cells[2].source = "def double(size): return size + size"
    source = write_source(tmp_path, "solutions", SOLUTION)
    target = tmp_path / "exercises/01_first.ipynb"
    target.parent.mkdir()
    nbformat.write(solved, target)
    work = target.read_bytes()
    build(tmp_path, source)
    assert not is_edited(target)
    (copy,) = target.parent.glob("01_first.edited-*.ipynb")
    assert re.fullmatch(r"01_first\.edited-20\d\d-\d\d-\d\d-\d{6}\.ipynb", copy.name)
    assert copy.read_bytes() == work and copy.name in capsys.readouterr().out
    assert check(tmp_path) == []  # the saved copy is nobody's drift


def test_unreadable_notebook_is_kept_too(tmp_path: Path) -> None:
    (tmp_path / "01_first.ipynb").write_bytes(b'{"cells": 3}')
    copy = save_edited(tmp_path / "01_first.ipynb")
    assert copy and copy.read_bytes() == b'{"cells": 3}'


# Failures


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("1 / 0", r"cell 01_first-03 \(1 / 0\).*ZeroDivisionError"),
        ("import sys; print('careful', file=sys.stderr)", r"cell 01_first-03 .*stderr:\ncareful"),
    ],
)
def test_failing_cell_is_named_and_nothing_is_written(tmp_path: Path, cell: str, says: str) -> None:
    source = write_source(tmp_path, "notebooks", LESSON.replace("6 * 7", cell))
    with pytest.raises(BuildError) as problem:
        build(tmp_path, source)
    assert re.search(says, str(problem.value), re.DOTALL)
    assert list((tmp_path / "notebooks").glob("*.ipynb*")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is ipykernel that looks for its parent")
def test_a_kernel_ends_with_the_build(tmp_path: Path) -> None:
    asked = (
        "import ctypes\n"
        "found = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(found))\n"
        "print(found.value)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(asked)])
    assert run(notebook, tmp_path).cells[0].outputs[0].text == "9\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("### END SOLUTION", "pass", "without its partner"),
        ("    ### BEGIN SOLUTION", "    pass ### BEGIN SOLUTION", "not on its own line"),
        ("SOLUTION", "ANSWER", "nothing to solve"),
    ],
)
def test_markers_that_do_not_pair_up_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    source = write_source(tmp_path, "solutions", SOLUTION.replace(old, new))
    with pytest.raises(BuildError, match=says):
        drafts(tmp_path, source)
    lesson = write_source(tmp_path, "notebooks", SOLUTION)
    with pytest.raises(BuildError, match=r"belongs in solutions/src/01_first\.py"):
        drafts(tmp_path, lesson)


def test_a_lesson_is_named_in_several_ways_and_other_names_are_refused(
    course: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("01", "01_first", "notebooks/src/01_first.py", "notebooks/01_first.ipynb"):
        assert [path.parts[-3] for path in find_sources(course, [name])] == ["notebooks", "solutions"]
    assert build_all(course, ["01_frist"]) == 1
    assert "did you mean '01_first'?" in capsys.readouterr().err
    write_source(tmp_path, "notebooks", LESSON, "01-first")
    with pytest.raises(BuildError, match="NN_name"):
        find_sources(tmp_path)
