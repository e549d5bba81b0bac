"""The course's figures: colors fixed once for each kind of memory, a title that states the conclusion, alt text always.

`stack` and `timeline` show where the bytes are, `compare_bars` lays an estimate beside a measurement, `bars` and
`lines` show the rest. Each returns a `Figure`. Sizes are bytes; `unit` says how to print them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..breakdown import KINDS, MemoryBreakdown
from ..gpus import Gpu
from ..measurement import Measurement
from ..units import UNITS, format_bytes
from .axes import (
    COLOURS,
    OVER,
    UNDER,
    UNIT_NOTES,
    Row,
    Segment,
    amount,
    amount_with_unit,
    digits_for,
    draw_legend,
    draw_swatch,
    named_capacity,
    segments_of,
    stop,
    total_of,
    words,
)
from .canvas import INK, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, ink_on, number, text_width, ticks, wrap
from .curves import lines
from .timelines import timeline

__all__ = ["COLOURS", "Figure", "Segment", "bars", "compare_bars", "lines", "stack", "stack_svg", "timeline"]


def stack(
    rows: Mapping[str, Row] | Sequence[MemoryBreakdown],
    title: str,
    *,
    capacity: int | Gpu | None = None,
    capacity_label: str = "",
    provenance: str = "",
    unit: str = "GB",
    digits: int | None = None,
    alt: str | None = None,
) -> Figure:
    """Horizontal bars stacked by kind, one for each row, with their totals and a GPU's capacity marked.

    A row is a breakdown (any mapping from kinds to bytes), a measurement, or a list of `Segment`s; `rows` maps labels
    to them, or lists breakdowns that carry labels. `capacity` is bytes or a `Gpu`. Raises ValueError without any row.
    """
    named = _named_rows(rows)
    limit, limit_name = named_capacity(capacity, capacity_label, unit)
    alt = alt or _stack_alt(named, title, limit, limit_name, unit, digits)
    return Figure(stack_svg(named, title, limit, limit_name, provenance, unit, digits, alt), alt)


def stack_svg(
    rows: Mapping[str, Sequence[Segment]],
    title: str,
    limit: int | None,
    limit_name: str,
    provenance: str,
    unit: str,
    digits: int | None,
    alt: str,
    values_in_legend: bool = False,
    nominal: int | None = None,
) -> str:
    """The SVG of `stack`; the explorer calls it at each key, so it takes about a millisecond.

    `nominal` bytes, where they are not the limit, get a dashed line of their own.
    """
    canvas = Canvas()
    totals = {label: total_of(segments) for label, segments in rows.items()}
    digits = digits_for(max([*totals.values(), limit or 0]), unit) if digits is None else digits
    scale = _stack_scale(rows, totals, limit, unit, digits, nominal or 0)
    y = canvas.title(title)
    if values_in_legend or not all(_all_named(segments, scale) for segments in rows.values()):
        parts = [part for row in rows.values() for part in row if values_in_legend or scale.width(part.size) >= 0.5]
        y = draw_legend(canvas, parts, y + 6, unit, digits, values_in_legend)
    top = y + (30 if limit else 14)
    bottom = top + len(rows) * BAR_STEP - (BAR_STEP - BAR_HEIGHT) + 8
    _value_axis(canvas, scale, top - 6, bottom, unit)
    for index, (label, segments) in enumerate(rows.items()):
        _bar(canvas, label, segments, scale, top + index * BAR_STEP, unit)
    if limit:
        _limit_line(canvas, scale, limit, f"{limit_name}", top - 6, bottom)
    if nominal and nominal != limit:
        x = scale.x(nominal)
        canvas.line(x, top - 6, x, bottom, OVER, stroke_width=1, stroke_dasharray="4 3", data_nominal=nominal)
    for index, (label, segments) in enumerate(rows.items()):
        _labels_inside(canvas, segments, scale, top + index * BAR_STEP, digits, unit)
        _bar_total(canvas, totals[label], scale, top + index * BAR_STEP, digits, unit)
    end = canvas.note(provenance, bottom + 62)
    return canvas.svg(end - (2 if provenance else 10), title, alt)


BAR_HEIGHT, BAR_STEP = 46, 62


@dataclass(frozen=True)
class _Scale:
    """Bytes to pixels along a bar: zero is at `left`, `largest` bytes at `right`; a line may mark `limit` bytes."""

    left: float
    right: float
    largest: int
    limit: int | None = None

    def x(self, size: float) -> float:
        return self.left + self.width(size)

    def width(self, size: float) -> float:
        return (self.right - self.left) * size / max(1, self.largest)


def _named_rows(rows: Mapping[str, Row] | Sequence[MemoryBreakdown]) -> dict[str, list[Segment]]:
    if not rows:
        raise ValueError("a stack needs at least one row")
    if not isinstance(rows, Mapping):
        rows = {row.label or f"{index}": row for index, row in enumerate(rows, 1)}
    return {label: segments_of(row) for label, row in rows.items()}


def _stack_scale(
    rows: Mapping[str, Sequence[Segment]],
    totals: Mapping[str, int],
    limit: int | None,
    unit: str,
    digits: int,
    nominal: int,
) -> _Scale:
    """Bars between the widest label on their left and the widest total, with its verdict, on their right."""
    widest = max((text_width(line, 13) for label in rows for line in wrap(label, 13, 190)), default=0)
    beside = [text_width(format_bytes(total, unit, digits), 14, bold=True) for total in totals.values()]
    beside += [text_width(_verdict(total, limit, unit, digits), 11) for total in totals.values()] if limit else []
    left = MARGIN + (widest + 12 if widest else 0)
    return _Scale(left, WIDTH - 12 - max(beside), max([*totals.values(), limit or 0, nominal]), limit)


def _starts(segments: Sequence[Segment]) -> list[int]:
    """Where each segment begins, in bytes."""
    return [0, *accumulate(part.size for part in segments)][:-1]


CLEAR = 4.0
"""Pixels that texts keep away from the line that marks the capacity."""


def _spot(start: int, part: Segment, scale: _Scale) -> tuple[float, float]:
    """Left and right end, in pixels, of the room for a segment's label: the wider side where the line crosses it."""
    left, right = scale.x(start), scale.x(start + part.size)
    if scale.limit is None or not left < (line := scale.x(scale.limit)) < right:
        return left, right
    return max((left, line - CLEAR + 2), (line + CLEAR - 2, right), key=lambda side: side[1] - side[0])


