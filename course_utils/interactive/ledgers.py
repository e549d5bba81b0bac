"""Ledgers: named bytes, estimated and measured, as a table with totals and differences."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..units import UNITS, aligned, format_bytes, format_signed, html_table
from .saved import Saved


@dataclass(frozen=True, repr=False)
class Ledger:
    """Named bytes, each with what was measured where there is a measurement, and totals; draws itself as a table.

    `rows` holds (name, estimated bytes or None, measured bytes or None), `unit` is one for the whole table. `columns`
    names the two sides; the third column is the first minus the second, as everywhere in the course.
    """

    rows: Sequence[tuple[str, int | None, int | None]]
    unit: str
    measured: bool
    columns: tuple[str, str] = ("estimate", "measured")

    def totals(self) -> tuple[int, int]:
        """Bytes estimated and bytes measured, all rows together."""
        return sum(row[1] or 0 for row in self.rows), sum(row[2] or 0 for row in self.rows)

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The table as text: a header, the rows, a row of totals."""
        yield ("", *self.columns, " − ".join(self.columns)) if self.measured else ("", "bytes")
        for name, estimate, measured in [*self.rows, ("total", *self.totals())]:
            yield (name, *self._amounts(estimate, measured))

    def _amounts(self, estimate: int | None, measured: int | None) -> tuple[str, ...]:
        if not self.measured:
            return (self._spell(estimate),)
        difference = "–" if estimate is None or measured is None else format_signed(estimate - measured)
        return self._spell(estimate), self._spell(measured), difference

    def _spell(self, size: int | None) -> str:
        return "–" if size is None else format_bytes(size, self.unit, 0 if self.unit == "B" else 3)

    def __repr__(self) -> str:
        return aligned(self.cells())

    def _repr_html_(self) -> str:
        return html_table(self.cells(), totals=True)


Rows = Mapping[str, int] | Sequence[Saved]


def ledger(
    estimate: Rows,
    measured: Rows | None = None,
    unit: str | None = None,
    columns: tuple[str, str] = ("estimate", "measured"),
) -> Ledger:
    """A table of named bytes, and beside them what was measured, row by row in the order of `estimate`.

    Each side is a mapping from name to bytes, or what `saved_by` returns. `unit` is the largest that the total fills
    unless given; `columns` names the sides if they are not an estimate and a measurement. Raises ValueError for a
    unit that is not known.
    """
    left, right = _as_mapping(estimate), _as_mapping(measured or {})
    names = [*left, *(name for name in right if name not in left)]
    total = max(sum(left.values()), sum(right.values()))
    unit = unit or next((name for name in ("GB", "MB", "KB") if total >= UNITS[name]), "B")
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r}; known: {', '.join(UNITS)}")
    return Ledger([(name, left.get(name), right.get(name)) for name in names], unit, measured is not None, columns)


def show_ledger(
    estimate: Rows,
    measured: Rows | None = None,
    unit: str | None = None,
    columns: tuple[str, str] = ("estimate", "measured"),
) -> None:
    """Show `ledger(estimate, measured, unit, columns)` in the notebook, or print it in a terminal."""
    show(ledger(estimate, measured, unit, columns))


def _as_mapping(rows: Rows) -> dict[str, int]:
    """Name to bytes; saved tensors that share a name are added up."""
    if isinstance(rows, Mapping):
        return dict(rows)
    named: dict[str, int] = {}
    for row in rows:
        named[row.name] = named.get(row.name, 0) + row.bytes
    return named


def show(thing: object) -> None:
    """Draw in a notebook, print in a terminal."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        print(thing)
    else:
        sys.modules["IPython"].display.display(thing)
