"""Ways through the course from 90 minutes to all of it, by the minutes that lessons and exercises state."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..interactive.course_files import ROOT, number_of, numbered, text_of

PAGE = Path("docs", "syllabi.md")
EXERCISE = re.compile(r"^## (\d+) · .+\n\*\*Difficulty\*\* \S+ · \*\*(\d+) minutes", re.MULTILINE)
TITLE = re.compile(r"^# \d\d[a-z]? · (.+)$", re.MULTILINE)
MINUTES = re.compile(r"^\*\*(\d+) minutes\.?\*\*", re.MULTILINE)


class Lesson(NamedTuple):
    """The statements of a lesson: its file, its title, its minutes, and those of its exercises by number."""

    file: str
    title: str
    minutes: int
    exercises: dict[int, int]


Item = tuple[str, tuple[int, ...] | int]
"""A lesson's number with some of its exercises, or none for the lesson itself; or something else and its
minutes.
"""


class Day(NamedTuple):
    """A syllabus, or a day of one: its title, the minutes that there are, why it is cut so, and its pieces in
    order.
    """

    title: str
    minutes: int
    why: str
    items: tuple[Item, ...]


def _days() -> Iterator[Day]:
    for day in tomllib.loads(Path(__file__).with_name("syllabi.toml").read_text(encoding="utf-8"))["days"]:
        items = ((what, tuple(rest) if isinstance(rest, list) else rest) for what, rest in day["items"])
        yield Day(day["title"], day["minutes"], " ".join(day["why"].split()), tuple(items))


DAYS = tuple(_days())


def lessons(root: Path = ROOT) -> dict[str, Lesson]:
    """Every lesson by number, "07" or "07b". ValueError for one that does not state its title and minutes."""
    return {
        number_of(path): _read(path, root / "exercises" / path.name) for path in numbered(root / "notebooks")
    }


def _read(path: Path, exercises: Path) -> Lesson:
    text = text_of(path)
    title = TITLE.search(text)
    minutes = MINUTES.search(text)
    if title is None or minutes is None:
        raise ValueError(f"{path.name} does not state its title, or its minutes in bold")
    found = EXERCISE.findall(text_of(exercises)) if exercises.exists() else []
    return Lesson(path.name, title[1], int(minutes[1]), {int(number): int(time) for number, time in found})


def described(item: Item, known: dict[str, Lesson]) -> tuple[str, int]:
    """The text of a piece and its minutes. KeyError for a lesson or an exercise that is not there."""
    what, exercises = item
    if isinstance(exercises, int):
        return what, exercises
    lesson = known[what]
    if not exercises:
        return f"[Lesson {what} · {lesson.title}](../notebooks/{lesson.file})", lesson.minutes
    noun = "exercises" if len(exercises) > 1 else "exercise"
    words = f"[Lesson {what}'s {noun}](../exercises/{lesson.file}) {', '.join(map(str, exercises))}"
    return words, sum(lesson.exercises[number] for number in exercises)


def page(root: Path = ROOT) -> str:
    """The page of the website. ValueError for a lesson without its minutes; KeyError for one that is not
    there.
    """
    known = lessons(root)
    parts = ["# Syllabi", INTRODUCTION, *(_day(day, known) for day in DAYS), _alone(known)]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """Minutes are those that lessons and exercises state themselves. They are reasoned, from the
length of the text and what its cells take; no class has been timed yet. Lunch is not counted. For a class,
[set the machines up beforehand](classroom.md)."""


def _day(day: Day, known: dict[str, Lesson]) -> str:
    rows = []
    clock = 0
    for words, minutes in (described(item, known) for item in day.items):
        rows.append(f"| {clock // 60}:{clock % 60:02d} | {words} | {minutes} |")
        clock += minutes
    table = [
        "| from | what | minutes |",
        "|---|---|---|",
        *rows,
        f"| {clock // 60}:{clock % 60:02d} | end | |",
    ]
    return "\n".join([f"## {day.title}", day.why, "", *table])


def _alone(known: dict[str, Lesson]) -> str:
    practice = {number: sum(lesson.exercises.values()) for number, lesson in known.items()}
    rows = [
        f"| [{number} · {lesson.title}](../notebooks/{lesson.file}) | {lesson.minutes} |"
        f" {practice[number] or ''} |"
        for number, lesson in known.items()
    ]
    total = f"| all | {sum(lesson.minutes for lesson in known.values())} | {sum(practice.values())} |"
    words = (
        "In order, a lesson on one evening and its exercises on the next. In a hurry, take the core path"
        " above; the lessons say at the top what they need."
    )
    return "\n".join(
        ["## Alone", words, "", "| lesson | minutes | its exercises |", "|---|---|---|", *rows, total]
    )
