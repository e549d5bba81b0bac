"""Has each exercise three hints, and each lesson a quiz? They help where a check only says what is off."""

import json
import re
from pathlib import Path

import pytest

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.interactive.course_files import text_of
from course_utils.lessons import lessons

HINT = re.compile(r"<details><summary>Hint (\d): (.+?)</summary>\n\n(.+?)\n\n</details>", re.DOTALL)
EXERCISES = committed_notebooks(ROOT, "exercises")


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_every_exercise_has_three_hints_that_are_closed_until_opened(path: Path) -> None:
    _, *parts = re.split(r"^## (?=(?:\d+|Unchecked) · )", text_of(path), flags=re.MULTILINE)
    assert len(parts) >= 4, f"{path.stem} has {len(parts)} of at least 4 exercises: write more"
    for part in parts:
        hints = HINT.findall(part)
        assert [number for number, *_ in hints] == ["1", "2", "3"], part.splitlines()[0]
        assert part.count("<details") == 3 and "<details open" not in part


def test_every_lesson_that_has_exercises_shows_its_quiz() -> None:
    assert [int(path.name[:2]) for path in EXERCISES] == lessons()
    for number in lessons():
        [path] = (ROOT / "notebooks").glob(f"{number:02d}_*.ipynb")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        [shown] = [cell for cell in cells if f"quiz({number})" in "".join(cell["source"])]
        [output] = shown["outputs"]
        assert "".join(output["data"]["text/plain"]).startswith(f"Quiz of lesson {number:02d}")
