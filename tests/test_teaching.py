"""Guesses that are kept, and a list of what autograd keeps that fits arithmetic."""

from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from torch import nn

from course_utils.authoring.build import fold_answers
from course_utils.interactive import guesses
from course_utils.interactive.guess_form import GuessForm
from course_utils.interactive.guesses import (
    Prediction,
    lock_guess,
    parse_guess,
    predict,
    reveal,
    stored_guesses,
)
from course_utils.interactive.learner_folder import remember
from course_utils.interactive.notebook_runs import run
from course_utils.interactive.saved_tensors import saved_by

GB = 10**9


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nobody has guessed yet."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "course"))
    return tmp_path / "course"


def test_a_guess_that_comes_after_another_kernel_has_shown_the_answer_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(**event: Any) -> None:  # another kernel comes between this one's reading and its writing
        remember(guess="01.peak", value=41, unit="GB")
        remember(answered="01.peak")
        remember(**event)

    monkeypatch.setattr(guesses, "remember", slow)
    assert lock_guess("01.peak", 134, "GB").value == 41 == stored_guesses()["01.peak"].value


def test_numbers_are_read_as_people_write_them() -> None:
    numbers = {"41": 41, " 41.5 GB ": 41.5, "3,3": 3.3, "0,125": 0.125, "1.000": 1, "1_000": 1000, ".5": 0.5}
    assert {text: parse_guess(text, "GB") for text in numbers} == numbers


# The field


def lock(form: GuessForm, shown: str, enter: bool = False) -> None:
    """Press the button or Enter, and answer the form's question as a page does that shows `shown`."""
    custom = {"data": {"method": "custom", "content": {"event": "submit"}}}
    if enter:
        form.field._handle_msg({"content": custom, "buffers": []})
    else:
        form.button.click()
    form.told.value = shown


@pytest.mark.parametrize("enter", [True, False])
def test_what_the_page_shows_is_stored_and_not_what_has_arrived_of_it(enter: bool) -> None:
    """The Enter key and clicks overtake a field's value."""
    form = Prediction("01.peak", "GB").form()
    assert form.field.placeholder == "your guess in GB"
    lock(form, "much", enter)
    assert "Write your guess in GB, only the number." in form.answer.value and stored_guesses() == {}
    form.field.value = "1"
    assert form.answer.value == ""
    lock(form, "134.5", enter)
    form.field.value = "134.5"  # late
    assert stored_guesses()["01.peak"].value == 134.5
    assert "Your guess is locked: <b>134.5 GB</b>" in form.answer.value and "alert" not in form.answer.value
    assert form.button.description == "✓ Locked"
    assert not form.field.disabled and not form.button.disabled  # else the keyboard would leave the cell


def test_a_page_is_asked_with_each_click_and_heard_once() -> None:
    form = Prediction("01.peak", "GB").form()
    form.button.click()
    first = form.link
    form.button.click()  # the page was opened anew, and has not answered
    second = form.link
    assert first.comm is None
    assert second.source == (form.field, "value")
    assert second.target == (form.told, "value")
    form.told.value = "41"
    assert form.link is None and second.comm is None, "a link that stays would store each key"
    form.told.value = "415"  # sent before the page heard that the link was closed
    assert stored_guesses()["01.peak"].value == 41


def test_two_threads_take_turns_so_what_was_stored_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's message, handled in another thread, reads before the guess is stored and writes after it."""
    form = Prediction("01.peak", "GB").form()
    has_read, may_write = Event(), Event()
    about = Prediction.about

    def slowly(ask: Prediction, text: str) -> Any:
        said = about(ask, text)
        if not has_read.is_set():
            has_read.set()
            may_write.wait(1)  # what takes turns waits in vain
        return said

    monkeypatch.setattr(Prediction, "about", slowly)
    key = Thread(target=setattr, args=(form.field, "value", "134.5"))
    key.start()
    assert has_read.wait(60)
    lock(form, "134.5")
    may_write.set()
    key.join()
    assert "Your guess is locked: <b>134.5 GB</b>" in form.answer.value


