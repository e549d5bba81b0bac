"""Ledgers: named bytes, estimated and measured, as a table with totals and differences."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..breakdown import KINDS
from ..units import UNITS, Table, format_bytes, format_signed
from .saved_tensors import Saved

Rows = Mapping[str, int] | Sequence[Saved]


def ledger(
    estimate: Rows,
    measured: Rows | None = None,
    unit: str | None = None,
    columns: tuple[str, str] = ("estimate", "measured"),
) -> Table:
    """A table of named bytes and what was measured, row by row in the order of `estimate`, with totals.

    Each side is a mapping from name to bytes, or what `saved_by` returns. `unit` is the largest that the
    total fills unless given. The third column is the first minus the second. Raises ValueError for a unit
    that is not known.
    """
    left = _as_mapping(estimate)
    right = _as_mapping(measured or {})
    names = [*left, *(name for name in right if name not in left)]
    totals = sum(left.values()), sum(right.values())
    shown_in = unit or next((name for name in ("GB", "MB", "KB") if max(totals) >= UNITS[name]), "B")
    decimals = 0 if shown_in == "B" else 3

    def spelled(size: int | None) -> str:
        return "–" if size is None else format_bytes(size, shown_in, decimals)

    rows: list[tuple[str, ...]] = [("", "bytes")]
    if measured is not None:
        rows = [("", *columns, " − ".join(columns))]
    sizes = [(name, left.get(name), right.get(name)) for name in names]
    for name, one, other in [*sizes, ("total", *totals)]:
        called = name.replace("_", " ") if name in KINDS else name
        row = (called, spelled(one))
        if measured is not None:
            difference = "–" if one is None or other is None else format_signed(one - other)
            row += (spelled(other), difference)
        rows.append(row)
    return Table(rows, totals=True)


def show_ledger(estimate: Rows, measured: Rows | None = None, **more: Any) -> None:
    """Show `ledger`, which has the same arguments, in the notebook, or print it in a terminal."""
    show(ledger(estimate, measured, **more))


def _as_mapping(rows: Rows) -> dict[str, int]:
    if isinstance(rows, Mapping):
        return dict(rows)
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.name] = sizes.get(row.name, 0) + row.bytes
    return sizes


def running_shell() -> Any:
    """IPython's shell where this runs in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def show(thing: object) -> None:
    """Draw in a notebook, print in a terminal."""
    if running_shell() is None:
        print(thing)
    else:
        sys.modules["IPython"].display.display(thing)
