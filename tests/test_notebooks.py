"""The contract that every committed notebook keeps, and proof that the contract notices when one does not."""

import base64
import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import code_cells, faults
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.interactive.notebook_runs import read_notebook, run

LESSONS = committed_notebooks(ROOT, "notebooks")
SOLUTIONS = committed_notebooks(ROOT, "solutions")
EXERCISES = committed_notebooks(ROOT, "exercises")
QUICK = ("03", "04", "08", "14")
"""Exercises that are executed in any case; the others under --full."""

CHECK_CALL = re.compile(r"^\s*check\.\w+\(", re.MULTILINE)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# What is committed


def test_there_are_lessons_exercises_and_solutions() -> None:
    assert LESSONS and [path.name for path in EXERCISES] == [path.name for path in SOLUTIONS] != []


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=name)
def test_notebook_keeps_the_contract(path: Path) -> None:
    assert faults(read_notebook(path), path) == []


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=name)
def test_bytes_of_a_simulated_gpu_are_not_called_measured(path: Path) -> None:
    outputs = [output for cell in code_cells(read_notebook(path)) for output in cell.outputs]
    said = [text for output in outputs for text in (output.get("text", ""), *output.get("data", {}).values())]
    simulated = [text for text in said if "simulated GPU · torch" in str(text)]
    assert [text for text in simulated if re.search(r"\bmeasured\b", str(text))] == []


@pytest.mark.parametrize("path", EXERCISES, ids=name)
def test_exercise_has_gaps_and_no_outputs(path: Path) -> None:
    notebook = read_notebook(path)
    source = (ROOT / "solutions/src" / path.with_suffix(".py").name).read_text(encoding="utf-8")
    text = "\n".join(cell.source for cell in notebook.cells)
    assert text.count("raise NotSolved(") == source.count("### BEGIN SOLUTION") > 0
    assert "SOLUTION" not in text
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.name[:2] in QUICK else pytest.mark.sweep(0)) for path in EXERCISES],
    ids=name,
)
def test_unsolved_exercise_invites_once_for_each_check(path: Path) -> None:
    """Every cell that checks ends in one line of NotSolved; no other cell fails."""
    notebook = run(read_notebook(path), path.parent, allow_errors=True)
    checks = [cell.id for cell in code_cells(notebook) if CHECK_CALL.search(cell.source)]
    errors = [
        (cell.id, one) for cell in code_cells(notebook) for one in cell.outputs if one.output_type == "error"
    ]
    assert [cell for cell, _ in errors] == checks != []
    for _, error in errors:
        assert error.ename == "NotSolved" and len(error.traceback) == 1 and "\n" not in error.traceback[0]


# What the contract notices

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Weights take three of four'
    ' gigabytes."></svg>'
)
PICTURE = {"image/svg+xml": SVG, "text/plain": "Weights take three of four gigabytes."}
CLOSE = "> **Remember** Count.\n> **Breaks when** you don't.\n> **Cheat-sheet line** 16 bytes."
PATH = Path("notebooks/01_first.ipynb")


def good_lesson() -> NotebookNode:
    """A lesson with which nothing is wrong."""
    cells = [
        new_markdown_cell(
            "# A lesson\n"
            "**30 minutes.** You should know what a tensor is.\n\n"
            "![A stack of bytes.](a.svg)\n\n"
            "| claim | truth |\n"
            "|---|---|\n"
            "| 41 GB | 37 GB |"
        ),
        new_code_cell(
            "predict('01.peak')", outputs=[new_output("display_data", {"text/plain": "Your guess."})]
        ),
        new_code_cell(
            "reveal('01.peak', 3)", outputs=[new_output("display_data", {"text/plain": "It is 3 GB."})]
        ),
        new_code_cell("stack(rows)", outputs=[new_output("execute_result", PICTURE, execution_count=3)]),
        new_code_cell("x = 1"),
        new_markdown_cell("[The exercise](../exercises/01_first.ipynb)"),
        new_markdown_cell(CLOSE),
    ]
    for number, cell in enumerate(cells, start=1):
        cell.id = f"01_first-{number:02d}"
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
    return new_notebook(cells=cells, metadata={"course": {"minutes": 30}})


def output_of(number: int, **changes: object) -> Callable[[NotebookNode], None]:
    """Replace the data of the output of cell `number`."""
    return lambda notebook: notebook.cells[number].outputs[0].data.update(changes)


def source_of(number: int, old: str, new: str) -> Callable[[NotebookNode], None]:
    """Replace a part of the source of cell `number`."""

    def change(notebook: NotebookNode) -> None:
        assert old in notebook.cells[number].source
        notebook.cells[number].source = notebook.cells[number].source.replace(old, new)

    return change


def set_item(number: int, key: str, value: object) -> Callable[[NotebookNode], None]:
    return lambda notebook: notebook.cells[number].update({key: value})


