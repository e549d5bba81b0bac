"""Lines: how one quantity grows with another, each line named at its end. Drawn by matplotlib."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .axes import OVER, stop
from .canvas import (
    GRID,
    INK,
    MARGIN,
    QUIET,
    RULE,
    Canvas,
    Figure,
    framed,
    number,
    reflowing,
    spread,
    text_width,
    wrap,
)
from .plotting import LAYOUT_FONT, Chart, finish, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from matplotlib.text import Annotation

LINE_COLOURS = ("#0072B2", "#B34700", "#00704F", "#9B3C78", "#111111", "#7A5C00")
DASHES = (None, (7, 4), (2, 3), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2))
"""Pixels of stroke and gap: lines are told apart in grey print too."""

PLOT_HEIGHT = 290

FRAME = {"stroke_linejoin": "round", "xmlns:xlink": "http://www.w3.org/1999/xlink"}
NEEDLESS = re.compile(
    r' id="(text|line2d|[xy]tick|patch|axes|figure|legend|matplotlib)[^"]*"| transform="rotate\(-0'
    r' [^"]*\)"|<!--.*?-->'
)
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}

LEGEND: dict[str, Any] = {
    "loc": "lower left",
    "frameon": False,
    "borderpad": 0,
    "borderaxespad": 0,
    "labelspacing": 0.3,
    "handlelength": 3,
    "labelcolor": "linecolor",
    "prop": {"size": 12.5, "weight": "bold"},
}

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


@reflowing
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
) -> Figure:
    """One line for each series (its x and its y values), named at its end; units belong into the labels.

    `level` draws a named horizontal line, such as a capacity. The series named in `circles` are not joined:
    they were measured here and there, and nobody knows what lies between. `bands` are lower and upper values
    to shade around the series of that name. Raises ValueError for empty or unequal series, for more than
    there are colors, and for values that a logarithmic axis cannot show.
    """
    _check_series(series, log_x, log_y)
    canvas = Canvas()
    width = canvas.width
    room = canvas.width - 2 * MARGIN
    heading = wrap(title, 16.5, room, bold=True)
    small_print = wrap(provenance, 11, room)
    names = dict[str, list[str]]()
    if canvas.narrow:  # it has no room for names at the ends of the lines: a legend has them
        names = {name: wrap(name, 12.5, room - 44, bold=True) for name in series}
    top = 49 + 21 * len(heading) + 17 * sum(map(len, names.values()))
    below = 60 + 14 * len(small_print) if provenance else 52
    height = top + PLOT_HEIGHT + below
    more = [y for lower, upper in bands.values() for y in (*lower, *upper)]
    if level:
        more.append(level[1])
    marks = partial(_marks, series=series, bands=bands, level=level, markers=markers, circles=circles)
    with look():
        from matplotlib.figure import Figure as Drawing

        # one point is one pixel of ours
        drawing = Drawing(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
        axes = _axes(drawing, series, more, log_x, log_y, top)
        marks(axes)
        _write(drawing, axes, heading, small_print, (xlabel, ylabel), {} if names else series, top)
        if names:
            place: dict[str, Any] = {"bbox_to_anchor": (MARGIN / width, 1 - (top - 30) / height)}
            handles = [axes.lines[index] for index in range(len(names))]
            drawing.legend(handles, ["\n".join(lines) for lines in names.values()], **LEGEND, **place)
        shapes = _shapes(drawing)
    ends = "; ".join(_ends(name, *line) for name, line in series.items())
    alt = alt or f"{stop(title)} Lines of {ylabel} against {xlabel}: {ends}."
    onto = partial(_onto, marks=marks, series=series, more=more, labels=(xlabel, ylabel), logs=(log_x, log_y))
    picture = framed(shapes, width, height, title, alt, **FRAME)
    return Figure(picture, alt, chart=Chart(title, provenance, onto))


def _marks(
    axes: "Axes",
    series: Series,
    bands: Series,
    level: tuple[str, float] | None,
    markers: bool,
    circles: Collection[str],
) -> None:
    for index, (name, line) in enumerate(series.items()):
        if name in bands:
            axes.fill_between(line[0], *bands[name], color=LINE_COLOURS[index], alpha=0.18, linewidth=0)
        _draw(axes, line, index, markers, joined=name not in circles)
    if level:
        _draw_level(axes, series, *level)


def _onto(
    axes: "Axes",
    marks: Callable[["Axes"], None],
    series: Series,
    more: Sequence[float],
    labels: tuple[str, str],
    logs: tuple[bool, bool],
) -> None:
    """The same lines on Axes of a learner's own, who may zoom in."""
    all_x = [x for xs, _ in series.values() for x in xs]
    all_y = [y for _, ys in series.values() for y in ys]
    for name, log, found in zip("xy", logs, (all_x, [*all_y, *more]), strict=True):
        low, high = _range(found, log, from_zero=name == "y")
        if log:
            getattr(axes, f"set_{name}scale")("log", base=2 if high / low <= 2**10 else 10)
        elif name == "y":
            axes.set_ylim(low, high)
    others = len(axes.lines)
    marks(axes)
    for line, name in zip(axes.lines[others:], series, strict=False):
        line.set(label=name, clip_on=True)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.minorticks_off()
    finish(axes, "y", labelcolor="linecolor", handlelength=3)


