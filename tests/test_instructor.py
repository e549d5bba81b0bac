"""Do the instructor's notes have every lesson, each with its parts, and do their minutes and names hold?"""

import json
import re
from pathlib import Path

import pytest

from course_utils.cli.main import COMMANDS
from course_utils.lessons import lessons, quiz
from course_utils.teaching import syllabi

ROOT = Path(__file__).resolve().parent.parent
NOTES = (ROOT / "solutions" / "instructor.md").read_text(encoding="utf-8")
KNOWN = syllabi.lessons()
ROW = re.compile(r"^\| (\d):(\d\d) \| (.+) \| (\d+) \| (?:\d+ s)? ?\|$", re.MULTILINE)
PARTS = ("**Common misconceptions**", "**Ask**", "**If time is short**", "**Show live**")


def notes_of(number: str) -> str:
    """What the notes say of one lesson."""
    _, _, rest = NOTES.partition(f"\n## Lesson {number} · {KNOWN[number].title}\n")
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def sections_of(number: str) -> list[str]:
    notebook = json.loads((ROOT / "notebooks" / KNOWN[number].file).read_text(encoding="utf-8"))
    text = "\n\n".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("number", KNOWN)
def test_a_lesson_has_each_part_once(number):
    notes = notes_of(number)
    assert [notes.count(part) for part in PARTS] == [1] * len(PARTS)
    wrong, ask, short, show = re.split("|".join(map(re.escape, PARTS)), notes)[1:]
    assert wrong.count("\n- ") >= 3 and ask.count("\n- *") >= 2
    assert all(re.search(r"\?\*(?: |\n)+\w", question) for question in ask.split("\n- ")[1:]), (
        "a question, its answer"
    )
    assert len(short.split()) >= 10 and len(show.split("\n\n")[0].split()) >= 8


@pytest.mark.parametrize("number", KNOWN)
def test_minutes_by_section_are_of_this_lesson_and_add_up(number):
    rows = ROW.findall(notes_of(number))
    assert [section for _, _, section, _ in rows] == sections_of(number), (
        "renew the table in solutions/instructor.md"
    )
    clock = 0
    for hour, minute, _, minutes in rows:
        assert 60 * int(hour) + int(minute) == clock
        clock += int(minutes)
    assert clock == KNOWN[number].minutes


@pytest.mark.parametrize("number", KNOWN)
def test_sections_that_notes_name_are_the_lessons(number):
    short = notes_of(number).partition("**If time is short**")[2].partition("**Show live**")[0]
    named = re.findall(r'"(\S(?:[^"]|(?<=\w)"(?=\w))+)"', " ".join(short.split()))
    assert named and not [name for name in named if name not in sections_of(number)]


def test_quiz_questions_that_notes_name_are_there():
    for number in lessons():
        questions = quiz(number).questions
        named = set(map(int, re.findall(r"question\s+(\d)\)", notes_of(f"{number:02d}"))))
        assert named and max(named) <= len(questions)


def test_what_is_shown_live_is_there():
    demos = (ROOT / "notebooks" / "src" / "demos.py").read_text(encoding="utf-8")
    titles = re.findall(r"^# ## (\d · .+)$", demos, re.MULTILINE)
    assert len(titles) == 7 and all(f"| {title} |" in NOTES for title in titles)
    named = re.findall(r"[Dd]emo (\d), ([^:.]+?)(?=[:.]|, shows|, fails)", NOTES)
    assert {f"{number} · {name}" for number, name in named} == set(titles)
    assert set(re.findall(r"course_utils (\w+)", NOTES)) <= set(COMMANDS)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "notebooks" / "src").glob("*.py"))
    players = set(re.findall(r"`(\w+_(?:player|sliders|builder))`", NOTES))
    assert len(players) >= 6 and all(player in sources for player in players)


MADE_UP = {"changes 'values'": "Your function changes", "Right in GB": "Right in"}
"""Hints that a check completes with a name, and what stands in its source."""


def test_hints_that_notes_quote_are_those_of_the_checks():
    lessons = ROOT / "course_utils/lessons"
    paths = [
        *lessons.glob("*/*.py"),
        *lessons.glob("*/*.toml"),
        *(ROOT / "course_utils/interactive").glob("*.py"),
    ]
    sources = [path.read_text(encoding="utf-8") for path in paths]
    said = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources)))
    tables = re.findall(r"\| wrong answer \| hint \|\n\|---\|---\|\n((?:\|.*\n)+)", NOTES)
    rows = [row for table in tables for row in table.splitlines()]
    quoted = [words for row in rows for words in re.findall(r'"([^"]+)"', row)]
    assert len(quoted) > 300
    assert [words for words in quoted if (MADE_UP.get(words) or words) not in said] == []
