"""Do the minutes, sections, questions, demos and hints that the instructor's notes name exist?"""

import re
from pathlib import Path

import pytest

from course_utils.cli.main import COMMANDS
from course_utils.interactive.course_files import text_of
from course_utils.teaching import syllabi

ROOT = Path(__file__).resolve().parent.parent
NOTES = (ROOT / "solutions" / "instructor.md").read_text(encoding="utf-8")
KNOWN = syllabi.lessons()
ROW = re.compile(r"^\| (\d):(\d\d) \| (.+) \| (\d+) \| (?:\d+ s)? ?\|$", re.MULTILINE)


def notes_of(number: str) -> str:
    """What the notes say of one lesson."""
    _, _, rest = NOTES.partition(f"\n## Lesson {number} · {KNOWN[number].title}\n")
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("number", KNOWN)
def test_sections_are_the_lessons_and_their_minutes_add_up(number: str) -> None:
    notes = notes_of(number)
    rows = ROW.findall(notes)
    sections = re.findall(r"^## (.+)$", text_of(ROOT / "notebooks" / KNOWN[number].file), re.MULTILINE)
    assert [section for _, _, section, _ in rows] == sections, "renew the table in solutions/instructor.md"
    clock = 0
    for hour, minute, _, minutes in rows:
        assert 60 * int(hour) + int(minute) == clock
        clock += int(minutes)
    assert clock == KNOWN[number].minutes
    short = notes.partition("**If time is short**")[2].partition("**Show live**")[0]
    named = re.findall(r'"(\S(?:[^"]|(?<=\w)"(?=\w))+)"', " ".join(short.split()))
    assert named and set(named) <= set(sections)


def test_what_is_shown_live_is_there() -> None:
    demos = (ROOT / "notebooks" / "src" / "demos.py").read_text(encoding="utf-8")
    titles = re.findall(r"^# ## (\d · .+)$", demos, re.MULTILINE)
    named = re.findall(r"[Dd]emo (\d), ([^:.]+?)(?=[:.]|, shows|, fails)", NOTES)
    assert {f"{number} · {name}" for number, name in named} == set(titles)
    assert set(re.findall(r"course_utils (\w+)", NOTES)) <= set(COMMANDS)


MADE_UP = {"changes 'values'": "Your function changes", "Right in GB": "Right in"}
"""Hints that a check completes with a name, and what stands in its source."""


def test_hints_that_notes_quote_are_those_of_the_checks() -> None:
    package = ROOT / "course_utils"
    paths = [*package.glob("lessons/*/*.py"), *package.glob("lessons/*/*.toml")]
    paths += package.glob("interactive/*.py")
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    said = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", code))
    tables = re.findall(r"\| wrong answer \| hint \|\n\|---\|---\|\n((?:\|.*\n)+)", NOTES)
    quoted = [words for table in tables for words in re.findall(r'"([^"]+)"', table)]
    assert len(quoted) > 300
    assert [words for words in quoted if (MADE_UP.get(words) or words) not in said] == []
