"""The timeline: memory by kind after each allocation and free, with the phases of each step named."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from .. import palette
from ..gpus import Gpu
from ..measurement import Measurement
from ..palette import COLOURS, INK, OVER, QUIET, words
from ..units import UNITS, format_bytes
from . import style
from .style import MARGIN, WIDTH, Drawn

TIMELINE_ORDER = (
    "parameters", "optimizer_states", "gradients", "weight_copies",
    "workspaces", "inputs", "communication", "activations", "temporaries",
)  # fmt: skip
"""From the bottom: what stays longest lies lowest, so that flat things look flat."""

MOST_POINTS = 600  # of a curve: one for each point of the width
HIGH = 250.0  # points of the plot
LEFT = MARGIN + 34
LABEL = "allocations and frees, in order (short phases drawn wider)"


class Span(NamedTuple):
    """A phase from one event count to another."""

    start: int
    end: int
    step: int
    phase: str


def timeline(
    measurement: Measurement,
    title: str,
    *,
    unit: str = "GB",
    steps: Sequence[int] | None = None,
    capacity: int | Gpu | None = None,
    capacity_label: str = "",
    letters: Mapping[str, int] | None = None,
    ax: Axes | None = None,
) -> Drawn:
    """Memory by kind after each allocation and free, with names of the steps, their phases and the peak.

    `steps` picks training steps (1 is the first); without it everything is shown, set-up included. `letters`
    names moments, by how many events have happened, with a pin on the axis. Returns the figure, or `ax` if it
    is given. Raises ValueError for what was not measured.
    """
    spans = _spans(measurement, steps)
    first, last = spans[0].start, spans[-1].end
    letters = letters or {}
    for letter, count in letters.items():
        if not first <= count <= last:
            raise ValueError(f"{letter} is at event {count}; shown are {first} to {last}")
    sizes = _sizes(measurement, first, last)
    totals = np.sum([*sizes.values()], axis=0)
    peak = _peak(totals, measurement.peak_event - first)
    limit, limit_name = palette.named_capacity(capacity, capacity_label, unit)
    one = UNITS[unit]
    high = max(1.14 * totals[peak], 1.07 * (limit or 0), 1) / one
    width = style.room(ax) if ax else WIDTH - MARGIN - LEFT - 8  # half of the last number
    place_of = _places(spans, first + peak, width)
    counts = thin(
        totals, [peak, *(span.start - first for span in spans), *(c - first for c in letters.values())]
    )
    xs = place_of(first + np.array(counts))
    tops = np.cumsum([size[counts] / one for size in sizes.values()], axis=0)
    edges = dict(zip(sizes, tops, strict=True))
    spots = _spots(xs, edges, HIGH / high)
    seen = [kind for kind, size in sizes.items() if size.max() * HIGH >= high * one]  # at least a point high
    others = [words(kind) for kind in seen if kind not in spots]
    above = 42 + (18 * style.legend_rows(others, width)[1] if others else 0)
    source = str(measurement.provenance)
    with style.look():
        drawn = ax or style.sheet(title, above + HIGH + 41, source).place(LEFT, above, width, HIGH)
        drawn.set(xlim=(0, width), ylim=(0, high), xlabel=LABEL)
        style.value_axis(drawn, "y", f"{unit} allocated")
        style.bare(drawn, "bottom")
        areas = _fill(drawn, xs, edges, spots)
        if others:
            style.legend(drawn, [areas[name] for name in others], others, above=44)
        if limit:
            drawn.axhline(limit / one, color=OVER, linewidth=2)
            _annotate(drawn, limit_name, 8, limit / one, color=OVER, ha="left")
        _name_spans(drawn, spans, place_of)
        said = _told_peak(spans, first + peak, int(totals[peak]), unit)
        _name_peak(drawn, float(place_of(first + peak + 0.5)), totals[peak] / one, said, width)
        for letter, count in letters.items():
            _pin(drawn, letter, float(place_of(count)), totals[count - first] / one)
        what = f"Memory by kind over {last - first:,} allocations and frees"
        alt = f"{palette.stop(title)} {what}: {said}. {source}."
        return style.finished(drawn, ax, title, alt, source, _table(spans, sizes, unit), above)


def _spans(measurement: Measurement, steps: Sequence[int] | None) -> list[Span]:
    """The phases of `steps`, or all of them, and before these the set-up, step 0."""
    marks = sorted(measurement.timeline.marks, key=lambda mark: mark.event)
    events = len(measurement.timeline)
    if not events:
        raise ValueError("this timeline holds no events, so there is nothing to draw")
    starts = [(0, 0, "set-up"), *((mark.event, mark.step, mark.phase) for mark in marks)]
    ends = [*(mark.event for mark in marks), events]
    spans = [Span(start, end, step, phase) for (start, step, phase), end in zip(starts, ends, strict=True)]
    if steps is None:
        return [span for span in spans if span.start < span.end]
    known = {mark.step for mark in marks}
    if not steps or not set(steps) <= known:
        raise ValueError(f"steps {list(steps)} asked for; measured were {sorted(known)}")
    return [span for span in spans if min(steps) <= span.step <= max(steps) and span.start < span.end]


def _sizes(measurement: Measurement, first: int, last: int) -> dict[str, np.ndarray]:
    """Bytes after each event from `first` to `last`, of each kind that is there then, from the bottom up."""
    curves = measurement.timeline.curves()
    sizes = {
        kind: np.array([0, *curves[kind]])[first : last + 1] for kind in TIMELINE_ORDER if kind in curves
    }
    return {kind: size for kind, size in sizes.items() if size.any()}


def thin(totals: np.ndarray, keep: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """Places in `totals`: at most `most`, the ends and those in `keep` among them.

    In each of many equal stretches the highest and the lowest one survive, so no peak is lost or lowered.
    """
    if len(totals) <= most:
        return [*range(len(totals))]
    stretches = np.array_split(np.arange(len(totals)), (most - len(keep)) // 2 - 1)
    ends = [(part[totals[part].argmax()], part[totals[part].argmin()]) for part in stretches]
    return sorted({0, len(totals) - 1, *keep, *map(int, chain(*ends))})


def _outline(xs: np.ndarray, edge: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The outline of an area of steps down to the axis, without points at which nothing changes."""
    changes = np.flatnonzero(np.diff(edge, prepend=-1.0))
    right = np.repeat(np.append(xs[changes], xs[-1]), 2)
    return right, np.concatenate([[0.0], np.repeat(edge[changes], 2), [0.0]])


