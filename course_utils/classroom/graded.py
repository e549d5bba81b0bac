"""What grading found, of each exercise and notebook: as a table, and in a journal that survives an interruption."""

import csv
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock

from .collecting import Submission

ROOT = Path(__file__).resolve().parents[2]
STATES = ("passed", "not solved", "not right", "error", "not checked", "not reached")


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
        parts = sorted([*(ROOT / "exercises").glob("*.ipynb"), *(ROOT / "course_utils" / "checks").glob("*.py")])
        self.course = hashlib.sha256(b"".join(part.read_bytes() for part in parts) + limits.encode()).digest()
        self.known: dict[str, Graded] = {}
        if path and path.exists():
            whole, _, cut_short = path.read_text(encoding="utf-8").rpartition("\n")
            if cut_short:
                path.write_text(f"{whole}\n" if whole else "", encoding="utf-8", newline="\n")
            self.known = dict(map(_noted, whole.splitlines()))

    def recall(self, one: Submission) -> Graded | None:
        """What became of this notebook when it was graded before, under whatever name."""
        known = self.known.get(self._key(one))
        return known and replace(known, learner=one.learner, file=one.file)

    def write(self, one: Submission, graded: Graded) -> None:
        """Add a line."""
        if self.path is None:
            return
        line = json.dumps({"key": self._key(one), "graded": asdict(graded)})
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(line + "\n")

    def _key(self, one: Submission) -> str:
        notebook = one.problem.encode() if one.problem else one.path.read_bytes()
        return hashlib.sha256(self.course + notebook).hexdigest()


def _noted(line: str) -> tuple[str, Graded]:
    entry = json.loads(line)
    outcomes = {name: Outcome(**outcome) for name, outcome in entry["graded"].pop("outcomes").items()}
    return entry["key"], Graded(**entry["graded"], outcomes=outcomes)


def write_table(graded: Iterable[Graded], path: Path) -> None:
    """One row for each notebook and exercise: learner, lesson, exercise, state, what the check said, problem, seconds
    by the clock, the file, and "no" where a newer one counts in its place.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["learner", "lesson", "exercise", "state", "said", "problem", "seconds", "file", "counts"])
        for one in graded:
            end = [_plain(one.problem), f"{one.seconds:.0f}", _plain(one.file), "yes" if one.counts else "no"]
            learner = _plain(one.learner)
            for exercise, outcome in one.outcomes.items():
                rows.writerow([learner, one.lesson, exercise, outcome.state, _plain(outcome.said), *end])
            if not one.outcomes:
                rows.writerow([learner, one.lesson, "", "", "", *end])


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
