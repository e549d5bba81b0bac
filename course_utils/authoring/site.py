"""`python -m course_utils site`: the website, made of what is in the repository. It needs no network."""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ..classroom import syllabi
from ..interactive.command_line import Parser
from ..interactive.course_files import ROOT, numbered
from ..recording.notebooks import BuildError

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
ANCHOR = re.compile(r'^<span id="[^"]+"></span>\n\n', re.MULTILINE)
"""JupyterLab needs these to find a term of the glossary; on the website the heading itself has that name."""

COURSE_FILE = re.compile(r"\.\./(course_utils/[\w/]+\.py)")
EXPLORER = "explorer"
"""The explorer's page within the website, and its sources within docs."""

TOUR = Path("notebooks", "explorer.ipynb")
"""The explorer's own notebook, which is no lesson; docs/explorer.md lists it."""

ENTRY = "interactive/explorer_page.py"
MODULES = ("*.py", "estimating/**/*.py", "planning/*.py", "figures/*.py", "interactive/__init__.py",
           "interactive/explorer.py", ENTRY)  # fmt: skip
"""The part of the package that the explorer's page runs: `interactive.explorer_page` and the folders below it."""

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
"""The explorer page's work, to be done by a Python that has its standard library alone."""


def main(arguments: Sequence[str]) -> int:
    """Make the website; 1, with Sphinx's words on stderr, if it warns of anything."""
    parser = Parser("site", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder for the pages")
    parser.add_argument(
        "--explorer", action="store_true", help="only the explorer's page, in the folder explorer there"
    )
    options = parser.parse_args(arguments)
    try:
        made = make_explorer(options.out / EXPLORER) if options.explorer else make(options.out)
    except BuildError as problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"Put {made} on any static host. To see it here: python3 -m http.server --directory {made}")
    return 0


def make(out: Path, root: Path = ROOT) -> Path:
    """Lay out the sources and run Sphinx, warnings being errors; returns `out`. Raises BuildError with its words."""
    with tempfile.TemporaryDirectory(prefix="course-site-", ignore_cleanup_errors=True) as name:
        stage = Path(name)
        lay_out(stage, root)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "2", "-b", "html"]
        command += ["-c", str(stage / "docs"), "-d", str(stage / "_doctrees"), str(stage), str(out)]
        environment = os.environ | {"COURSE_ROOT": str(root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"the website is not clean:\n{done.stderr.strip()}")
    for page in out.rglob("*.html"):
        page.write_text(reachable(page.read_text(encoding="utf-8")), encoding="utf-8")
    make_explorer(out / EXPLORER, root)
    return out


def reachable(page: str) -> str:
    """The page with what Sphinx and its theme leave out: its headings' levels, and keys that scroll code and tables."""
    page = page.replace('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">')
    return page.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<table tabindex="0">')


def lay_out(stage: Path, root: Path = ROOT) -> None:
    """Copy what becomes pages, in the repository's own layout, so that links between them hold."""
    shutil.copytree(root / "docs", stage / "docs", ignore=shutil.ignore_patterns(EXPLORER))
    for name in PAGES:
        shutil.copy2(root / name, stage / name)
    for folder in ("notebooks", "exercises"):
        (stage / folder).mkdir()
        for path in numbered(root / folder):
            shutil.copy2(path, stage / folder / path.name)
            _copy_linked_code(path, root, stage)
    shutil.copy2(root / TOUR, stage / TOUR)
    for page in (stage / "docs").glob("*.md"):
        page.write_text(ANCHOR.sub("", page.read_text(encoding="utf-8")), encoding="utf-8")
    index = stage / "docs" / "index.md"
    index.write_text(index.read_text(encoding="utf-8").replace("{{LESSONS}}", lessons(root)), encoding="utf-8")


def lessons(root: Path) -> str:
    """The list of lessons with their minutes and exercises, and the tree of pages that the site's menu shows."""
    rows, pages, practice = ["| lesson | minutes | practice |", "|---|---|---|"], [], []
    for number, lesson in syllabi.lessons(root).items():
        name = Path(lesson.file).stem
        exercises = f"[exercises](../exercises/{lesson.file})" if lesson.exercises else ""
        title = f"[{number:02d} · {lesson.title}](../notebooks/{lesson.file})"
        rows.append(f"| {title} | {lesson.minutes} | {exercises} |")
        pages.append(f"../notebooks/{name}")
        practice += [f"../exercises/{name}"] * bool(exercises)
    return "\n".join([*rows, "", *_tree("Lessons", pages), "", *_tree("Exercises", practice)])


def _tree(caption: str, pages: list[str]) -> list[str]:
    return ["```{toctree}", ":hidden:", ":maxdepth: 1", f":caption: {caption}", "", *pages, "```"]


def _copy_linked_code(notebook: Path, root: Path, stage: Path) -> None:
    """Programs that a lesson links to, so that its page can hand them out."""
    for name in set(COURSE_FILE.findall(notebook.read_text(encoding="utf-8"))):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, stage / name)


def make_explorer(out: Path, root: Path = ROOT) -> Path:
    """Put the explorer's page and an archive of the modules that it needs into `out`, a folder that any static host can
    serve: it needs no other network, and no Sphinx. Returns `out`.

    Raises BuildError if one of those modules needs more than the standard library.
    """
    content = archive(root)
    shutil.copytree(root / "docs" / EXPLORER, out, dirs_exist_ok=True)
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
