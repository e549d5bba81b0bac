"""Guesses that are kept, ledgers that add up, and a list of what autograd keeps that fits arithmetic."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook, new_output
from torch import nn

from course_utils.authoring.build import fold_answers, share_script
from course_utils.figures import bars
from course_utils.figures.themes import READING
from course_utils.interactive import guesses, learner_folder
from course_utils.interactive.guess_form import GuessForm
from course_utils.interactive.guesses import (
    Guess,
    Prediction,
    Revelation,
    lock_guess,
    parse_guess,
    predict,
    reveal,
    stored_guesses,
    waits_for,
)
from course_utils.interactive.learner_folder import remember
from course_utils.interactive.ledgers import ledger, show_ledger
from course_utils.interactive.notebook_runs import run
from course_utils.interactive.saved_tensors import Saved, saved_by
from course_utils.lessons.will_it_fit.fit_figures import grade

GB = 10**9
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nobody has guessed yet."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "course"))
    return tmp_path / "course"


def test_a_guess_is_stored_once_and_its_last_value_counts(home: Path) -> None:
    lock_guess("01.peak", 134, "GB")
    assert lock_guess("01.peak", 41, "GB").value == 41
    lock_guess("01.peak", 41, "GB")
    assert stored_guesses()["01.peak"].amount == 41 * GB
    assert [file.name for file in home.iterdir()] == ["progress.jsonl"]
    assert len((home / "progress.jsonl").read_text().splitlines()) == 2


def test_a_guess_that_comes_after_another_kernel_has_shown_the_answer_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(**event: Any) -> None:  # another kernel comes between this one's reading and its writing
        remember(guess="01.peak", value=41, unit="GB")
        remember(answered="01.peak")
        remember(**event)

    monkeypatch.setattr(guesses, "remember", slow)
    assert lock_guess("01.peak", 134, "GB").value == 41 == stored_guesses()["01.peak"].value


@pytest.mark.parametrize("broken", ["folder", "file"])
def test_guesses_that_cannot_be_kept_are_refused_and_the_field_says_so(
    broken: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "folder":
        (tmp_path / "file").touch()
        monkeypatch.setenv("COURSE_HOME", str(tmp_path / "file" / "course"))
    else:
        (home / "progress.jsonl").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"cannot be kept in .*course.*COURSE_HOME"):
        predict("01.peak", guess=41)
    form = Prediction("01.peak", "GB").form()
    lock(form, "41")
    # another folder, another try
    assert "COURSE_HOME" in form.answer.value and form.button.description == "Lock it in"


@pytest.mark.parametrize(
    ("platform", "variable", "base"),
    [
        ("linux", "XDG_STATE_HOME", ".local/state"),
        ("darwin", "HOME", "Library/Application Support"),
        ("win32", "LOCALAPPDATA", "AppData/Local"),
    ],
)
def test_guesses_live_where_the_system_keeps_such_things(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, variable: str, base: str
) -> None:
    monkeypatch.delenv("COURSE_HOME")
    monkeypatch.setattr(learner_folder.sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv(variable, raising=False)
    assert learner_folder.course_home() == tmp_path / base / "where-did-the-memory-go"
    if variable != "HOME":
        monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
        assert learner_folder.course_home() == tmp_path / "elsewhere" / "where-did-the-memory-go"


NUMBERS = {
    "41": 41,
    " 41.5 GB ": 41.5,
    "41,5": 41.5,
    "3,3": 3.3,
    "1,0001": 1.0001,
    "0,125": 0.125,
    "1.000": 1,
    "1_000": 1000,
    "0.25GB": 0.25,
    ".5": 0.5,
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_read_as_people_write_them(text: str, value: float) -> None:
    assert parse_guess(text, "GB") == value


NO_NUMBERS = dict.fromkeys(
    ["", "a lot", "41 GiB", "-3", "1e", "4 1", "9" * 400, "inf", "nan"], "only the number"
) | {
    "1,000": "can mean two numbers: write 1000 or 1.0",
    "134,500 GB": "write 134500 or 134.5",
    "1_234,500": "1234500 or 1234.5",
}


@pytest.mark.parametrize(("text", "words"), NO_NUMBERS.items())
def test_other_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_guess(text, "GB")


@pytest.mark.parametrize(
    ("unit", "asked", "refusal", "locked"),
    [
        ("GB", "your guess in GB", "Write your guess in GB, only the number.", "41 GB"),
        ("", "your guess", "Write only a number.", "41"),
        ("of two", "your guess of two", "only the number", "41 of"),
    ],
)
def test_field_stores_what_is_typed_once_the_button_is_pressed(
    unit: str, asked: str, refusal: str, locked: str
) -> None:
    form = Prediction("01.peak", unit).form()
    assert form.field.placeholder == asked
    form.field.value = "much"
    lock(form, "much")
    assert refusal in form.answer.value and stored_guesses() == {}
    form.field.value = "41"
    assert form.answer.value == ""
    lock(form, "41", enter=bool(unit))
    assert f"Your guess is locked: <b>{locked}" in form.answer.value
    assert form.button.description == "✓ Locked" and stored_guesses()["01.peak"].value == 41
    assert not form.field.disabled and not form.button.disabled  # else the keyboard would leave the cell


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
    form.field.value = "1"
    lock(form, "134.5", enter)
    form.field.value = "134.5"  # late
    assert stored_guesses()["01.peak"].value == 134.5
    assert "<b>134.5 GB</b>" in form.answer.value and "alert" not in form.answer.value


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


def test_a_guess_can_be_replaced_until_its_answer_is_shown(home: Path) -> None:
    form = Prediction("01.peak", "GB").form()
    lock(form, "13")
    form.field.value = "134.5"
    assert form.button.description == "Lock this instead" and "<b>13 GB</b>" in form.answer.value
    lock(form, "134.5")
    assert form.button.description == "✓ Locked" and stored_guesses()["01.peak"].value == 134.5
    reveal("01.peak", 134.5 * GB)
    form.field.value = "99"
    assert "Your guess of 134.5 GB stays: its answer has been shown." in form.answer.value
    lock(form, "99")
    assert stored_guesses()["01.peak"].value == 134.5
    text = (home / "progress.jsonl").read_text()
    reveal("01.peak", 134.5 * GB)
    assert (home / "progress.jsonl").read_text() == text


def test_a_guess_that_an_older_course_took_back_is_forgotten() -> None:
    remember(guess="01.peak", value=41, unit="GB")
    remember(answered="01.peak")
    remember(forgotten="01.peak")
    assert stored_guesses() == {} and guesses.shown_answers() == set()
    assert lock_guess("01.peak", 13, "GB").value == 13


def test_an_answer_that_is_shown_without_a_guess_leaves_the_next_one_free() -> None:
    reveal("01.peak", 134.5 * GB)
    waits_for("01.peak")
    lock_guess("01.peak", 41, "GB")
    assert guesses.shown_answers() == set()
    waits_for("01.peak")
    assert guesses.shown_answers() == {"01.peak"}


def test_a_graded_prediction_stays() -> None:
    lock_guess("19.peak", 41, "GB")
    grade("19.peak", 42 * GB, "simulated")
    assert guesses.shown_answers() == {"19.peak"}


def test_a_stored_guess_is_spelled_in_full() -> None:
    assert str(lock_guess("01.peak", 1_234_567.25, "GB")) == "1,234,567.25 GB"


def test_two_guesses_in_a_cell_are_told_apart() -> None:
    assert Prediction("04.experts", "billion", "stored").form().field.description == "stored"
    assert (
        repr(Prediction("04.experts", "billion", "stored"))
        == "Your guess (stored), in billion: run this cell and type it in."
    )


def test_field_has_a_text_that_is_the_same_on_each_run() -> None:
    bundles = [Prediction("01.peak", "GB")._repr_mimebundle_() for _ in range(2)]
    asks = "Your guess, in GB: run this cell and type it in."
    assert [bundle["text/plain"] for bundle in bundles[:2]] == [asks, asks]
    assert "application/vnd.jupyter.widget-view+json" in bundles[0]
    lock_guess("01.peak", 41, "GB")
    locked = Prediction("01.peak", "GB")._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in locked, "it can be replaced"
    guesses.mark_shown("01.peak")
    assert set(Prediction("01.peak", "GB")._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert "41 GB" in locked["text/html"] and "course-ask" in bundles[0]["text/html"] != locked["text/html"]
    assert repr(Prediction("03.ones", "")) == "Your guess: run this cell and type it in."
    assert repr(Prediction("03.trained", "of five")) == "Your guess, of five: run this cell and type it in."


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


@pytest.mark.parametrize(
    ("guess", "unit", "actual", "said"),
    [
        (100, "GB", 100 * GB, "spot on"),
        (104, "GB", 100 * GB, "spot on"),
        (120, "GB", 100 * GB, "20 % too much"),
        (80, "GB", 100 * GB, "20 % too little"),
        (350, "GB", 100 * GB, "3.5 times too much"),
        (0, "GB", 5 * GB, "one of the two is zero"),
        (0, "GB", 0, "right"),
        (30, "%", 33.3, "You said 30 %, it is 33.3 %: 10 % too little."),
        (255, "", 256, "You said 255, it is 256: spot on, within 5 %."),
        (None, "GiB", 2**30, "It is 1.0 GiB."),
        (None, "B", 512, "It is 512 B."),
    ],
)
def test_verdict_says_how_far_off_the_guess_was(
    guess: float | None, unit: str, actual: float, said: str
) -> None:
    made = Guess(guess, unit, "2026-11-21") if guess is not None else None
    revelation = Revelation(actual, made, unit)
    assert said in repr(revelation) and said in revelation._repr_html_()
    assert ("<div" in revelation._repr_html_()) == (guess is not None)
    assert ("<details class='course-answer'" in revelation._repr_html_()) == (guess is None)


CELLS = """from course_utils.interactive.guesses import Prediction, reveal, shown_answers, waits_for
print("a figure that gives it away")
waits_for("01.peak")
---
reveal("01.peak", 134.5e9)
"""


def test_what_is_folded_unfolds_when_the_guess_is_locked(tmp_path: Path) -> None:
    """In one kernel: a cell that waits, an answer, and a lock that redraws both where they were shown."""
    lock = "form = Prediction('01.peak', 'GB').form()\n"
    lock += "form.button.click(); form.told.value = '41'\nassert shown_answers() == {'01.peak'}"
    waits, answer = CELLS.split("---\n")[:2]
    before = run(new_notebook(cells=[*map(new_code_cell, (waits, answer))]), tmp_path).cells
    after = run(new_notebook(cells=[*map(new_code_cell, (waits, answer, lock))]), tmp_path).cells
    folded = "<details class='course-answer' data-guess='01.peak'"
    assert folded in before[0].outputs[1].data["text/html"]
    assert folded in before[1].outputs[0].data["text/html"]
    assert after[0].outputs[1].data["text/html"] == "" and "gives it away" in after[0].outputs[0].text
    assert "3.3 times too little" in after[1].outputs[0].data["text/html"]
    assert "details" not in after[1].outputs[0].data["text/html"]


def test_an_answer_is_closed_in_the_notebook_that_is_shipped(tmp_path: Path) -> None:
    """JupyterLab drops the style that folds an answer's neighbours until the notebook is run."""
    notebook = run(
        new_notebook(cells=[*map(new_code_cell, CELLS.split("---\n")[:2]), new_code_cell("1")]), tmp_path
    )
    fold_answers(notebook)
    hidden = [cell.metadata.get("jupyter", {}).get("outputs_hidden", False) for cell in notebook.cells]
    assert hidden == [True, True, False]
    assert [cell.outputs[0].data["text/html"].splitlines()[0] for cell in notebook.cells[:2]] == [" ", " "]


