"""Is a learner's progress remembered, where it belongs, whatever happens to it?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from course_utils.cli.main import main
from course_utils.interactive.feedback import CheckFailed, exercise, fail
from course_utils.interactive.guesses import shown_answers, stored_guesses
from course_utils.interactive.learner_folder import remembered
from course_utils.interactive.progress import ROOT, mark_passed, mark_quiz, passed, progress, quiz_scores
from course_utils.interactive.quiz_form import QuizForm
from course_utils.lessons import quiz


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a machine on which nobody has solved anything yet."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "course"))
    return tmp_path / "course" / "progress.jsonl"


@exercise("06.1", "Well done.")
def check(answer: int) -> None:
    if answer != 42:
        fail("Not this.")


def test_a_check_that_passes_is_remembered_once(file: Path) -> None:
    with pytest.raises(CheckFailed):
        check(41)
    assert passed() == {}
    check(42)
    check(42)
    assert list(passed()) == ["06.1"] and len(file.read_text().splitlines()) == 1


def test_a_damaged_line_costs_itself_alone_and_is_named(file: Path) -> None:
    mark_passed("06.1")
    damaged = [b"{", b"[]", b'{"passed": "06.3"}', b'{"passed": "06.3", "day": "x"}', b"\xff"]
    newer = b'{"seen": "a kind of event to come", "day": "2030-01-01", "course": "9.9"}'
    with file.open("ab") as lines:
        # an empty line of two kernels; and at the end the machine went down
        lines.write(b"\n".join([*damaged, newer, b"", b'{"passed": "06.2", "da']))
    mark_passed("06.2")
    assert list(passed()) == ["06.1", "06.2"]
    assert str(progress()).count("cannot be read") == len(damaged) + 1
    assert f"Line 2 of {file} cannot be read" in progress()._repr_html_()


def test_two_kernels_that_write_at_once_lose_nothing() -> None:
    code = """
import sys
from course_utils.interactive import guesses, progress
for number in range(100):
    progress.mark_passed(f"{sys.argv[1]}.{number}")
    guesses.lock_guess(f"{sys.argv[1]}.{number}", number, "")
"""
    both = [subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT) for name in ("01", "02")]
    assert [kernel.wait(timeout=1200) for kernel in both] == [0, 0]
    assert len(passed()) == len(stored_guesses()) == 200 and "cannot be read" not in str(progress())


def test_a_course_that_was_moved_or_upgraded_finds_it_again(tmp_path: Path) -> None:
    """The file knows exercises by number alone: folder names, new titles, dropped exercises do not matter."""
    mark_passed("06.1")
    mark_passed("06.9")
    folder = tmp_path / "renamed elsewhere" / "exercises"
    folder.mkdir(parents=True)
    text = ["# Exercises 06 · Recomputation\n", "## 1 · The cost, told anew\n", "## 2 · New\n"]
    cell = {"cell_type": "markdown", "source": text}
    for name in ("06_x.ipynb", "06_x.edited-2026-01-01.ipynb"):  # the second is a copy, and not counted
        (folder / name).write_text(json.dumps({"cells": [cell]}))
    [lesson] = progress(folder.parent).lessons
    assert list(lesson.passed) == ["06.1"] and lesson.next == "06.2 New"


OLD: list[dict[str, Any]] = [
    {"passed": "06.1"},
    {"passed": "07.4"},
    {"passed": "14.1"},
    {"quiz": 7, "first_tries": 5, "questions": 5},
    {"guess": "07.tokens", "value": 3, "unit": "thousand tokens"},
    {"guess": "07.noise", "value": 8, "unit": "sequences"},
    {"guess": "08.ring", "value": 40, "unit": "KB"},
    {"answered": "08.ring"},
    {"guess": "09.tensor", "value": 30, "unit": "times"},
    {"guess": "12.bit", "value": 1, "unit": "%"},
    {"forgotten": "12.bit"},
]
"""What a learner had stored when lessons were numbered 00 to 14, with 07b."""


def write_old(file: Path, *events: dict[str, Any]) -> None:
    """Add events as an older version of the course wrote them."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        for event in events:
            lines.write(json.dumps({**event, "day": "2026-01-01", "course": "0.1.0"}) + "\n")


def test_what_was_stored_under_the_old_numbers_counts_under_the_new_ones(file: Path) -> None:
    write_old(file, *OLD)
    before = file.read_bytes()
    assert set(passed()) == {"06.1", "08.4", "19.1"} and quiz_scores() == {8: (5, 5)}
    assert stored_guesses().keys() == {"08.tokens", "09.noise", "10.ring", "15.tensor"}
    assert stored_guesses()["10.ring"].value == 40 and shown_answers() == {"10.ring"}
    assert "cannot be read" not in str(progress()) and file.read_bytes() == before


def test_the_page_and_the_command_show_what_is_done_and_what_is_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mark_passed("06.1")
    for tries in (2, 5, 3):
        mark_quiz(6, tries, 5)
    shown = progress()
    lesson = shown.lessons[5]
    assert lesson.next.startswith("06.2 ") and lesson.score == (5, 5)
    assert main(["progress"]) == 0
    printed = capsys.readouterr().out
    for words in ("5 of 5", "1 of ", "not taken", "06.2"):
        assert words in printed
    for words in ("5 of 5 at the first try", "1 of ", "not taken", lesson.next):
        assert words in shown._repr_html_()


def test_a_quiz_that_is_finished_is_remembered_once_an_attempt() -> None:
    form = QuizForm(quiz(1))
    for _ in range(2):
        for question, buttons in zip(form.quiz.questions, form.buttons, strict=True):
            buttons[question.choices.index(question.right)].click()
    count = len(form.quiz.questions)
    assert quiz_scores() == {1: (count, count)} and len(remembered()[0]) == 1


def test_an_answer_is_right_even_if_it_cannot_be_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "file" / "course"))
    check(42)
    said = capsys.readouterr().out
    assert said.startswith("✓ 06.1 Well done.")
    assert "progress cannot be kept in" in said and "COURSE_HOME" in said
