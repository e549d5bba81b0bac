"""`python -m course_utils site`: the website, made of what is in the repository. It needs no network."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..classroom import syllabi
from ..interactive.command_line import Parser
from ..interactive.course_files import ROOT, numbered
from ..recording.notebooks import BuildError
from . import explorer_page

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
ANCHOR = re.compile(r'^<span id="[^"]+"></span>\n\n', re.MULTILINE)
"""JupyterLab needs these to find a term of the glossary; on the website the heading itself has that name."""

COURSE_FILE = re.compile(r"\.\./(course_utils/[\w/]+\.py)")
EXPLORER = "explorer"
"""The explorer's page within the website, and its sources within docs."""

TOUR = Path("notebooks", "explorer.ipynb")
"""The explorer's own notebook, which is no lesson; docs/explorer.md lists it."""


def main(arguments: Sequence[str]) -> int:
    """Make the website; 1, with Sphinx's words on stderr, if it warns of anything."""
    parser = Parser("site", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder for the pages")
    parser.add_argument(
        "--explorer", action="store_true", help="only the explorer's page, in the folder explorer there"
    )
    options = parser.parse_args(arguments)
    try:
        made = explorer_page.make(options.out / EXPLORER) if options.explorer else make(options.out)
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
    explorer_page.make(out / EXPLORER, root)
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
