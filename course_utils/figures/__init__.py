"""The course's figures: one color for each kind of memory, a title that states the conclusion, alt text.

Each function returns a `Figure`. Sizes are bytes; `unit` says how to print them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING

from ..breakdown import KINDS
from ..gpus import Gpu
from ..measurement import Measurement
from ..units import UNITS, format_bytes
from .axes import (
    COLOURS,
    OVER,
    UNDER,
    Row,
    Segment,
    amount,
    amount_with_unit,
    axis_label,
    digits_for,
    draw_legend,
    draw_limit,
    draw_nominal,
    draw_swatch,
    named_capacity,
    segments_of,
    stop,
    words,
)
from .canvas import (
    INK,
    MARGIN,
    QUIET,
    RULE,
    WIDE,
    Canvas,
    Figure,
    ink_on,
    number,
    reflowing,
    text_width,
    ticks,
    wrap,
)
from .curves import lines
from .plotting import Bar, Chart, Limit, draw_rows
from .timelines import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "Figure", "Segment", "bars", "compare_bars", "lines", "stack", "timeline"]

BAR_HEIGHT = 46  # pixels
GAP = 16  # pixels between bars
LINE = 16  # pixels of each line of words above a bar


@reflowing
def stack(
    rows: Mapping[str, Row],
    title: str,
    *,
    capacity: int | Gpu | None = None,
    capacity_label: str = "",
    nominal: int | None = None,
    provenance: str = "",
    unit: str = "GB",
    values_in_legend: bool = False,
    alt: str | None = None,
) -> Figure:
    """Horizontal bars stacked by kind, one for each labeled row, with totals and a GPU's capacity.

    A row is a breakdown (any mapping from kinds to bytes), a measurement, or a list of `Segment`s. `capacity`
    is bytes or a `Gpu`; `nominal` bytes, where they are not the capacity, get a dashed line of their own.
    Raises ValueError without any row.
    """
    if not rows:
        raise ValueError("a stack needs at least one row")
    named = {label: segments_of(row) for label, row in rows.items()}
    limit, limit_name = named_capacity(capacity, capacity_label, unit)
    totals = {label: sum(part.size for part in parts) for label, parts in named.items()}
    largest = max([*totals.values(), limit or 0])
    canvas = Canvas()
    digits = digits_for(largest, unit)
    draw = _Stack(canvas, unit, digits, limit, totals, max(largest, nominal or 0))
    y = canvas.title(title)
    if values_in_legend or not draw.has_room_for_names(named.values()):
        parts = draw.in_legend(named.values(), values_in_legend)
        y = draw_legend(canvas, parts, y + 6, unit, digits, values_in_legend)
    limit_lines = wrap(limit_name, 12, canvas.width - 2 * MARGIN - 12, bold=True)
    above = 16 + 14 * len(limit_lines) if limit else 14
    top = y + above
    tops = draw.tops(top)
    bottom = tops[-1] + BAR_HEIGHT + 8
    draw.axis(top - 6, bottom)
    for (label, parts), y in zip(named.items(), tops, strict=True):
        draw.bar(label, parts, y)
    for (label, parts), y in zip(named.items(), tops, strict=True):
        draw.labels_inside(parts, y)
        draw.total(label, y)
    # Lines come last: they leave gaps for the texts that are drawn already.
    if limit:
        draw.limit_line(limit, limit_lines, top - 6, bottom)
    if nominal and nominal != limit:
        draw_nominal(canvas, draw.x(nominal), top - 6, draw.x(nominal), bottom, nominal)
    alt = alt or draw.alt(title, named, limit_name)
    onto = partial(draw.onto, named, nominal, limit_name)
    return canvas.figure(bottom, title, alt, provenance, Chart(title, provenance, onto))


CLEAR = 4.0  # pixels that texts keep away from the line that marks the capacity


def _look(kind: str) -> dict[str, str]:
    """A kind's color, with an edge where it is too light to be seen on paper."""
    return {"color": COLOURS[kind], "edgecolor": RULE if kind in ("cached", "free") else "#FFFFFF"}


