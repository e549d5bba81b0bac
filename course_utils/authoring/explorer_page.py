"""The explorer's page: a folder that any static host can serve, with the course's own formulas in it and Python to run
them. It needs no other network, and no Sphinx.
"""

import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..interactive.course_files import ROOT
from ..recording.notebooks import BuildError

PAGE = Path("docs", "explorer")
ENTRY = "interactive/explorer_page.py"
MODULES = ("*.py", "estimating/**/*.py", "planning/*.py", "figures/*.py", "interactive/__init__.py",
           "interactive/explorer.py", ENTRY)  # fmt: skip
"""The part of the package that the page runs: `explorer_page` and the folders below it."""

ARCHIVE = "course_utils.zip"
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive: the same sources make the same bytes."""

TRIAL = """import json, sys
sys.path.insert(0, sys.argv[1])
from course_utils.interactive import explorer_page as page
first = json.dumps(page.texts(page.DEFAULTS))
assert "stack" in json.loads(page.draw(first)), "the first choices are refused"
page.changes(first), page.plan(first)
"""
"""The page's work, to be done by a Python that has its standard library alone."""


def make(out: Path, root: Path = ROOT) -> Path:
    """Put the page, its runtime and an archive of the modules that it needs into `out`; returns `out`.

    Raises BuildError if one of those modules needs more than the standard library.
    """
    content = archive(root)
    shutil.copytree(root / PAGE, out, dirs_exist_ok=True)
    (out / ARCHIVE).write_bytes(content)
    return out


def archive(root: Path = ROOT) -> bytes:
    """A zip of the modules that the page runs, the same bytes for the same sources.

    They are stored, not packed: packing differs between machines, and servers pack what they send. Raises BuildError if
    they do not run by themselves.
    """
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_STORED) as target:
        for path in sorted({path for part in MODULES for path in (root / "course_utils").glob(part)}):
            name = zipfile.ZipInfo(path.relative_to(root).as_posix(), LONG_AGO)
            name.create_system = 3  # or Windows writes another byte
            target.writestr(name, path.read_bytes())
    with tempfile.TemporaryDirectory(prefix="course-explorer-") as folder:
        (file := Path(folder, ARCHIVE)).write_bytes(kept.getvalue())
        command = [sys.executable, "-I", "-S", "-c", TRIAL, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"the explorer's page does not run by itself: {done.stderr.strip().splitlines()[-1]}")
    return kept.getvalue()