def _name_lines(part: Segment, room: float) -> list[str]:
    """The segment's name on the one or two lines that fit into `room` pixels, or nothing."""
    lines = wrap(part.name, 11, room - 8)
    return lines if len(lines) <= 2 and all(text_width(line, 11) <= room - 8 for line in lines) else []


def _all_named(segments: Sequence[Segment], scale: _Scale) -> bool:
    spots = (_spot(start, part, scale) for start, part in zip(_starts(segments), segments, strict=True))
    return all(_name_lines(part, right - left) for part, (left, right) in zip(segments, spots, strict=True))


def _bar(canvas: Canvas, label: str, segments: Sequence[Segment], scale: _Scale, y: float, unit: str) -> None:
    lines = wrap(label, 13, 190)
    for index, line in enumerate(lines):
        offset = y + BAR_HEIGHT / 2 + 4.5 + 15 * (index - (len(lines) - 1) / 2)
        canvas.text(scale.left - 10, offset, line, 13, text_anchor="end")
    for start, part in zip(_starts(segments), segments, strict=True):
        x, width = scale.x(start), scale.width(part.size)
        tip = f"{part.name}: {format_bytes(part.size, unit, 3)}"
        draw_swatch(canvas, x, y, width, BAR_HEIGHT, part.kind, tip, data_kind=part.kind, data_bytes=part.size)
        if start:
            canvas.line(x, y, x, y + BAR_HEIGHT, "#FFFFFF", stroke_width=1)


