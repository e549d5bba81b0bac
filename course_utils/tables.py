"""Rows of text as a table: in columns for a terminal, as HTML for a notebook. The first row is the header."""

from collections.abc import Iterable, Sequence
from html import escape

Cells = Sequence[str]


def aligned(rows: Iterable[Cells], words: int = 1) -> str:
    """The rows below one another, two spaces between columns; the first `words` columns begin, the others end, in line.

    All rows have as many cells. Raises ValueError otherwise.
    """
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(_line(row, widths, words) for row in table)


def _line(row: Cells, widths: Sequence[int], words: int) -> str:
    columns = enumerate(zip(row, widths, strict=True))
    return "  ".join(cell.ljust(w) if index < words else cell.rjust(w) for index, (cell, w) in columns).rstrip()


def html_table(rows: Iterable[Cells], words: int = 1, *, totals: bool = False) -> str:
    """The same as HTML; with `totals` the last row stands out like the header."""
    header, *body = rows
    last = [body.pop()] if totals else []
    lines = [_html_line("th", header, words), *(_html_line("td", row, words) for row in body)]
    return f"<table>{''.join([*lines, *(_html_line('th', row, words) for row in last)])}</table>"


def _html_line(tag: str, row: Cells, words: int) -> str:
    left = [f"<{tag} style='text-align:left'>{escape(cell)}</{tag}>" for cell in row[:words]]
    return f"<tr>{''.join([*left, *(f'<{tag}>{escape(cell)}</{tag}>' for cell in row[words:])])}</tr>"
