"""Is a learner's progress remembered, where it belongs, whatever happens to it?"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from course_utils.cli.main import main
from course_utils.interactive.feedback import CheckFailed, exercise, fail
from course_utils.interactive.guesses import lock_guess, shown_answers, stored_guesses
from course_utils.interactive.learner_folder import MOVED_GUESSES, RENUMBERED, remembered
from course_utils.interactive.progress import ROOT, mark_passed, mark_quiz, passed, progress, quiz_scores
from course_utils.interactive.quiz_form import QuizForm
from course_utils.lessons import quiz

FILE = "progress.jsonl"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nobody has solved anything yet."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "course"))
    return tmp_path / "course"


@exercise("06.1", "Well done.")
def check(answer: int) -> None:
    if answer != 42:
        fail("Not this.")


def test_a_check_that_passes_is_remembered_once(home: Path) -> None:
    with pytest.raises(CheckFailed):
        check(41)
    assert passed() == {}
    check(42)
    check(42)
    assert list(passed()) == ["06.1"]
    assert len((home / FILE).read_text().splitlines()) == 1


def test_another_process_sees_it_and_a_newer_course_reads_it(home: Path) -> None:
    mark_passed("06.1")
    with (home / FILE).open("a") as lines:
        lines.write(
            json.dumps({"seen": "a kind of event to come", "day": "2030-01-01", "course": "9.9"}) + "\n"
        )
    code = (
        "from course_utils.interactive.progress import mark_passed, passed; "
        "mark_passed('06.2'); print(*passed())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["06.1", "06.2"]
    assert list(passed()) == ["06.1", "06.2"]


def test_an_answer_is_right_even_if_it_cannot_be_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "file" / "course"))
    check(42)
    said = capsys.readouterr().out
    assert said.startswith("✓ 06.1 Well done.")
    assert "progress cannot be kept in" in said
    assert "COURSE_HOME" in said


@pytest.mark.parametrize("line", ["{", "[]", '{"passed": "06.1"}', '{"day": "x"}', "\udcff"])
def test_a_damaged_line_costs_itself_alone_and_is_named(home: Path, line: str) -> None:
    mark_passed("06.1")
    with (home / FILE).open("ab") as lines:
        lines.write((line + "\n").encode(errors="surrogateescape"))
    mark_passed("06.2")
    assert list(passed()) == ["06.1", "06.2"] and len((home / FILE).read_bytes().splitlines()) == 3
    assert f"Line 2 of {home / FILE} cannot be read" in str(progress())
    assert "cannot be read" in progress()._repr_html_()


def test_half_a_line_does_not_spoil_the_next_one(home: Path) -> None:
    mark_passed("06.1")
    with (home / FILE).open("a") as lines:
        # an empty line of two kernels; and here the machine went down
        lines.write('\n{"passed": "06.2", "da')
    mark_passed("06.3")
    assert list(passed()) == ["06.1", "06.3"] and str(progress()).count("cannot be read") == 1
    (home / FILE).unlink()
    (home / FILE).mkdir()
    with pytest.raises(ValueError, match=r"progress cannot be kept in .*COURSE_HOME"):
        progress()


def test_two_kernels_that_write_at_once_lose_nothing(home: Path) -> None:
    code = "import sys; from course_utils.interactive import guesses, progress; kernel = sys.argv[1];"
    code += (
        "[(progress.mark_passed(f'{kernel}.{n}'), "
        "guesses.lock_guess(f'{kernel}.{n}', n, '')) for n in range(150)]"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT) for name in ("01", "02")]
    assert [kernel.wait(timeout=1200) for kernel in both] == [0, 0]
    assert len(passed()) == len(stored_guesses()) == 300 and "cannot be read" not in str(progress())


def test_a_course_that_was_moved_or_upgraded_finds_it_again(tmp_path: Path) -> None:
    """The file knows exercises by number alone: folder names, new titles, dropped exercises do not matter."""
    mark_passed("06.1")
    mark_passed("06.9")
    for name, title in (("course", "The cost"), ("renamed elsewhere", "The cost, told anew")):
        (tmp_path / name / "exercises").mkdir(parents=True)
        text = ["# Exercises 06 · Recomputation\n", f"## 1 · {title}\n", "## 2 · New\n"]
        cell = {"cell_type": "markdown", "source": text}
        for file in ("06_x.ipynb", "06_x.edited-2026-01-01.ipynb"):  # the second is a copy, and not counted
            (tmp_path / name / "exercises" / file).write_text(json.dumps({"cells": [cell]}))
        (lesson,) = progress(tmp_path / name).lessons
        assert list(lesson.passed) == ["06.1"] and lesson.next == "06.2 New"


OLD: list[dict[str, Any]] = [
    {"passed": "06.1"},
    {"passed": "07.4"},
    {"passed": "08.2"},
    {"passed": "14.1"},
    {"quiz": 7, "first_tries": 5, "questions": 5},
    {"quiz": 13, "first_tries": 2, "questions": 4},
    {"guess": "07.tokens", "value": 3, "unit": "thousand tokens"},
    {"guess": "07.noise", "value": 8, "unit": "sequences"},
    {"guess": "08.ring", "value": 40, "unit": "KB"},
    {"answered": "08.ring"},
    {"guess": "09.tensor", "value": 30, "unit": "times"},
    {"guess": "12.bit", "value": 1, "unit": "%"},
    {"forgotten": "12.bit"},
]
"""What a learner had stored when lessons were numbered 00 to 14, with 07b."""


def written(home: Path, *events: dict[str, Any]) -> Path:
    """A learner's file with these events, as an older version of the course wrote them."""
    home.mkdir(exist_ok=True)
    file = home / FILE
    with file.open("a", encoding="utf-8") as lines:
        for event in events:
            lines.write(json.dumps({**event, "day": "2026-01-01", "course": "0.1.0"}) + "\n")
    return file


