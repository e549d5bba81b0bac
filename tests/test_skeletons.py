"""Do the sources that CONTRIBUTING.md tells one to copy build as they stand, and say what a lesson has to say?"""

import shutil

from course_utils.authoring.build import build, check
from course_utils.authoring.slides import slides
from course_utils.authoring.sources import find_sources
from course_utils.classroom import syllabi
from course_utils.interactive.course_files import ROOT
from course_utils.recording.notebooks import read_notebook

SKELETONS = ROOT / "docs" / "skeletons"


def test_the_skeletons_build_as_they_stand(tmp_path):
    for name, place in (("15_my_lesson.py", "notebooks"), ("15_my_exercises.py", "solutions")):
        (tmp_path / place / "src").mkdir(parents=True)
        shutil.copy(SKELETONS / name, tmp_path / place / "src" / "15_my_lesson.py")
    for source in find_sources(tmp_path):
        build(tmp_path, source)
    assert check(tmp_path, ["15"]) == []
    (lesson,) = syllabi.lessons(tmp_path).values()
    assert (lesson.title, lesson.minutes, lesson.exercises) == ("My lesson", 30, {1: 5})
    solved, unsolved = (read_notebook(tmp_path / name / "15_my_lesson.ipynb") for name in ("solutions", "exercises"))
    shown = [output.get("data", {}) for cell in solved.cells for output in cell.get("outputs", [])]
    assert any(data.get("text/plain", "").startswith("✓") for data in shown)
    assert "NotSolved" in str(unsolved) and "BEGIN SOLUTION" not in str(unsolved) and "**Why.**" not in str(unsolved)
    kinds = [slide.kind for slide in slides(read_notebook(tmp_path / "notebooks" / "15_my_lesson.ipynb"))]
    assert {"title", "question", "answer", "gap", "table", "closing"} <= set(kinds)


def test_how_to_write_a_lesson_is_one_page_and_names_them():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert 200 < len(text.partition("\n## Lessons\n")[2].partition("\n## ")[0].split()) < 600
    for path in SKELETONS.glob("*.py"):
        assert f"docs/skeletons/{path.name}" in text
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