@dataclass(frozen=True)
class _Stack:
    """Draws bars: zero is at `left`, `largest` bytes at `right` (pixels); a line may mark `limit` bytes."""

    canvas: Canvas
    unit: str
    digits: int
    limit: int | None
    totals: Mapping[str, int]
    largest: int

    @cached_property
    def left(self) -> float:
        if self.canvas.narrow:
            return MARGIN
        lines = [line for label in self.totals for line in wrap(label, 13, 190)]
        if not lines:
            return MARGIN
        return MARGIN + (max(text_width(line, 13) for line in lines) + 12)

    @cached_property
    def right(self) -> float:
        if self.canvas.narrow:
            return self.canvas.width - MARGIN
        ends = [text_width(self.shown(total), 14, bold=True) for total in self.totals.values()]
        if self.limit:
            ends += [text_width(self.verdict(total), 11) for total in self.totals.values()]
        return self.canvas.width - 12 - max(ends)

    def onto(
        self, rows: Mapping[str, Sequence[Segment]], nominal: int | None, limit_name: str, ax: "Axes"
    ) -> None:
        """The same bars by matplotlib."""
        one = UNITS[self.unit]
        bars = list[Bar]()
        for place, (label, row) in enumerate(rows.items()):
            pieces = [(part.name, part.size / one, _look(part.kind)) for part in row]
            bars.append((place, 0.7, pieces, self.summary(label, "\n")))
        limits = list[Limit]()
        if self.limit:
            limits.append((limit_name, self.limit / one, "-"))
        if nominal and nominal != self.limit:
            limits.append(("", nominal / one, "--"))
        draw_rows(ax, [*rows], bars, axis_label(self.unit), limits)

    def heading(self, label: str) -> list[str]:
        """The lines that a narrow picture writes above a bar: its name, and room for its total."""
        if not self.canvas.narrow:
            return []
        return [*wrap(label, 13, self.right - self.left), ""]

    def tops(self, top: float) -> list[float]:
        """The y of each bar's upper edge, where the first one's heading begins at `top`."""
        tops = []
        for label in self.totals:
            step = GAP + BAR_HEIGHT + LINE * len(self.heading(label))
            tops.append(top + step - GAP - BAR_HEIGHT)
            top += step
        return tops

    def has_room_for_names(self, rows: Iterable[Sequence[Segment]]) -> bool:
        """True if every segment's name fits inside it, so that no legend is needed."""
        return all(self.name_lines(*spot) for parts in rows for spot in self.spots(parts))

    def in_legend(self, rows: Iterable[Sequence[Segment]], values: bool) -> list[Segment]:
        """The segments that a legend names: all if it gives values, else those that can be seen."""
        return [part for row in rows for part in row if values or self.width(part.size) >= 0.5]

    def summary(self, label: str, between: str = ", ") -> str:
        total = self.totals[label]
        if not self.limit:
            return self.shown(total)
        return f"{self.shown(total)}{between}{self.verdict(total)}"

    def shown(self, size: int) -> str:
        return format_bytes(size, self.unit, self.digits)

    def x(self, size: float) -> float:
        return self.left + self.width(size)

    def width(self, size: float) -> float:
        return (self.right - self.left) * size / max(1, self.largest)

    def verdict(self, total: int) -> str:
        assert self.limit is not None
        gap = self.shown(abs(self.limit - total))
        return f"{gap} too much" if total > self.limit else f"{gap} free"

    def verdict_ink(self, total: int) -> str:
        if self.limit is None:
            return INK
        return OVER if total > self.limit else UNDER

    def placed(self, parts: Sequence[Segment]) -> Iterator[tuple[Segment, float]]:
        """Each segment and the x of its left end."""
        return zip(parts, map(self.x, accumulate((part.size for part in parts), initial=0)), strict=False)

    def spots(self, parts: Sequence[Segment]) -> Iterator[tuple[Segment, float, float]]:
        """Each segment, and the ends in pixels of the room for its label.

        Where the line crosses it, that is the wider side.
        """
        line = None if self.limit is None else self.x(self.limit)
        for part, left in self.placed(parts):
            right = left + self.width(part.size)
            if line is not None and left < line < right:
                sides = (left, line - CLEAR + 2), (line + CLEAR - 2, right)
                left, right = max(sides, key=lambda side: side[1] - side[0])
            yield part, left, right

    @staticmethod
    def name_lines(part: Segment, left: float, right: float) -> list[str]:
        """The segment's name on the one or two lines that fit between two pixels, or nothing."""
        room = right - left - 8
        lines = wrap(part.name, 11, room)
        fits = len(lines) <= 2 and all(text_width(line, 11) <= room for line in lines)
        return lines if fits else []

    def axis(self, top: float, bottom: float) -> None:
        for tick in ticks(0, self.largest / UNITS[self.unit], 4 if self.canvas.narrow else 7):
            x = self.x(tick * UNITS[self.unit])
            self.canvas.line(x, top, x, bottom + 5)
            self.canvas.text(x, bottom + 20, number(tick), 12, QUIET, text_anchor="middle")
        self.canvas.line(self.left, top, self.left, bottom, RULE)
        self.canvas.line(self.left, bottom, self.right, bottom, RULE)
        middle = (self.left + self.right) / 2
        self.canvas.text(middle, bottom + 40, axis_label(self.unit), 12, QUIET, text_anchor="middle")

    def bar(self, label: str, parts: Sequence[Segment], y: float) -> None:
        lines = [] if self.canvas.narrow else wrap(label, 13, 190)
        for index, line in enumerate(lines):
            offset = y + BAR_HEIGHT / 2 + 4.5 + 15 * (index - (len(lines) - 1) / 2)
            self.canvas.text(self.left - 10, offset, line, 13, text_anchor="end")
        before = f"{label} · " if label else ""
        for part, x in self.placed(parts):
            width = self.width(part.size)
            tip = f"{before}{part.name}: {format_bytes(part.size, self.unit, 3)}"
            look = {"data_kind": part.kind, "data_bytes": part.size}
            draw_swatch(self.canvas, x, y, width, BAR_HEIGHT, part.kind, tip, **look)
            if x > self.left and width >= 2:
                self.canvas.line(x, y, x, y + BAR_HEIGHT, "#FFFFFF", stroke_width=1)

    def limit_line(self, limit: int, name: Sequence[str], top: float, bottom: float) -> None:
        x = self.x(limit)
        half = max(text_width(line, 12, bold=True) for line in name) / 2
        draw_limit(self.canvas, x, top, x, bottom, limit)
        x = min(max(x, MARGIN + half), self.canvas.width - MARGIN - half)
        for index, line in enumerate(reversed(name)):
            self.canvas.text(
                x, top - 6 - 14 * index, line, 12, OVER, text_anchor="middle", font_weight="bold"
            )

    def labels_inside(self, parts: Sequence[Segment], y: float) -> None:
        """Each segment's name and size inside it, its size alone, or nothing, as there is room."""
        level = y + BAR_HEIGHT / 2 + 4.5
        for (part, left, right), (_, x) in zip(self.spots(parts), self.placed(parts), strict=True):
            fill = COLOURS[part.kind]
            ink = ink_on(fill)
            shown = amount(part.size, self.unit, self.digits)
            room = text_width(shown, 12) + 4
            if room <= right - left:
                center = (left + right) / 2
                names = self.name_lines(part, left, right)
                if names:
                    self.name_and_size(center, y, names, shown, ink)
                else:
                    self.canvas.text(center, level, shown, 12, ink, text_anchor="middle")
            elif room <= self.width(part.size):  # no side of the line has room: write over it
                center = x + self.width(part.size) / 2
                self.canvas.halo_text(center, level, shown, 12, fill, fill=ink, text_anchor="middle")

    def name_and_size(self, center: float, y: float, names: Sequence[str], shown: str, ink: str) -> None:
        """One or two lines of a name, and a size in bold below them, inside a bar at `y`."""
        first = y + (19 if len(names) == 1 else 14)
        for index, line in enumerate(names):
            self.canvas.text(center, first + 12 * index, line, 11, ink, text_anchor="middle")
        below = first + 12 * len(names) + 4
        self.canvas.text(center, below, shown, 13, ink, text_anchor="middle", font_weight="bold")

    def total_above(self, label: str, y: float) -> None:
        """The name and total above a bar of a narrow picture."""
        for index, line in enumerate(reversed(self.heading(label))):
            self.canvas.halo_text(MARGIN, y - 6 - LINE * index, line, 13)
        look = {"fill": self.verdict_ink(self.totals[label]), "font_weight": "bold"}
        self.canvas.halo_text(self.right, y - 6, self.summary(label), 13, text_anchor="end", **look)

    def total(self, label: str, y: float) -> None:
        """The total at the end of its bar, or beyond the capacity's line if that would cross the words."""
        if self.canvas.narrow:
            self.total_above(label, y)
            return
        total = self.totals[label]
        x = self.x(total) + 8
        shown = self.shown(total)
        if self.limit is None:
            self.canvas.halo_text(x, y + BAR_HEIGHT / 2 + 5, shown, 14, font_weight="bold")
            return
        verdict = self.verdict(total)
        line = self.x(self.limit)
        width = max(text_width(shown, 14, bold=True), text_width(verdict, 11))
        if x - CLEAR - 2 <= line <= x + width + CLEAR:
            x = line + 8
        self.canvas.halo_text(x, y + 21, shown, 14, font_weight="bold")
        self.canvas.halo_text(x, y + 37, verdict, 11, fill=self.verdict_ink(total))

    def alt(self, title: str, rows: Mapping[str, Sequence[Segment]], limit_name: str) -> str:
        told = "; ".join(self.told(label, parts) for label, parts in rows.items())
        alt = f"{stop(title)} Stacked bars. {told}."
        if self.limit:
            alt += f" The line marks {limit_name}."
        return alt

    def told(self, label: str, parts: Sequence[Segment]) -> str:
        """A bar in the description: its total, its largest kind, whether it fits."""
        total = self.totals[label]
        told = f"{label}: {self.shown(total)}" if label else self.shown(total)
        if parts:
            largest = max(parts, key=lambda part: part.size)
            told += f", most of it {largest.name} ({amount(largest.size, self.unit, self.digits)})"
        if self.limit:
            told += f", {self.verdict(total)}"
        return told


