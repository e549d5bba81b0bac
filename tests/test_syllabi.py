"""Do the syllabi take the minutes that there are, by what the lessons themselves state?"""

import re

from course_utils.interactive.course_files import ROOT
from course_utils.teaching import syllabi

KNOWN = syllabi.lessons()
WAYS = {"90 minutes": 1, "half a day": 1, "core path": 1, "two days": 2}
"""How many of the days each way through the course takes."""


def needs(number: str) -> set[str]:
    """The lessons that a lesson says at its top that one should know."""
    source = (ROOT / "notebooks" / "src" / KNOWN[number].file).with_suffix(".py").read_text(encoding="utf-8")
    _, _, after = source.partition("You should know")
    return set(re.findall(r"\]\((\d\d)_\w+\.ipynb\)", after.partition("\n#\n")[0]))


def test_a_day_takes_the_minutes_that_it_has() -> None:
    for day in syllabi.DAYS:
        assert sum(syllabi.described(item, KNOWN)[1] for item in day.items) == day.minutes


def test_nothing_comes_before_what_it_needs() -> None:
    assert len(syllabi.DAYS) == sum(WAYS.values()) and needs("11") == {"03", "10"}
    days = iter(syllabi.DAYS)
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
    for number in KNOWN:
        assert all(needed < number for needed in needs(number)), "alone, lessons come by number"