def _labels_inside(
    canvas: Canvas, segments: Sequence[Segment], scale: _Scale, y: float, digits: int, unit: str
) -> None:
    for start, part in zip(_starts(segments), segments, strict=True):
        left, right = _spot(start, part, scale)
        shown = amount(part.size, unit, digits)
        if text_width(shown, 12) + 4 <= right - left:
            _label_inside(canvas, part, (left + right) / 2, right - left, y, shown)
        elif text_width(shown, 12) + 4 <= scale.width(part.size):  # no side of the line has room: write over it
            fill, center = COLOURS[part.kind], scale.x(start + part.size / 2)
            canvas.halo_text(center, y + BAR_HEIGHT / 2 + 4.5, shown, 12, fill, fill=ink_on(fill), text_anchor="middle")


def _label_inside(canvas: Canvas, part: Segment, center: float, room: float, y: float, amount: str) -> None:
    ink = ink_on(COLOURS[part.kind])
    lines = _name_lines(part, room)
    if lines:
        first = y + (19 if len(lines) == 1 else 14)
        for index, line in enumerate(lines):
            canvas.text(center, first + 12 * index, line, 11, ink, text_anchor="middle")
        canvas.text(center, first + 12 * len(lines) + 4, amount, 13, ink, text_anchor="middle", font_weight="bold")
    else:
        canvas.text(center, y + BAR_HEIGHT / 2 + 4.5, amount, 12, ink, text_anchor="middle")


def _bar_total(canvas: Canvas, total: int, scale: _Scale, y: float, digits: int, unit: str) -> None:
    """The total beside its bar, or beyond the line that marks the capacity if it would run through the words."""
    limit, shown = scale.limit, format_bytes(total, unit, digits)
    if limit is None:
        canvas.halo_text(scale.x(total) + 8, y + BAR_HEIGHT / 2 + 5, shown, 14, font_weight="bold")
        return
    verdict = _verdict(total, limit, unit, digits)
    x, line = scale.x(total) + 8, scale.x(limit)
    width = max(text_width(shown, 14, bold=True), text_width(verdict, 11))
    if x - CLEAR - 2 <= line <= x + width + CLEAR:
        x = line + 8
    canvas.halo_text(x, y + 21, shown, 14, font_weight="bold")
    canvas.halo_text(x, y + 37, verdict, 11, fill=OVER if total > limit else UNDER)


def _verdict(total: int, limit: int, unit: str, digits: int) -> str:
    gap = format_bytes(abs(limit - total), unit, digits)
    return f"{gap} too much" if total > limit else f"{gap} free"


def _limit_line(canvas: Canvas, scale: _Scale, limit: int, name: str, top: float, bottom: float) -> None:
    x, half = scale.x(limit), text_width(name, 12, bold=True) / 2
    canvas.line(x, top, x, bottom, "#FFFFFF", stroke_width=5)
    canvas.line(x, top, x, bottom, OVER, stroke_width=2, data_capacity=limit)
    x = min(max(x, MARGIN + half), WIDTH - MARGIN - half)
    canvas.text(x, top - 6, name, 12, OVER, text_anchor="middle", font_weight="bold")


def _value_axis(canvas: Canvas, scale: _Scale, top: float, bottom: float, unit: str) -> None:
    for tick in ticks(0, scale.largest / UNITS[unit]):
        x = scale.x(tick * UNITS[unit])
        canvas.line(x, top, x, bottom + 5)
        canvas.text(x, bottom + 20, number(tick), 12, QUIET, text_anchor="middle")
    canvas.line(scale.left, top, scale.left, bottom, RULE)
    canvas.line(scale.left, bottom, scale.right, bottom, RULE)
    label = f"{unit} ({UNIT_NOTES[unit]})" if unit in UNIT_NOTES else "bytes"
    canvas.text((scale.left + scale.right) / 2, bottom + 40, label, 12, QUIET, text_anchor="middle")


