"""Do the syllabi take the minutes that there are, by what the lessons themselves state?"""

import json
import re

import pytest

from course_utils.classroom import syllabi
from course_utils.front_door import ROOT

KNOWN = syllabi.lessons()


@pytest.mark.parametrize("day", syllabi.DAYS, ids=lambda day: day.title)
def test_a_day_takes_the_minutes_that_it_has(day):
    assert sum(syllabi.minutes(item, KNOWN) for item in day.items) == day.minutes


def test_minutes_are_those_of_the_headers_and_of_the_text():
    for number, lesson in KNOWN.items():
        source = (ROOT / "notebooks" / "src" / lesson.file).with_suffix(".py").read_text(encoding="utf-8")
        assert f"#     minutes: {lesson.minutes}\n" in source
        stated = re.search(r"\*\*(\d+) minutes\.?\*\*", source)
        assert stated and int(stated[1]) == lesson.minutes
        if number:
            assert list(lesson.exercises) == list(range(1, len(lesson.exercises) + 1)) and len(lesson.exercises) > 3


def test_the_page_is_what_the_lessons_say_now():
    assert (ROOT / syllabi.PAGE).read_text(encoding="utf-8") == syllabi.page(), "run python3 -m course_utils build"


def test_a_lesson_without_minutes_is_refused(tmp_path):
    (tmp_path / "notebooks").mkdir()
    cells = [{"cell_type": "markdown", "source": "# 01 · X"}]
    (tmp_path / "notebooks" / "01_x.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    with pytest.raises(ValueError, match=r"01_x\.ipynb does not state"):
        syllabi.lessons(tmp_path)
