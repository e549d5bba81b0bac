"""The course's notebooks on disk, in order, and the marks of solutions in them."""

import re
from pathlib import Path

EDITED = ".edited-"
"""What the name of a copy has in it that `build` saved of a notebook because somebody had edited it."""

ANSWERS = ("### BEGIN SOLUTION", "### END SOLUTION")
ONLY_IN_SOLUTIONS = frozenset({"solution", "explanation"})
"""Tags of cells that learners do not get."""

NOT_SOLVED_IMPORT = "from course_utils.checks import NotSolved"
"""What learners' notebooks need in place of the solutions."""


def notebooks(folder: Path) -> list[Path]:
    """A folder's notebooks, copies of edited ones left out; none where there is no such folder."""
    return sorted(path for path in folder.glob("*.ipynb") if EDITED not in path.name)


def numbered(folder: Path) -> list[Path]:
    """Those of a folder's notebooks that are a lesson or its exercises: 06_recomputation.ipynb."""
    return [path for path in notebooks(folder) if re.match(r"\d\d_", path.name)]
