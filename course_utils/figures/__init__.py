"""The course's figures: colors fixed once for each kind of memory, a title that states the conclusion, alt
text always.

Each function returns a `Figure`. Sizes are bytes; `unit` says how to print them.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from .plotting import Bar, Chart, draw_rows
from .timelines import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "Figure", "Segment", "bars", "compare_bars", "lines", "stack", "timeline"]

BAR_HEIGHT, GAP, LINE = 46, 16, 16  # pixels: of bars, between them, of words above them


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
    """Horizontal bars stacked by kind, one for each row by its label, with their totals and a GPU's capacity
    marked.

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
    if values_in_legend or not all(
        draw.name_lines(*spot) for parts in named.values() for spot in draw.spots(parts)
    ):
        parts = [
            part for row in named.values() for part in row if values_in_legend or draw.width(part.size) >= 0.5
        ]
        y = draw_legend(canvas, parts, y + 6, unit, digits, values_in_legend)
    limit_lines = wrap(limit_name, 12, canvas.width - 2 * MARGIN - 12, bold=True)
    top = y + (16 + 14 * len(limit_lines) if limit else 14)
    steps = [GAP + BAR_HEIGHT + LINE * len(draw.heading(label)) for label in named]
    tops = [
        top + step - GAP - BAR_HEIGHT
        for step, top in zip(steps, accumulate(steps, initial=top), strict=False)
    ]
    bottom = tops[-1] + BAR_HEIGHT + 8
    draw.axis(top - 6, bottom)
    for (label, parts), y in zip(named.items(), tops, strict=True):
        draw.bar(label, parts, y)
    for (label, parts), y in zip(named.items(), tops, strict=True):
        draw.labels_inside(parts, y)
        draw.total(label, y)
    if limit:
        draw.limit_line(limit, limit_lines, top - 6, bottom)
    if nominal and nominal != limit:
        draw_nominal(canvas, draw.x(nominal), top - 6, draw.x(nominal), bottom, nominal)
    told = "; ".join(map(draw.told, named, named.values(), totals.values()))
    alt = alt or f"{stop(title)} Stacked bars. {told}.{f' The line marks {limit_name}.' if limit else ''}"
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
        widest = max(
            (text_width(line, 13) for label in self.totals for line in wrap(label, 13, 190)), default=0
        )
        return MARGIN + (widest + 12 if widest else 0)

    @cached_property
    def right(self) -> float:
        if self.canvas.narrow:
            return self.canvas.width - MARGIN
        ends = [text_width(self.shown(total), 14, bold=True) for total in self.totals.values()]
        ends += [text_width(self.verdict(total), 11) for total in self.totals.values()] if self.limit else []
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
        limits = [(limit_name, self.limit / one, "-")] if self.limit else []
        limits += [("", nominal / one, "--")] if nominal and nominal != self.limit else []
        draw_rows(ax, [*rows], bars, axis_label(self.unit), limits)

    def heading(self, label: str) -> list[str]:
        """The lines that a narrow picture writes above a bar: its name, and room for its total."""
        return [*wrap(label, 13, self.right - self.left), ""] if self.canvas.narrow else []

    def summary(self, label: str, between: str = ", ") -> str:
        total = self.totals[label]
        return self.shown(total) + (f"{between}{self.verdict(total)}" if self.limit else "")

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

    def placed(self, parts: Sequence[Segment]) -> Iterator[tuple[Segment, float]]:
        """Each segment and the x of its left end."""
        return zip(parts, map(self.x, accumulate((part.size for part in parts), initial=0)), strict=False)

    def spots(self, parts: Sequence[Segment]) -> Iterator[tuple[Segment, float, float]]:
        """Each segment, and the ends in pixels of the room for its label: the wider side where the line
        crosses it.
        """
        for part, left in self.placed(parts):
            right = left + self.width(part.size)
            if self.limit is not None and left < (line := self.x(self.limit)) < right:
                sides = (left, line - CLEAR + 2), (line + CLEAR - 2, right)
                left, right = max(sides, key=lambda side: side[1] - side[0])
            yield part, left, right

    @staticmethod
    def name_lines(part: Segment, left: float, right: float) -> list[str]:
        """The segment's name on the one or two lines that fit between two pixels, or nothing."""
        room = right - left - 8
        lines = wrap(part.name, 11, room)
        return lines if len(lines) <= 2 and all(text_width(line, 11) <= room for line in lines) else []

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
        for part, x in self.placed(parts):
            tip = f"{label and f'{label} · '}{part.name}: {format_bytes(part.size, self.unit, 3)}"
            look = {"data_kind": part.kind, "data_bytes": part.size}
            draw_swatch(self.canvas, x, y, self.width(part.size), BAR_HEIGHT, part.kind, tip, **look)
            if x > self.left and self.width(part.size) >= 2:
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
        for (part, left, right), (_, x) in zip(self.spots(parts), self.placed(parts), strict=True):
            fill = COLOURS[part.kind]
            shown = amount(part.size, self.unit, self.digits)
            ink = ink_on(fill)
            width = text_width(shown, 12) + 4
            center = (left + right) / 2
            if width <= right - left:
                names = self.name_lines(part, left, right)
                first = y + (19 if len(names) == 1 else 14)
                for index, line in enumerate(names):
                    self.canvas.text(center, first + 12 * index, line, 11, ink, text_anchor="middle")
                place, bold = (
                    (first + 12 * len(names) + 4, "bold") if names else (y + BAR_HEIGHT / 2 + 4.5, None)
                )
                size = 13 if names else 12
                self.canvas.text(center, place, shown, size, ink, text_anchor="middle", font_weight=bold)
            elif width <= self.width(part.size):  # no side of the line has room: write over it
                center = x + self.width(part.size) / 2
                self.canvas.halo_text(
                    center, y + BAR_HEIGHT / 2 + 4.5, shown, 12, fill, fill=ink, text_anchor="middle"
                )

    def total(self, label: str, y: float) -> None:
        """The total at the end of its bar, or beyond the capacity's line if that would
        run through the words.
        """
        total = self.totals[label]
        if self.canvas.narrow:
            for index, line in enumerate(reversed(self.heading(label))):
                self.canvas.halo_text(MARGIN, y - 6 - LINE * index, line, 13)
            look = {
                "fill": INK if self.limit is None else OVER if total > self.limit else UNDER,
                "font_weight": "bold",
            }
            self.canvas.halo_text(self.right, y - 6, self.summary(label), 13, text_anchor="end", **look)
            return
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
        self.canvas.halo_text(x, y + 37, verdict, 11, fill=OVER if total > self.limit else UNDER)

    def told(self, label: str, parts: Sequence[Segment], total: int) -> str:
        """A bar in the description: its total, its largest kind, whether it fits."""
        largest = max(parts, key=lambda part: part.size, default=None)
        most = (
            f", most of it {largest.name} ({amount(largest.size, self.unit, self.digits)})" if largest else ""
        )
        fits = f", {self.verdict(total)}" if self.limit else ""
        return f"{label + ': ' if label else ''}{self.shown(total)}{most}{fits}"