def test_the_script_that_reads_figures_out_is_left_to_the_first_and_to_the_first_that_is_seen() -> None:
    """A folded output runs no script before it is opened."""
    html = bars({"AdamW": 16, "SGD": 8}, "Adam costs double").html
    cells = [
        new_code_cell("figure", outputs=[new_output("display_data", {"text/html": html})]) for _ in range(5)
    ]
    for folded in (cells[0], cells[1], cells[3]):
        folded.metadata["jupyter"] = {"outputs_hidden": True}
    share_script(
        new_notebook(cells=[new_code_cell("print(1)", outputs=[new_output("stream", text="1")]), *cells])
    )
    stored = [cell.outputs[0].data["text/html"] for cell in cells]
    assert html.count(READING) == 1
    assert [text == html for text in stored] == [True, False, True, False, False]
    assert {text for text in stored if text != html} == {html.replace(READING, "")}


def test_a_notebook_that_is_built_has_none_of_the_builders_guesses(tmp_path: Path) -> None:
    lock_guess("01.peak", 41, "GB")
    code = "from course_utils.interactive.guesses import predict\npredict('01.peak')"
    (cell,) = run(new_notebook(cells=[new_code_cell(code)]), tmp_path).cells
    asked = "Your guess, in GB: run this cell and type it in."
    html = f"<p class='course-ask' data-guess='01.peak' data-unit='GB'>{asked}</p>"
    assert cell.outputs[0].data == {"text/plain": asked, "text/html": html}