def _ends(name: str, xs: Sequence[float], ys: Sequence[float]) -> str:
    if len(xs) == 1:
        return f"{name} is {_read(ys[0])} at {number(xs[0])}"
    return f"{name} goes from {_read(ys[0])} at {number(xs[0])} to {_read(ys[-1])} at {number(xs[-1])}"


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


def _axes(
    drawing: "Drawing", series: Series, more: Sequence[float], log_x: bool, log_y: bool, top: float
) -> "Axes":
    all_x = [x for xs, _ in series.values() for x in xs]
    all_y = [y for _, ys in series.values() for y in ys]
    ends = _range(all_x, log_x, from_zero=False)
    low, high = _range([*all_y, *more], log_y, from_zero=True)
    heights = _ticks(low, high, log_y)
    left = 40 + max(text_width(number(tick), 12) for tick in heights)
    width = 72 * drawing.get_figwidth()
    height = 72 * drawing.get_figheight()
    names = 0.0 if Canvas().narrow else max(text_width(name, 12.5, bold=True) for name in series)
    right = width - MARGIN - 12 - names
    box = (left / width, 1 - (top + PLOT_HEIGHT) / height, (right - left) / width, PLOT_HEIGHT / height)
    axes = drawing.add_axes(box, facecolor="none", xlim=ends, ylim=(low, high))
    axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    axes.set_yticks(heights, [number(tick) for tick in heights], minor=False)
    places = _points_or_ticks(all_x, axes, log_x)
    axes.set_xticks(places, [number(tick) for tick in places], minor=False)
    axes.minorticks_off()
    axes.tick_params("x", length=5, width=1, pad=7, color=RULE, labelcolor=QUIET)
    axes.tick_params("y", length=0, pad=8, labelcolor=QUIET)
    axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return axes


def _range(values: Sequence[float], log: bool, from_zero: bool) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    if log:
        return low, (high if high > low else low * 10)
    if from_zero:
        low = min(0.0, low)
        high += 0.06 * (high - low)
    return low, (high if high > low else low + 1)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers; on a logarithmic axis powers of two for a small range, powers of ten for a large one."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if log:
        locator = LogLocator(base=2 if high / low <= 2**10 else 10, numticks=12)
    else:
        locator = MaxNLocator(nbins=7, steps=[1, 2, 5, 10])
    found = locator.tick_values(low, high)
    margin = 1e-9 * (high - low)
    return [float(tick) for tick in found if low - margin <= tick <= high + margin] or [low, high]


def _points_or_ticks(xs: Sequence[float], axes: "Axes", log: bool) -> list[float]:
    points = sorted(set(xs))

    def roomy(places: Sequence[float]) -> bool:
        widest = max(text_width(number(place), 12) for place in places)
        return all(_x(axes, right) - _x(axes, left) > widest + 10 for left, right in pairwise(places))

    if len(points) > 12 or not roomy(points):
        points = _ticks(*axes.get_xlim(), log)
        while len(points) > 2 and not roomy(points):
            points = points[::2]
    return points


def _x(axes: "Axes", value: float) -> float:
    return float(axes.transData.transform((value, axes.get_ylim()[0]))[0])


