"""Shared parts of the course's figures: one color for each kind of memory, names, numbers, legends."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..gpus import Gpu
from ..measurement import Measurement
from ..units import UNITS, format_bytes
from .canvas import INK, MARGIN, QUIET, RULE, Canvas, number, short, text_width, ticks, wrap

COLOURS = {
    "parameters": "#0072B2",
    "weight_copies": "#12305E",
    "gradients": "#8FD0F7",
    "optimizer_states": "#E69F00",
    "activations": "#009E73",
    "inputs": "#F0E442",
    "communication": "#D55E00",
    "workspaces": "#662200",
    "temporaries": "#BFBFBF",
    "cached": "#E9E9E9",
    "free": "#FFFFFF",
}
"""One color for each kind of memory, after Okabe and Ito's palette.

`cached` and `free` belong to the allocator. They are told apart with each kind of color blindness, and
neighbors in a stack by their lightness alone, as in grey print.
"""

OVER, UNDER = "#A8071A", "#00624A"

UNIT_NOTES = {
    "KB": "1 KB = 10³ bytes",
    "MB": "1 MB = 10⁶ bytes",
    "GB": "1 GB = 10⁹ bytes",
    "TB": "1 TB = 10¹² bytes",
    "KiB": "1 KiB = 2¹⁰ bytes",
    "MiB": "1 MiB = 2²⁰ bytes",
    "GiB": "1 GiB = 2³⁰ bytes",
    "TiB": "1 TiB = 2⁴⁰ bytes",
}


def axis_label(unit: str) -> str:
    """A unit of bytes with its meaning: "GB (1 GB = 10⁹ bytes)"."""
    return f"{unit} ({UNIT_NOTES[unit]})" if unit in UNIT_NOTES else "bytes"


@dataclass(frozen=True)
class Segment:
    """A part of a stack with its own name ("fp32 momentum"): `size` bytes in the color of its `kind`."""

    name: str
    size: int
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in COLOURS:
            raise ValueError(f"unknown kind of memory {self.kind!r}; known: {', '.join(COLOURS)}")


Row = Mapping[str, int] | Sequence[Segment] | Measurement


def segments_of(row: Row) -> list[Segment]:
    """The parts of one bar that are not empty, in stacking order. Raises ValueError for unknown kinds."""
    if isinstance(row, Measurement):
        row = row.breakdown
    if isinstance(row, Mapping):
        parts = [Segment(words(kind), size, kind) for kind, size in row.items()]
        row = sorted(parts, key=lambda part: list(COLOURS).index(part.kind))
    return [part for part in row if part.size > 0]


def words(kind: str) -> str:
    return kind.replace("_", " ")


def named_capacity(capacity: int | Gpu | None, label: str, unit: str) -> tuple[int | None, str]:
    if isinstance(capacity, Gpu):
        return capacity.memory, label or f"{capacity.name}: {format_bytes(capacity.memory, unit, 1)}"
    if capacity and not label:
        label = f"{number(round(capacity / UNITS[unit], 1))} {unit} GPU"
    return capacity, label


def digits_for(largest: int, unit: str) -> int:
    amount = largest / UNITS[unit]
    if unit == "B" or amount >= 1000:
        return 0
    if amount >= 10:
        return 1
    return 2 if amount >= 1 else 3


def amount(size: int, unit: str, digits: int) -> str:
    return f"{size / UNITS[unit]:,.{digits}f}"


def amount_with_unit(size: int, unit: str, digits: int) -> str:
    """Format bytes as `format_bytes` does, but in a smaller unit where the size would round to zero."""
    vanishes = size != 0 and round(abs(size) / UNITS[unit], digits) == 0
    return format_bytes(size) if vanishes else format_bytes(size, unit, digits)


def draw_legend(
    canvas: Canvas,
    parts: Sequence[Segment],
    y: float,
    unit: str,
    digits: int,
    values: bool,
    left: float = MARGIN,
) -> float:
    """Draws a swatch for each kind with its parts' names, and sizes with `values`; returns the y below."""
    names: dict[str, dict[str, None]] = {}
    for part in sorted(parts, key=lambda part: list(COLOURS).index(part.kind)):
        shown = f"{part.name} {amount_with_unit(part.size, unit, digits)}" if values else part.name
        names.setdefault(part.kind, {})[shown] = None
    entries = ((kind, ", ".join(shown)) for kind, shown in names.items())

    def swatch(x: float, y: float, size: float, kind: str) -> None:
        draw_swatch(canvas, x, y, size, size, kind)

    return legend(canvas, entries, y, swatch, left)


