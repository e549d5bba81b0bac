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
from course_utils.authoring.sources import FOLDED_CODE, PAGES, THIS_MACHINE, drafts, find_sources, frame
from course_utils.interactive.course_files import LESSONS
from course_utils.interactive.notebook_runs import BuildError, read_notebook, run

LESSON = """
# ---
# jupyter:
#   course: {minutes: 20, budget_seconds: 30}
# ---

# %% [markdown]
# # A lesson
# **The gap** is small.

# %%
import os

print(os.environ["COURSE_SOURCE"])

# %% tags=["nbval-ignore-output"]
6 * 7
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


@pytest.fixture
def edited(course: Path, tmp_path: Path) -> Path:
    """A copy of the built exercise in which a learner has solved it."""
    path = tmp_path / "01_first.ipynb"
    notebook = read_notebook(course / "exercises/01_first.ipynb")
    notebook.cells[2].source = "def double(size): return size + size"
    nbformat.write(notebook, path)
    return path


def test_lesson_is_executed_with_the_simulated_gpu(course: Path) -> None:
    notebook = read_notebook(course / "notebooks/01_first.ipynb")
    cells = notebook.cells
    assert [cell.execution_count for cell in cells[1:3]] == [1, 2]
    assert cells[1].outputs[0].text == "simulated\n"
    assert cells[2].outputs[0].data == {"text/plain": "42"}
    assert [cell.metadata.get("tags", []) for cell in cells] == [[], [], ["nbval-ignore-output"], []]
    kinds = [cell.metadata.slideshow.slide_type for cell in cells]
    assert kinds == ["slide", "subslide", "subslide", "notes"]
    assert [cell.id for cell in cells] == ["01_first-01", "01_first-02", "01_first-03", "01_first-04"]
    assert notebook.metadata.language_info == {"name": "python"}
    assert set(notebook.metadata) == {"course", "kernelspec", "language_info"}
    assert notebook.metadata.course.items() >= {"minutes": 20, "budget_seconds": 30}.items()


def test_building_again_changes_nothing(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_all(course, only_check=True) == 0 and "agrees" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in committed_notebooks(course)}
    assert len(before) == 3 and build_all(course) == 0
    assert {path: path.read_bytes() for path in committed_notebooks(course)} == before


def test_exercise_has_the_gap_and_the_solution_the_answer(course: Path) -> None:
    exercise = read_notebook(course / "exercises" / "01_first.ipynb")
    solution = read_notebook(course / "solutions" / "01_first.ipynb")
    gap = '    """Twice `size`."""\n    raise NotSolved("Return twice the size, in bytes.")'
    assert exercise.cells[2].source.endswith(gap)
    first_line = exercise.cells[1].source.splitlines()[0]
    assert first_line == "from course_utils.interactive.feedback import NotSolved"
    assert "return twice" in solution.cells[2].source
    assert "NotSolved" not in solution.cells[1].source
    assert solution.cells[5].outputs[0].data["text/plain"] == "42"
    assert [cell.id for cell in exercise.cells] == [f"01_first-0{number}" for number in (1, 2, 3, 4, 7)]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in exercise.cells)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("6 * 7", "6 * 8", "01_first-03 differs"),
        ("# # A lesson", "# # A lesson\n\n# %% [markdown]\n# More", "01_first-04 differs"),
        ("minutes: 20", "minutes: 25", "its course settings differ"),
        ("nbval-ignore-output", "raises-exception", "01_first-03 differs"),
    ],
)
def test_check_reports_a_source_that_has_moved_on(
    course: Path, tmp_path: Path, old: str, new: str, says: str
) -> None:
    target = tmp_path / "notebooks/01_first.ipynb"
    write_source(tmp_path, "notebooks", LESSON.replace(old, new))
    write_source(tmp_path, "solutions", SOLUTION)
    target.write_bytes((course / "notebooks/01_first.ipynb").read_bytes())
    assert any(says in line for line in check(tmp_path)), check(tmp_path)


def test_a_lesson_begins_and_ends_with_where_it_is_and_the_ways_on() -> None:
    """Number, core path, exercises with minutes, the lessons before and after; links that lead somewhere."""
    lesson = ROOT / "notebooks" / "src" / "06_recomputation.py"
    exercises = ROOT / "solutions" / "src" / "06_recomputation.py"
    way = frame(ROOT, lesson)
    assert f"**Lesson 06** of {max(LESSONS)} · core path" in way
    assert "core path · [4 exercises, 73 minutes](../exercises/06_recomputation.ipynb)" in way
    assert "[← 05 What does each operation keep?](05_activations.ipynb)" in way
    assert "[08 Gradient accumulation →](08_gradient_accumulation.ipynb)" in way
    assert "**Exercises** of [lesson 06](../notebooks/06_recomputation.ipynb)" in frame(ROOT, exercises)
    for source in find_sources(ROOT):
        first, *_, last = drafts(ROOT, source)[0].notebook.cells
        links = re.findall(r"\]\(([^)]+)\)", frame(ROOT, source))
        assert all((source.parents[1] / link).exists() for link in links)
        assert first.source.count("border-left") == (1 if links else 0)
        assert (last.source == frame(ROOT, source)) == bool(links)
        assert bool(links) == (source.stem not in PAGES)


def test_code_that_only_draws_is_folded_and_a_machine_is_forgotten(tmp_path: Path) -> None:
    drawing = LESSON.replace("nbval-ignore-output", FOLDED_CODE)
    machine = LESSON.replace("nbval-ignore-output", THIS_MACHINE)
    folded = drafts(tmp_path, write_source(tmp_path, "notebooks", drawing))[0].notebook.cells
    assert [cell.metadata.get("jupyter") for cell in folded[:3]] == [None, None, {"source_hidden": True}]
    build(tmp_path, write_source(tmp_path, "notebooks", machine))
    cells = read_notebook(tmp_path / "notebooks/01_first.ipynb").cells
    assert [bool(cell.outputs) for cell in cells[1:3]] == [True, False]


def test_text_alone_is_renewed_without_running_anything(course: Path, tmp_path: Path) -> None:
    """By a build of any lesson. Code that has moved on, and a learner's work, are left as they are."""
    shutil.copytree(course, tmp_path, dirs_exist_ok=True)
    lesson = tmp_path / "notebooks" / "01_first.ipynb"
    solved = tmp_path / "solutions" / "01_first.ipynb"
    before = read_notebook(lesson)
    write_source(tmp_path, "notebooks", LESSON.replace("# # A lesson", "# # A lesson, told anew"))
    renew_text(tmp_path)
    after = read_notebook(lesson)
    assert after.cells[0].source.startswith("# A lesson, told anew") and check(tmp_path) == []
    assert after.cells[1:] == before.cells[1:] and after.cells[1].outputs and not is_edited(lesson)
    written = solved.read_bytes(), lesson.read_bytes()
    other_code = LESSON.replace("# # A lesson", "# # Another").replace("6 * 7", "6 * 8")
    write_source(tmp_path, "notebooks", other_code)
    renew_text(tmp_path)
    assert (solved.read_bytes(), lesson.read_bytes()) == written and len(check(tmp_path)) == 2
    after.cells[0].source = "# Mine"
    nbformat.write(after, lesson)
    write_source(tmp_path, "notebooks", LESSON.replace("# # A lesson", "# # Another"))
    renew_text(tmp_path)
    assert read_notebook(lesson).cells[0].source == "# Mine"


