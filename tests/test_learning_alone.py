"""Has each exercise three hints, and each lesson a quiz? They help where a check only says what is off."""

import json
import re
from pathlib import Path

import pytest

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.interactive.course_files import EXERCISES_WITH, LESSONS
from course_utils.lessons import lessons as lessons_with_a_quiz

HINT = re.compile(r"<details><summary>Hint (\d): (.+?)</summary>\n\n(.+?)\n\n</details>", re.DOTALL)
EXERCISES = committed_notebooks(ROOT, "exercises")


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_every_exercise_has_three_hints_that_are_closed_until_opened(path: Path) -> None:
    text = "\n\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    _, *parts = re.split(r"^## (?=(?:\d+|Unchecked) · )", text, flags=re.MULTILINE)
    assert len(parts) >= 4, f"{path.stem} has {len(parts)} of at least 4 exercises: write more"
    for part in parts:
        hints = HINT.findall(part)
        assert [number for number, *_ in hints] == ["1", "2", "3"], part.splitlines()[0]
        assert part.count("<details") == 3 and "<details open" not in part
        assert len({summary for _, summary, _ in hints}) == 3 and all(len(said) > 20 for *_, said in hints)


def test_every_lesson_that_has_exercises_shows_its_quiz() -> None:
    names = [path.name for path in committed_notebooks(ROOT, "notebooks") if path.name[:1].isdigit()]
    numbers = [int(name[:2]) for name in sorted(names) if name[:2] not in EXERCISES_WITH]
    assert numbers[1:] == [int(path.name[:2]) for path in EXERCISES] == lessons_with_a_quiz() == [*LESSONS], (
        "00 has none"
    )
    for path in (ROOT / "notebooks" / exercise.name for exercise in EXERCISES):
        shown = [cell for cell in cells(path) if f"quiz({int(path.name[:2])})" in "".join(cell["source"])]
        assert len(shown) == 1, path.name
        (output,) = shown[0]["outputs"]
        assert "".join(output["data"]["text/plain"]).startswith(f"Quiz of lesson {path.name[:2]}")
