"""Ways through the course from 90 minutes to all of it, by the minutes that lessons and exercises state."""

import re
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
"""A lesson's number with some of its exercises, or none for the lesson itself; or something else and its minutes."""


class Day(NamedTuple):
    """A syllabus, or a day of one: its title, the minutes that there are, why it is cut so, and its pieces in order."""

    title: str
    minutes: int
    why: str
    items: tuple[Item, ...]


DAYS = (
    Day(
        "90 minutes", 90,
        "Lesson 01 holds the course's question and its answer. Ask for guesses by show of hands; exercises in pairs. "
        "Where the lesson is best cut is in the instructor's notes.",
        (("01", ()), ("01", (1, 2)), ("Questions; how to go on alone", 13)),
    ),
    Day(
        "Half a day", 240,
        "The question, and its largest part: activations. At the end everybody measures a run of their own.",
        (
            ("01", ()), ("01", (1, 2)), ("Break", 15), ("05", ()), ("05", (1, 2)), ("Break", 10),
            ("A run of your own: `estimate`, then `compare`", 28),
        ),
    ),
    Day(
        "A weekend: the core path", 600,
        "Ten hours for one who learns alone: the account of one GPU, and how to make a run fit. None of these lessons "
        "needs one that is left out. From lesson 05 on, [lesson 12](../notebooks/12_lora_and_quantization.ipynb) on "
        "LoRA may come at any time.",
        (
            ("00", ()), ("01", ()), ("01", (1,)), ("02", ()), ("02", (1,)), ("05", ()), ("05", (1,)), ("06", ()),
            ("06", (1,)), ("07", ()), ("10", ()), ("10", (1,)), ("14", ()), ("14", (1,)),
            ("A script of your own: `watch`, and a [recipe](recipes.md)", 17),
        ),
    ),
    Day(
        "Two days: the first", 390, "One GPU: what is kept, in which format, and why. Lesson 00 before you come.",
        (
            ("01", ()), ("01", (1, 2)), ("Break", 15), ("02", ()), ("02", (1,)), ("03", ()), ("03", (1,)),
            ("Break", 15), ("05", ()), ("05", (1,)), ("Questions", 20),
        ),
    ),
    Day(
        "Two days: the second", 390, "What to do about it, on one GPU and on many.",
        (
            ("06", ()), ("06", (1, 2)), ("Break", 15), ("07", ()), ("07", (1,)), ("08", ()), ("Break", 15),
            ("09", ()), ("09", (1,)), ("Questions; what each will change at home", 9),
        ),
    ),
)  # fmt: skip


def lessons(root: Path = ROOT) -> dict[str, Lesson]:
    """Every lesson by number, "07" or "07b". ValueError for one that does not state its title and minutes."""
    return {number_of(path): _read(path, root / "exercises" / path.name) for path in numbered(root / "notebooks")}


def _read(path: Path, exercises: Path) -> Lesson:
    text = text_of(path)
    title, minutes = TITLE.search(text), MINUTES.search(text)
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
    """The page of the website. ValueError for a lesson without its minutes; KeyError for one that is not there."""
    known = lessons(root)
    parts = ["# Syllabi", INTRODUCTION, *(_day(day, known) for day in DAYS), _alone(known)]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """Minutes are those that lessons and exercises state themselves. They are reasoned, from the length
of the text and what its cells take; no class has been timed yet. Lunch is not counted. For a class, [set the machines
up beforehand](classroom.md)."""


def _day(day: Day, known: dict[str, Lesson]) -> str:
    rows, clock = [], 0
    for words, minutes in (described(item, known) for item in day.items):
        rows.append(f"| {clock // 60}:{clock % 60:02d} | {words} | {minutes} |")
        clock += minutes
    table = ["| from | what | minutes |", "|---|---|---|", *rows, f"| {clock // 60}:{clock % 60:02d} | end | |"]
    return "\n".join([f"## {day.title}", day.why, "", *table])


def _alone(known: dict[str, Lesson]) -> str:
    practice = {number: sum(lesson.exercises.values()) for number, lesson in known.items()}
    rows = [
        f"| [{number} · {lesson.title}](../notebooks/{lesson.file}) | {lesson.minutes} | {practice[number] or ''} |"
        for number, lesson in known.items()
    ]
    total = f"| all | {sum(lesson.minutes for lesson in known.values())} | {sum(practice.values())} |"
    words = (
        "In order, a lesson on one evening and its exercises on the next. In a hurry, take the core path above; the "
        "lessons say at the top what they need."
    )
    return "\n".join(["## Alone", words, "", "| lesson | minutes | its exercises |", "|---|---|---|", *rows, total])
