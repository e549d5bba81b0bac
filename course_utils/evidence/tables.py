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

_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")

TABLES: dict[str, dict[str, str]] = tomllib.loads(_TEXT)
"""The tables by name: what each `shows`, and the `title` of those from recordings."""

Cell = str | int | float

BIAS_HEADINGS = ("signed median, %", "below the truth, %", "minimum ratio", "maximum ratio")
"""The headings above the four cells of a `Bias`."""


class Bias(NamedTuple):
    """The direction of errors: signed median and rows below the truth, in percent; the extreme ratios."""

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
        made = f"{date.today().isoformat()} · {machine()}"
        if self.source:
            made += f" · {self.source}"
        return "\n".join([f"## {self.title}", "", made, "", *self._body()])

    def page(self) -> str:
        """The same without day and machine: it depends on the results alone."""
        return "\n".join([f"## {self.title}", "", *self._body()])

    __repr__ = _repr_markdown_ = page

    def _body(self) -> list[str]:
        if not self.rows:
            return list(self.notes)
        shown = [self.headings, *(tuple(_shown(cell) for cell in row) for row in self.rows)]
        columns = range(len(self.headings))
        widths = [max(len(row[column]) for row in shown) for column in columns]
        numbers = [all(isinstance(row[column], (int, float)) for row in self.rows) for column in columns]
        heading, *rows = [_line(row, widths, numbers) for row in shown]
        lines = [heading, _rule(widths, numbers), *rows]
        if self.notes:
            lines.append("")
        return lines + [f"- {note}" for note in self.notes]

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
    cells: list[str] = []
    for cell, width, is_number in zip(row, widths, numbers, strict=True):
        cells.append(cell.rjust(width) if is_number else cell.ljust(width))
    return f"| {' | '.join(cells)} |"


def _rule(widths: list[int], numbers: list[bool]) -> str:
    """The line below the headings; in Markdown, a colon at its end aligns a column to the right."""
    cells: list[str] = []
    for width, is_number in zip(widths, numbers, strict=True):
        cells.append("-" * (width + 1) + (":" if is_number else "-"))
    return f"|{'|'.join(cells)}|"
