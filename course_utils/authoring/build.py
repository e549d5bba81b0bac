"""`python -m course_utils build`: make notebooks, exercises and solutions from their sources, or compare them."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ..classroom import syllabi
from ..interactive.command_line import Parser
from ..interactive.course_files import EDITED, ROOT, notebooks
from ..interactive.keeping import write_whole
from ..lessons.calculators import errata
from ..lessons.shared.cheat_sheet import cheat_sheet
from ..recording.notebooks import BuildError, cell_name, read_notebook, run
from . import gpu_page, pictures
from .sources import Draft, differences, drafts, find_sources, fingerprint

GENERATED = ("notebooks", "exercises", "solutions")

PAGES: dict[Path, tuple[str, Callable[[Path], str]]] = {
    Path("docs", "cheat_sheet.md"): ("lessons", lambda root: cheat_sheet(root).markdown),
    syllabi.PAGE: ("lessons", syllabi.page),
    Path("docs", errata.PAGE.name): ("errata", lambda _: errata.page()),
    gpu_page.PAGE: ("recordings", lambda _: gpu_page.gpu_page()),
}
"""Pages of docs/ that are made: of what, and how."""


def main(argv: list[str] | None = None) -> int:
    """Build all lessons, or those named. Returns 1 when a source is wrong, a cell fails or `--check` finds drift."""
    parser = Parser("build", __doc__)
    parser.add_argument("names", nargs="*", help="lessons to build, as 01 or 01_name; all of them without")
    parser.add_argument("--check", action="store_true", help="run and write nothing: compare cells with sources")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        if options.check:
            drawn = [] if options.names else [*pictures.check(options.root), *check_pages(options.root)]
            return _report([*check(options.root, options.names), *drawn])
        for source in find_sources(options.root, options.names):
            build(options.root, source)
        if not options.names:
            pictures.draw(options.root)
        write_pages(options.root)
    except BuildError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def write_pages(root: Path) -> None:
    """Write the pages that are made of lessons and recordings; a tree without docs/ has none."""
    for page, text in _pages(root).items():
        write_whole(root / page, text)


def check_pages(root: Path) -> list[str]:
    """A line for each of those pages that is missing, or not what it would be made now."""
    stale = [page for page, text in _pages(root).items() if not (root / page).exists() or _text(root / page) != text]
    return [f"{page.as_posix()} is not what the {PAGES[page][0]} say now" for page in stale]


def _pages(root: Path) -> dict[Path, str]:
    """What each page should say. BuildError for a lesson that does not say what a page takes from it."""
    try:
        return {page: made(root) for page, (_, made) in PAGES.items() if (root / page).parent.exists()}
    except ValueError as problem:
        raise BuildError(str(problem)) from problem


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _report(drift: list[str]) -> int:
    if drift:
        print("\n".join([*drift, "Build them again: python -m course_utils build"]), file=sys.stderr)
        return 1
    print("Every notebook and picture agrees with its source.")
    return 0


def build(root: Path, source: Path) -> list[Path]:
    """Run what `source` describes and write it; returns what was written. Nothing is written unless everything ran.

    Raises BuildError naming the cell that failed.
    """
    start = time.perf_counter()
    planned = drafts(root, source)
    for draft in planned:
        draft.target.parent.mkdir(exist_ok=True)
    finished = [execute(draft) if draft.execute else draft.notebook for draft in planned]
    for draft, notebook in zip(planned, finished, strict=True):
        copy = save_edited(draft.target)
        if copy:
            print(f"{draft.target.name} was edited since it was built: that work is kept in {copy.name}")
        write(notebook, draft.target)
    written = [draft.target for draft in planned]
    names = " and ".join(str(path.relative_to(root)) for path in written)
    print(f"{names} in {time.perf_counter() - start:.0f} s")
    return written


def write(notebook: NotebookNode, target: Path) -> None:
    """Write `notebook` to `target`, whole or not at all. Raises nbformat's ValidationError if it is none."""
    nbformat.validate(notebook)
    scratch = target.with_suffix(".ipynb.part")
    scratch.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")
    scratch.replace(target)


def is_edited(target: Path) -> bool:
    """Whether the notebook at `target` is no longer what a build wrote: its cells do not fit its own fingerprint.

    Running a notebook changes outputs alone and is no edit; one without a fingerprint, or that cannot be read, counts.
    """
    try:
        metadata = json.loads(target.read_text(encoding="utf-8")).get("metadata", {})
    except (ValueError, AttributeError):
        return True  # half written, or not a notebook: nothing that a build made, so nothing that it may replace
    stored = metadata.get("course", {}).get("cells_sha256")
    return stored is None or stored != fingerprint(read_notebook(target).cells)


def save_edited(target: Path, now: datetime | None = None) -> Path | None:
    """Copy an edited notebook beside itself under a dated name; returns the copy, None if there was nothing to save."""
    if not target.exists() or not is_edited(target):
        return None
    stem = f"{target.stem}{EDITED}{now or datetime.now():%Y-%m-%d-%H%M}"
    names = (f"{stem}{suffix}.ipynb" for suffix in ("", *(f"-{count}" for count in range(2, 1000))))
    copy = next(path for name in names if not (path := target.with_name(name)).exists())
    scratch = copy.with_suffix(".ipynb.part")
    shutil.copy2(target, scratch)
    return scratch.replace(copy)


def committed_notebooks(root: Path, *folders: str) -> list[Path]:
    """The notebooks that builds made in `folders` (all three without), in order; copies of edited ones left out."""
    return sorted(path for folder in folders or GENERATED for path in notebooks(root / folder))


def check(root: Path, names: list[str] | None = None) -> list[str]:
    """How the notebooks on disk differ from what their sources say: one line for each difference, none when they agree.

    Raises BuildError for a source that is wrong and for a name that no lesson has.
    """
    planned = [draft for source in find_sources(root, names or ()) for draft in drafts(root, source)]
    lines = [line for draft in planned for line in _drift(root, draft)]
    if not names:
        targets = {draft.target for draft in planned}
        strays = [path for path in committed_notebooks(root) if path not in targets]
        lines += [f"{path.relative_to(root)} has no source" for path in strays]
    return lines


def _drift(root: Path, draft: Draft) -> list[str]:
    name = draft.target.relative_to(root)
    if not draft.target.exists():
        return [f"{name} has not been built"]
    stored = read_notebook(draft.target)
    why = " (edited by hand)" if is_edited(draft.target) else ""
    return [f"{name}{why}: {line}" for line in differences(draft, stored)]


def execute(draft: Draft) -> NotebookNode:
    """The notebook with the outputs of every cell, run in its own folder.

    Raises BuildError naming the cell that failed, ran too long or wrote to stderr.
    """
    notebook = run(draft.notebook, draft.target.parent)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise BuildError(f"{draft.target.name}: {cell_name(cell)} writes to stderr:\n{output['text']}")
    return notebook
