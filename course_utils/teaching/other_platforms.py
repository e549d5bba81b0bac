"""The course on other platforms: notebooks for Google Colab, exercises for nbgrader, links that open lessons.

docs/classroom.md says how each is used. Links have the forms of nbgitpuller's link generator
(https://nbgitpuller.readthedocs.io), of Binder's for any git repository (https://mybinder.readthedocs.io,
"v2/git") and of Colab's for one on GitHub.
"""

import json
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ..interactive.course_files import ANSWERS, NOT_SOLVED_IMPORT, ONLY_IN_SOLUTIONS, ROOT, numbered
from ..interactive.learner_folder import write_whole
from .check_cells import check_cells
from .release import refuse_used, release

FOLDERS = ("notebooks", "exercises")
COLAB_BRANCH = "colab"  # Where .github/workflows/site.yml publishes the copies that README's badges open
GPU = {"accelerator": "GPU", "colab": {"gpuType": "T4", "provenance": []}}
"""Metadata of a notebook in Colab when "T4 GPU" is chosen as the runtime's type."""

SET_UP = Path(__file__).with_name("colab_set_up.txt")
"""Code of the cell that fetches the course in Colab, with `CLONE` or `UNPACK` in it."""

CONFIG = Path(__file__).with_name("nbgrader_config.txt")
"""nbgrader's settings."""

CLONE = "    !git clone --quiet --depth 1 --branch {branch} {repository} {{COURSE}}"
UNPACK = """    said = "Upload course.zip first: the folder at the left, then the arrow."
    assert os.path.exists("course.zip"), said
    import shutil

    shutil.unpack_archive("course.zip", COURSE)"""


def colab_copies(folder: Path, repository: str | None, branch: str = "main") -> list[Path]:
    """Write a copy of each notebook and exercise to `folder`, which must be new; returns the copies.

    With None for the repository, course.zip is written next to them, without solutions. Raises ValueError if
    something is there already, and for an address with what a shell would not take as one word.
    """
    refuse_used(folder)
    if repository is None:
        fetch = UNPACK
    else:
        for word in (repository, branch):
            if not re.fullmatch(r"[\w.~/@][\w.~/@:+%-]*", word):
                raise ValueError(f"{word!r} is not a repository's address or a branch's name")
        fetch = CLONE.format(branch=branch, repository=repository)
    set_up = SET_UP.read_text(encoding="utf-8")
    copies = []
    for name in FOLDERS:
        for path in numbered(ROOT / name):
            notebook = _read(path)
            cell = _set_up_cell(set_up.format(fetch=fetch, folder=name))
            notebook["cells"].insert(_first_code(notebook["cells"]), cell)
            notebook["metadata"] |= GPU
            copies.append(_write(notebook, folder / name / path.name))
    if repository is None:
        with tempfile.TemporaryDirectory(prefix="course-release-") as scratch:
            release(Path(scratch, "course"))
            shutil.make_archive(str(folder / "course"), "zip", Path(scratch, "course"))
    return copies


def _set_up_cell(source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": "colab-set-up",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
        "source": source,
    }


def nbgrader_source(folder: Path) -> list[Path]:
    """Write nbgrader's settings and an assignment per lesson to `folder`, which must be new.

    Returns the assignments.
    """
    refuse_used(folder)
    assignments = []
    for path in numbered(ROOT / "solutions"):
        target = folder / "source" / path.stem / path.name
        assignments.append(_write(_assignment(_read(path)), target))
    write_whole(folder / "nbgrader_config.py", CONFIG.read_text(encoding="utf-8"))
    return assignments


def _assignment(solutions: dict[str, Any]) -> dict[str, Any]:
    """A lesson's solutions, marked as nbgrader wants them, without outputs and what is for teachers alone."""
    kept = []
    for cell in solutions["cells"]:
        tags = cell["metadata"].get("tags", ())
        if not ONLY_IN_SOLUTIONS.intersection(tags):
            kept.append(cell)
    checks = check_cells({**solutions, "cells": kept})
    cells = [_marked(cell, cell["id"] in checks) for cell in kept]
    first = cells[_first_code(cells)]
    first["source"] = f"{NOT_SOLVED_IMPORT}\n{first['source']}"  # what nbgrader puts for a solution raises it
    return {**solutions, "cells": cells}


def _marked(cell: dict[str, Any], is_check: bool) -> dict[str, Any]:
    """The cell without its outputs, and with nbgrader's metadata if it holds a solution or a check."""
    source = "".join(cell["source"])
    is_code = cell["cell_type"] == "code"
    is_solution = is_code and any(mark in source for mark in ANSWERS)
    marked = dict(cell)
    if is_code:
        marked |= {"outputs": [], "execution_count": None}
    metadata = dict(cell["metadata"])
    if is_solution or is_check:
        metadata["nbgrader"] = {
            "schema_version": 3,
            "grade_id": cell["id"],
            "locked": is_check,
            "task": False,
            "solution": is_solution,
            "grade": is_check,
        }
    if is_check:
        metadata["nbgrader"]["points"] = 1
    return marked | {"source": source, "metadata": metadata}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(notebook: dict[str, Any], target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(notebook, ensure_ascii=False, indent=1) + "\n")
    return target


def _first_code(cells: Sequence[dict[str, Any]]) -> int:
    return next(index for index, cell in enumerate(cells) if cell["cell_type"] == "code")


def link(notebook: str, repository: str, branch: str, hub: str = "", colab: bool = False) -> str:
    """A link that opens a notebook of a repository on a JupyterHub, in Colab, or on Binder.

    On the hub, nbgitpuller fetches or renews the course; Binder builds the course's image. ValueError for
    Colab if the repository is not on GitHub.
    """
    place = urlsplit(repository)
    if hub:
        folder = PurePosixPath(place.path.rstrip("/")).name.removesuffix(".git")  # where git puts it
        query = {"repo": repository, "branch": branch, "urlpath": f"lab/tree/{folder}/{notebook}"}
        return f"{hub.rstrip('/')}/hub/user-redirect/git-pull?{urlencode(query)}"
    if colab:
        if place.hostname != "github.com":
            raise ValueError(f"Colab opens notebooks from GitHub, but {repository} is not on GitHub")
        name = place.path.removesuffix(".git")
        return f"https://colab.research.google.com/github{name}/blob/{branch}/{notebook}"
    path = f"{quote(repository, safe='')}/{quote(branch, safe='')}"
    return f"https://mybinder.org/v2/git/{path}?{urlencode({'labpath': notebook})}"


def colab(chosen: Namespace) -> int:
    """`colab FOLDER [--repository URL]`: prints what was written."""
    copies = colab_copies(chosen.folder, chosen.repository, chosen.branch)
    source = chosen.repository or "what you upload: course.zip, next to them"
    print(f"{len(copies)} notebooks in {chosen.folder}, each with a cell that fetches {source}")
    return 0


def nbgrader(chosen: Namespace) -> int:
    """`nbgrader FOLDER`: prints what was written."""
    written = nbgrader_source(chosen.folder)
    place = chosen.folder / "source"
    print(f"{len(written)} assignments in {place}. There: nbgrader generate_assignment NAME")
    return 0


def links(chosen: Namespace) -> int:
    """`links --repository URL [--branch B] [--hub URL | --colab]`: a line of Markdown for each lesson."""
    for path in numbered(ROOT / "notebooks"):
        address = link(f"notebooks/{path.name}", chosen.repository, chosen.branch, chosen.hub, chosen.colab)
        print(f"- [{path.stem}]({address})")
    return 0