@reflowing
def compare_bars(
    estimated: Mapping[str, int], measured: Measurement, title: str, *, unit: str = "GB"
) -> Figure:
    """Estimate and measurement side by side, a pair of bars for each kind, and the gap of each.

    Differences are estimate minus measurement. The measurement is called what it was: measured, simulated or
    recorded. Kinds that are zero in both are left out.
    """
    word = measured.word
    both = {kind: (estimated.get(kind, 0), measured.breakdown[kind]) for kind in KINDS}
    pairs = {kind: pair for kind, pair in both.items() if any(pair)}
    totals = (sum(pair[0] for pair in pairs.values()), sum(pair[1] for pair in pairs.values()))
    digits = digits_for(max(totals), unit) + 1
    alt = _compared_alt(title, pairs, totals, word, unit, digits)
    canvas = Canvas()
    if canvas.narrow:  # no room for columns
        return _stacked_pairs(pairs, title, measured, unit, digits, alt)
    bottom = _ledger(canvas, title, pairs, totals, word, unit, digits)
    bars = _paired_bars(pairs, totals, word, unit, digits)
    onto = partial(draw_rows, names=[*map(words, pairs)], bars=bars, xlabel=axis_label(unit))
    provenance = str(measured.provenance)
    return canvas.figure(bottom - 10, title, alt, provenance, Chart(title, provenance, onto))


