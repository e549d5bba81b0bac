"""A table of results that says where it comes from."""

import os
import platform
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

TABLES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""The benchmark's tables by name: what each `shows`, and the `title` of those from recordings."""

Cell = str | int | float

BIAS_HEADINGS = ("signed median, %", "below the truth, %", "minimum ratio", "maximum ratio")
"""The headings above the four cells of a `Bias`."""


class Bias(NamedTuple):
    """The direction of errors: their signed median and the rows below the truth, in percent; the extreme
    ratios.
    """

    median: float
    below: float
    minimum: float
    maximum: float

    def __str__(self) -> str:
        shares = f"signed median {self.median:+.4f} %, {self.below:.0f} % of the rows below the truth"
        return f"{shares}, ratios {self.minimum:.4f} to {self.maximum:.4f}"


def bias_of(ratios: Iterable[float]) -> Bias:
    """The bias of answers, given as answer / truth of each row. Raises ValueError without a row.

    The cells of a table: `(*bias_of(ratios),)` under `BIAS_HEADINGS`. An answer equal to the truth is not
    below it.
    """
    from statistics import median  # not above: every command of the course reads the names of tables

    found = sorted(ratios)
    if not found:
        raise ValueError("there is no bias of no rows: give at least one ratio, answer / truth")
    below = 100 * sum(ratio < 1 for ratio in found) / len(found)
    return Bias(100 * (median(found) - 1), below, found[0], found[-1])


@dataclass(frozen=True, repr=False)
class Table:
    """Rows under headings, the sentence that they show, and notes."""

    name: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    source: str = ""

    def markdown(self) -> str:
        """The table as Markdown: the title, date, machine and source, the rows, the notes."""
        made = f"{date.today().isoformat()} · {machine()}" + (f" · {self.source}" if self.source else "")
        return "\n".join([f"## {self.title}", "", made, "", *self._body()])

    def page(self) -> str:
        """The same without day and machine: it depends on the results alone."""
        return "\n".join([f"## {self.title}", "", *self._body()])

    __repr__ = _repr_markdown_ = page

    def _body(self) -> list[str]:
        if not self.rows:
            return [*self.notes]
        shown = [tuple(_shown(cell) for cell in row) for row in self.rows]
        widths = [
            max(len(row[column]) for row in [self.headings, *shown]) for column in range(len(self.headings))
        ]
        numbers = [
            all(isinstance(row[column], (int, float)) for row in self.rows) for column in range(len(widths))
        ]
        lines = [_line(row, widths, numbers) for row in [self.headings, *shown]]
        rule = "|".join(
            ["", *(f"{'-' * (w + 1)}{':' if n else '-'}" for w, n in zip(widths, numbers, strict=True)), ""]
        )
        notes = [f"- {note}" for note in self.notes]
        return [lines[0], rule, *lines[1:], *([""] if notes else []), *notes]

    def save(self, folder: Path) -> None:
        """Write NAME.md into `folder`, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown() + "\n", encoding="utf-8")


def machine() -> str:
    """This machine in one line: cores that this process may use, processor, Python and torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.machine()}"
    return f"{cores} cores, {system}, Python {platform.python_version()}, torch {metadata.version('torch')}"


def _shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "/")
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.3f}"


def _line(row: tuple[str, ...], widths: list[int], numbers: list[bool]) -> str:
    cells = (f"{c:>{w}}" if n else f"{c:<{w}}" for c, w, n in zip(row, widths, numbers, strict=True))
    return f"| {' | '.join(cells)} |"
