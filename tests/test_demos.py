"""The demos: an expected failure gives its memory back, and `demos --check` says which demo fails.

nbval executes their notebook and compares its outputs, as for every lesson.
"""

import weakref
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course_utils import GpuOutOfMemory, TrainingRun, expected_out_of_memory, on_gpu
from course_utils.authoring import demos
from course_utils.authoring.build import INVITATION
from course_utils.authoring.sources import FOLDED_OUTPUT
from course_utils.cli import main as front_door
from course_utils.cli import teach
from course_utils.interactive.course_files import ROOT
from course_utils.interactive.notebook_runs import read_notebook, text_of

NOTEBOOK = read_notebook(ROOT / "notebooks" / "demos.ipynb")


def test_seven_demos_ask_first_and_fold_what_they_answer() -> None:
    titles = [title for title, _ in demos.sections(NOTEBOOK) if title]
    assert [title[:3] for title in titles] == [f"{number} ·" for number in range(1, 8)]
    for cell in NOTEBOOK.cells:
        assert cell.cell_type == "markdown" or len(cell.source.splitlines()) <= 15
        is_folded = cell.metadata.get("jupyter", {}).get("outputs_hidden", False)
        assert is_folded == (FOLDED_OUTPUT in cell.metadata.get("tags", ()))
        if is_folded:  # of which JupyterLab shows the first line
            first = text_of(cell).lstrip("\n").partition("\n")[0]
            assert first == INVITATION or first.startswith("simulated GPU")


def test_an_expected_failure_is_kept_in_words_and_its_memory_comes_back() -> None:
    kept: list[weakref.ref] = []

    def fill() -> None:
        held = []
        for _ in range(100):
            held.append(torch.empty(2**20, dtype=torch.uint8, device="cuda"))
            kept.append(weakref.ref(held[-1]))

    with expected_out_of_memory() as failure, on_gpu("40 MiB"):
        fill()
    assert failure.message.startswith("CUDA out of memory. Tried to allocate")
    assert len(kept) == 40 and not any(tensor() is not None for tensor in kept)
    with on_gpu("40 MiB"):
        assert torch.cuda.memory_allocated() == 0
        torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")


def test_the_courses_own_error_counts_as_out_of_memory() -> None:
    with expected_out_of_memory() as failure:
        raise GpuOutOfMemory("gpt2 does not fit this GPU")
    assert failure.message == "gpt2 does not fit this GPU"


@pytest.mark.parametrize("other", [RuntimeError("shapes differ"), KeyError("x"), KeyboardInterrupt()])
def test_other_errors_pass(other: BaseException) -> None:
    with pytest.raises(type(other)), expected_out_of_memory():
        raise other


def test_nothing_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="there was enough"), expected_out_of_memory():
        TrainingRun("gpt2")


def written(folder: Path, *cells: nbformat.NotebookNode) -> Path:
    path = folder / "demos.ipynb"
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


def test_a_demo_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    path = written(
        tmp_path,
        new_code_cell("import os\nprint(os.environ['COURSE_SOURCE'])"),
        new_markdown_cell("## 1 · Broken"),
        new_code_cell("raise ValueError('the projector is gone')"),
        new_code_cell("x = 1"),
        new_markdown_cell("## 2 · Fine\nWords."),
        new_code_cell("assert 'x' not in globals()"),
    )
    assert demos.check(path) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "simulated"
    assert lines[-3].startswith("FAIL") and lines[-3].endswith(
        "1 · Broken: ValueError: the projector is gone"
    )
    assert lines[-2].startswith("pass") and lines[-2].endswith("2 · Fine")
    assert lines[-1] == "1 failed"


def test_a_kernel_that_dies_fails_its_demo_and_those_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(
        tmp_path,
        new_markdown_cell("## 1 · Dies"),
        new_code_cell("import os\nos._exit(1)"),
        new_markdown_cell("## 2 · Next"),
        new_code_cell("1"),
    )
    assert demos.check(path) == 1
    assert capsys.readouterr().out.count("FAIL") == 2


def test_the_command_opens_the_notebook_or_checks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(demos, "check", lambda path: asked.append(path) or 1)
    assert front_door.main(["demos", "--here", "--check"]) == 1
    monkeypatch.setattr(teach, "lab", lambda chosen: asked.extend(chosen.others) or 0)
    assert front_door.main(["demos", "--here"]) == 0
    assert asked == [
        ROOT / "notebooks" / "demos.ipynb",
        "--LabApp.default_url=/doc/tree/notebooks/demos.ipynb",
    ]
