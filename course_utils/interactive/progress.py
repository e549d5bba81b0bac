"""A learner's progress by lesson: exercises passed and quizzes finished. It never leaves this machine."""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from ..units import Table, aligned
from .course_files import CORE, LESSONS, ROOT, numbered, old_numbers, text_of
from .learner_folder import remember, remembered

HEADING = re.compile(r"^## (\d+) · (.+)$", re.MULTILINE)
TITLE = re.compile(r"^# \w+ (\d\d) · (.+)$", re.MULTILINE)


def mark_passed(exercise: str) -> None:
    """Remember that an exercise's check ("06.1") passed; the first time counts. ValueError if it cannot."""
    if exercise not in passed():
        remember(passed=exercise)


def mark_quiz(lesson: int, first_tries: int, questions: int) -> None:
    """Remember that a quiz was finished, with so many right at the first try. ValueError if it cannot."""
    remember(quiz=lesson, first_tries=first_tries, questions=questions)


def passed() -> dict[str, str]:
    """The day (ISO date) on which each exercise's check first passed. ValueError for an unreadable file."""
    days: dict[str, str] = {}
    for event in remembered()[0]:
        if "passed" in event:
            days.setdefault(event["passed"], event["day"])
    return days


def quiz_scores() -> dict[int, tuple[int, int]]:
    """The best attempt at each lesson's quiz: right at the first try, and questions. Raises like `passed`."""
    best: dict[int, tuple[int, int]] = {}
    for event in remembered()[0]:
        if "quiz" in event:
            score = event["first_tries"], event["questions"]
            best[event["quiz"]] = max(score, best.get(event["quiz"], score))
    return best


class Lesson(NamedTuple):
    """A lesson's exercises (number to title), the days on which they were passed, the quiz's best score."""

    number: int
    title: str
    exercises: dict[str, str]
    passed: dict[str, str]
    score: tuple[int, int] | None

    @property
    def next(self) -> str:
        """The first exercise that is not passed yet, as "06.2 The best interval"; "" if there is none."""
        for number, title in self.exercises.items():
            if number not in self.passed:
                return f"{number} {title}"
        return ""

    @property
    def cells(self) -> tuple[str, ...]:
        number = f"{self.number:02d}"
        name = f"{number} {self.title}"
        if number in CORE:
            name += " · core"
        done = f"{len(self.passed)} of {len(self.exercises)}"
        if self.number not in LESSONS:
            quiz = ""
        elif self.score is None:
            quiz = "not taken"
        else:
            quiz = "{} of {} at the first try".format(*self.score)
        return name, done, quiz, self.next or "all passed"


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
        core = f"The core path of eleven hours is lessons {', '.join(CORE)}."
        return " ".join([kept, core, *self.problems])

    def __str__(self) -> str:
        narrow = [("lesson", "exercises", "quiz, first try", "next")]
        for lesson in self.lessons:
            name, done, quiz, following = lesson.cells
            number = following.partition(" ")[0] if lesson.next else "–"
            narrow.append(
                (name.removesuffix(" · core"), done, quiz.removesuffix(" at the first try"), number)
            )
        return f"{aligned(narrow, 4)}\n\n{self.summary}"

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
        lines = [f"✓ {self.number} {self.praise}"]
        if number:
            lines.append(f"  Next: {number} {title}")
        if self.problem:
            lines.append(f"  ({self.problem})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        number, title = self.next
        said = f"<b>✓ {self.number}</b> {escape(self.praise)}"
        if number:
            said += f"<br>Next: <a href='#exercise-{number[3:]}'>{number} · {escape(title)}</a>"
        if self.problem:
            said += f"<br><i>{escape(self.problem)}</i>"
        look = "border-left:6px solid #009e73;padding:4px 14px;line-height:1.6"
        return f"<div role='status' style='{look}'>{said}</div>"


def progress(root: Path = ROOT) -> Progress:
    """The progress in the exercises below `root` and in the quizzes. Raises ValueError like `passed`."""
    days = passed()
    scores = quiz_scores()
    found = []
    for path in numbered(root / "exercises"):
        number, title, exercises = _exercises(path)
        mine = {name: days[name] for name in exercises if name in days}
        found.append(Lesson(number, title, exercises, mine, scores.get(number)))
    problems = [*remembered()[1], *filter(None, [old_numbers(root)])]
    return Progress(tuple(found), tuple(problems))


def _exercises(path: Path) -> tuple[int, str, dict[str, str]]:
    """A lesson's number and title, and its exercises by number, as the notebook's headings have them."""
    text = text_of(path)
    title = TITLE.search(text)
    if title is None:
        raise ValueError(
            f"{path.name} does not begin with its number and title, as '# Exercises 06 · Recomputation'"
        )
    exercises = {f"{title[1]}.{number}": name for number, name in HEADING.findall(text)}
    return int(title[1]), title[2], exercises