Pairs = Mapping[str, tuple[int, int]]  # by kind, what was estimated and what was measured


def _compared_alt(
    title: str, pairs: Pairs, totals: tuple[int, int], word: str, unit: str, digits: int
) -> str:
    told = "; ".join(
        f"{words(kind)} {amount(estimated, unit, digits)} and {amount(measured, unit, digits)}"
        for kind, (estimated, measured) in pairs.items()
    )
    estimated, measured = (format_bytes(total, unit, digits) for total in totals)
    return (
        f"{stop(title)} Estimated and {word}, in {unit}: {told}."
        f" In total {estimated} estimated and {measured} {word},"
        f" a difference of {signed(totals[0] - totals[1], unit, digits)}."
    )


def _paired_bars(pairs: Pairs, totals: tuple[int, int], word: str, unit: str, digits: int) -> list[Bar]:
    """The bars for matplotlib, each pair around its row, after two of no size that a legend names."""
    estimated, measured = (format_bytes(total, unit, digits) for total in totals)
    hatched = {"edgecolor": INK, "hatch": "///"}
    legend = [
        (f"estimated {estimated}", 0, {"color": "#FFFFFF", **hatched}),
        (f"{word} {measured}", 0, {"color": "#6B6B6B"}),
    ]
    bars: list[Bar] = [(0, 0, legend, "")]
    for place, (kind, pair) in enumerate(pairs.items()):
        one, other = (size / UNITS[unit] for size in pair)
        bars.append((place - 0.19, 0.36, [("", one, {"color": f"{COLOURS[kind]}59", **hatched})], ""))
        gap = " ".join(filter(None, differences(pair, unit, digits)))
        bars.append((place + 0.19, 0.36, [("", other, {"color": COLOURS[kind]})], gap))
    return bars


