"""Does a lesson that `new-lesson` made build without a change, and are its checks judged?"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from new_lesson import Lesson, make

from course_utils.interactive.course_files import LESSONS, ROOT
from course_utils.interactive.notebook_runs import read_notebook
from course_utils.teaching import syllabi

NEW = Lesson(f"{max(LESSONS) + 1:02d}", "tides", "High tide")
FOLDERS = ("course_utils", "docs/skeletons", "notebooks/src", "solutions/src")
FILES = ("README.md", "pyproject.toml", "solutions/instructor.md", "tests/conftest.py", "tests/checking.py")
"""The course knows by pyproject.toml that it is in a clone."""


def python(root: Path, *arguments: str) -> str:
    """What Python says in a copy of the course, which imports that copy."""
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "300", "COURSE_FULL": "0"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_lesson_builds_as_it_stands_and_its_checks_are_judged(tmp_path: Path) -> None:
    root = tmp_path / "course"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tests").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    make(root, NEW)
    code = (
        "import sys; from pathlib import Path; from course_utils.authoring.build import build;"
        f"[build(Path('.').resolve(), Path(f'{{f}}/src/{NEW.stem}.py').resolve())"
        " for f in ('notebooks', 'solutions')]"
    )
    python(root, "-c", code)
    [known] = syllabi.lessons(root).values()
    assert (known.title, known.minutes, known.exercises) == ("High tide", 30, {1: 10})
    solved = read_notebook(root / "solutions" / f"{NEW.stem}.ipynb")
    shown = [output.get("data", {}) for cell in solved.cells for output in cell.get("outputs", [])]
    assert any(data.get("text/plain", "").startswith(f"✓ {NEW.number}.1") for data in shown)
    unsolved = str(read_notebook(root / "exercises" / f"{NEW.stem}.ipynb"))
    assert "NotSolved" in unsolved and "BEGIN SOLUTION" not in unsolved and "**Why.**" not in unsolved
    made = read_notebook(root / "notebooks" / f"{NEW.stem}.ipynb")
    kinds = {cell.metadata.slideshow.slide_type for cell in made.cells}
    assert kinds == {"slide", "subslide", "notes", "skip"}
    judged = python(
        root, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_lesson_{NEW.number}.py"
    )
    # a right answer, four wrong ones
    assert re.search(r"^5 passed", judged, re.MULTILINE), judged
