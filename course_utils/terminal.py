"""Text for a terminal: no wider than it is, and in the colors of memory where it shows colors."""

import os
import re
import shutil
import sys
from textwrap import wrap

from .breakdown import MemoryBreakdown
from .palette import COLOURS, words
from .units import aligned, formatter, percent

WIDE = 1000
"""Characters: a width at which nothing is wrapped."""

SHORTEST_BAR = 10
GAP = 2
RESET = "\x1b[0m"
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def columns() -> int:
    """The width of the terminal in characters: COLUMNS if it is set, 80 where there is no terminal."""
    return shutil.get_terminal_size().columns


def shows_colors() -> bool:
    """True if stdout is a terminal that understands colors and nobody has set NO_COLOR (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    old_console = os.name == "nt" and "WT_SESSION" not in os.environ  # it may print the codes themselves
    return sys.stdout.isatty() and not old_console


def say(text: object) -> None:
    """Print a text within the terminal's width."""
    print(within(str(text), columns()))


def within(text: str, width: int) -> str:
    """The text with every line that is longer than `width` characters continued below.

    It continues below its last column if that begins in the left half, else below its first word; a line
    that begins at the edge continues two spaces from it. A word is never broken.
    """
    lines = []
    for line in text.split("\n"):
        left = " " * _left_of_continued(line, width)
        parts = wrap(line, width, subsequent_indent=left, break_long_words=False, break_on_hyphens=False)
        lines += parts if len(COLOR.sub("", line)) > width else [line]
    return "\n".join(lines)


def _left_of_continued(line: str, width: int) -> int:
    begin = [match.end() for match in re.finditer(r"\S {2,}(?=\S)", line)]
    if begin and begin[-1] <= width // 2:
        return begin[-1]
    return len(line) - len(line.lstrip()) or 2


def stack(breakdown: MemoryBreakdown, width: int, colors: bool = False) -> str:
    """A breakdown as lines: each kind with its bytes, its share and a bar of one color, then the total.

    Below 50 characters of width there are no bars.
    """
    shown = formatter(breakdown.total)
    sizes = {kind: size for kind, size in breakdown.items() if size}
    rows = [(words(kind), shown(size), percent(size / breakdown.total)) for kind, size in sizes.items()]
    *lines, total = aligned([*rows, ("total", shown(breakdown.total), "")]).split("\n")
    longest = width - max(map(len, lines), default=0) - GAP
    if longest >= SHORTEST_BAR:
        most = max(sizes.values(), default=1)
        bars = [(kind, "█" * round(longest * size / most)) for kind, size in sizes.items()]
        drawn = [in_color(bar, COLOURS[kind]) if colors and bar else bar for kind, bar in bars]
        lines = [f"{line}{' ' * GAP}{bar}".rstrip() for line, bar in zip(lines, drawn, strict=True)]
    title = [breakdown.title] if breakdown.title else []
    return "\n".join([*title, *lines, total])


def in_color(text: str, color: str) -> str:
    """The text in the nearest to "#RRGGBB" of the 216 colors that terminals have at numbers 16 to 231."""
    red, green, blue = (round(channel / 255 * 5) for channel in bytes.fromhex(color[1:]))
    return f"\x1b[38;5;{16 + 36 * red + 6 * green + blue}m{text}{RESET}"