def _spots(xs: np.ndarray, edges: Mapping[str, np.ndarray], one: float) -> dict[str, tuple[float, float]]:
    """The center of the highest place for each name inside its area, if any is as high as a line of text.

    `one` are the points of a unit of bytes.
    """
    spots = {}
    low = np.zeros(len(xs))
    for kind, high in edges.items():
        wide = style.text_width(words(kind), 11.5, bold=True) + 8
        roomiest = 15 / one
        for left in np.arange(0, xs[-1] - wide, 6):
            inside = slice(max(0, np.searchsorted(xs, left) - 1), np.searchsorted(xs, left + wide) + 1)
            floor, roof = low[inside].max(), high[inside].min()
            if roof - floor > roomiest:
                roomiest = roof - floor
                spots[kind] = (left + wide / 2, (floor + roof) / 2)
        low = high
    return spots


def _peak(totals: np.ndarray, own: int) -> int:
    """The place of the peak: the measurement's own, unless what is shown is higher elsewhere."""
    shown = 0 <= own < len(totals) and totals[own] == totals.max()
    return own if shown else int(totals.argmax())


def _places(spans: Sequence[Span], peak: int, width: float) -> Callable[[Any], np.ndarray]:
    """The x of each event count: a phase of few events is wide enough for its name, as is the one event of
    the peak for an arrow."""
    last = spans[-1].end
    counts = sorted({*(span.start for span in spans), peak, min(peak + 1, last), last})
    places = np.cumsum([0, *np.cbrt(np.diff(counts))])
    return lambda count: np.interp(count, counts, places * width / places[-1])


