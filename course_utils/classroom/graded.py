"""Results of grading, of each exercise and notebook, and the table of them."""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unicodedata import category

from ..interactive.keeping import write_whole

STATES = ("passed", "not solved", "not right", "error", "not checked", "not reached")

FORMULA = tuple("=+-@＝＋－＠")
"""Characters with which a formula begins; a Japanese spreadsheet takes the wide ones, too."""

INNER_FORMULA = re.compile(r"([;\t\r\n]\s*)([=+\-@＝＋－＠])")
"""A formula after a character that begins a new cell in a spreadsheet that splits at semicolons or tabs."""

LONGEST = 1_000


@dataclass(frozen=True)
class Outcome:
    """The result of one exercise: one of `STATES`, and the message of its check."""

    state: str
    said: str = ""


@dataclass(frozen=True)
class Graded:
    """One notebook: its learner and lesson, and the outcomes of its exercises.

    `problem` says why the notebook could not be read or was ended, or is "". `file` is its path in what was handed in;
    `counts` is False if the same learner handed in a newer one of the same lesson.
    """

    learner: str
    lesson: str
    outcomes: dict[str, Outcome]
    problem: str
    seconds: float
    file: str = ""
    counts: bool = True

    @property
    def passed(self) -> int:
        """Number of exercises that passed."""
        return sum(outcome.state == "passed" for outcome in self.outcomes.values())


def write_table(graded: Iterable[Graded], path: Path) -> None:
    """Write one row for each notebook and exercise: learner, lesson, exercise, state, message of the check, problem,
    seconds by the clock, the file, and "no" where a newer one counts in its place.
    """
    text = StringIO()
    rows = csv.writer(text)
    rows.writerow(["learner", "lesson", "exercise", "state", "said", "problem", "seconds", "file", "counts"])
    for one in graded:
        for exercise, outcome in (one.outcomes or {"": Outcome("")}).items():
            row = [one.learner, one.lesson, exercise, outcome.state, outcome.said, one.problem, f"{one.seconds:.0f}"]
            rows.writerow(map(_plain, [*row, one.file, "yes" if one.counts else "no"]))
    write_whole(path, text.getvalue(), newline="")


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula, whatever blanks come first, and wherever it splits a line."""
    inner = INNER_FORMULA.sub(r"\1'\2", text)
    first = next((letter for letter in text if letter.isprintable() and not letter.isspace()), "")
    return f"'{inner}" if first in FORMULA or text.startswith(("\t", "\r", "\n")) else inner


def printable(text: str) -> str:
    """Text as one line that any file and terminal takes: no control characters, no lone surrogates, not too long."""
    cleaned = "".join(" " if category(letter) in ("Cc", "Cs", "Zl", "Zp") else letter for letter in text)
    shortened = " ".join(cleaned.split())
    return shortened if len(shortened) <= LONGEST else f"{shortened[:LONGEST]}…"