@reflowing
def compare_bars(
    estimated: Mapping[str, int], measured: Measurement, title: str, *, unit: str = "GB"
) -> Figure:
    """Estimate and measurement side by side, a pair of bars for each kind; differences are estimate minus
    measurement.

    The measurement is called what it was: measured, simulated or recorded. Kinds that are zero in both are
    left out.
    """
    word = measured.word
    pairs = {kind: (estimated.get(kind, 0), measured.breakdown[kind]) for kind in KINDS}
    pairs = {kind: pair for kind, pair in pairs.items() if any(pair)}
    totals = (sum(pair[0] for pair in pairs.values()), sum(pair[1] for pair in pairs.values()))
    digits = digits_for(max(totals), unit) + 1
    told = "; ".join(
        f"{words(k)} {' and '.join(amount(s, unit, digits) for s in pair)}" for k, pair in pairs.items()
    )
    both = [format_bytes(total, unit, digits) for total in totals]
    alt = (
        f"{stop(title)} Estimated and {word}, in {unit}: {told}. In total {both[0]} estimated and {both[1]}"
        f" {word}, a difference of {signed(totals[0] - totals[1], unit, digits)}."
    )
    canvas = Canvas()
    hatched = {"edgecolor": INK, "hatch": "///"}
    legend = [
        (f"estimated {both[0]}", 0, {"color": "#FFFFFF", **hatched}),
        (f"{word} {both[1]}", 0, {"color": "#6B6B6B"}),
    ]
    bars: list[Bar] = [(0, 0, legend, "")]
    for place, (kind, pair) in enumerate(pairs.items()):
        one, other = (size / UNITS[unit] for size in pair)
        bars.append((place - 0.19, 0.36, [("", one, {"color": f"{COLOURS[kind]}59", **hatched})], ""))
        gap = " ".join(filter(None, differences(pair, unit, digits)))
        bars.append((place + 0.19, 0.36, [("", other, {"color": COLOURS[kind]})], gap))
    onto = partial(draw_rows, names=[*map(words, pairs)], bars=bars, xlabel=axis_label(unit))
    if canvas.narrow:  # no room for columns
        two = {
            name: {k: pair[side] for k, pair in pairs.items()}
            for side, name in enumerate(("estimated", word))
        }
        note = ", ".join(f"{words(kind)} {signed(a - b, unit, digits)}" for kind, (a, b) in pairs.items())
        return stack(
            two, title, unit=unit, provenance=f"estimated − {word}: {note} · {measured.provenance}", alt=alt
        )
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
    return canvas.figure(
        bottom - 10, title, alt, str(measured.provenance), Chart(title, str(measured.provenance), onto)
    )


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
    shown = (*(amount_with_unit(size, unit, digits) for size in pair), *differences(pair, unit, digits))
    for text, x in zip(shown, LEDGER_COLUMNS, strict=True):
        canvas.text(x, y, text, 13, text_anchor="end", **more)