def _stacked_pairs(
    pairs: Pairs, title: str, measured: Measurement, unit: str, digits: int, alt: str
) -> Figure:
    """The same as two stacked bars, with the differences in the small print."""
    word = measured.word
    rows = {
        "estimated": {kind: pair[0] for kind, pair in pairs.items()},
        word: {kind: pair[1] for kind, pair in pairs.items()},
    }
    gaps = ", ".join(f"{words(kind)} {signed(a - b, unit, digits)}" for kind, (a, b) in pairs.items())
    note = f"estimated − {word}: {gaps} · {measured.provenance}"
    return stack(rows, title, unit=unit, provenance=note, alt=alt)


def _ledger(
    canvas: Canvas, title: str, pairs: Pairs, totals: tuple[int, int], word: str, unit: str, digits: int
) -> float:
    """Draws title, bars and numbers in columns; returns the y below the last row."""
    scale = 175 / max([1, *(size for pair in pairs.values() for size in pair)])
    top = canvas.title(title) + 22
    _ledger_head(canvas, top, word)
    for index, (kind, pair) in enumerate(pairs.items()):
        _ledger_row(canvas, kind, pair, top + 14 + 40 * index, scale, word)
        _ledger_numbers(canvas, pair, top + 37 + 40 * index, unit, digits)
    bottom = top + 14 + 40 * len(pairs)
    canvas.line(MARGIN, bottom + 4, WIDE - MARGIN, bottom + 4, RULE)
    canvas.text(140, bottom + 25, "total", 13, text_anchor="end", font_weight="bold")
    _ledger_numbers(canvas, totals, bottom + 25, unit, digits, font_weight="bold")
    return bottom


LEDGER_COLUMNS = (430, 522, 626, WIDE - MARGIN)
"""The right ends, in pixels, of the columns estimated, measured (or simulated), difference and relative."""


def _ledger_head(canvas: Canvas, y: float, word: str) -> None:
    canvas.rect(150, y - 10, 22, 10, "#FFFFFF", stroke=INK, stroke_width=1.2)
    canvas.hatch(150, y - 10, 22, 10, INK)
    canvas.text(179, y, "estimated", 12)
    canvas.rect(250, y - 10, 22, 10, "#6B6B6B")
    canvas.text(279, y, word, 12)
    for name, x in zip(("estimated", word, "difference", "relative"), LEDGER_COLUMNS, strict=True):
        canvas.text(x, y, name, 12, QUIET, text_anchor="end")
    canvas.line(MARGIN, y + 9, WIDE - MARGIN, y + 9, RULE)


def _ledger_row(canvas: Canvas, kind: str, pair: tuple[int, int], y: float, scale: float, word: str) -> None:
    color = COLOURS[kind]
    estimated, measured = (scale * size for size in pair)
    outline = color if kind == "weight_copies" else INK
    canvas.text(140, y + 23, words(kind), 13, text_anchor="end")
    canvas.rect(
        150, y + 5, estimated, 12, "#FFFFFF", stroke=outline, stroke_width=0.8, data_estimated=pair[0]
    )
    tip = f"{words(kind)}, estimated: {format_bytes(pair[0])}"
    canvas.rect(150, y + 5, estimated, 12, color, tip, fill_opacity=0.35)
    canvas.hatch(150, y + 5, estimated, 12, outline)
    tip = f"{words(kind)}, {word}: {format_bytes(pair[1])}"
    canvas.rect(150, y + 19, measured, 12, color, tip, data_measured=pair[1], data_kind=kind)


def _ledger_numbers(canvas: Canvas, pair: tuple[int, int], y: float, unit: str, digits: int, **more) -> None:
    estimated, measured = (amount_with_unit(size, unit, digits) for size in pair)
    gap, relative = differences(pair, unit, digits)
    for text, x in zip((estimated, measured, gap, relative), LEDGER_COLUMNS, strict=True):
        canvas.text(x, y, text, 13, text_anchor="end", **more)


