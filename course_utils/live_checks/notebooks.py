"""A lesson or its solutions executed with the GPU as the source: does each cell pass, and how long does it take?"""

import re
import time
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ..authoring.execute import run
from ..authoring.sources import read_notebook

ROOT = Path(__file__).resolve().parents[2]

LIVE = re.compile(r"live on [^·\n]+ · torch")
"""How a measurement says that it was made on a GPU here; `doctor` has a row "live on a GPU", which is none."""

NOT_LIVE = re.compile(r"needs [\d.]+ \w+, .+? has [\d.]+ \w+ free|this GPU \(compute capability[^<\n]*")
"""How one says why it was simulated although there is a GPU."""

AS_CARD = "from course_utils.measuring.devices import as_card\n_ = as_card({name!r})"


def execute_live(path: Path, as_card: str = "", source: str = "auto") -> dict[str, Any]:
    """Execute a notebook, `source` deciding where "auto" measures. Nothing is written.

    Returns its seconds, how many cells ran, in how many a measurement was live, the reasons why others were not, and
    the cells that failed. With `as_card` its kernel first takes no more of the GPU than that card has.
    """
    notebook = read_notebook(path)
    if as_card:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(AS_CARD.format(name=as_card)))
    start = time.monotonic()
    run(notebook, path.parent, allow_errors=True, environment={"COURSE_SOURCE": source})
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = [text_of(cell) for cell in cells]
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cells": len(cells),
        "live": sum(bool(LIVE.search(text)) for text in texts),
        "not_live": sorted({found for text in texts for found in NOT_LIVE.findall(text)}),
        "failed": [problem for cell in cells for problem in problems(cell)],
    }


def text_of(cell: NotebookNode) -> str:
    """All text that a cell has put out."""
    parts: list[str] = []
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts += [str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def problems(cell: NotebookNode) -> list[str]:
    """What a cell raised that its source does not announce, and checks that did not pass, each in one line."""
    if "raises-exception" in cell.metadata.get("tags", ()):
        return []
    first = next(iter(cell.source.splitlines()), "")
    return [
        f"{first}: {output.ename}: {output.evalue.partition(chr(10))[0][:200]}"
        for output in cell.outputs
        if output.output_type == "error"
    ]