def _fill(
    drawn: Axes, xs: np.ndarray, edges: dict[str, np.ndarray], spots: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """The areas by name, each with its name where that has room."""
    areas = {}
    for kind in reversed(edges):
        # Down to the axis, the topmost first, so that the next covers all but its band. The outline keeps a
        # spike of one event, thinner than a pixel, in sight.
        [areas[words(kind)]] = drawn.fill(*_outline(xs, edges[kind]), color=COLOURS[kind], linewidth=0.7)
    for kind, spot in spots.items():
        ink = palette.ink_on(COLOURS[kind])
        drawn.text(*spot, words(kind), ha="center", va="center", fontweight="bold", color=ink)
    return areas


def _name_spans(drawn: Axes, spans: Sequence[Span], place_of: Callable[[Any], np.ndarray]) -> None:
    """Steps and phases above the plot, each with a line where it starts, as there is room."""
    for span in spans:
        name = span.phase if span.step else ""
        _name_span(drawn, name, place_of([span.start, span.end]), 8, color=QUIET, fontsize=10)
    steps = [[*members] for _, members in groupby(spans, lambda span: span.step)]
    for members in steps:
        ends = place_of([members[0].start, members[-1].end])
        _name_span(drawn, step_name(members[0].step), ends, 24, fontweight="bold")
    ticks = [*(members[0].start for members in steps), spans[-1].end]
    drawn.set_xticks(place_of(ticks), map(palette.number, ticks))
    drawn.tick_params("x", pad=6)


def _name_span(drawn: Axes, name: str, ends: np.ndarray, above: float, **look: Any) -> None:
    top = {"transform": drawn.get_xaxis_transform(), "clip_on": False}
    rule = "#7A7A7A" if above > 10 else "#C9C9C9"
    drawn.plot(ends[[0, 0]], [0, 1 + (above + 10) / HIGH], color=rule, linewidth=0.8, zorder=0.5, **top)
    if style.text_width(name, 11) <= np.ptp(ends):
        drawn.text(ends.mean(), 1 + above / HIGH, name, ha="center", **look, **top)


def _annotate(drawn: Axes, said: str, x: float, y: float, **look: Any) -> None:
    """Words above a place."""
    look = {"ha": "center", "bbox": style.paper(0.5), **look}
    drawn.annotate(
        said, (x, y), (0, look.pop("up", 4)), textcoords="offset points", fontweight="bold", **look
    )


def _name_peak(drawn: Axes, x: float, y: float, said: str, width: float) -> None:
    """Words above the peak, kept on the sheet, and an arrow head on it."""
    head = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
    drawn.annotate("", (x, y), (0, 10), textcoords="offset points", arrowprops=head)
    half = style.text_width(said, 12, bold=True) / 2
    _annotate(drawn, said, min(max(x, half), width - half), y, up=12, fontsize=12)


def _pin(drawn: Axes, letter: str, x: float, y: float) -> None:
    """A pin for a letter, from the axis to above the curve: there it hides no number."""
    drawn.plot([x, x], [0, y], color="white", linewidth=4)
    drawn.plot([x, x], [0, y], color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    ring = {"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": INK}
    _annotate(drawn, letter, x, y, up=12, bbox=ring)


def _told_peak(spans: Sequence[Span], peak: int, size: int, unit: str) -> str:
    """The peak, its phase, and its step if several are shown: "peak 31.0 GB in loss, step 2"."""
    said = f"peak {format_bytes(size, unit, palette.digits_for(size, unit))}"
    # An event belongs to the phase after whose beginning it happens.
    at = next(span for span in spans if peak <= span.end)
    several = at.step and len({span.step for span in spans if span.step}) > 1
    return f"{said} in {at.phase}, {step_name(at.step)}" if several else f"{said} in {at.phase}"


def step_name(step: int) -> str:
    return f"step {step}" if step else "set-up"


def _table(spans: Sequence[Span], sizes: Mapping[str, np.ndarray], unit: str) -> list[list[str]]:
    """The highest moment of each phase, by kind."""
    totals = np.sum([*sizes.values()], axis=0)
    digits = palette.digits_for(int(totals.max()), unit)
    table = [["highest moment of", *map(words, sizes), f"total ({unit})"]]
    for start, end, step, phase in spans:
        inside = slice(start - spans[0].start, end + 1 - spans[0].start)
        at = inside.start + int(totals[inside].argmax())
        shown = [palette.amount_with_unit(int(size[at]), unit, digits) for size in sizes.values()]
        name = f"{phase}, {step_name(step)}" if step else phase
        table.append([name, *shown, palette.amount(int(totals[at]), unit, digits)])
    return table
