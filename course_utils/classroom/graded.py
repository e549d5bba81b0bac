"""What grading found, of each exercise and notebook: as a table, and in a journal that survives an interruption."""

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from threading import Lock

from ..interactive.course_files import ROOT
from ..interactive.keeping import write_whole
from .collecting import Submission

STATES = ("passed", "not solved", "not right", "error", "not checked", "not reached")

FORMULA = tuple("=+-@＝＋－＠")
"""What a formula begins with; the wide letters are the same to a Japanese spreadsheet."""

INNER_FORMULA = re.compile(r"([;\t\r\n]\s*)([=+\-@＝＋－＠])")
"""A formula after what begins a cell for a spreadsheet that splits at semicolons or tabs."""


@dataclass(frozen=True)
class Outcome:
    """What became of one exercise: "passed", "not solved", "not right", "error", "not checked" or "not reached", and
    what its check said.
    """

    state: str
    said: str = ""


@dataclass(frozen=True)
class Graded:
    """One notebook: whose, of which lesson, what became of its exercises, and of itself.

    `problem` is "" unless the notebook could not be read, or was ended: then it says so in words. `file` is its path in
    what was handed in; `counts` is False if the same learner handed in a newer one of the same lesson.
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
        """How many of the exercises passed."""
        return sum(outcome.state == "passed" for outcome in self.outcomes.values())


class Journal:
    """What is graded already, a line of JSON for each notebook, in a file; without a file it remembers nothing.

    A line is found again by the bytes of the notebook, the limits, and the course's own exercises and checks: when any
    of them has changed, the notebook is graded anew. A last line that was cut short is taken out.
    """

    def __init__(self, path: Path | None, limits: str) -> None:
        self.path, self.lock = path, Lock()
        parts = sorted([*(ROOT / "exercises").glob("*.ipynb"), *(ROOT / "course_utils" / "lessons").rglob("*.py")])
        self.course = hashlib.sha256(b"".join(part.read_bytes() for part in parts) + limits.encode()).digest()
        self.known: dict[str, Graded] = {}
        if path and path.exists():
            whole, feed, cut_short = path.read_bytes().rpartition(b"\n")
            if cut_short:
                os.truncate(path, len(whole) + len(feed))  # on a full disk it could not be written anew
            self.known = dict(filter(None, map(_noted, whole.split(b"\n"))))

    def recall(self, key: str) -> Graded | None:
        """What became of the notebook of this key when it was graded before, under whatever name."""
        return self.known.get(key)

    def write(self, key: str, graded: Graded) -> None:
        """Add a line."""
        if self.path is None:
            return
        line = json.dumps({"key": key, "graded": asdict(graded)})
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(line + "\n")

    def key(self, one: Submission) -> str:
        """What a notebook is known by: its bytes, and all that its marks depend on. Raises OSError."""
        notebook = one.problem.encode() if one.problem else one.path.read_bytes()
        return hashlib.sha256(self.course + notebook).hexdigest()


def _noted(line: bytes) -> tuple[str, Graded] | None:
    """A line of the journal; None for one that is damaged, or of a course with other fields: that is graded anew."""
    try:
        entry = json.loads(line)
        outcomes = {name: Outcome(**outcome) for name, outcome in entry["graded"].pop("outcomes").items()}
        return entry["key"], Graded(**entry["graded"], outcomes=outcomes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_table(graded: Iterable[Graded], path: Path) -> None:
    """One row for each notebook and exercise: learner, lesson, exercise, state, what the check said, problem, seconds
    by the clock, the file, and "no" where a newer one counts in its place.
    """
    text = StringIO()
    rows = csv.writer(text)
    rows.writerow(["learner", "lesson", "exercise", "state", "said", "problem", "seconds", "file", "counts"])
    for one in graded:
        end = [_plain(one.problem), f"{one.seconds:.0f}", _plain(one.file), "yes" if one.counts else "no"]
        learner = _plain(one.learner)
        for exercise, outcome in one.outcomes.items():
            rows.writerow([learner, one.lesson, exercise, outcome.state, _plain(outcome.said), *end])
        if not one.outcomes:
            rows.writerow([learner, one.lesson, "", "", "", *end])
    write_whole(path, text.getvalue(), newline="")


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula, whatever blanks come first, and wherever it splits a line."""
    inner = INNER_FORMULA.sub(r"\1'\2", text)
    first = next((letter for letter in text if letter.isprintable() and not letter.isspace()), "")
    return f"'{inner}" if first in FORMULA or text.startswith(("\t", "\r", "\n")) else inner
