"""Copies of the notebooks for Google Colab: `python3 -m course_utils colab FOLDER [--repository URL]`.

A copy asks for a GPU in its metadata, and its first cell fetches the course: Colab opens a notebook without the other
files. Put the copies where Colab can open them, on a branch of your repository or in Google Drive. Without a
repository the course comes as course.zip, which is uploaded to each session.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..interactive.command_line import Parser
from ..interactive.course_files import ROOT, numbered
from .release import refuse_used, release

FOLDERS = ("notebooks", "exercises")
GPU = {"accelerator": "GPU", "colab": {"gpuType": "T4", "provenance": []}}
"""Metadata of a notebook in Colab when "T4 GPU" is chosen as the runtime's type."""

SET_UP = """# Fetch the course once in each session; this takes a minute or two.
import os, sys

COURSE = os.path.abspath("course")
if not os.path.exists(COURSE):
{fetch}
    !{{sys.executable}} -m pip install --quiet "{{COURSE}}[lab]"
os.chdir(os.path.join(COURSE, "{folder}"))
sys.path.insert(0, COURSE)
"""
CLONE = "    !git clone --quiet --depth 1 --branch {branch} {repository} {{COURSE}}"
UNPACK = """    assert os.path.exists("course.zip"), "Upload course.zip first: the folder at the left, then the arrow."
    import shutil

    shutil.unpack_archive("course.zip", COURSE)"""


def write(folder: Path, repository: str | None, branch: str = "main", root: Path = ROOT) -> list[Path]:
    """Write a copy of each notebook and exercise to `folder`, which must be new; returns the copies.

    With None for the repository, course.zip is written next to them, without solutions. Raises ValueError if something
    is there already, and for an address with what a shell would not take as one word.
    """
    refuse_used(folder)
    for word in () if repository is None else (repository, branch):
        if not word or set(word) & set(" '\"\\;&|<>$`(){}\n") or word.startswith("-"):
            raise ValueError(f"{word!r} is no address of a repository, or no name of a branch")
    fetch = UNPACK if repository is None else CLONE.format(branch=branch, repository=repository)
    copies = [_copy(path, folder / name / path.name, fetch) for name in FOLDERS for path in numbered(root / name)]
    if repository is None:
        _archive(folder / "course.zip", root)
    return copies


def _archive(target: Path, root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="course-release-") as scratch:
        release(Path(scratch, "course"), root)
        shutil.make_archive(str(target.with_suffix("")), "zip", Path(scratch, "course"))


def _copy(path: Path, target: Path, fetch: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    set_up = SET_UP.format(fetch=fetch, folder=path.parent.name)
    made = for_colab(json.loads(path.read_text(encoding="utf-8")), set_up)
    target.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", newline="\n")
    return target


def for_colab(notebook: dict[str, Any], set_up: str) -> dict[str, Any]:
    """The notebook with a GPU asked for and with the cell `set_up` before its first code."""
    cell = {"cell_type": "code", "id": "colab-set-up", "source": set_up, "metadata": {}, "outputs": []}
    cells = list(notebook["cells"])
    first = next(index for index, one in enumerate(cells) if one["cell_type"] == "code")
    cells.insert(first, {**cell, "execution_count": None})
    return {**notebook, "cells": cells, "metadata": {**notebook["metadata"], **GPU}}


def main(arguments: Sequence[str]) -> int:
    """`colab FOLDER [--repository URL]`: prints what was written."""
    parser = Parser("colab", "Copies for Google Colab.")
    parser.add_argument("folder", type=Path, help="a new folder for the copies")
    parser.add_argument("--repository", help="address that git clones; without it, course.zip is made for an upload")
    parser.add_argument("--branch", default="main", help="the branch to fetch (default: main)")
    options = parser.parse_args(arguments)
    copies = write(options.folder, options.repository, options.branch)
    source = options.repository or "what you upload: course.zip, next to them"
    print(f"{len(copies)} notebooks in {options.folder}, each with a cell that fetches {source}")
    return 0
