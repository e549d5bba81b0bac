"""`python -m course_utils build`: notebooks, exercises and solutions from their sources, or compared."""

import shutil
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ..interactive.course_files import EDITED, ROOT, notebooks
from ..interactive.learner_folder import write_whole
from ..interactive.notebook_runs import BuildError, cell_name, read_notebook, run
from .pages import check_pages, write_pages
from .sources import FOLDED_OUTPUT, THIS_MACHINE, differences, drafts, find_sources, fingerprint


def build_all(root: Path = ROOT, names: Sequence[str] = (), only_check: bool = False) -> int:
    """Build all lessons and pages, or the lessons named; with `only_check`, write nothing and compare.

    Returns 1, with words on stderr, when a source is wrong, a cell fails or something differs from its
    source.
    """
    try:
        if only_check:
            return _report_drift(root, names)
        for source in find_sources(root, names):
            build(root, source)
        renew_text(root)
        write_pages(root)
    except BuildError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def _report_drift(root: Path, names: Sequence[str]) -> int:
    drift = check(root, names)
    if not names:
        drift += check_pages(root)
    if not drift:
        print("Every notebook and picture agrees with its source.")
        return 0
    print("\n".join([*drift, "Build them again: python -m course_utils build"]), file=sys.stderr)
    return 1


def build(root: Path, source: Path) -> None:
    """Run what `source` describes, then write it. Raises BuildError naming the cell that failed."""
    start = time.perf_counter()
    planned = drafts(root, source)
    for draft in planned:
        draft.target.parent.mkdir(exist_ok=True)
    finished = []
    for draft in planned:
        notebook = run(draft.notebook, draft.target.parent) if draft.execute else draft.notebook
        finished.append(notebook)
    for draft, notebook in zip(planned, finished, strict=True):
        refuse_stderr(notebook, draft.target.name)
    for draft, notebook in zip(planned, finished, strict=True):
        fold_answers(notebook)
        hide_first_lines(notebook)
        forget_machine(notebook)
        if copy := save_edited(draft.target):
            print(f"{draft.target.name} was edited since it was built: that work is kept in {copy.name}")
        write(notebook, draft.target)
    names = " and ".join(str(draft.target.relative_to(root)) for draft in planned)
    print(f"{names} in {time.perf_counter() - start:.0f} s")


def refuse_stderr(notebook: NotebookNode, name: str) -> None:
    """Raise BuildError for the first cell that wrote to stderr."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise BuildError(f"{name}: {cell_name(cell)} writes to stderr:\n{output['text']}")


def renew_text(root: Path) -> None:
    """Renew notebooks that differ from their source in Markdown alone, such as links. Nothing is run."""
    planned = [draft for source in find_sources(root) for draft in drafts(root, source)]
    for draft in planned:
        if not draft.target.exists() or is_edited(draft.target):
            continue
        stored = read_notebook(draft.target)
        cells = draft.notebook.cells
        ran = {cell.id: cell for cell in stored.cells if cell.cell_type == "code"}
        changed = {line.removesuffix(" differs") for line in differences(draft, stored)}
        code_is_same = not changed & set(ran)
        code_ids = {cell.id for cell in cells if cell.cell_type == "code"}
        if changed and code_is_same and code_ids == set(ran):
            draft.notebook.cells = [ran.get(cell.id, cell) for cell in cells]
            write(draft.notebook, draft.target)


def fold_answers(notebook: NotebookNode) -> None:
    """Close the outputs of cells with a folded answer.

    JupyterLab takes `guesses.FOLD` out until a cell is run. The answer comes first, as JupyterLab shows a
    line of the first output that it has closed.
    """
    for cell in notebook.cells:
        pages = [output.get("data", {}).get("text/html", "") for output in cell.get("outputs", ())]
        answers = [place for place, page in enumerate(pages) if "course-answer" in page]
        if answers:
            cell.outputs.insert(0, cell.outputs.pop(answers[0]))
            cell.metadata.setdefault("jupyter", NotebookNode()).outputs_hidden = True


INVITATION = "<!-- Run this cell to see. -->"


def hide_first_lines(notebook: NotebookNode) -> None:
    """Put a line above pictures that are folded: JupyterLab shows the first line of what it has folded."""
    for cell in notebook.cells:
        if FOLDED_OUTPUT in cell.metadata.get("tags", ()):
            for output in cell.outputs[:1]:
                if "text/html" in output.get("data", {}):
                    output.data["text/html"] = f"{INVITATION}\n{output.data['text/html']}"


def forget_machine(notebook: NotebookNode) -> None:
    """Drop what describes the machine that built: each reader's is another one."""
    for cell in notebook.cells:
        if THIS_MACHINE in cell.metadata.get("tags", ()):
            cell.outputs = []


def write(notebook: NotebookNode, target: Path) -> None:
    """Write `notebook` to `target`, whole or not at all. Raises nbformat's ValidationError if it is none."""
    nbformat.validate(notebook)
    write_whole(target, nbformat.writes(notebook) + "\n")


def is_edited(target: Path) -> bool:
    """True unless the cells of the notebook at `target` fit its own fingerprint; outputs do not count."""
    try:
        notebook = read_notebook(target)
        return notebook.metadata.course.cells_sha256 != fingerprint(notebook.cells)
    except Exception:
        # of any kind: half written, or not a notebook that a build made, so nothing that it may replace
        return True


def save_edited(target: Path) -> Path | None:
    """Copy an edited notebook next to itself under a dated name; returns the copy, None if none is needed."""
    if not target.exists() or not is_edited(target):
        return None
    copy = target.with_name(f"{target.stem}{EDITED}{datetime.now():%Y-%m-%d-%H%M%S}.ipynb")
    part = copy.with_suffix(".ipynb.part")
    shutil.copy2(target, part)
    return part.replace(copy)  # at once: a copy that has its name is whole


def committed_notebooks(root: Path, *folders: str) -> list[Path]:
    """The notebooks that builds made in `folders` (all three without), in order, without edited copies."""
    wanted = folders or ("notebooks", "exercises", "solutions")
    return sorted(path for folder in wanted for path in notebooks(root / folder))


def check(root: Path, names: Sequence[str] = ()) -> list[str]:
    """Differences between the notebooks on disk and their sources, a line for each; none when they agree.

    Raises BuildError for a source that is wrong and for a name that no lesson has.
    """
    planned = [draft for source in find_sources(root, names) for draft in drafts(root, source)]
    lines = []
    for draft in planned:
        name = draft.target.relative_to(root)
        if draft.target.exists():
            why = " (edited by hand)" if is_edited(draft.target) else ""
            lines += [f"{name}{why}: {line}" for line in differences(draft, read_notebook(draft.target))]
        else:
            lines.append(f"{name} has not been built")
    if not names:
        targets = {draft.target for draft in planned}
        strays = [path for path in committed_notebooks(root) if path not in targets]
        lines += [f"{path.relative_to(root)} has no source" for path in strays]
    return lines
