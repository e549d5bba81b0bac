"""`expected_out_of_memory` gives memory back, and `demos --check` says which demo fails.

nbval executes the notebook of the demos and compares its outputs, as for every lesson.
"""

import weakref
from pathlib import Path

import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, writes

from course_utils import GpuOutOfMemory, expected_out_of_memory, on_gpu
from course_utils.authoring import demos


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


def test_the_courses_own_error_counts_others_pass_and_success_is_an_error() -> None:
    with expected_out_of_memory() as failure:
        raise GpuOutOfMemory("gpt2 does not fit this GPU")
    assert failure.message == "gpt2 does not fit this GPU"
    with pytest.raises(KeyError), expected_out_of_memory():
        raise KeyError("x")
    with pytest.raises(RuntimeError, match="there was enough"), expected_out_of_memory():
        pass


def test_a_demo_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    cells = [
        new_code_cell("import os\nprint(os.environ['COURSE_SOURCE'])"),
        new_markdown_cell("## 1 · Broken"),
        new_code_cell("raise ValueError('the projector is gone')"),
        new_code_cell("x = 1"),
        new_markdown_cell("## 2 · Fine\nWords."),
        new_code_cell("assert 'x' not in globals()"),
        new_markdown_cell("## 3 · Dies"),
        new_code_cell("os._exit(1)"),
        new_markdown_cell("## 4 · Next"),
        new_code_cell("1"),
    ]
    (tmp_path / "demos.ipynb").write_text(writes(new_notebook(cells=cells)), encoding="utf-8")
    assert demos.check(tmp_path / "demos.ipynb") == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said[0] == "simulated" and said[-1] == "3 failed"
    assert [line.partition(" ")[0] for line in said[1:-1]] == ["FAIL", "pass", "FAIL", "FAIL"]
    assert said[1].endswith("1 · Broken: ValueError: the projector is gone")
