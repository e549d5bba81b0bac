"""A learner's progress, lesson by lesson: exercises passed and quizzes finished. It never leaves this
machine.
"""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from ..units import Table
from .course_files import CORE, LESSONS, ROOT, numbered, text_of
from .keeping import remember, remembered

HEADING = re.compile(r"^## (\d+) · (.+)$", re.MULTILINE)
TITLE = re.compile(r"^# \w+ (\d\d) · (.+)$", re.MULTILINE)


def mark_passed(exercise: str) -> None:
    """Remember that the check of an exercise ("06.1") has passed; the first time counts. ValueError if it
    cannot.
    """
    if exercise not in passed():
        remember(passed=exercise)


def mark_quiz(lesson: int, first_tries: int, questions: int) -> None:
    """Remember that a lesson's quiz was finished, with so many right at the first try. ValueError if it
    cannot.
    """
    remember(quiz=lesson, first_tries=first_tries, questions=questions)


def passed() -> dict[str, str]:
    """The day (ISO date) on which each exercise's check first passed. ValueError for a file that cannot be
    read.
    """
    days: dict[str, str] = {}
    for event in remembered()[0]:
        if "passed" in event:
            days.setdefault(event["passed"], event["day"])
    return days


def quiz_scores() -> dict[int, tuple[int, int]]:
    """The best attempt at each lesson's quiz: questions right at the first try, and questions. Raises like
    `passed`.
    """
    best: dict[int, tuple[int, int]] = {}
    for event in remembered()[0]:
        if "quiz" in event:
            score = event["first_tries"], event["questions"]
            best[event["quiz"]] = max(score, best.get(event["quiz"], score))
    return best


class Lesson(NamedTuple):
    """A lesson's exercises (number to title), the days on which they were passed, and
    the quiz's best score.
    """

    number: int
    title: str
    exercises: dict[str, str]
    passed: dict[str, str]
    score: tuple[int, int] | None

    @property
    def next(self) -> str:
        """The first exercise that has not been passed yet, as "06.2 The best interval";
        "" if there is none.
        """
        return next((f"{n} {title}" for n, title in self.exercises.items() if n not in self.passed), "")

    @property
    def cells(self) -> tuple[str, ...]:
        taken = "{} of {} at the first try".format(*self.score) if self.score else "not taken"
        quiz = taken if self.number in LESSONS else ""
        done = f"{len(self.passed)} of {len(self.exercises)}"
        core = " · core" * (f"{self.number:02d}" in CORE)
        return f"{self.number:02d} {self.title}{core}", done, quiz, self.next or "all passed"


@dataclass(frozen=True, repr=False)
class Progress:
    """The exercises passed and the quizzes taken, lesson by lesson; shows itself as a table."""

    lessons: tuple[Lesson, ...]
    problems: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        cells = [lesson.cells for lesson in self.lessons]
        return Table([("lesson", "exercises passed", "quiz", "next exercise"), *cells], words=4)

    @property
    def summary(self) -> str:
        done = sum(len(one.passed) for one in self.lessons)
        of = sum(len(one.exercises) for one in self.lessons)
        kept = f"{done} of {of} exercises passed. This is stored only on your machine."
        core = f"The core path of ten hours is lessons {', '.join(CORE)}."
        return " ".join([kept, core, *self.problems])

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.summary}"

    def __repr__(self) -> str:
        return "Your progress, lesson by lesson. Run this cell to see it."

    def _repr_html_(self) -> str:
        return f"{self.table._repr_html_()}<p>{escape(self.summary)}</p>"


@dataclass(frozen=True, repr=False)
class Passed:
    """A check that passed: its exercise, what is said of the answer, and the way to the next one."""

    number: str
    praise: str
    problem: str = ""

    @property
    def next(self) -> tuple[str, str]:
        """The lesson's next exercise, as "06.2", and its title; two empty texts after the last one."""
        for path in numbered(ROOT / "exercises"):
            if path.name.startswith(self.number[:2]):
                later = {name: title for name, title in _exercises(path)[2].items() if name > self.number}
                return next(iter(later.items()), ("", ""))
        return "", ""

    def __repr__(self) -> str:
        number, title = self.next
        way = f"  Next: {number} {title}" if number else ""
        return "\n".join(
            filter(None, [f"✓ {self.number} {self.praise}", way, self.problem and f"  ({self.problem})"])
        )

    def _repr_html_(self) -> str:
        number, title = self.next
        way = f"<br>Next: <a href='#exercise-{number[3:]}'>{number} · {escape(title)}</a>" if number else ""
        said = f"<b>✓ {self.number}</b> {escape(self.praise)}{way}"
        said += f"<br><i>{escape(self.problem)}</i>" * bool(self.problem)
        return (
            "<div role='status' style='border-left:6px solid #009e73;padding:4px"
            f" 14px;line-height:1.6'>{said}</div>"
        )


def progress(root: Path = ROOT) -> Progress:
    """The progress in the exercises of `root`/exercises and in the quizzes. Raises
    ValueError like `passed`.
    """
    days = passed()
    scores = quiz_scores()
    found = []
    for path in numbered(root / "exercises"):
        number, title, exercises = _exercises(path)
        mine = {name: days[name] for name in exercises if name in days}
        found.append(Lesson(number, title, exercises, mine, scores.get(number)))
    return Progress(tuple(found), tuple(remembered()[1]))


def _exercises(path: Path) -> tuple[int, str, dict[str, str]]:
    """A lesson's number and title, and its exercises by number, as the notebook's headings have them."""
    text = text_of(path)
    title = TITLE.search(text)
    if title is None:
        raise ValueError(
            f"{path.name} does not begin with its number and title, as '# Exercises 06 · Recomputation'"
        )
    return int(title[1]), title[2], {f"{title[1]}.{number}": name for number, name in HEADING.findall(text)}