def _stack_alt(
    rows: Mapping[str, Sequence[Segment]], title: str, limit: int | None, limit_name: str, unit: str, digits: int | None
) -> str:
    digits = digits_for(max([*map(total_of, rows.values()), limit or 0]), unit) if digits is None else digits
    told = []
    for label, segments in rows.items():
        total = total_of(segments)
        largest = max(segments, key=lambda part: part.size, default=None)
        most = f", most of it {largest.name} ({amount(largest.size, unit, digits)})" if largest and total else ""
        fits = f", {_verdict(total, limit, unit, digits)}" if limit else ""
        told.append(f"{label + ': ' if label else ''}{format_bytes(total, unit, digits)}{most}{fits}")
    marked = f" The line marks {limit_name}." if limit else ""
    return f"{stop(title)} Stacked bars. {'; '.join(told)}.{marked}"


def compare_bars(
    estimated: Mapping[str, int],
    measured: Mapping[str, int] | Measurement,
    title: str,
    *,
    provenance: str = "",
    unit: str = "GB",
    digits: int | None = None,
    alt: str | None = None,
) -> Figure:
    """Estimate and measurement side by side, a pair of bars for each kind; differences are estimate minus measurement.

    Both map kinds to bytes; a measurement brings its own provenance, and is called what it was: measured, simulated or
    recorded. Kinds that are zero in both are left out.
    """
    word = "measured"
    if isinstance(measured, Measurement):
        word, provenance, measured = measured.word, provenance or str(measured.provenance), measured.breakdown
    pairs = {kind: (estimated.get(kind, 0), measured.get(kind, 0)) for kind in KINDS}
    pairs = {kind: pair for kind, pair in pairs.items() if any(pair)}
    totals = (sum(pair[0] for pair in pairs.values()), sum(pair[1] for pair in pairs.values()))
    digits = digits_for(max(totals), unit) + 1 if digits is None else digits
    canvas = Canvas()
    top = canvas.title(title) + 22
    scale = _Scale(150, 490, max([size for pair in pairs.values() for size in pair], default=0))
    _ledger_head(canvas, top, word)
    for index, (kind, pair) in enumerate(pairs.items()):
        _ledger_row(canvas, kind, pair, top + 14 + 40 * index, scale, unit, digits)
    bottom = top + 14 + 40 * len(pairs)
    _ledger_total(canvas, totals, bottom, unit, digits)
    alt = alt or _compare_alt(pairs, totals, title, word, unit, digits)
    end = canvas.note(provenance, bottom + 52)
    return Figure(canvas.svg(end - (2 if provenance else 10), title, alt), alt)


LEDGER_COLUMNS = (590, 685, 785, WIDTH - MARGIN)
"""Where the columns estimated, measured (or simulated), difference and relative end, in pixels."""


def _ledger_head(canvas: Canvas, y: float, word: str) -> None:
    canvas.rect(150, y - 10, 22, 10, "#FFFFFF", stroke=INK, stroke_width=1.2)
    canvas.hatch(150, y - 10, 22, 10, INK)
    canvas.text(179, y, "estimated", 12)
    canvas.rect(265, y - 10, 22, 10, "#6B6B6B")
    canvas.text(294, y, word, 12)
    for name, x in zip(("estimated", word, "difference", "relative"), LEDGER_COLUMNS, strict=True):
        canvas.text(x, y, name, 12, QUIET, text_anchor="end")
    canvas.line(MARGIN, y + 9, WIDTH - MARGIN, y + 9, RULE)


def _ledger_row(
    canvas: Canvas, kind: str, pair: tuple[int, int], y: float, scale: _Scale, unit: str, digits: int
) -> None:
    estimated, measured = pair
    color = COLOURS[kind]
    outline = color if kind == "weight_copies" else INK
    canvas.text(140, y + 23, words(kind), 13, text_anchor="end")
    canvas.rect(
        150, y + 5, scale.width(estimated), 12, "#FFFFFF", stroke=outline, stroke_width=0.8, data_estimated=estimated
    )
    canvas.rect(150, y + 5, scale.width(estimated), 12, color, fill_opacity=0.35)
    canvas.hatch(150, y + 5, scale.width(estimated), 12, outline)
    canvas.rect(150, y + 19, scale.width(measured), 12, color, data_measured=measured, data_kind=kind)
    _ledger_numbers(canvas, pair, y + 23, unit, digits)


