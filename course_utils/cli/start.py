"""`start FOLDER`: the course out of the wheel, into a folder of the learner's own."""

import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..interactive.course_files import IS_CLONE, SHIPPED
from ..teaching.release import FILES, PAGES, refuse_used
from .environment import NAME, SetupError

# what installs the package: the wheel holds it for `release` alone
FOR_A_CLONE = {*FILES, ".binder"} - {*PAGES}
PYTEST = "[pytest]\n# With this file here pytest finds conftest.py, which keeps your guesses out of a run.\n"


def options(parser: ArgumentParser) -> None:
    """The arguments of `start`."""
    parser.add_argument("folder", type=Path, help="a new or empty folder for the course")


def run(chosen: Namespace) -> int:
    """Copy the course to the folder and say what comes next.

    Raises SetupError in a clone, and ValueError if something is in the folder: nothing is ever overwritten.
    """
    if IS_CLONE:
        raise SetupError("This is a clone and already holds the course: run `python3 -m course_utils lab`.")
    copy_course(SHIPPED, chosen.folder)
    print(f"The course is in {chosen.folder.resolve()}. Next, in that folder: {NAME} lab")
    return 0


def copy_course(source: Path, folder: Path) -> None:
    """Copy a wheel's course to a new or empty folder, without its permissions, which may forbid to write."""
    refuse_used(folder)
    try:
        for path in sorted(source.rglob("*")):
            place = path.relative_to(source)
            if path.is_file() and "__pycache__" not in place.parts and place.parts[0] not in FOR_A_CLONE:
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / place)
        (folder / "pytest.ini").write_text(PYTEST, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half a course would look like one
        raise
