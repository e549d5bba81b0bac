"""Do the syllabi take the minutes that there are, by what the lessons themselves state?"""

import json
import re

import pytest

from course_utils.interactive.course_files import CORE, ROOT
from course_utils.interactive.progress import progress
from course_utils.teaching import syllabi

KNOWN = syllabi.lessons()


@pytest.mark.parametrize("day", syllabi.DAYS, ids=lambda day: day.title)
def test_a_day_takes_the_minutes_that_it_has(day):
    assert sum(syllabi.described(item, KNOWN)[1] for item in day.items) == day.minutes


def test_minutes_are_those_of_the_headers_and_of_the_text():
    for lesson in KNOWN.values():
        source = (ROOT / "notebooks" / "src" / lesson.file).with_suffix(".py").read_text(encoding="utf-8")
        assert f"#     minutes: {lesson.minutes}\n" in source
        stated = re.search(r"\*\*(\d+) minutes\.?\*\*", source)
        assert stated and int(stated[1]) == lesson.minutes
        if lesson.exercises:
            assert list(lesson.exercises) == list(range(1, len(lesson.exercises) + 1))
            tasks = (ROOT / "solutions" / "src" / lesson.file).with_suffix(".py").read_text(encoding="utf-8")
            count = len(lesson.exercises) + tasks.count("# ## Unchecked · ")
            assert count > 3, f"{lesson.file} has {count} of at least 4 exercises"


def test_a_lesson_without_minutes_is_refused(tmp_path):
    (tmp_path / "notebooks").mkdir()
    cells = [{"cell_type": "markdown", "source": "# 01 · X"}]
    (tmp_path / "notebooks" / "01_x.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    with pytest.raises(ValueError, match=r"01_x\.ipynb does not state"):
        syllabi.lessons(tmp_path)


def needs(number: str) -> set[str]:
    """The lessons that a lesson says at its top that one should know."""
    source = (ROOT / "notebooks" / "src" / KNOWN[number].file).with_suffix(".py").read_text(encoding="utf-8")
    _, _, after = source.partition("You should know")
    return set(re.findall(r"\]\((\d\d)_\w+\.ipynb\)", after.partition("\n#\n")[0]))


WAYS = {"90 minutes": 1, "half a day": 1, "core path": 1, "two days": 2}


def test_nothing_comes_before_what_it_needs():
    days = iter(syllabi.DAYS)
    assert len(syllabi.DAYS) == sum(WAYS.values()) and needs("11") == {"03", "10"}
    for way, count in WAYS.items():
        taught: set[str] = set()
        for lesson, exercises in (item for _ in range(count) for item in next(days).items):
            if isinstance(exercises, int):
                continue
            if exercises:
                assert lesson in taught, f"{way}: exercises before lesson {lesson}"
            else:
                assert needs(lesson) <= taught, f"{way}: lesson {lesson} before what it needs"
                taught.add(lesson)
    assert all(needed < number for number in KNOWN for needed in needs(number)), (
        "alone, lessons come by number"
    )


CORE_DAY = next(day for day in syllabi.DAYS if "core path" in day.title)


def test_the_core_path_takes_ten_hours_and_is_the_same_wherever_it_is_stated():
    assert (
        tuple(dict.fromkeys(lesson for lesson, rest in CORE_DAY.items if not isinstance(rest, int))) == CORE
    )
    assert CORE_DAY.minutes == 10 * 60
    stated = re.compile(
        r"core path\b[^.]*?(?:\bten\b[^.]*?)?\bhours?\b[^.:]*?:? ([\d, \n#and]+\d)", re.IGNORECASE
    )
    for page in ("README.md", "notebooks/src/00_start_here.py"):
        said = stated.search((ROOT / page).read_text(encoding="utf-8"))
        assert said and tuple(re.findall(r"\d\d", said[1])) == CORE, page
    assert ", ".join(CORE) in progress().summary
    assert [lesson.number in map(int, CORE) for lesson in progress().lessons] == [
        " · core" in lesson.cells[0] for lesson in progress().lessons
    ]


def test_what_the_core_path_leaves_out_is_not_presupposed_and_lora_follows_it_at_once():
    assert all(needs(number) <= set(CORE) for number in (*CORE, "16"))
