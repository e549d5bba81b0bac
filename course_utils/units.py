"""Bytes inside, GB and GiB only where a person reads them: the one formatter and the one parser."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

KB = 10**3
MB = 10**6
GB = 10**9
TB = 10**12
KiB = 2**10
MiB = 2**20
GiB = 2**30
TiB = 2**40

UNITS = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
"""Bytes in each unit; the letter i means a power of two (IEC 80000-13)."""

BLOCK = 512
"""Bytes: CUDA's caching allocator hands out multiples of this.

kMinBlockSize in c10/cuda/CUDACachingAllocator.
"""


def round_up(size: int, multiple: int = BLOCK) -> int:
    """The smallest multiple of `multiple` (bytes) that holds `size` bytes: what the allocator takes."""
    return -(-size // multiple) * multiple


def format_bytes(size: int, unit: str | None = None, digits: int | None = None) -> str:
    """`size` bytes for a reader, always with its unit: `format_bytes(3_115_222_400)` is "3.12 GB".

    `unit` is one of `UNITS`; without it the largest decimal unit that leaves at least 1, when rounded, is
    taken. `digits` counts decimals; without it three significant figures are shown, below 1 three decimals,
    of bytes none. Raises ValueError for a unit that is not known.
    """
    if not unit:
        unit = next((name for name in ("TB", "GB", "MB", "KB") if abs(size) >= 0.9995 * UNITS[name]), "B")
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r}; known: {', '.join(UNITS)}")
    amount = size / UNITS[unit]
    if digits is None:
        digits = 0 if unit == "B" else _decimals(amount)
    return f"{amount:,.{digits}f} {unit}".replace("-", "−")


def _decimals(amount: float) -> int:
    """The decimals that show three significant figures, or three decimals below 1."""
    # Rounded first: 9.996 has to count as 10.00, which needs one decimal less.
    return next((n for n in (3, 2, 1) if abs(round(amount, n)) < 10 ** (3 - n)), 0)


def binary(size: int) -> str:
    """`size` bytes as torch's own message prints them."""
    unit = next((name for name in ("GiB", "MiB", "KiB") if size > UNITS[name]), "")
    return format_bytes(size, unit, 2) if unit else f"{size} bytes"


def format_signed(size: int) -> str:
    """A difference in bytes as `format_bytes` has it, with its sign: "+120 MB"; an exact 0 is "0"."""
    if size == 0:
        return "0"
    sign = "+" if size > 0 else "−"
    return f"{sign}{format_bytes(abs(size))}"


def plus_minus(number: float, digits: int = 0) -> str:
    """A difference with its sign and so many decimals: "+1,024", "−19,968"; an exact 0 is "0"."""
    if number == 0:
        return "0"
    return f"{number:+,.{digits}f}".replace("-", "−")


def percent(part: float, digits: int = 0) -> str:
    """A part of 1 as "63 %", with so many decimals."""
    return f"{100 * part:.{digits}f} %"


def each(shown: Callable[[Any], str], **values: Any) -> dict[str, str]:
    """Values by name, as `shown` puts them into words: `each(format_bytes, weights=2 * N)`."""
    return {name: shown(value) for name, value in values.items()}


def formatter(total: int) -> Callable[[int], str]:
    """A function that formats the parts of a total of so many bytes, all in one suitable unit.

    It shows three decimals, so a table can be added up by eye: GB for totals of 1 GB and more, MB below, KB
    below 1 MB.
    """
    unit = next((unit for unit in ("GB", "MB") if abs(total) >= UNITS[unit]), "KB")
    return lambda size: format_bytes(size, unit, 3)


def parse_bytes(text: str | int) -> int:
    """Bytes meant by "80 GB", "1.5GiB", "512" or an int. Raises ValueError saying what it takes.

    A comma or an underscore parts thousands: "1,5 GB" could mean two things, and is refused.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    amount = _amount(text) if isinstance(text, str) else math.inf
    if amount == math.inf:
        raise ValueError(
            f"{text!r} is not an amount of memory: write a number and a unit, such as '80 GB' or '16 GiB'"
        )
    return round(amount)


def _amount(text: str) -> float:
    """Bytes meant by a text; infinite where it is no amount of memory, or too large for a float."""
    number = r"((?:[0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"\s*{number}\s*([A-Za-z]*)\s*", text)
    if match is None:
        return math.inf
    sizes = {name.lower(): size for name, size in UNITS.items()}
    size = sizes.get((match[2] or "B").lower())
    if size is None:
        return math.inf
    return float(re.sub("[,_]", "", match[1])) * size


# Tables. Not by `tabulate`: these modules need the standard library alone, as they run in a browser and
# before set-up, too.

Cells = Sequence[str]


def cut(line: str, width: int) -> str:
    """The line, or its beginning and "…" where it is longer than `width` characters."""
    return line.rstrip() if len(line) <= width else f"{line[: width - 1]}…"


def aligned(rows: Iterable[Cells], words: int | range = 1) -> str:
    """The rows below one another, two spaces between columns.

    The first `words` columns, or that range, begin in line. The other columns end in line. All rows have as
    many cells. Raises ValueError otherwise.
    """
    table = [tuple(row) for row in rows]
    left = range(words) if isinstance(words, int) else words
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        if index in left:
            columns.append([cell.ljust(width) for cell in column])
        else:
            columns.append([cell.rjust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def html_table(
    rows: Iterable[Cells],
    words: int = 1,
    *,
    header: bool = True,
    totals: bool = False,
    caption: str = "",
    hints: Sequence[str] = (),
) -> str:
    """The rows as an HTML table whose first `words` columns are aligned left.

    The first row is a `header` unless that is False; with `totals` the last row is highlighted, too. `hints`
    are shown when the pointer is on a row.
    """
    table = list(rows)
    lines = list[str]()
    marked_rows = set[int]()
    if header:
        marked_rows.add(0)
    if totals:
        marked_rows.add(len(table) - 1)
    for index, row in enumerate(table):
        tag = "th" if index in marked_rows else "td"
        left = "".join(f"<{tag} style='text-align:left'>{escape(cell)}</{tag}>" for cell in row[:words])
        right = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row[words:])
        hint = f" title='{escape(hints[index])}'" if index < len(hints) else ""
        lines.append(f"<tr{hint}>{left}{right}</tr>")
    above = ""
    if caption:
        above = f"<caption style='text-align:left;white-space:nowrap'>{escape(caption)}</caption>"
    return f"<table>{above}{''.join(lines)}</table>"


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of text under a header row; draws itself in a notebook, and aligned in a terminal."""

    rows: Sequence[Cells]
    words: int = 1
    totals: bool = False

    def __repr__(self) -> str:
        return aligned(self.rows, self.words)

    def _repr_html_(self) -> str:
        return html_table(self.rows, self.words, totals=self.totals)


CODE = re.compile(r"`([^`]+)`")


def marked(text: str) -> str:
    """`text` as HTML, with code between backticks marked as such."""
    return CODE.sub(r"<code>\1</code>", escape(text))
