"""A lesson executed on a GPU: how many cells measured live, why others did not, and what failed."""

import re
import time
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from ..interactive.notebook_runs import read_notebook, run, text_of

LIVE = re.compile(r"live on [^·\n]+ · torch")
"""The words of a measurement that was made on a GPU here; `doctor` has a row "live on a GPU", which is none.
"""

NOT_LIVE = re.compile(r"needs [\d.]+ \w+, .+? has [\d.]+ \w+ free|this GPU \(compute capability[^<\n]*")
"""The reasons for a simulation although there is a GPU."""


def execute_live(path: Path) -> dict[str, Any]:
    """Execute a notebook, and write nothing.

    Returns its seconds, how many cells ran, in how many a measurement was live, the reasons why others were
    not, and the cells that failed.
    """
    notebook = read_notebook(path)
    start = time.monotonic()
    run(notebook, path.parent, allow_errors=True, environment={"COURSE_SOURCE": "auto"})
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = [text_of(cell) for cell in cells]
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cells": len(cells),
        "live": sum(bool(LIVE.search(text)) for text in texts),
        "not_live": sorted({found for text in texts for found in NOT_LIVE.findall(text)}),
        "failed": [problem for cell in cells for problem in _problems(cell)],
    }


def _problems(cell: NotebookNode) -> list[str]:
    """Errors of a cell that its source does not announce, each in one line."""
    if "raises-exception" in cell.metadata.get("tags", ()):
        return []
    first_line = next(iter(cell.source.splitlines()), "")
    found = []
    for output in cell.outputs:
        if output.output_type == "error":
            message = output.evalue.partition("\n")[0]
            found.append(f"{first_line}: {output.ename}: {message[:200]}")
    return found