def _draw(
    axes: "Axes", line: tuple[Sequence[float], Sequence[float]], index: int, markers: bool, joined: bool
) -> None:
    color = LINE_COLOURS[index]
    if not joined:
        look = {
            "markersize": 10,
            "markerfacecolor": "#FFFFFF",
            "markeredgecolor": color,
            "markeredgewidth": 2.2,
        }
        axes.plot(*line, "o", clip_on=False, zorder=4, **look)
        return
    dots: dict[str, Any] = {
        "marker": "o",
        "markersize": 7,
        "markeredgecolor": "#FFFFFF",
        "markeredgewidth": 1,
    }
    shown = dots if markers and len(line[0]) <= 40 else {}
    dashes = DASHES[index]  # in pixels; matplotlib counts in line widths
    style = (0, tuple(length / 2.2 for length in dashes)) if dashes else "-"
    axes.plot(*line, color=color, linewidth=2.2, linestyle=style, clip_on=False, zorder=3, **shown)


def _draw_level(axes: "Axes", series: Series, name: str, value: float) -> None:
    """A horizontal line with its name above it: at the left, or at the right if that would hide a series."""
    axes.axhline(value, color=OVER, linewidth=1.6, linestyle=(0, (2, 2)), clip_on=False)
    paper = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.5}
    style = {"color": OVER, "fontweight": "bold", "va": "baseline", "bbox": paper, "zorder": 4}
    place = {"textcoords": "offset points", "xycoords": ("axes fraction", "data")}
    left = axes.annotate(name, (0, value), xytext=(8, 6), **place, **style)
    if _hides(axes, series, left):
        right = axes.annotate(name, (1, value), xytext=(-8, 6), ha="right", **place, **style)
        if _hides(axes, series, right):
            right.remove()
        else:
            left.remove()


def _hides(axes: "Axes", series: Series, words: "Annotation") -> bool:
    from matplotlib.path import Path

    box = words.get_window_extent()
    ways = (Path(axes.transData.transform(list(zip(xs, ys, strict=True)))) for xs, ys in series.values())
    return any(way.intersects_bbox(box, filled=False) for way in ways)


def _write(
    drawing: "Drawing",
    axes: "Axes",
    heading: Sequence[str],
    small_print: Sequence[str],
    labels: tuple[str, str],
    series: Series,
    top: float,
) -> None:
    width = 72 * drawing.get_figwidth()
    bottom = top + PLOT_HEIGHT
    height = 72 * drawing.get_figheight()
    left, right = (_x(axes, value) for value in axes.get_xlim())

    def put(x: float, y: float, words: str, size: float = 12, color: str = QUIET, **more: Any) -> None:
        drawing.text(x / width, 1 - y / height, words, fontsize=size, color=color, va="baseline", **more)

    for index, line in enumerate(heading):
        put(MARGIN, 28 + 21 * index, line, 16.5, INK, fontweight="bold")
    put(MARGIN, top - 16, labels[1])
    put((left + right) / 2, bottom + 40, labels[0], ha="center")
    for index, line in enumerate(small_print):
        put(width - MARGIN, bottom + 62 + 14 * index, line, 11, ha="right")
    ends = {name: _end(axes, *line) for name, line in series.items()}
    # A single point in mid-plot has its name next to it; all other names share the right margin.
    alone = {name for name, (xs, _) in series.items() if len(xs) == 1 and ends[name][0] < right - 1}
    at_right = {name: height - y for name, (_, y) in ends.items() if name not in alone}
    heights = dict(zip(at_right, spread([*at_right.values()], 17, top, bottom), strict=True))
    for index, (name, (x, y)) in enumerate(ends.items()):
        color = LINE_COLOURS[index]
        if name in alone:
            put(x + 11, height - y - 8, name, 12.5, color, fontweight="bold")
        else:
            put(right + 10, heights[name] + 4, name, 12.5, color, fontweight="bold")


def _end(axes: "Axes", xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """The place of a line's rightmost point, in pixels from the bottom left corner."""
    last = max(zip(xs, ys, strict=True), key=lambda point: point[0])
    x, y = axes.transData.transform(last)
    return float(x), float(y)


def _shapes(drawing: "Drawing") -> str:
    """The shapes that matplotlib draws, without its frame, its font, and its style sheet.

    The style sheet would reach beyond the picture.
    """
    page = StringIO()
    drawing.savefig(page, format="svg", metadata=NO_METADATA)
    [inside] = re.findall(r"<svg[^>]*>(.*)</svg>", page.getvalue(), re.DOTALL)
    plain = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inside, count=1, flags=re.DOTALL)
    plain = plain.replace(f" font-family: '{LAYOUT_FONT}';", "")
    short = re.sub(r"\s*\n\s*", " ", NEEDLESS.sub("", plain))
    return short.replace("> <", "><").strip()


def _read(value: float) -> str:
    return number(float(f"{value:.4g}"))