def differences(pair: tuple[int, int], unit: str, digits: int) -> tuple[str, str]:
    """Estimate minus measurement in bytes and in percent of the measurement, "" for what cannot be told."""
    gap = pair[0] - pair[1]
    relative = signed_percent(gap, pair[1]) if pair[1] and gap else ""
    return signed(gap, unit, digits), relative


def signed(size: int, unit: str, digits: int) -> str:
    """A difference in bytes with its sign: "+0.12 GB", "−3.00 GB", and "0" only when it is exactly that."""
    if size == 0:
        return "0"
    sign = "+" if size > 0 else "−"
    return sign + amount_with_unit(abs(size), unit, digits)


def signed_percent(difference: int, whole: int) -> str:
    """`difference` in percent of `whole`, with its sign and two significant digits: "−0.65 %"."""
    percent = abs(100 * difference / whole)
    if percent >= 10:
        shown = f"{percent:,.0f}"
    elif percent >= 0.01:
        shown = f"{percent:.2g}"
    else:
        shown = "<0.01"
    sign = "+" if difference > 0 else "−"
    return f"{sign}{shown} %"


@reflowing
def bars(
    values: Mapping[str, float],
    title: str,
    *,
    unit: str = "GB",
    digits: int | None = None,
    kind: str = "parameters",
    highlight: str = "",
    provenance: str = "",
) -> Figure:
    """One horizontal bar for each value, its value at its end.

    Values are bytes where `unit` is one of bytes ("GB", "MiB"); otherwise plain numbers in that unit ("ms",
    "%"). A bar named after a kind of memory gets that kind's color, all others that of `kind`; `highlight`
    names a bar to set off. Raises ValueError for negative values.
    """
    if not values or any(value < 0 for value in values.values()):
        raise ValueError("bars need at least one value, and none below zero")
    one = UNITS.get(unit, 1)
    largest = max(values.values()) / one
    if digits is None:
        digits = _bar_digits(largest)
    shown = {name: f"{value / one:,.{digits}f} {unit}".strip() for name, value in values.items()}
    named = {name: words(name) if name in COLOURS else name for name in values}
    colors = {name: _bar_color(name, kind, highlight) for name in values}
    canvas = Canvas()
    top = canvas.title(title) + 10
    if canvas.narrow:  # names have lines of their own above the bars
        above = 20
        step = 56
        left = float(MARGIN)
    else:
        above = 0
        step = 34
        left = MARGIN + 12 + max(text_width(name, 13) for name in named.values())
    room = canvas.width - left - MARGIN - 14 - max(text_width(text, 13, bold=True) for text in shown.values())
    for index, (name, value) in enumerate(values.items()):
        y = top + above + step * index
        width = room * value / one / (largest or 1)
        _bar_name(canvas, named[name], left, y)
        canvas.rect(left, y, width, 26, colors[name], f"{named[name]}: {shown[name]}", data_value=value)
        canvas.text(left + width + 8, y + 18, shown[name], 13, font_weight="bold")
    bottom = top + step * len(values)
    canvas.line(left, top - 4, left, bottom - 4, RULE)
    alt = f"{stop(title)} Bars: {'; '.join(f'{name} {text}' for name, text in shown.items())}."
    end = canvas.note(provenance, bottom + 16)
    height = end - (2 if provenance else 8)
    rows = [
        (place, 0.7, [("", value / one, {"color": colors[name]})], shown[name])
        for place, (name, value) in enumerate(values.items())
    ]
    xlabel = axis_label(unit) if unit in UNITS else unit
    onto = partial(draw_rows, names=[*named.values()], bars=rows, xlabel=xlabel)
    return Figure(canvas.svg(height, title, alt), alt, chart=Chart(title, provenance, onto))


def _bar_digits(largest: float) -> int:
    if largest >= 1000:
        return 0
    return 1 if largest >= 10 else 2


def _bar_name(canvas: Canvas, name: str, left: float, y: float) -> None:
    """The name of a bar at (`left`, `y`): above it in a narrow picture, else next to it."""
    if canvas.narrow:
        canvas.text(left, y - 6, name, 13)
    else:
        canvas.text(left - 10, y + 18, name, 13, text_anchor="end")


def _bar_color(name: str, kind: str, highlight: str) -> str:
    """A kind's own color; of all others that of `kind`, or grey where another bar is set off."""
    other = COLOURS[kind] if highlight in ("", name) else COLOURS["temporaries"]
    return COLOURS.get(name, other)
