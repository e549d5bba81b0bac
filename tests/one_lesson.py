"""Which tests are one lesson's: `python3 -m course_utils test --lesson 05` runs those alone, in a minute or
two.

They are its notebook under nbval, the tests of its checks and of its model code, and of the tests that judge
every lesson the cases of this one.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from course_utils.errors import unknown
from course_utils.interactive.course_files import EXERCISES_WITH, LESSONS, ROOT, number_of, numbered

EVERY_LESSON = (
    "test_checks_in_common", "test_front_door", "test_glossary", "test_instructor", "test_learning_alone",
    "test_notebooks", "test_quizzes", "test_recipes", "test_skeletons", "test_syllabi",
)  # fmt: skip
"""Files of tests that judge every lesson: in a case for each, or in one case."""

IN_ONE_CASE = (
    "test_every_exercise_has_one_check",
    "test_every_lesson_that_has_exercises_shows_its_quiz",
    "test_hints_that_notes_quote_are_those_of_the_checks",
    "test_minutes_are_those_of_the_headers_and_of_the_text",
    "test_no_lesson_has_words_of_a_skeleton",
    "test_quiz_questions_that_notes_name_are_there",
    "test_readme_links_every_lesson_with_its_minutes",
    "test_the_page_of_recipes_has_each_lessons_own",
)
"""Those in one case."""


def scope(test: str) -> str:
    """What one worker runs: all tests of an exercise in that file, or of the file; a notebook's cells."""
    exercise = re.search(r"\[(\d\d\.\d+)-", test)
    return f"{test.partition('::')[0]} {exercise[1] if exercise else ''}"


class OneLesson:
    """A plugin of pytest: leaves out what does not judge the lesson of a number, "05"."""

    def __init__(self, number: str) -> None:
        notebooks = {number_of(path): path for path in numbered(ROOT / "notebooks")}
        number = f"0{number}" if re.match(r"\d(?!\d)", number) else number
        if number not in notebooks:
            raise pytest.UsageError(str(unknown("lesson", number, notebooks)))
        self.number, self.notebook = number, notebooks[number]
        self.folder = LESSONS.get(int(EXERCISES_WITH.get(number, number)), "none")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """True for a file without a test of this lesson, which is then not even read."""
        if (
            collection_path.is_dir()
            or collection_path == self.notebook
            or collection_path.stem in EVERY_LESSON
        ):
            return None
        return None if collection_path.suffix != ".ipynb" and self.is_own(collection_path) else True

    def is_own(self, path: Path) -> bool:
        """True for a file of tests of this lesson alone: its checks, or what its folder
        computes and draws.
        """
        if path.stem.startswith("test_lessons_"):
            code = path.read_text(encoding="utf-8")
            return bool(re.search(rf"\blessons(\.| import .*\b){self.folder}\b", code))
        return path.stem == f"test_lesson_{self.number}_checks"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.path.stem not in EVERY_LESSON or self.is_case(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    @pytest.hookimpl(optionalhook=True)  # for runs without pytest-xdist
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """A lesson's checks are most of its tests: each exercise goes to a worker that is free, not the whole
        file.
        """
        from xdist.scheduler import LoadScopeScheduling

        class ByExercise(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return scope(nodeid)

        return ByExercise(config, log)

    def is_case(self, item: pytest.Item) -> bool:
        """True for a case of this lesson, by the number that its name has in brackets, and for a test of all
        in one.
        """
        short = self.number.lstrip("0")
        found = re.search(rf"\[(?:.*/)?0?{short}(?:[_.-].*)?\]$", item.name)
        return bool(found) or getattr(item, "originalname", item.name) in IN_ONE_CASE