def _ledger_total(canvas: Canvas, totals: tuple[int, int], y: float, unit: str, digits: int) -> None:
    canvas.line(MARGIN, y + 4, WIDTH - MARGIN, y + 4, RULE)
    canvas.text(140, y + 25, "total", 13, text_anchor="end", font_weight="bold")
    _ledger_numbers(canvas, totals, y + 25, unit, digits, font_weight="bold")


def _ledger_numbers(canvas: Canvas, pair: tuple[int, int], y: float, unit: str, digits: int, **more) -> None:
    difference = pair[0] - pair[1]
    relative = f"{signed_percent(difference, pair[1])}" if pair[1] and difference else ""
    shown = (*(amount_with_unit(size, unit, digits) for size in pair), signed(difference, unit, digits), relative)
    for text, x in zip(shown, LEDGER_COLUMNS, strict=True):
        canvas.text(x, y, text, 13, text_anchor="end", **more)


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


def _compare_alt(
    pairs: Mapping[str, tuple[int, int]], totals: tuple[int, int], title: str, word: str, unit: str, digits: int
) -> str:
    told = [
        f"{words(kind)} {amount(one, unit, digits)} and {amount(other, unit, digits)}"
        for kind, (one, other) in pairs.items()
    ]
    return (
        f"{stop(title)} Estimated and {word}, in {unit}: {'; '.join(told)}. In total "
        f"{format_bytes(totals[0], unit, digits)} estimated and {format_bytes(totals[1], unit, digits)} {word}, "
        f"a difference of {signed(totals[0] - totals[1], unit, digits)}."
    )


# ------------------------------------------------------------------------------------------------------- bars and lines


def bars(
    values: Mapping[str, float],
    title: str,
    *,
    unit: str = "GB",
    digits: int | None = None,
    kind: str = "parameters",
    highlight: str = "",
    provenance: str = "",
    alt: str | None = None,
) -> Figure:
    """One horizontal bar for each value, longest scale first to last as given, its value at its end.

    Values are bytes where `unit` is one of bytes ("GB", "MiB"); otherwise plain numbers in that unit ("ms", "%").
    A bar named after a kind of memory gets that kind's color, all others that of `kind`; `highlight` names a bar to
    set off. Raises ValueError for negative values.
    """
    if not values or any(value < 0 for value in values.values()):
        raise ValueError("bars need at least one value, and none below zero")
    one = UNITS.get(unit, 1)
    largest = max(values.values()) / one
    digits = (0 if largest >= 1000 else 1 if largest >= 10 else 2) if digits is None else digits
    shown = {name: f"{value / one:,.{digits}f} {unit}".strip() for name, value in values.items()}
    canvas = Canvas()
    top = canvas.title(title) + 10
    left = MARGIN + 12 + max(text_width(name, 13) for name in values)
    room = WIDTH - left - MARGIN - 14 - max(text_width(text, 13, bold=True) for text in shown.values())
    for index, (name, value) in enumerate(values.items()):
        y, color = (
            top + 34 * index,
            COLOURS.get(name, COLOURS[kind if name == highlight or not highlight else "temporaries"]),
        )
        canvas.text(left - 10, y + 18, words(name) if name in COLOURS else name, 13, text_anchor="end")
        canvas.rect(left, y, room * value / one / (largest or 1), 26, color, data_value=value)
        canvas.text(left + room * value / one / (largest or 1) + 8, y + 18, shown[name], 13, font_weight="bold")
    bottom = top + 34 * len(values)
    canvas.line(left, top - 4, left, bottom - 4, RULE)
    alt = alt or f"{stop(title)} Bars: {'; '.join(f'{name} {text}' for name, text in shown.items())}."
    end = canvas.note(provenance, bottom + 16)
    return Figure(canvas.svg(end - (2 if provenance else 8), title, alt), alt)