def test_cells_are_watched_from_the_courses_import_on_in_a_notebook_alone() -> None:
    code = """
import importlib, IPython, course_utils
assert IPython.get_ipython() is None
shell = IPython.core.interactiveshell.InteractiveShell.instance()
assert shell.custom_exceptions == ()
importlib.reload(course_utils)
importlib.reload(course_utils)
from course_utils.interactive.failed_cells import give_back
assert shell.events.callbacks["post_run_cell"].count(give_back) == 1
assert shell.custom_exceptions == (Exception,)
shell.set_custom_exc((OSError,), print)
importlib.reload(course_utils)
assert shell.custom_exceptions == (OSError,), "another library's way to show errors stays"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_ledger_sums_exactly() -> None:
    book = ledger(
        {"weights": 6 * GB, "moments": 12 * GB}, {"weights": 6 * GB, "moments": 12 * GB + 512, "other": 8}
    )
    assert [row[1:3] for row in book.rows] == [
        ("estimate", "measured"),
        ("6.000 GB", "6.000 GB"),
        ("12.000 GB", "12.000 GB"),
        ("–", "0.000 GB"),
        ("18.000 GB", "18.000 GB"),
    ]
    assert [row[3] for row in book.rows[1:]] == ["0", "−512 B", "–", "−520 B"]


def test_ledger_without_measurement_has_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    show_ledger({"a & b": 4, "c": 2})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["a", "&", "b", "4", "B"], ["c", "2", "B"], ["total", "6", "B"]]
    assert "a &amp; b" in ledger({"a & b": 4})._repr_html_()


def test_ledger_adds_up_saved_tensors_of_one_name_and_takes_a_unit() -> None:
    saved = [Saved("mask", (2,), "uint8", 2), Saved("mask", (3,), "uint8", 3)]
    assert ledger(saved, saved).rows[1] == ("mask", "5 B", "5 B", "0")
    assert "GiB" in repr(ledger({"a": 2**30}, unit="GiB"))
    with pytest.raises(ValueError, match="unknown unit 'Gb'; known: B, KB"):
        ledger({"a": 1}, unit="Gb")


def test_linear_keeps_its_input_once_and_not_its_weights() -> None:
    module = nn.Linear(16, 64)
    (saved,) = saved_by(module, (8, 16), dtype="bf16")
    assert saved == Saved("Addmm: mat1", (8, 16), "bf16", 8 * 16 * 2)
    assert module.weight.dtype is torch.float32, "the module is left as it was"


def test_views_of_one_storage_count_once() -> None:
    (saved,) = saved_by(lambda x: x * x.reshape(-1).reshape(4, 6), (4, 6))
    assert saved.bytes == 4 * 6 * 4
    half = saved_by(lambda x: x[:2] * x[2:], (4, 6))
    assert [item.bytes for item in half] == [4 * 6 * 4]  # a view keeps the whole storage alive
    assert sorted(item.bytes for item in saved_by(torch.matmul, (3, 4), (4, 2))) == [4 * 2 * 4, 3 * 4 * 4]


def test_tensors_may_be_given_and_tuples_returned() -> None:
    ids = torch.zeros(5, dtype=torch.int64)
    (saved,) = saved_by(nn.Embedding(10, 4), ids)
    assert saved == Saved("Embedding: indices", (5,), "int64", 40)
    both = saved_by(lambda x: (x.exp(), x.sigmoid()), (6,))
    assert [item.name for item in both] == ["Exp: result", "Sigmoid: result"]


def test_simulated_gpu_keeps_what_its_kernels_keep() -> None:
    """On CUDA a bf16 LayerNorm keeps fp32 statistics, and dropout a mask of one byte; on the CPU neither."""
    layer = nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.1))
    cpu, gpu = (
        [(s.dtype, s.bytes) for s in saved_by(layer, (2, 3, 16), dtype="bf16", device=d)]
        for d in ("cpu", "gpu")
    )
    assert gpu == [("bf16", 2 * 96), ("fp32", 4 * 6), ("fp32", 4 * 6), ("bool", 96)]
    assert cpu == [("bf16", 2 * 96), ("bf16", 2 * 6), ("bf16", 2 * 6), ("bf16", 2 * 96)]
    # 100 GB, were it real
    (linear,) = saved_by(nn.Linear(1600, 4), (32, 1_000_000, 1600), dtype="bf16", device="gpu")
    assert linear.bytes == 32 * 1_000_000 * 1600 * 2


def test_wrong_requests_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"unknown dtype 'int7'.*Known: fp64, fp32, fp16, bf16"):
        saved_by(nn.Linear(4, 4), (2, 4), dtype="int7")
    with pytest.raises(ValueError, match=r"unknown device 'cuda'.*Known: cpu, gpu"):
        saved_by(nn.Linear(4, 4), (2, 4), device="cuda")
