"""A learner's progress: exercises passed, quizzes finished, guesses locked. It never leaves this machine.

Each event is one line of JSON appended to a file next to the guesses, so that two notebooks can write at once, nothing
is ever overwritten, and a newer course reads what an older one wrote. The file is in the learner's own folder, not in
the course's: the course may be moved, renamed, upgraded or fetched anew. A line that cannot be read costs itself alone.
"""

import json
import re
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from .. import __version__
from ..units import aligned, html_table
from .course_files import ROOT, has_quiz, numbered
from .keeping import course_home, problems_in_words

FILE = "progress.jsonl"
HEADING = re.compile(r"^## (\d+) · (.+)$", re.MULTILINE)
TITLE = re.compile(r"^# \w+ (\d\d) · (.+)$", re.MULTILINE)


def mark_passed(exercise: str) -> None:
    """Remember that the check of an exercise ("06.1") has passed; the first time counts. ValueError if it cannot."""
    if exercise not in passed():
        _append({"passed": exercise})


def mark_quiz(lesson: int, first_tries: int, questions: int) -> None:
    """Remember that a lesson's quiz was finished, and how many of its questions were right at the first try.

    Raises ValueError where nothing can be kept.
    """
    _append({"quiz": lesson, "first_tries": first_tries, "questions": questions})


def passed() -> dict[str, str]:
    """The day (ISO date) on which each exercise's check first passed, by number.

    Raises ValueError for a file that cannot be read at all.
    """
    days: dict[str, str] = {}
    for event in _events()[0]:
        if "passed" in event:
            days.setdefault(event["passed"], event["day"])
    return days


def quiz_scores() -> dict[int, tuple[int, int]]:
    """The best attempt at each lesson's quiz: questions right at the first try, and questions. Raises like `passed`."""
    best: dict[int, tuple[int, int]] = {}
    for event in _events()[0]:
        if "quiz" in event:
            score = event["first_tries"], event["questions"]
            best[event["quiz"]] = max(score, best.get(event["quiz"], score))
    return best


@dataclass(frozen=True)
class Lesson:
    """A lesson's exercises (number to title) and what has been done: their days, and the quiz's best score, if any."""

    number: int
    title: str
    exercises: dict[str, str]
    passed: dict[str, str]
    has_quiz: bool
    score: tuple[int, int] | None

    @property
    def next(self) -> str:
        """The first exercise that has not been passed yet, as "06.2 The best interval"; "" if there is none."""
        return next((f"{n} {title}" for n, title in self.exercises.items() if n not in self.passed), "")

    @property
    def cells(self) -> tuple[str, ...]:
        """The lesson's row in the table."""
        quiz = f"{self.score[0]} of {self.score[1]} at the first try" if self.score else "not taken"
        done = f"{len(self.passed)} of {len(self.exercises)}"
        return f"{self.number:02d} {self.title}", done, quiz if self.has_quiz else "", self.next or "all passed"


@dataclass(frozen=True, repr=False)
class Progress:
    """The exercises passed and the quizzes taken, lesson by lesson; shows itself as a table."""

    lessons: tuple[Lesson, ...]
    problems: tuple[str, ...] = ()

    @property
    def counts(self) -> tuple[int, int]:
        """Exercises passed, and exercises."""
        return sum(len(lesson.passed) for lesson in self.lessons), sum(len(lesson.exercises) for lesson in self.lessons)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table, its header first."""
        return [("lesson", "exercises passed", "quiz", "next exercise"), *(lesson.cells for lesson in self.lessons)]

    @property
    def summary(self) -> str:
        """The number of exercises passed, and the lines that could not be read, in sentences."""
        done, of = self.counts
        kept = f"{done} of {of} exercises passed. This is kept on your machine, and nowhere else."
        return " ".join([kept, *self.problems])

    def __str__(self) -> str:
        return f"{aligned(self.rows, 4)}\n\n{self.summary}"

    def __repr__(self) -> str:
        return "Your progress, lesson by lesson. Run this cell to see it."

    def _repr_html_(self) -> str:
        return f"{html_table(self.rows, 4)}<p>{escape(self.summary)}</p>"


def progress(root: Path = ROOT) -> Progress:
    """The progress in the exercises of `root`/exercises and in the quizzes. Raises ValueError like `passed`."""
    days, scores = passed(), quiz_scores()
    found = []
    for path in numbered(root / "exercises"):
        number, title, exercises = _exercises(path)
        mine = {name: days[name] for name in exercises if name in days}
        found.append(Lesson(number, title, exercises, mine, has_quiz(number), scores.get(number)))
    return Progress(tuple(found), tuple(_events()[1]))


def _exercises(path: Path) -> tuple[int, str, dict[str, str]]:
    """A lesson's number and title, and its exercises by number, as the notebook's headings have them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    title = TITLE.search(text)
    if title is None:
        raise ValueError(f"{path.name} does not begin with its number and title, as '# Exercises 06 · Recomputation'")
    return int(title[1]), title[2], {f"{title[1]}.{number}": name for number, name in HEADING.findall(text)}


def _append(event: dict[str, Any]) -> None:
    file = course_home() / FILE
    line = json.dumps({**event, "day": date.today().isoformat(), "course": __version__})
    with problems_in_words("Progress", file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as lines:  # one write for the whole line, so that two kernels cannot mix theirs
            lines.write(f"{_break_after_half_a_line(file)}{line}\n".encode())


def _break_after_half_a_line(file: Path) -> str:
    """A line break if the file does not end with one: else the next event would be lost with the damaged line.

    What looks like half a line may be one that another kernel is still writing: then an empty line remains.
    """
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 1))
        return "\n" if lines.read(1) not in (b"", b"\n") else ""


def _events() -> tuple[list[dict[str, Any]], list[str]]:
    file = course_home() / FILE
    with problems_in_words("Progress", file.parent):
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    events, damaged = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        try:
            event = json.loads(line)
            _check(event)
            events.append(event)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.append(f"Line {number} of {file} cannot be read and is not counted: you may delete it.")
    return events, damaged


def _check(event: Any) -> None:
    """Refuse what is no event of this or an older course; an event that a newer one has added is passed over."""
    date.fromisoformat(event["day"])
    if "passed" in event and not isinstance(event["passed"], str):
        raise TypeError("an exercise has no name")
    if "quiz" in event and not all(isinstance(event[name], int) for name in ("quiz", "first_tries", "questions")):
        raise TypeError("a quiz without numbers")