SPOILED: dict[str, tuple[Callable[[NotebookNode], object], str]] = {
    "invalid": (set_item(4, "outputs", 3), "is no valid notebook"),
    "random id": (set_item(3, "id", "ab12"), "has ids that are not"),
    "ids out of order": (set_item(3, "id", "01_first-09"), "has ids that are not"),
    "metadata": (set_item(3, "metadata", {"scrolled": True}), "metadata other than tags: scrolled"),
    "not executed": (set_item(3, "execution_count", None), "was not executed once"),
    "executed twice": (set_item(4, "execution_count", 9), "was not executed once"),
    "no output": (set_item(1, "outputs", []), "01_first-02 shows nothing"),
    "no value": (set_item(3, "outputs", []), "01_first-04 shows nothing"),
    "stderr": (
        set_item(4, "outputs", [new_output("stream", name="stderr", text="careful")]),
        "01_first-05 writes to stderr",
    ),
    "error": (
        set_item(4, "outputs", [new_output("error", ename="KeyError", evalue="x")]),
        "ends in KeyError",
    ),
    "home": (output_of(1, **{"text/plain": "see /home/me/x.py"}), "a machine's path: /home/me/x.py"),
    "temporary": (output_of(1, **{"text/html": "<p>/tmp/run-1</p>"}), "a machine's path: /tmp/run-1"),
    "Windows": (source_of(4, "x = 1", "x = 'C:\\\\Users\\\\me'"), "a machine's path: C:"),
    "address": (output_of(2, **{"text/plain": "<Run object at 0x7f0123456789>"}), "an address in memory"),
    "picture without words": (output_of(3, **{"text/plain": "<Figure>"}), "no sentence: '<Figure>'"),
    "drawing without words": (output_of(3, **{"image/svg+xml": "<svg></svg>"}), "no sentence: ''"),
    "photograph": (output_of(1, **{"image/png": base64.b64encode(b"/home/me/").decode()}), "no sentence"),
    "image tag": (output_of(1, **{"text/html": "<img src='a.png'>"}), "no sentence: ''"),
    "markdown image": (source_of(0, "A stack of bytes.", "stack"), "no sentence: 'stack'"),
    "broken table": (source_of(0, "| 41 GB |", "| 41 |\nGB |"), "a table whose rows and header differ"),
    "accidental bullet": (source_of(5, "[The", "Save it (Ctrl\n+ S).\n\n[The"), "Markdown makes a bullet"),
    "second title": (source_of(5, "[The exercise]", "# [The exercise]"), "01_first-06 holds a second title"),
    "no title": (source_of(0, "# A lesson", "A lesson"), "does not begin with a title"),
    "no minutes": (source_of(0, "30 minutes", "a while"), "how many minutes"),
    "other minutes": (source_of(0, "30 minutes", "25 minutes"), "says 25 minutes at the top"),
    "no prerequisites": (source_of(0, "know what", "like what"), "what one should know"),
    "nothing to remember": (source_of(6, "Remember", "Recall"), "does not end with **Remember**"),
    "no limits": (source_of(6, "Breaks when", "Fine if"), "does not end with **Breaks when**"),
    "no cheat sheet": (source_of(6, "Cheat-sheet line", "Line"), "does not end with **Cheat-sheet line**"),
    "no guess": (source_of(1, "predict", "print"), "does not ask for a guess"),
    "answer first": (source_of(1, "predict", "reveal"), "does not ask for a guess"),
    "no exercise": (source_of(5, "../exercises/01_first.ipynb", "later"), "has no link to ../exercises"),
    "skipped": (set_item(4, "metadata", {"tags": ["nbval-skip"]}), "is not tested at all"),
    "uncompared": (
        lambda notebook: [cell.metadata.update(tags=["nbval-ignore-output"]) for cell in notebook.cells[1:3]],
        "leaves the outputs of 2 of 4 code cells uncompared",
    ),
}


def test_good_lesson_has_no_fault() -> None:
    notebook = good_lesson()
    assert faults(notebook, PATH) == []
    data = {"image/png": "abc+/home/me/", "text/plain": "A photograph of a stack of bytes."}
    notebook.cells[1].outputs = [new_output("display_data", data)]
    assert faults(notebook, PATH) == [], "a photograph's bytes are not searched for paths"


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda key: key.replace(" ", "-"))
def test_contract_notices(spoil: str) -> None:
    notebook = copy.deepcopy(good_lesson())
    change, fault = SPOILED[spoil]
    change(notebook)
    found = faults(notebook, PATH)
    assert any(fault in line for line in found), found


def test_first_notebook_and_solutions_need_no_rhythm() -> None:
    notebook = good_lesson()
    notebook.cells[1].source = notebook.cells[2].source = "print(3)"
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"00_start-{number:02d}"
    assert faults(notebook, Path("notebooks/00_start.ipynb")) == []
    notebook.cells.pop()
    assert faults(notebook, Path("solutions/00_start.ipynb")) == []
