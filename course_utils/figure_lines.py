"""Lines: how one quantity grows with another, each line named at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log10

from .figure import MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, number, short, spread, text_width, ticks
from .figure_parts import OVER, stop

LINE_COLOURS = ("#0072B2", "#B34700", "#00704F", "#9B3C78", "#111111", "#7A5C00")
DASHES = (None, "7 4", "2 3", "9 3 2 3", "12 4", "4 2 1 2")

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def lines(
    series: Series,
    title: str,
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    level: tuple[str, float] | None = None,
    markers: bool = True,
    provenance: str = "",
    alt: str | None = None,
) -> Figure:
    """One line for each series (its x values and its y values), each named at its end; units belong into the labels.

    `level` draws a named horizontal line, such as a capacity. Raises ValueError for empty or unequal series, for more
    than there are colors, and for values that a logarithmic axis cannot show.
    """
    _check_series(series, log_x, log_y)
    xs = [x for line, _ in series.values() for x in line]
    ys = [y for _, line in series.values() for y in line] + ([level[1]] if level else [])
    canvas = Canvas()
    top = canvas.title(title) + 34
    right = WIDTH - MARGIN - 12 - max(text_width(name, 12.5, bold=True) for name in series)
    left = 30 + 10 + max(text_width(number(tick), 12) for tick in _axis(ys, log_y)[0])
    across = _Axis(*_axis(xs, log_x, from_zero=False)[1], log_x, left, right)
    up = _Axis(*_axis(ys, log_y)[1], log_y, top + 290, top)
    _line_axes(canvas, across, up, xs, ys, xlabel, ylabel)
    for index, line in enumerate(series.values()):
        _draw_line(canvas, line, across, up, index, markers)
    if level:
        canvas.line(left, up(level[1]), right, up(level[1]), OVER, stroke_width=1.6, stroke_dasharray="3 3")
        canvas.halo_text(left + 8, up(level[1]) - 6, level[0], 12, fill=OVER, font_weight="bold")
    _line_names(canvas, series, up, right, top)
    alt = alt or _lines_alt(series, title, xlabel, ylabel)
    end = canvas.note(provenance, top + 290 + 62)
    return Figure(canvas.svg(end - (2 if provenance else 10), title, alt), alt)


@dataclass(frozen=True)
class _Axis:
    """Values to pixels along one axis."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, value = (
            (log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1)


def _check_series(series: Series, log_x: bool, log_y: bool) -> None:
    if not series or len(series) > len(LINE_COLOURS):
        raise ValueError(f"{len(series)} lines: a figure shows 1 to {len(LINE_COLOURS)} that can be told apart")
    for name, (xs, ys) in series.items():
        if len(xs) != len(ys) or not xs:
            raise ValueError(f"{name!r} has {len(xs)} x values and {len(ys)} y values: they go in pairs, at least one")
        if (log_x and min(xs) <= 0) or (log_y and min(ys) <= 0):
            raise ValueError(f"{name!r} has a value that is not above zero, which a logarithmic axis cannot show")


def _axis(values: Sequence[float], log: bool, from_zero: bool = True) -> tuple[list[float], tuple[float, float]]:
    """Tick positions, and the lowest and highest value to show."""
    low, high = min(values), max(values)
    if log:
        return _log_ticks(low, high), (low, high if high > low else low * 10)
    low = min(0.0, low) if from_zero else low
    high = high + 0.06 * (high - low) if from_zero else high
    return ticks(low, high, 6), (low, high if high > low else low + 1)


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two where the range is small, powers of ten where it is large."""
    base = 2 if high / low <= 2**10 else 10
    power, found = 1.0, []
    while power > low:
        power /= base
    while power <= high * 1.0001:
        found += [power] if power >= low * 0.9999 else []
        power *= base
    return found or [low, high]


def _line_axes(
    canvas: Canvas, across: _Axis, up: _Axis, xs: Sequence[float], ys: Sequence[float], xlabel: str, ylabel: str
) -> None:
    for tick in _axis(ys, up.log)[0]:
        canvas.line(across.start, up(tick), across.end, up(tick))
        canvas.text(across.start - 8, up(tick) + 4, number(tick), 12, QUIET, text_anchor="end")
    for tick in _points_or_ticks(xs, across):
        canvas.line(across(tick), up.start, across(tick), up.start + 5, RULE)
        canvas.text(across(tick), up.start + 20, number(tick), 12, QUIET, text_anchor="middle")
    canvas.line(across.start, up.start, across.end, up.start, RULE)
    canvas.text((across.start + across.end) / 2, up.start + 40, xlabel, 12, QUIET, text_anchor="middle")
    canvas.text(MARGIN, up.end - 16, ylabel, 12, QUIET)


def _points_or_ticks(xs: Sequence[float], across: _Axis) -> list[float]:
    """The x values themselves where they are few and far enough apart to be printed, round numbers otherwise."""
    points = sorted(set(xs))
    widest = max(text_width(number(point), 12) for point in points)
    roomy = all(across(right) - across(left) > widest + 10 for left, right in pairwise(points))
    return points if len(points) <= 12 and roomy else _axis(xs, across.log, from_zero=False)[0]


def _draw_line(
    canvas: Canvas, line: tuple[Sequence[float], Sequence[float]], across: _Axis, up: _Axis, index: int, markers: bool
) -> None:
    points = [(short(across(x)), short(up(y))) for x, y in zip(*line, strict=True)]
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    color = LINE_COLOURS[index]
    canvas.path(
        path, fill="none", stroke=color, stroke_width=2.2, stroke_dasharray=DASHES[index], stroke_linejoin="round"
    )
    if markers and len(points) <= 40:
        dots = "".join(f"M{x} {y}m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0" for x, y in points)
        canvas.path(dots, fill=color, stroke="#FFFFFF", stroke_width=1)


def _line_names(
    canvas: Canvas,
    series: Series,
    up: _Axis,
    right: float,
    top: float,
) -> None:
    ends = [up(ys[max(range(len(xs)), key=xs.__getitem__)]) for xs, ys in series.values()]
    for index, (name, y) in enumerate(zip(series, spread(ends, 17, top, top + 290), strict=True)):
        canvas.text(right + 10, y + 4, name, 12.5, LINE_COLOURS[index], font_weight="bold")


def _lines_alt(series: Series, title: str, xlabel: str, ylabel: str) -> str:
    told = [
        f"{name} goes from {ys[0]:,.4g} at {number(xs[0])} to {ys[-1]:,.4g} at {number(xs[-1])}"
        for name, (xs, ys) in series.items()
    ]
    return f"{stop(title)} Lines of {ylabel} against {xlabel}: {'; '.join(told)}."
