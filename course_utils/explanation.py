"""The largest tensors at a measurement's peak, one row for those that differ only in the layer they belong to."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .units import format_bytes

if TYPE_CHECKING:
    from .measurement import Allocation

COLUMNS = ("count", "each", "together", "of peak", "kind", "module", "operation", "shape", "dtype", "made in", "line")


@dataclass(frozen=True)
class Row:
    """`count` tensors alike, of `bytes` each; `module` has a * for each number in which they differ."""

    count: int
    bytes: int
    kind: str
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    made_in: str
    line: str

    @property
    def total(self) -> int:
        """Bytes of all of them together."""
        return self.count * self.bytes


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `Measurement.explain` returns: the largest groups of tensors at the peak (`rows`), and what is left out.

    `rest` counts the tensors that are not shown, `rest_bytes` is what they take, `peak` all that is allocated.
    """

    title: str
    rows: tuple[Row, ...]
    rest: int
    rest_bytes: int
    peak: int

    def _cells(self, row: Row) -> tuple[str, ...]:
        share = f"{100 * row.total / self.peak:.1f} %"
        return (
            f"{row.count} ×", format_bytes(row.bytes), format_bytes(row.total), share, row.kind.replace("_", " "),
            row.module, row.operation, str(row.shape), row.dtype, row.made_in, row.line,
        )  # fmt: skip

    def _closing(self) -> str:
        if not self.rest:
            return "These are all the tensors at the peak."
        tensors = f"{self.rest:,} more tensor" + ("s" if self.rest > 1 else "")
        return f"{tensors}: {format_bytes(self.rest_bytes)}, {100 * self.rest_bytes / self.peak:.1f} % of the peak."

    def __repr__(self) -> str:
        table = [COLUMNS, *(self._cells(row) for row in self.rows)]
        widths = [max(len(cells[column]) for cells in table) for column in range(len(COLUMNS))]
        right = range(4)  # numbers
        lines = [
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in table
        ]
        return "\n".join([self.title, *lines, self._closing()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in self._cells(row)) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption style='text-align:left;white-space:nowrap'>{escape(self.title)}</caption>"
        return f"<table>{caption}<tr>{head}</tr>{body}</table><p><small>{escape(self._closing())}</small></p>"


def explained(allocations: Iterable["Allocation"], count: int, title: str) -> Explanation:
    """The `count` groups of `allocations` that take most. Raises ValueError unless count is a whole number above 0."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"count is {count!r}: how many rows to show, a whole number of at least 1")
    groups: dict[tuple[object, ...], list[Allocation]] = {}
    for item in allocations:
        alike = (item.kind, item.bytes, item.shape, item.dtype, item.operation, item.phase, item.step, item.line)
        groups.setdefault((*alike, re.sub(r"\d+", "*", item.module)), []).append(item)
    rows = sorted((_row(group) for group in groups.values()), key=lambda row: -row.total)
    left_out = rows[count:]
    return Explanation(
        title, tuple(rows[:count]), sum(row.count for row in left_out), sum(row.total for row in left_out),
        sum(row.total for row in rows),
    )  # fmt: skip


def _row(group: list["Allocation"]) -> Row:
    first = group[0]
    names = {item.module for item in group}
    module = first.module if len(names) == 1 else _pattern(names)
    made_in = f"{first.phase}, step {first.step}" if first.step else "set-up"
    return Row(
        len(group), first.bytes, first.kind, module, first.operation, first.shape, first.dtype, made_in, first.line
    )


def _pattern(names: set[str]) -> str:
    """One name for several that differ in numbers alone: blocks.*.mlp.0 for blocks.0.mlp.0 and blocks.1.mlp.0."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