def differences(pair: tuple[int, int], unit: str, digits: int) -> tuple[str, str]:
    """Estimate minus measurement in bytes and in percent of the measurement, "" for what cannot be told."""
    gap = pair[0] - pair[1]
    return signed(gap, unit, digits), signed_percent(gap, pair[1]) if pair[1] and gap else ""


def signed(size: int, unit: str, digits: int) -> str:
    """A difference in bytes with its sign: "+0.12 GB", "−3.00 GB", and "0" only when it is exactly that."""
    if size == 0:
        return "0"
    return ("+" if size > 0 else "−") + amount_with_unit(abs(size), unit, digits)


def signed_percent(difference: int, whole: int) -> str:
    """`difference` in percent of `whole`, with its sign and two significant digits: "−0.65 %"."""
    percent = abs(100 * difference / whole)
    shown = f"{percent:,.0f}" if percent >= 10 else f"{percent:.2g}" if percent >= 0.01 else "<0.01"
    return f"{'+' if difference > 0 else '−'}{shown} %"


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
    digits = (0 if largest >= 1000 else 1 if largest >= 10 else 2) if digits is None else digits
    shown = {name: f"{value / one:,.{digits}f} {unit}".strip() for name, value in values.items()}
    canvas = Canvas()
    top = canvas.title(title) + 10
    named = {name: words(name) if name in COLOURS else name for name in values}
    look = {name: COLOURS["temporaries" if highlight not in ("", name) else kind] for name in values}
    colors = {name: COLOURS.get(name, color) for name, color in look.items()}
    above, step = (20, 56) if canvas.narrow else (0, 34)
    left = float(MARGIN) if above else MARGIN + 12 + max(text_width(name, 13) for name in named.values())
    room = canvas.width - left - MARGIN - 14 - max(text_width(text, 13, bold=True) for text in shown.values())
    for index, (name, value) in enumerate(values.items()):
        y = top + above + step * index
        width = room * value / one / (largest or 1)
        canvas.text(
            left if above else left - 10,
            y - 6 if above else y + 18,
            named[name],
            13,
            text_anchor=None if above else "end",
        )
        canvas.rect(left, y, width, 26, colors[name], f"{named[name]}: {shown[name]}", data_value=value)
        canvas.text(left + width + 8, y + 18, shown[name], 13, font_weight="bold")
    bottom = top + step * len(values)
    canvas.line(left, top - 4, left, bottom - 4, RULE)
    alt = f"{stop(title)} Bars: {'; '.join(f'{name} {text}' for name, text in shown.items())}."
    end = canvas.note(provenance, bottom + 16)
    rows = [
        (place, 0.7, [("", value / one, {"color": colors[name]})], shown[name])
        for place, (name, value) in enumerate(values.items())
    ]
    xlabel = axis_label(unit) if unit in UNITS else unit
    onto = partial(draw_rows, names=[*named.values()], bars=rows, xlabel=xlabel)
    return Figure(
        canvas.svg(end - (2 if provenance else 8), title, alt), alt, chart=Chart(title, provenance, onto)
    )