def test_check_reports_what_was_never_built_and_what_has_no_source(course: Path, tmp_path: Path) -> None:
    write_source(tmp_path, "notebooks", LESSON)
    stray = tmp_path / "solutions/07_other.ipynb"
    stray.parent.mkdir()
    stray.write_bytes((course / "notebooks/01_first.ipynb").read_bytes())
    expected = [str(Path("notebooks/01_first.ipynb")) + " has not been built"]
    assert check(tmp_path) == [*expected, str(Path("solutions/07_other.ipynb")) + " has no source"]


def test_running_a_notebook_is_no_edit(course: Path, tmp_path: Path) -> None:
    notebook = read_notebook(course / "notebooks/01_first.ipynb")
    notebook.cells[1].outputs = []
    notebook.cells[1].execution_count = 17
    notebook.metadata.language_info.version = "3.14.0"
    nbformat.write(notebook, tmp_path / "01_first.ipynb")
    assert save_edited(tmp_path / "01_first.ipynb") is None


def test_learners_work_is_kept_under_its_date_and_the_build_says_where(
    tmp_path: Path, edited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = edited.read_bytes()
    source = write_source(tmp_path / "course", "solutions", SOLUTION)
    target = tmp_path / "course/exercises/01_first.ipynb"
    target.parent.mkdir()
    target.write_bytes(work)
    build(tmp_path / "course", source)
    assert not is_edited(target)
    (copy,) = target.parent.glob("01_first.edited-*.ipynb")
    assert re.fullmatch(r"01_first\.edited-20\d\d-\d\d-\d\d-\d{6}\.ipynb", copy.name)
    assert copy.read_bytes() == work and copy.name in capsys.readouterr().out
    assert check(tmp_path / "course") == []  # the saved copy is nobody's drift


@pytest.mark.parametrize("content", [b"", b"not a notebook", b'{"cells": 3}'])
def test_unreadable_notebook_is_kept_too(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "01_first.ipynb").write_bytes(content)
    copy = save_edited(tmp_path / "01_first.ipynb")
    assert copy and copy.read_bytes() == content


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


def a_notebook(code: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])