def legend(
    canvas: Canvas,
    entries: Iterable[tuple[str, str]],
    y: float,
    swatch: Callable[[float, float, float, str], object],
    left: float = MARGIN,
    scale: float = 1,
    quiet: Collection[str] = (),
) -> float:
    """Draws swatches with words, breaking lines as needed; returns the y below.

    `swatch` takes x, y, size and the entry's name.
    """
    x = float(left)
    baseline = y + 12 * scale
    for name, words in entries:
        lines = wrap(words, 12 * scale, canvas.width - left - 28 * scale)
        wide = 28 * scale + max(text_width(line, 12 * scale) for line in lines)
        if x + wide > canvas.width and x > left:
            x = float(left)
            baseline += 19 * scale
        swatch(x, baseline - 10 * scale, 12 * scale, name)
        for index, line in enumerate(lines):
            if index > 0:
                baseline += 15 * scale
            canvas.text(x + 18 * scale, baseline, line, 12 * scale, QUIET if name in quiet else INK)
        x += wide
    return baseline + 6 * scale


def draw_swatch(
    canvas: Canvas, x: float, y: float, width: float, height: float, kind: str, tip: str = "", **more
) -> None:
    outline = {}
    if kind in ("cached", "free"):
        outline = {"stroke": RULE, "stroke_width": 1}
    canvas.rect(x, y, width, height, COLOURS[kind], tip, **outline, **more)
    if kind == "cached":
        canvas.hatch(x, y, width, height, "#B5B5B5")


def draw_limit(canvas: Canvas, x1: float, y1: float, x2: float, y2: float, limit: int) -> None:
    """The line of what a program gets of a GPU, around the texts that are drawn already."""
    edge = {"stroke": "#FFFFFF", "stroke_width": 5}
    line = {"stroke": OVER, "stroke_width": 2, "data_capacity": limit}
    canvas.line_around_texts(x1, y1, x2, y2, edge, line)


def draw_nominal(canvas: Canvas, x1: float, y1: float, x2: float, y2: float, nominal: int) -> None:
    look = {"stroke": OVER, "stroke_width": 1, "stroke_dasharray": "4 3", "data_nominal": nominal}
    canvas.line_around_texts(x1, y1, x2, y2, look)


def draw_peak(canvas: Canvas, x: float, y: float, size: int) -> None:
    canvas.path(f"M{short(x)} {short(y)}m-5 -8h10l-5 7z", fill=INK, data_peak=size)


@dataclass(frozen=True)
class Plot:
    """The place of a plot on its canvas, in pixels; `largest` bytes are as high as the plot."""

    canvas: Canvas
    left: float
    right: float
    top: float
    bottom: float
    largest: float

    def y(self, size: float) -> float:
        return self.bottom - (self.bottom - self.top) * size / self.largest

    def value_axis(self, unit: str, count: int = 5, size: float = 12) -> None:
        """Draws horizontal grid lines with their values in `unit`."""
        for tick in ticks(0, self.largest / UNITS[unit], count):
            at = self.y(tick * UNITS[unit])
            self.canvas.line(self.left, at, self.right, at)
            self.canvas.text(self.left - 8, at + size / 3, number(tick), size, QUIET, text_anchor="end")

    def limit(self, limit: int) -> None:
        draw_limit(self.canvas, self.left, self.y(limit), self.right, self.y(limit), limit)


def largest_kinds(sizes: Mapping[str, int], count: int = 4) -> list[str]:
    """The kinds that take most, largest first; none that takes nothing."""
    taking = sorted(((size, kind) for kind, size in sizes.items() if size), reverse=True)
    return [kind for _, kind in taking[:count]]


def stop(title: str) -> str:
    return title if title.endswith((".", "!", "?")) else f"{title}."
