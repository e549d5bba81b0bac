"""Find the course's files: its root, its notebooks in order, and the marks of solutions in them."""

import json
import os
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of this package, `course_utils`."""

IS_CLONE = (PACKAGE.parent / "notebooks").is_dir() and (PACKAGE.parent / "pyproject.toml").is_file()
"""Whether the package lies in a clone (or a teacher's release); otherwise it was installed from a wheel."""

SHIPPED = PACKAGE.parent if IS_CLONE else PACKAGE / "course"
"""The course's files as they came with the package: the clone, or the wheel's own copy, never written to."""


def started_course(folder: Path) -> Path | None:
    """The nearest folder, from this one upwards, with the course as `start` makes it; None if none has it."""
    needed = ("notebooks/00_start_here.ipynb", "exercises")
    for candidate in (folder, *folder.parents):
        if all((candidate / name).exists() for name in needed):
            return candidate
    return None


ROOT = SHIPPED if IS_CLONE else (started_course(Path.cwd()) or SHIPPED)
"""The folder of the course that is worked in: notebooks, exercises, solutions and docs lie in it.

A clone is its own; with a wheel it is the started course around the working directory, else the wheel's own
copy.
"""

HAS_FOLDER = IS_CLONE or ROOT != SHIPPED
"""Whether that folder is the user's, to write to."""


def python_path() -> str:
    """PYTHONPATH for started programs: they find the course although a clone may be installed nowhere."""
    folders = [str(PACKAGE.parent)] if IS_CLONE else []
    given = os.environ.get("PYTHONPATH")
    if given:
        folders.append(given)
    return os.pathsep.join(folders)


def _lesson_folders() -> dict[int, str]:
    folders = {}
    for path in PACKAGE.glob("lessons/*/__init__.py"):
        if found := re.match(r'"""Lesson (\d\d):', path.read_text(encoding="utf-8")):
            folders[int(found[1])] = path.parent.name
    return dict(sorted(folders.items()))


LESSONS = _lesson_folders()
"""Each lesson's number and its folder in `course_utils/lessons`, whose first line says the number."""

CORE = ("00", "01", "02", "05", "06", "08", "12", "19")
"""The lessons of the core path: eleven hours with some of their exercises. None needs a lesson outside it."""

EXERCISES_WITH = {"09": "08"}
"""Lessons whose exercises are among those of another lesson."""

EDITED = ".edited-"
"""Part of the name of a copy that `build` saved of a notebook because somebody had edited it."""

ANSWERS = ("### BEGIN SOLUTION", "### END SOLUTION")
ONLY_IN_SOLUTIONS = frozenset({"solution", "explanation"})  # tags of cells that learners do not get

NOT_SOLVED_IMPORT = "from course_utils.interactive.feedback import NotSolved"
"""The import that learners' notebooks need in place of the solutions."""


def notebooks(folder: Path) -> list[Path]:
    """A folder's notebooks, copies of edited ones left out; none where there is no such folder."""
    return sorted(path for path in folder.glob("*.ipynb") if EDITED not in path.name)


def numbered(folder: Path) -> list[Path]:
    """A folder's notebooks that are a lesson or its exercises: 06_recomputation.ipynb."""
    return [path for path in notebooks(folder) if re.match(r"\d\d_", path.name)]


def scripts() -> list[Path]:
    """The growing script as each lesson that changes it leaves it: train_01.py and so on, in order."""
    return sorted((ROOT / "notebooks" / "train").glob("train_[0-9][0-9].py"))


def number_of(path: Path) -> str:
    """The number that the name of a lesson's file begins with: "06"."""
    return path.name.partition("_")[0]


def text_of(notebook: Path) -> str:
    """The Markdown of a notebook's cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


LESSON_SECONDS = 25.0
"""A notebook's budget, in CPU seconds, where its own metadata state none."""


def budget(notebook: Path) -> float:
    """The CPU seconds that a notebook's metadata grant it, as in `course: {cpu_seconds: 30}`."""
    metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
    return float(metadata.get("course", {}).get("cpu_seconds", LESSON_SECONDS))


def old_numbers(root: Path) -> str:
    """A sentence for a course folder from before the lessons were renumbered; "" for any other folder."""
    if not (root / "notebooks" / "07b_large_batches.ipynb").exists():
        return ""
    return (
        f"The lessons in {root} have their old numbers. Copy this version of the course to a new folder with "
        "`start`: your guesses and your progress come along, and your answers stay where they are."
    )