def test_a_kernel_that_dies_before_it_is_ready_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_kernels = "import os, sys\nif 'ipykernel_launcher' in sys.orig_argv: os._exit(3)"
    (tmp_path / "sitecustomize.py").write_text(ends_kernels)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BuildError, match="before the first cell: Kernel died"):
        run(a_notebook("1"), tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is ipykernel that looks for its parent")
def test_a_kernel_ends_with_the_build(tmp_path: Path) -> None:
    asked = (
        "import ctypes\n"
        "found = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(found))\n"
        "print(found.value)"
    )
    assert run(a_notebook(asked), tmp_path).cells[0].outputs[0].text == "9\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("### END SOLUTION", "pass", "without its partner"),
        ("### BEGIN SOLUTION", "pass  #", "without its partner"),
        ("twice = size * 2", "### BEGIN SOLUTION", "without its partner"),
        ("### BEGIN SOLUTION", "## BEGIN SOLUTION", "without its partner"),
        ("    ### BEGIN SOLUTION", "    pass ### BEGIN SOLUTION", "not on its own line"),
        ("SOLUTION", "ANSWER", "nothing to solve"),
    ],
)
def test_markers_that_do_not_pair_up_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    source = write_source(tmp_path, "solutions", SOLUTION.replace(old, new))
    with pytest.raises(BuildError, match=says):
        drafts(tmp_path, source)


def test_solution_markers_are_refused_in_a_lesson(tmp_path: Path) -> None:
    source = write_source(tmp_path, "notebooks", SOLUTION)
    with pytest.raises(BuildError, match=r"belongs in solutions/src/01_first\.py"):
        drafts(tmp_path, source)


@pytest.mark.parametrize("name", ["1st", "first_01", "01-first", "01_First"])
def test_source_that_is_named_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    write_source(tmp_path, "notebooks", LESSON, name)
    with pytest.raises(BuildError, match="NN_name"):
        find_sources(tmp_path)


def test_the_explorer_has_no_number_and_no_exercises(tmp_path: Path) -> None:
    source = write_source(tmp_path, "notebooks", LESSON, "explorer")
    assert find_sources(tmp_path, ["explorer"]) == [source]
    assert [draft.target.name for draft in drafts(tmp_path, source)] == ["explorer.ipynb"]
    write_source(tmp_path, "solutions", SOLUTION, "explorer")
    with pytest.raises(BuildError, match="NN_name"):
        find_sources(tmp_path)


def test_unknown_lesson_is_refused_with_the_nearest_name(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build_all(course, ["01_frist"]) == 1
    assert "did you mean '01_first'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["01", "01_first", "notebooks/src/01_first.py", "notebooks/01_first.ipynb"])
def test_lesson_may_be_named_in_several_ways(course: Path, name: str) -> None:
    assert [path.parts[-3] for path in find_sources(course, [name])] == ["notebooks", "solutions"]


def test_a_number_names_one_lesson(tmp_path: Path) -> None:
    first = write_source(tmp_path, "notebooks", LESSON, "08_first")
    second = write_source(tmp_path, "notebooks", LESSON, "09_second")
    assert find_sources(tmp_path, []) == [first, second]
    assert find_sources(tmp_path, ["08"]) == [first]
    assert find_sources(tmp_path, ["09"]) == [second]


def test_committed_notebooks_agree_with_their_sources() -> None:
    assert find_sources(ROOT), "no sources found"
    assert check(ROOT) == []
