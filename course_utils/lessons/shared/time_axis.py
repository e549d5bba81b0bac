"""One picture of a training step on a time axis: what computes, what communicates, and memory below."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, legend, legend_rows, look, sheet, text_width
from ...figures.style import value_axis as numbered_axis
from ...palette import COLOURS, INK, digits_for, ink_on, stop, words
from ...units import UNITS, format_bytes

ROW, PLOT, GAP = 30.0, 170.0, 14.0  # points: of a row of work, of the plot of memory, between the two


class Work(NamedTuple):
    """A piece of work from `start` to `end`, in the color of a `kind` of memory or in one of its own."""

    name: str
    start: float
    end: float
    kind: str = "temporaries"


def time_axis(
    rows: Mapping[str, Sequence[tuple[Any, ...]]],
    memory: Mapping[str, Sequence[int]],
    times: Sequence[float],
    title: str,
    *,
    xlabel: str = "time",
    unit: str = "GB",
    limit: tuple[str, int] | None = None,
    provenance: str = "",
) -> CourseFigure:
    """Rows of work ("compute", "communication"), and under them a stack of bytes over the same time.

    Each row has pieces `(name, start, end)` or, with its color, `(name, start, end, kind)`: a kind of memory
    or a color of matplotlib. A name that has no room in its box is left out. `memory` has bytes by kind, from
    the bottom up: `memory[kind][i]` from `times[i]` to `times[i + 1]`; the kind may be any name, then it is
    grey. `limit` draws a named line. Raises ValueError where a kind and `times` differ in length.
    """
    for kind, sizes in memory.items():
        if len(sizes) != len(times):
            raise ValueError(f"{kind} has {len(sizes)} sizes for {len(times)} times")
    works = {row: [Work(*one) for one in pieces] for row, pieces in rows.items()}
    ends = [one.end for pieces in works.values() for one in pieces] + [*times]
    starts = [one.start for pieces in works.values() for one in pieces] + [*times]
    span = (min(starts), max(ends))
    left = MARGIN + 34 + max((text_width(row, 11.5) - 30 for row in works), default=0)
    width = WIDTH - MARGIN - left - 8
    names = [words(kind) for kind in memory]
    above = 12 + (18 * legend_rows(names, width)[1] if names else 0)
    high = ROW * len(works)
    body = high + (above + GAP + PLOT if memory else 0)
    with look():
        figure = sheet(title, body + 41, provenance)
        lanes = figure.place(left, 4, width, high)
        _draw_rows(lanes, works, span, width)
        last = lanes
        if memory:
            last = figure.place(left, high + above + GAP, width, PLOT)
            _draw_memory(last, memory, times, span, unit, limit)
            legend(last, [Patch(color=_color(kind)) for kind in memory], names, above=8)
        else:
            bare(lanes, "bottom")
        numbered_axis(last, "x", xlabel, nbins=8)
        last.set_xlim(*span)
    figure.alt = _told(title, works, memory, unit)
    figure.rows = _table(memory, times, unit)
    return figure


def _draw_rows(
    ax: Axes, works: Mapping[str, Sequence[Work]], span: tuple[float, float], width: float
) -> None:
    """A row for each name, with a box for each piece of work."""
    one = width / (span[1] - span[0] or 1)
    for index, pieces in enumerate(works.values()):
        for work in pieces:
            color = _color(work.kind)
            ax.barh(index, work.end - work.start, 0.8, work.start, color=color, edgecolor="white")
            if text_width(work.name, 10) + 2 <= one * (work.end - work.start):
                middle = (work.start + work.end) / 2
                where = {"ha": "center", "va": "center_baseline", "fontsize": 10}
                ax.text(middle, index, work.name, color=ink_on(color), **where)
    ax.set(xlim=span, ylim=(len(works) - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(len(works)), [*works], color=INK)
    bare(ax)


def _draw_memory(
    ax: Axes,
    memory: Mapping[str, Sequence[int]],
    times: Sequence[float],
    span: tuple[float, float],
    unit: str,
    limit: tuple[str, int] | None,
) -> None:
    """Bytes as a stack of steps; the last ones stay until the time axis ends."""
    xs = [*times, max(span[1], times[-1])]
    low = np.zeros(len(xs))
    for kind, sizes in memory.items():
        top = low + np.array([*sizes, sizes[-1]]) / UNITS[unit]
        ax.fill_between(xs, low, top, step="post", color=_color(kind), linewidth=0)
        low = top
    most = max(low.max(), limit[1] / UNITS[unit] if limit else 0) or 1
    ax.set_ylim(0, 1.12 * most)
    at = int(low.argmax())
    said = format_bytes(int(low[at] * UNITS[unit]), unit, digits_for(int(low[at] * UNITS[unit]), unit))
    ax.axhline(low[at], color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    ax.annotate(f"peak {said}", (1, low[at]), (-2, 4), ha="right", fontweight="bold", **place)
    if limit:
        ax.axhline(limit[1] / UNITS[unit], color=COLOURS["communication"], linewidth=1.6)
        ax.annotate(limit[0], (0, limit[1] / UNITS[unit]), (2, 4), fontweight="bold", **place)
    numbered_axis(ax, "y", unit, nbins=5)
    bare(ax, "bottom")


def _color(kind: str) -> str:
    """The color of a kind of memory; a color stays one, and any other name is grey."""
    return COLOURS.get(kind, kind if kind.startswith("#") else COLOURS["temporaries"])


def _told(
    title: str, works: Mapping[str, Sequence[Work]], memory: Mapping[str, Sequence[int]], unit: str
) -> str:
    """The figure for those who do not see it: each row's pieces in order, and the peak of each kind."""
    told = [
        f"{row}, {_boxes(pieces)}: {', '.join(work.name for work in pieces)}" for row, pieces in works.items()
    ]
    said = f"{stop(title)} On a time axis: {'; '.join(told)}."
    if memory:
        totals = [sum(moment) for moment in zip(*memory.values(), strict=True)]
        peak = format_bytes(max(totals), unit, digits_for(max(totals), unit))
        most = "; ".join(
            f"{words(kind)} at most {format_bytes(max(sizes))}" for kind, sizes in memory.items()
        )
        said += f" Below, memory with a peak of {peak}: {most}."
    return said


def _table(memory: Mapping[str, Sequence[int]], times: Sequence[float], unit: str) -> list[list[str]]:
    """Bytes by kind at the time of the peak."""
    if not memory:
        return []
    totals = [sum(moment) for moment in zip(*memory.values(), strict=True)]
    at = totals.index(max(totals))
    digits = digits_for(totals[at], unit)
    head = ["time of the peak", *map(words, memory), f"total ({unit})"]
    sizes = [format_bytes(size, unit, digits) for size in (*(one[at] for one in memory.values()), totals[at])]
    return [head, [f"{times[at]:g}", *sizes]]


def _boxes(pieces: Sequence[Work]) -> str:
    return "1 box" if len(pieces) == 1 else f"{len(pieces)} boxes"
