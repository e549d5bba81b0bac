"""`python -m course_utils site`: the website, made of the repository. Only Pyodide needs a network, once."""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from argparse import Namespace
from pathlib import Path

from ..interactive.course_files import ROOT, numbered
from ..interactive.notebook_runs import BuildError
from ..pace import wait_for

PAGES = ("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "LICENSE-CC-BY-4.0.txt")
ANCHOR = re.compile(r'^<span id="[^"]+"></span>\n\n', re.MULTILINE)
"""JupyterLab needs these to find a term of the glossary; on the website the heading itself has that name."""

EXPLORER = "explorer"
"""The explorer's page within the website, and its sources within docs."""

TOUR = Path("notebooks", "explorer.ipynb")
SCRIPTS = Path("notebooks", "train")
"""The explorer's own notebook, which is no lesson; docs/explorer.md lists it."""

MODULES = ("*.py", "*.toml", "estimating/**/*.py", "planning/*.py", "interactive/__init__.py",
           "interactive/explorer.py", "interactive/explorer_page.py", "interactive/html_bars.py")  # fmt: skip
"""The part of the package that the explorer's page runs, which needs the standard library alone."""

ARCHIVE = "course_utils.zip"
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive: the same sources make the same bytes."""


def run(chosen: Namespace) -> int:
    """Make the website; 1, with Sphinx's words on stderr, if it warns of anything."""
    try:
        made = make_explorer(chosen.out / EXPLORER) if chosen.explorer else make(chosen.out, url=chosen.url)
    except BuildError as problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"Put {made} on any static host. To see it here: python3 -m http.server --directory {made}")
    return 0


def make(out: Path, root: Path = ROOT, url: str = "") -> Path:
    """Lay out the sources and run Sphinx; returns `out`. Raises BuildError with its words, also for warnings.

    `url` is where the pages will be. The explorer comes first: without Pyodide nobody should wait for Sphinx.
    """
    make_explorer(out / EXPLORER, root)
    with tempfile.TemporaryDirectory(prefix="course-site-", ignore_cleanup_errors=True) as name:
        stage = Path(name)
        lay_out(stage, root)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "2", "-b", "html"]
        command += ["-c", str(stage / "docs"), "-d", str(stage / "_doctrees"), str(stage), str(out)]
        environment = os.environ | {"COURSE_ROOT": str(root), "COURSE_URL": url}
        with tempfile.TemporaryFile() as said:
            sphinx = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)
            if wait_for(sphinx, "Sphinx is making the pages"):
                said.seek(0)
                told = said.read().decode(errors="replace").strip()
                raise BuildError(f"the website is not clean:\n{told}")
    return out


def lay_out(stage: Path, root: Path = ROOT) -> None:
    """Copy what becomes pages and what they link to, in the repository's own layout, so that links hold."""
    not_pages = shutil.ignore_patterns(EXPLORER, "__pycache__")
    shutil.copytree(root / "docs", stage / "docs", ignore=not_pages)
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "course_utils", stage / "course_utils", ignore=compiled)
    for name in PAGES:
        shutil.copy2(root / name, stage / name)
    for folder in ("notebooks", "exercises"):
        (stage / folder).mkdir()
        for path in numbered(root / folder):
            shutil.copy2(path, stage / folder / path.name)
    shutil.copytree(root / SCRIPTS, stage / SCRIPTS, ignore=compiled)
    shutil.copy2(root / TOUR, stage / TOUR)
    for page in (stage / "docs").glob("*.md"):
        page.write_text(ANCHOR.sub("", page.read_text(encoding="utf-8")), encoding="utf-8")


def make_explorer(out: Path, root: Path = ROOT) -> Path:
    """Put the explorer's page, Pyodide and an archive of the modules that it needs into `out`.

    Any static host can serve it. Raises BuildError, which says why, where Pyodide cannot be had.
    """
    command = [sys.executable, str(root / "docs" / "pyodide.py"), str(out / "pyodide")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr.strip())
    shutil.copytree(root / "docs" / EXPLORER, out, dirs_exist_ok=True)
    (out / ARCHIVE).write_bytes(archive(root))
    return out


def archive(root: Path = ROOT) -> bytes:
    """A zip of the page's modules, the same bytes everywhere.

    They are stored: packing differs between machines, and servers pack anyway.
    """
    package = root / "course_utils"
    modules = {path for part in MODULES for path in package.glob(part)}
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_STORED) as target:
        for path in sorted(modules):
            name = zipfile.ZipInfo(path.relative_to(root).as_posix(), LONG_AGO)
            name.create_system = 3  # or Windows writes another byte
            target.writestr(name, path.read_bytes())
    return kept.getvalue()