def test_a_guess_can_be_replaced_until_its_answer_is_shown(home: Path) -> None:
    form = Prediction("01.peak", "GB").form()
    lock(form, "13")
    form.field.value = "134.5"
    assert form.button.description == "Lock this instead" and "<b>13 GB</b>" in form.answer.value
    lock(form, "134.5")
    reveal("01.peak", 134.5 * GB)
    form.field.value = "99"
    assert "Your guess of 134.5 GB stays: its answer has been shown." in form.answer.value
    lock(form, "99")
    reveal("01.peak", 134.5 * GB)
    assert stored_guesses()["01.peak"].amount == 134.5 * GB
    assert len((home / "progress.jsonl").read_text().splitlines()) == 3, "two guesses, one answer"


# The answer


def test_predict_and_reveal_speak_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    predict("01.peak")
    reveal("01.peak", 134.5 * GB)
    predict("01.peak", guess=41)
    reveal("01.peak", 134.5 * GB)
    assert capsys.readouterr().out.splitlines() == [
        "Your guess, in GB: run this cell and type it in.",
        "It is 134.5 GB.",
        "Your guess is locked: 41 GB",
        "You said 41 GB, it is 134.5 GB: 3.3 times too little.",
    ]


CELLS = (
    "from course_utils.interactive.guesses import *\nprint('it gives it away')\nwaits_for('01.peak')",
    "reveal('01.peak', 134.5e9)",
    "predict('01.peak')",
)


def test_an_answer_is_folded_in_the_notebook_that_is_shipped(tmp_path: Path) -> None:
    """JupyterLab drops the style that folds an answer's neighbours until the notebook is run."""
    lock_guess("01.peak", 41, "GB")  # the builder's own guess, which stays out of it
    notebook = run(new_notebook(cells=[*map(new_code_cell, CELLS)]), tmp_path)
    waits, answer, asks = notebook.cells
    folded = "<details class='course-answer' data-guess='01.peak'"
    assert folded in waits.outputs[1].data["text/html"] and folded in answer.outputs[0].data["text/html"]
    asked = "Your guess, in GB: run this cell and type it in."
    html = f"<p class='course-ask' data-guess='01.peak' data-unit='GB'>{asked}</p>"
    assert asks.outputs[0].data == {"text/plain": asked, "text/html": html}
    fold_answers(notebook)
    hidden = [cell.metadata.get("jupyter", {}).get("outputs_hidden", False) for cell in notebook.cells]
    assert hidden == [True, True, False]
    assert [cell.outputs[0].data["text/html"].splitlines()[0] for cell in (waits, answer)] == [" ", " "]


# What autograd keeps


def test_simulated_gpu_keeps_what_its_kernels_keep() -> None:
    """On CUDA a bf16 LayerNorm keeps fp32 statistics, and dropout a mask of one byte; on the CPU neither."""
    layer = nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.1))
    cpu, gpu = (
        [(s.dtype, s.bytes) for s in saved_by(layer, (2, 3, 16), dtype="bf16", device=d)]
        for d in ("cpu", "gpu")
    )
    assert gpu == [("bf16", 2 * 96), ("fp32", 4 * 6), ("fp32", 4 * 6), ("bool", 96)]
    assert cpu == [("bf16", 2 * 96), ("bf16", 2 * 6), ("bf16", 2 * 6), ("bf16", 2 * 96)]


def test_guesses_that_cannot_be_kept_are_refused_and_the_field_says_so(home: Path) -> None:
    (home / "progress.jsonl").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"cannot be kept in .*course.*COURSE_HOME"):
        predict("01.peak", guess=41)
    form = Prediction("01.peak", "GB").form()
    lock(form, "41")
    # another folder, another try
    assert "COURSE_HOME" in form.answer.value and form.button.description == "Lock it in"
