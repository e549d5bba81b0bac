"""Lines: how one quantity grows with another, each line named at its end."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from ..palette import OVER, QUIET, number, stop
from . import style
from .style import MARGIN, NUMBERED, WIDTH, Drawn, room, text_width

LINE_COLOURS = ("#0072B2", "#B34700", "#00704F", "#9B3C78", "#111111", "#7A5C00")
DASHES = ("-", (0, (3.2, 1.8)), (0, (1, 1.4)), (0, (4, 1.4, 1, 1.4)), (0, (5.5, 1.8)), (0, (2, 1, 0.5, 1)))
"""Lines are told apart in grey print too; in widths of a line."""

HIGH = 250.0  # points of the plot
NAME = 11.5  # points of the names' font

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
    circles: Collection[str] = (),
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {},
    provenance: str = "",
    alt: str | None = None,
    ax: Axes | None = None,
) -> Drawn:
    """One line for each series (its x and its y values), named at its end; units belong into the labels.

    `level` draws a named horizontal line, such as a capacity. The series named in `circles` are not joined:
    they were measured here and there, and nobody knows what lies between. `bands` are lower and upper values
    to shade around the series of that name. Returns the figure, or `ax` if it is given. Raises ValueError for
    empty or unequal series, for more than there are colors, and for values that a logarithmic axis cannot
    show.
    """
    _check_series(series, log_x, log_y)
    names = {name: style.wrap(name, NAME, 130, bold=True) for name in series}
    right = MARGIN + 12 + max(text_width(line, NAME, bold=True) for one in names.values() for line in one)
    ys = [y for _, ys in series.values() for y in ys]
    ys += [y for lower, upper in bands.values() for y in (*lower, *upper)]
    ys += [level[1]] if level else []
    left = MARGIN + 12 + text_width(number(float(f"{max(ys):.1g}")), 11.5)
    with style.look():
        drawn = ax or style.sheet(title, 30 + HIGH + 41, provenance).place(
            left, 30, WIDTH - left - right, HIGH
        )
        _scales(drawn, series, ys, log_x, log_y)
        drawn.set_xlabel(xlabel)
        drawn.annotate(ylabel, (0, 1), (0, 10), "axes fraction", "offset points", color=QUIET)
        clip = ax is not None  # a learner may zoom in
        for index, (name, (xs, values)) in enumerate(series.items()):
            color = LINE_COLOURS[index]
            if name in bands:
                drawn.fill_between(xs, *bands[name], color=color, alpha=0.18, linewidth=0)
            if name in circles:
                drawn.plot(
                    xs, values, "o", ms=9, mfc="white", mec=color, mew=2, clip_on=clip, label=name, zorder=4
                )
                continue
            look: dict[str, Any] = {"color": color, "linestyle": DASHES[index]}
            if markers and len(xs) <= 40:
                look |= {"marker": "o", "ms": 6.5, "mec": "white", "mew": 1}
            drawn.plot(xs, values, label=name, linewidth=2.2, clip_on=clip, zorder=3, **look)
        if level:
            _level(drawn, series, *level)
        _name_ends(drawn, series, names)
        told = "; ".join(_told(name, *line) for name, line in series.items())
        alt = alt or f"{stop(title)} Lines of {ylabel} against {xlabel}: {told}."
        return style.finished(drawn, ax, title, alt, provenance, _table(series, xlabel), above=26)


def _check_series(series: Series, log_x: bool, log_y: bool) -> None:
    if not series or len(series) > len(LINE_COLOURS):
        raise ValueError(
            f"{len(series)} lines: a figure shows 1 to {len(LINE_COLOURS)} that can be told apart"
        )
    for name, (xs, ys) in series.items():
        if len(xs) != len(ys) or not xs:
            raise ValueError(
                f"{name!r} has {len(xs)} x values and {len(ys)} y values: they go in pairs, at least one"
            )
        if (log_x and min(xs) <= 0) or (log_y and min(ys) <= 0):
            raise ValueError(
                f"{name!r} has a value that is not above zero, which a logarithmic axis cannot show"
            )


def _scales(drawn: Axes, series: Series, ys: Sequence[float], log_x: bool, log_y: bool) -> None:
    """Axes from zero, or logarithmic ones; x is numbered at the points if they are few enough."""
    points = sorted({x for xs, _ in series.values() for x in xs})
    style.value_axis(drawn, "y", "", nbins=8)
    low, high = min(ys), max(ys)
    if not log_y:
        low = min(0.0, low)
        high += 0.06 * (high - low)
        drawn.set_ylim(low, high if high > low else low + 1)
    drawn.set_xlim(points[0], points[-1] if len(points) > 1 else points[0] * 10 if log_x else points[0] + 1)
    for axis, log, ends in (("x", log_x, drawn.get_xlim()), ("y", log_y, (low, high))):
        if log:
            base = 2 if ends[1] / ends[0] <= 2**10 else 10
            getattr(drawn, f"set_{axis}scale")("log", base=base)
            along = drawn.xaxis if axis == "x" else drawn.yaxis
            widest = text_width(number(float(f"{points[-1]:.1g}")), 11.5) + 10
            most = 9 if axis == "y" else min(9, int(room(drawn) / widest))
            along.set_major_locator(LogLocator(base=base, numticks=most))
            along.set_minor_locator(NullLocator())
    if log_y:
        drawn.set_ylim(low, high if high > low else low * 10)
    places = np.log(points) if log_x else np.array(points)
    gaps = room(drawn) * np.diff(places) / max(np.ptp(places), 1e-9)
    widest = max(text_width(number(x), 11.5) for x in points)
    if len(points) <= 12 and (gaps > widest + 8).all():
        drawn.xaxis.set_major_locator(FixedLocator(points))
    drawn.xaxis.set_major_formatter(NUMBERED)
    drawn.yaxis.set_major_formatter(NUMBERED)
    drawn.spines["left"].set_visible(False)


def _level(drawn: Axes, series: Series, name: str, value: float) -> None:
    """A horizontal line with its name above it, at the right where a series begins in the name's way."""
    drawn.axhline(value, color=OVER, linewidth=1.6, linestyle=(0, (2, 2)))
    level, *starts = (
        drawn.transData.transform((1, y))[1] for y in (value, *(ys[0] for _, ys in series.values()))
    )
    at_right = any(-4 < start - level < 24 for start in starts)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    place |= {"ha": "right" if at_right else "left", "bbox": style.paper(), "zorder": 4}
    offset = (-8 if at_right else 8, 6)
    drawn.annotate(name, (int(at_right), value), offset, color=OVER, fontweight="bold", **place)


