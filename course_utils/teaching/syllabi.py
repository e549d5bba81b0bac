"""Ways through the course from 90 minutes to all of it, by the minutes that lessons and exercises state."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..interactive.course_files import ROOT, number_of, numbered, text_of

PAGE = Path("docs", "syllabi.md")
EXERCISE = re.compile(r"^## (\d+) · .+\n\*\*Difficulty\*\* \S+ · \*\*(\d+) minutes", re.MULTILINE)
TITLE = re.compile(r"^# \d\d · (.+)$", re.MULTILINE)
MINUTES = re.compile(r"^\*\*(\d+) minutes\.?\*\*", re.MULTILINE)


class Lesson(NamedTuple):
    """The statements of a lesson: its file, its title, its minutes, and those of its exercises by number."""

    file: str
    title: str
    minutes: int
    exercises: dict[int, int]


Item = tuple[str, tuple[int, ...] | int]
"""A lesson's number with some of its exercises, or none for the lesson; or something else and its minutes."""


class Day(NamedTuple):
    """A syllabus, or a day of one: title, the minutes there are, why it is cut so, its pieces in order."""

    title: str
    minutes: int
    why: str
    items: tuple[Item, ...]


def _days() -> Iterator[Day]:
    content = tomllib.loads(Path(__file__).with_name("syllabi.toml").read_text(encoding="utf-8"))
    for day in content["days"]:
        why = " ".join(day["why"].split())
        items = [(what, tuple(rest) if isinstance(rest, list) else rest) for what, rest in day["items"]]
        yield Day(day["title"], day["minutes"], why, tuple(items))


DAYS = tuple(_days())


def lessons(root: Path = ROOT) -> dict[str, Lesson]:
    """Every lesson by its number, "07". ValueError for one that does not state its title and minutes."""
    found: dict[str, Lesson] = {}
    for path in numbered(root / "notebooks"):
        found[number_of(path)] = _read(path, root / "exercises" / path.name)
    return found


def _read(path: Path, exercises: Path) -> Lesson:
    text = text_of(path)
    title = TITLE.search(text)
    minutes = MINUTES.search(text)
    if title is None or minutes is None:
        raise ValueError(f"{path.name} does not state its title, or its minutes in bold")
    found = EXERCISE.findall(text_of(exercises)) if exercises.exists() else []
    times = {int(number): int(time) for number, time in found}
    return Lesson(path.name, title[1], int(minutes[1]), times)


def described(item: Item, known: dict[str, Lesson]) -> tuple[str, int]:
    """The text of a piece and its minutes. KeyError for a lesson or an exercise that is not there."""
    what, exercises = item
    if isinstance(exercises, int):
        return what, exercises
    lesson = known[what]
    if not exercises:
        return f"[Lesson {what} · {lesson.title}](../notebooks/{lesson.file})", lesson.minutes
    noun = "exercises" if len(exercises) > 1 else "exercise"
    numbers = ", ".join(str(number) for number in exercises)
    words = f"[Lesson {what}'s {noun}](../exercises/{lesson.file}) {numbers}"
    return words, sum(lesson.exercises[number] for number in exercises)


def page(root: Path = ROOT) -> str:
    """The page of the website. ValueError for a lesson without its minutes; KeyError for an unknown one."""
    known = lessons(root)
    parts = ["# Syllabi", INTRODUCTION, *(_day(day, known) for day in DAYS), _alone(known)]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """Minutes are those that lessons and exercises state themselves. They are reasoned, from the
length of the text and what its cells take; no class has been timed yet. Lunch is not counted. For a class,
[set the machines up beforehand](classroom.md)."""


def _day(day: Day, known: dict[str, Lesson]) -> str:
    lines = [f"## {day.title}", day.why, "", "| from | what | minutes |", "|---|---|---|"]
    clock = 0
    for item in day.items:
        words, minutes = described(item, known)
        lines.append(f"| {_hours(clock)} | {words} | {minutes} |")
        clock += minutes
    lines.append(f"| {_hours(clock)} | end | |")
    return "\n".join(lines)


def _hours(minutes: int) -> str:
    """ "1:05" for 65 minutes."""
    return f"{minutes // 60}:{minutes % 60:02d}"


def _alone(known: dict[str, Lesson]) -> str:
    words = (
        "In order, a lesson on one evening and its exercises on the next."
        " In a hurry, take the core path above; the lessons say at the top what they need."
    )
    lines = ["## Alone", words, "", "| lesson | minutes | its exercises |", "|---|---|---|"]
    all_minutes = 0
    all_practice = 0
    for number, lesson in known.items():
        practice = sum(lesson.exercises.values())
        title = f"[{number} · {lesson.title}](../notebooks/{lesson.file})"
        lines.append(f"| {title} | {lesson.minutes} | {practice or ''} |")
        all_minutes += lesson.minutes
        all_practice += practice
    lines.append(f"| all | {all_minutes} | {all_practice} |")
    return "\n".join(lines)