def test_what_was_stored_under_the_old_numbers_counts_under_the_new_ones(home: Path) -> None:
    file = written(home, *OLD)
    before = file.read_bytes()
    assert set(passed()) == {"06.1", "08.4", "10.2", "19.1"}
    assert quiz_scores() == {8: (5, 5), 18: (2, 4)}
    assert stored_guesses().keys() == {"08.tokens", "09.noise", "10.ring", "14.tensor"}
    assert stored_guesses()["10.ring"].value == 40 and shown_answers() == {"10.ring"}
    assert "cannot be read" not in str(progress()) and file.read_bytes() == before


def test_what_is_stored_now_is_not_renumbered_again(home: Path) -> None:
    written(home, {"passed": "07.1"})
    mark_passed("10.1")
    mark_quiz(8, 4, 5)
    lock_guess("08.tokens", 2, "thousand tokens")
    assert set(passed()) == {"08.1", "10.1"} and quiz_scores() == {8: (4, 5)}
    written(home, {"passed": "08.1"})  # by an older version of the course, next to this one
    assert set(passed()) == {"08.1", "10.1"} and stored_guesses().keys() == {"08.tokens"}


def test_every_old_guess_that_a_lesson_still_asks_for_is_found(home: Path) -> None:
    """Each key of the renumbered lessons is reached from the key that it had."""
    before = {new: old for old, new in RENUMBERED.items()}
    moved = {new: old for old, new in MOVED_GUESSES.items()}
    asked = {}
    for source in sorted((ROOT / "notebooks" / "src").glob("[01]*.py")):
        number = source.name[:2]
        for key in re.findall(r'predict\("([^"]+)"', source.read_text(encoding="utf-8")):
            old = f"{before.get(number, number)}.{key.partition('.')[2]}"
            asked[moved.get(key, old)] = key
    assert len(asked) > 60
    written(home, *({"guess": old, "value": 1, "unit": "GB"} for old in asked))
    assert stored_guesses().keys() == set(asked.values())


def test_a_course_folder_with_old_numbers_is_named(tmp_path: Path) -> None:
    for folder in ("notebooks", "exercises"):
        (tmp_path / folder).mkdir()
    assert "old numbers" not in str(progress(tmp_path))
    (tmp_path / "notebooks" / "07b_large_batches.ipynb").touch()
    assert "old numbers. Copy this version of the course to a new folder" in str(progress(tmp_path))


def test_the_page_shows_what_is_done_and_what_is_next() -> None:
    mark_passed("06.1")
    for tries in (2, 5, 3):
        mark_quiz(6, tries, 5)
    shown = progress()
    lesson = shown.lessons[5]
    assert lesson.next.startswith("06.2 ") and lesson.score == (5, 5)
    for text in (str(shown), shown._repr_html_()):
        assert "5 of 5 at the first try" in text
        assert "1 of " in text
        assert "not taken" in text
        assert lesson.next in text
    assert shown._repr_html_().startswith("<table>")


def test_a_quiz_that_is_finished_is_remembered_once_an_attempt() -> None:
    form = QuizForm(quiz(1))
    for _ in range(2):
        for question, buttons in zip(form.quiz.questions, form.buttons, strict=True):
            buttons[question.choices.index(question.right)].click()
    count = len(form.quiz.questions)
    assert quiz_scores() == {1: (count, count)}
    assert len(remembered()[0]) == 1
    form.restart.click()
    assert not form.attempt.finished


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    mark_passed("01.1")
    assert main(["progress"]) == 0
    assert "1 of " in capsys.readouterr().out
    assert main(["progress", "please"]) == 2
    assert main(["progress", "--help"]) == 0