def _name_ends(drawn: Axes, series: Series, names: Mapping[str, Sequence[str]]) -> None:
    """Each name in its line's color: right of the plot at the height of the line's end, none over another.

    A single point in mid-plot has its name next to it.
    """
    shares = drawn.transAxes.inverted()
    ends = {}
    for index, (name, (xs, ys)) in enumerate(series.items()):
        rightmost = max(zip(xs, ys, strict=True), key=lambda point: point[0])
        x, y = shares.transform(drawn.transData.transform(rightmost))
        look = {"color": LINE_COLOURS[index], "fontweight": "bold", "fontsize": NAME, "va": "center"}
        if len(xs) == 1 and x < 0.97:
            place = {"xycoords": "axes fraction", "textcoords": "offset points"}
            drawn.annotate(name, (x, y), (9, 7), **place, **look)
        else:
            ends[name] = (y, look)
    gaps = {name: (13 * len(names[name]) + 3) / HIGH for name in ends}
    for name, y in spread({name: y for name, (y, _) in ends.items()}, gaps).items():
        place = {"transform": drawn.transAxes, "linespacing": 1.1}
        drawn.text(1 + 10 / room(drawn), y, "\n".join(names[name]), **place, **ends[name][1])


def spread(wanted: Mapping[str, float], heights: Mapping[str, float]) -> dict[str, float]:
    """Middles of boxes near the `wanted` ones in their order, none over another, in 0 to 1 if they fit."""
    order = sorted(wanted, key=lambda name: wanted[name])
    placed = {}
    # First push each one up to keep clear of the one below, then back from the upper end.
    floor = -0.02
    for name in order:
        placed[name] = max(wanted[name], floor + heights[name] / 2)
        floor = placed[name] + heights[name] / 2
    roof = 1.04
    for name in reversed(order):
        placed[name] = min(placed[name], roof - heights[name] / 2)
        roof = placed[name] - heights[name] / 2
    return placed


def _told(name: str, xs: Sequence[float], ys: Sequence[float]) -> str:
    if len(xs) == 1:
        return f"{name} is {_read(ys[0])} at {number(xs[0])}"
    return f"{name} goes from {_read(ys[0])} at {number(xs[0])} to {_read(ys[-1])} at {number(xs[-1])}"


def _table(series: Series, xlabel: str) -> list[list[str]]:
    """A column for each series at up to a dozen of the places."""
    points = sorted({x for xs, _ in series.values() for x in xs})
    points = points[:: -(-len(points) // 12)]
    columns = [dict(zip(xs, ys, strict=True)) for xs, ys in series.values()]
    rows = [[number(x), *(_read(column[x]) if x in column else "" for column in columns)] for x in points]
    return [[xlabel, *series], *rows]


def _read(value: float) -> str:
    return number(float(f"{value:.4g}"))
