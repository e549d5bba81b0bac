"""Cells that fail: a refusal is one line, all else has its traceback. Interrupts: tests/rest."""

import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from course_utils.interactive.failed_cells import is_refused

START = "from course_utils import *"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def refused(code: str, **names: Any) -> bool:
    """True if a cell of this code, run after the imports, fails in one line, not with a traceback."""
    names = {"__name__": "__main__", **names}
    exec(START, names)
    try:
        exec(compile(code, "<cell>", "exec"), names)
    except Exception as error:
        return is_refused(error)
    raise AssertionError(f"nothing failed in {code}")


IN_A_STEP = """
import torch
def step(model, batch):
    model(batch).sum().nonzero().tolist()
measure(step=step, model=torch.nn.Linear(2, 2), batch=torch.ones(1, 2), source="simulated")
"""
IN_A_FUNCTION = """
def make():
    return TrainingRun("gtp2")
make()
"""
OUT_OF_MEMORY = """
import torch
with on_gpu("1 MB"):
    torch.ones(10_000_000, device="cuda")
"""


@pytest.mark.parametrize("code", ["parse_bytes('5 GX')", "estimate('gpt2')", IN_A_FUNCTION, IN_A_STEP])
def test_what_the_course_refuses_is_one_line(code: str) -> None:
    assert refused(code)


@pytest.mark.parametrize(
    "code", ["1 / 0", "raise ValueError('the learner')", "TrainingRun('gpt2').micro", OUT_OF_MEMORY]
)
def test_what_goes_wrong_in_a_learners_own_code_keeps_its_traceback(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    assert not refused(code)


@pytest.mark.parametrize(
    ("body", "is_meant"), [("raise OSError('the disk is full')", True), ("int('a')", False)]
)
def test_a_fault_of_the_course_keeps_its_traceback(body: str, is_meant: bool) -> None:
    """What the course itself raises is meant; what befalls it is not."""
    module: dict[str, Any] = {"__name__": "course_utils.somewhere"}
    exec(f"def helper():\n    {body}", module)
    assert refused("helper()", helper=module["helper"]) == is_meant


def test_a_failing_cell_fails_for_whoever_runs_the_notebook() -> None:
    sources = (START, "TrainingRun('gtp2')", "%tb", "1 / 0")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=1200, allow_errors=True).execute()
    [mistake], [asked], [own] = [cell.outputs for cell in notebook.cells[1:]]
    assert (mistake.output_type, mistake.ename) == ("error", "ValueError")
    said = mistake.evalue.partition(" Known: ")[0]  # the list of what is known is in the traceback
    assert said.endswith("did you mean 'gpt2'?")
    assert plain(mistake.traceback[0]) == f"ValueError: {said} (%tb shows the full traceback.)"
    shown = plain("\n".join(asked.traceback))
    assert "in check_known(what, name, known)" in shown and "Known: gpt2, " in shown
    assert len("\n".join(own.traceback).splitlines()) > 3
