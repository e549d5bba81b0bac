"""A copy of the course for learners: all but solutions, their sources and the tests that hold answers."""

import shutil
from argparse import Namespace
from pathlib import Path

from ..interactive.course_files import ANSWERS, EDITED, PACKAGE, ROOT, SHIPPED, notebooks

FOLDERS = (".binder", "docs", "exercises", "notebooks")
PAGES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "LICENSE-CC-BY-4.0.txt", "README.md")
FILES = (*PAGES, ".gitignore", "environment.yml", "pyproject.toml", "constraints.txt")
TESTING = ("conftest.py", "tests/nbval_sanitize.cfg")
"""Files that the `test` command needs to run the lessons: no answers are in them."""

LEFT_OUT = ("__pycache__", "*.pyc", ".ipynb_checkpoints", f"*{EDITED}*", "src", "skeletons")
"""`src` in notebooks/ holds the sources of lessons, `skeletons` in docs/ a solution."""


def release(target: Path, root: Path = ROOT) -> list[Path]:
    """Copy the course to `target`; returns what was copied, by name.

    Raises ValueError if something is there already, if it lies within what is copied, or if an exercise is
    solved.
    """
    refuse_used(target)
    copied = [*(root / name for name in FOLDERS), PACKAGE]
    if any(target.resolve().is_relative_to(path.resolve()) for path in copied):
        raise ValueError(f"{target} is inside a folder that is copied: choose another")
    for notebook in notebooks(root / "exercises"):
        text = notebook.read_text(encoding="utf-8")
        if any(mark in text for mark in ANSWERS):
            again = "python3 -m course_utils build"
            raise ValueError(f"{notebook.name} holds a solution: build it again, {again}")
    target.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(_source(root, name), target / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copytree(PACKAGE, target / "course_utils", ignore=shutil.ignore_patterns(*LEFT_OUT, "course"))
    (target / "tests").mkdir()
    for name in (*FILES, *TESTING):
        shutil.copy2(_source(root, name), target / name)
    return sorted(path.relative_to(target) for path in target.iterdir())


def _source(root: Path, name: str) -> Path:
    """A file or folder of this course, or of the one that the package ships, if this one has none."""
    own = root / name
    return own if own.exists() else SHIPPED / name


def refuse_used(folder: Path) -> None:
    """Raise ValueError if something is in the folder already."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose a new folder, because nothing is overwritten")


def run(chosen: Namespace) -> int:
    """`release FOLDER`: prints what was copied."""
    names = release(chosen.folder)
    print(f"Without solutions, in {chosen.folder}: {', '.join(map(str, names))}")
    return 0
