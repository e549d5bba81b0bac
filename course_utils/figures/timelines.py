"""The timeline: memory by kind after each allocation and free, with the phases of each step named."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator

from ..gpus import Gpu
from ..measurement import Mark, Measurement
from ..palette import (
    COLOURS,
    INK,
    OVER,
    QUIET,
    amount,
    amount_with_unit,
    digits_for,
    ink_on,
    named_capacity,
    number,
    sentence,
    stop,
    words,
)
from ..units import UNITS, format_bytes
from .style import (
    MARGIN,
    WIDTH,
    Drawn,
    finished,
    legend,
    legend_rows,
    look,
    paper,
    room,
    sheet,
    text_width,
    value_axis,
)

TIMELINE_ORDER = (
    "parameters", "optimizer_states", "gradients", "weight_copies",
    "workspaces", "inputs", "communication", "activations", "temporaries",
)  # fmt: skip
"""From the bottom: what stays longest lies lowest, so that flat things look flat."""

Name = TypeVar("Name")

MOST_POINTS = 600  # of a curve: one for each point of the width
HIGH = 250.0  # points of the plot
PEAK = 4.0  # points that the peak gets at least, though it last for one event of thousands
NARROWEST = 24.0  # points that each phase gets at least, where a third of the width suffices for that
LABEL = "allocations and frees, in order (short phases drawn wider)"
PHASE_WORDS = {
    "forward": ("forward", "fwd"),
    "backward": ("backward", "bwd"),
    "optimizer": ("optimizer", "optim.", "opt"),
}


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
    first, last = _window(measurement, steps)
    curves = _shown_curves(measurement, first, last)
    totals = [sum(at) for at in zip(*curves.values(), strict=True)]
    peak = _shown_peak(measurement, totals, first, last)
    letters = letters or {}
    for letter, count in letters.items():
        if not first <= count <= last:
            raise ValueError(f"{letter} is at event {count}; shown are {first} to {last}")
    limit, limit_name = named_capacity(capacity, capacity_label, unit)
    largest = max(totals[peak] * 1.14, (limit or 0) * 1.07, 1.0)
    left = MARGIN + 34
    width = room(ax) if ax else WIDTH - MARGIN - left - 8  # half of the last number
    keep = [
        peak,
        min(peak + 1, last),
        *letters.values(),
        *(mark.event for mark in measurement.timeline.marks),
    ]
    counts = thin(totals, first, last, keep)
    knots = _knots(measurement, first, last, width)
    starts, places = zip(*_widened(knots, peak, last), strict=True)
    xs = np.interp(counts, starts, places)
    edges = _edges(curves, counts, UNITS[unit])
    spots = {kind: _roomiest(xs, *edges[kind], HIGH / largest * UNITS[unit], words(kind)) for kind in curves}
    seen = [kind for kind in curves if spots[kind] is None and max(curves[kind]) * HIGH >= largest]
    rows = legend_rows([*map(words, seen)], width)[1] if seen else 0
    above = 42 + 18 * rows
    with look():
        drawn = ax or sheet(title, above + HIGH + 41, str(measurement.provenance)).place(
            left, above, width, HIGH
        )
        drawn.set(xlim=(0, width), ylim=(0, largest / UNITS[unit]))
        value_axis(drawn, "y", f"{unit} allocated")
        _count_axis(drawn, knots)
        _name_spans(drawn, measurement, first, last, knots)
        for kind, (_, high) in reversed(edges.items()):
            # Down to the axis, the topmost first, so that the next covers all but its band. The outline keeps
            # a spike of one event, thinner than a pixel, in sight.
            drawn.fill(*_steps(xs, high), color=COLOURS[kind], linewidth=0.7)
        for kind, spot in spots.items():
            if spot:
                style = {"ha": "center", "va": "center", "fontweight": "bold", "color": ink_on(COLOURS[kind])}
                drawn.text(*spot, words(kind), **style)
        if seen:
            legend(drawn, [Patch(color=COLOURS[kind]) for kind in seen], [*map(words, seen)], above=44)
        if limit:
            drawn.axhline(limit / UNITS[unit], color=OVER, linewidth=2)
            place = {"color": OVER, "fontweight": "bold", "va": "bottom", "bbox": paper(0.5)}
            drawn.text(8, (limit + 0.012 * largest) / UNITS[unit], limit_name, **place)
        said = told_peak(measurement, first, last, peak, totals[peak], unit)
        x = float(np.interp(peak, counts, xs) + np.interp(min(peak + 1, last), counts, xs)) / 2
        _name_peak(drawn, x, totals[peak] / UNITS[unit], said, width)
        for letter, count in letters.items():
            _pin(drawn, letter, float(np.interp(count, counts, xs)), totals[count] / UNITS[unit])
        alt = _timeline_alt(measurement, title, curves, totals, first, last, said, peak, unit)
        table = _table(measurement, curves, totals, first, last, unit)
        return finished(drawn, ax, title, alt, str(measurement.provenance), table, above)


def _shown_curves(measurement: Measurement, first: int, last: int) -> dict[str, list[int]]:
    """Bytes by kind after each event, from the bottom up, of the kinds that are there in what is shown."""
    curves = {kind: [0, *curve] for kind, curve in measurement.timeline.curves().items()}
    return {kind: curves[kind] for kind in TIMELINE_ORDER if any(curves.get(kind, ())[first : last + 1])}


def _shown_peak(measurement: Measurement, totals: Sequence[int], first: int, last: int) -> int:
    """The event count of the peak: the measurement's own, unless what is shown has another one."""
    peak = measurement.peak_event
    if first <= peak <= last and totals[peak] >= max(totals[first : last + 1]):
        return peak
    return max(range(first, last + 1), key=totals.__getitem__)


Edges = tuple[np.ndarray, np.ndarray]  # the lower and the upper edge of an area, in a unit of bytes


def _edges(curves: Mapping[str, Sequence[int]], counts: Sequence[int], one: int) -> dict[str, Edges]:
    edges = {}
    low = np.zeros(len(counts))
    for kind, curve in curves.items():
        high = low + np.array([curve[count] for count in counts]) / one
        edges[kind] = (low, high)
        low = high
    return edges


def _steps(xs: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The outline of an area of steps down to the axis, without points at which nothing changes."""
    changes = [0, *(index for index in range(1, len(xs)) if high[index] != high[index - 1])]
    right = np.repeat(np.append(xs[changes], xs[-1]), 2)
    up = np.concatenate([[0.0], np.repeat(high[changes], 2), [0.0]])
    return right, up


def _roomiest(
    xs: np.ndarray, low: np.ndarray, high: np.ndarray, one: float, name: str
) -> tuple[float, float] | None:
    """The center of the best place for a name inside an area; None where none is high enough.

    `one` are the points of a unit of bytes.
    """
    width = text_width(name, 11.5, bold=True) + 8
    roomiest = 15 / one  # a line's height
    center: tuple[float, float] | None = None
    for start in range(0, int(xs[-1] - width), 6):
        inside = slice(max(0, np.searchsorted(xs, start) - 1), np.searchsorted(xs, start + width) + 1)
        floor = float(low[inside].max())
        roof = float(high[inside].min())
        if roof - floor > roomiest:
            roomiest = roof - floor
            center = (start + width / 2, (floor + roof) / 2)
    return center


def _count_axis(drawn: Axes, knots: Sequence[tuple[int, float]]) -> None:
    """Event counts where phases begin: the last in any case, others where they are far from all before."""
    shown: list[tuple[int, float]] = []
    for count, x in [knots[-1], *knots[:-1]]:
        if all(abs(x - other) > 52 for _, other in shown):
            shown.append((count, x))
    drawn.xaxis.set_major_locator(FixedLocator([x for _, x in shown]))
    drawn.set_xticklabels([number(count) for count, _ in shown])
    drawn.set_xlabel(LABEL)
    drawn.spines["left"].set_visible(False)


def _name_spans(
    drawn: Axes, measurement: Measurement, first: int, last: int, knots: Sequence[tuple[int, float]]
) -> None:
    """Steps and phases above the plot, each with a line where it starts, as there is room."""
    counts, places = zip(*knots, strict=True)
    top = {"transform": drawn.get_xaxis_transform(), "clip_on": False}

    def name_one(
        start: int, end: int, names: Sequence[str], above: int, rule: str, look: dict[str, Any]
    ) -> None:
        left, right = np.interp([start, end], counts, places)
        drawn.plot([left, left], [0, 1 + (above + 10) / HIGH], color=rule, linewidth=0.8, zorder=0.5, **top)
        said = next((name for name in names if text_width(name, 11) <= right - left), "")
        drawn.text((left + right) / 2, 1 + above / HIGH, said, ha="center", **look, **top)

    for start, end, phase in _spans(measurement, first, last, lambda mark: mark.phase):
        names = PHASE_WORDS.get(phase, (phase,))
        name_one(start, end, names, 8, "#C9C9C9", {"color": QUIET, "fontsize": 10})
    for start, end, step in _spans(measurement, first, last, lambda mark: mark.step):
        names = (step_name(step), str(step or ""))
        name_one(start, end, names, 24, "#7A7A7A", {"fontweight": "bold"})


def _name_peak(drawn: Axes, x: float, y: float, said: str, width: float) -> None:
    """Words above the peak, kept on the sheet, and an arrow head on it."""
    half = text_width(said, 12, bold=True) / 2
    head = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
    drawn.annotate("", (x, y), (0, 10), textcoords="offset points", arrowprops=head)
    place = {"ha": "center", "fontsize": 12, "fontweight": "bold", "bbox": paper(0.5)}
    middle = min(max(x, half), width - half)
    drawn.annotate(said, (middle, y), (0, 12), textcoords="offset points", **place)


def _pin(drawn: Axes, letter: str, x: float, y: float) -> None:
    """A pin for a letter, from the axis to above the curve: there it hides no number."""
    drawn.plot([x, x], [0, y], color="white", linewidth=4)
    drawn.plot([x, x], [0, y], color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    ring = {"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": INK}
    place = {"ha": "center", "fontweight": "bold", "bbox": ring}
    drawn.annotate(letter, (x, y), (0, 12), textcoords="offset points", **place)


def told_peak(measurement: Measurement, first: int, last: int, peak: int, size: int, unit: str) -> str:
    """The peak, its phase, and its step if several are shown: "peak 31.0 GB in loss, step 2"."""
    said = f"peak {format_bytes(size, unit, digits_for(size, unit))}"
    before = [mark for mark in measurement.timeline.marks if mark.event < peak]
    if not before:
        return f"{said} in set-up"
    mark = max(before, key=lambda mark: mark.event)
    steps = {step for _, _, step in _spans(measurement, first, last, lambda mark: mark.step)}
    return f"{said} in {mark.phase}, step {mark.step}" if len(steps) > 1 else f"{said} in {mark.phase}"


def _timeline_alt(
    measurement: Measurement,
    title: str,
    curves: Mapping[str, Sequence[int]],
    totals: Sequence[int],
    first: int,
    last: int,
    said: str,
    peak: int,
    unit: str,
) -> str:
    digits = digits_for(totals[peak], unit)
    largest = sorted((kind for kind in curves if curves[kind][peak]), key=lambda kind: -curves[kind][peak])[
        :4
    ]
    parts = sentence(f"{words(kind)} {amount(curves[kind][peak], unit, digits)}" for kind in largest)
    return (
        f"{stop(title)} Areas by kind of memory over {last - first:,} allocations and frees."
        f" The peak is {said.removeprefix('peak ')}: {parts}."
        f" It ends at {format_bytes(totals[last], unit, digits)}. {measurement.provenance}."
    )


def _table(
    measurement: Measurement,
    curves: Mapping[str, Sequence[int]],
    totals: Sequence[int],
    first: int,
    last: int,
    unit: str,
) -> list[list[str]]:
    """The highest moment of each phase, by kind."""
    digits = digits_for(max(totals), unit)
    table = [["highest moment of", *map(words, curves), f"total ({unit})"]]
    for start, end, (step, phase) in _spans(measurement, first, last, lambda mark: (mark.step, mark.phase)):
        at = max(range(start, end + 1), key=totals.__getitem__)
        sizes = [amount_with_unit(curve[at], unit, digits) for curve in curves.values()]
        table.append([f"{phase}, {step_name(step)}", *sizes, amount(totals[at], unit, digits)])
    return table


def step_name(step: int) -> str:
    return f"step {step}" if step else "set-up"


def _window(measurement: Measurement, steps: Sequence[int] | None) -> tuple[int, int]:
    """Numbers of events that have happened at the beginning and at the end of what is shown."""
    marks = measurement.timeline.marks
    events = len(measurement.timeline)
    if not events:
        raise ValueError("this timeline holds no events, so there is nothing to draw")
    if steps is None:
        return 0, events
    known = {mark.step for mark in marks}
    if not steps or not set(steps) <= known:
        raise ValueError(f"steps {list(steps)} asked for; measured were {sorted(known)}")
    first = min(mark.event for mark in marks if mark.step in steps)
    after = [mark.event for mark in marks if mark.event > first and mark.step > max(steps)]
    return first, min(after, default=events)


def _knots(measurement: Measurement, first: int, last: int, width: float) -> list[tuple[int, float]]:
    """The counts at which phases begin, and their x: wider than a phase's share where it is short."""
    spans = _spans(measurement, first, last, lambda mark: (mark.step, mark.phase))
    counts = sorted({first, *(start for start, _, _ in spans), last})
    shares = [end - start for start, end in pairwise(counts)]
    least = min(NARROWEST, width / 3 / max(1, len(shares)))
    # Short phases get `least`. That is too much in all, so what others have beyond `least` is scaled down.
    wide = [max(least, width * share / max(1, last - first)) for share in shares]
    spare = width - least * len(wide)
    beyond = sum(one - least for one in wide) or 1.0
    widths = [least + (one - least) * spare / beyond for one in wide]
    return list(zip(counts, accumulate(widths, initial=0.0), strict=True))


def _widened(knots: list[tuple[int, float]], peak: int, last: int) -> list[tuple[int, float]]:
    """The knots with room for the event of the peak, at the cost of the others of its phase."""
    index = next((k for k, (count, _) in enumerate(knots) if count > peak), 0)
    if not index or peak == last:
        return knots
    (start, left), (end, right) = knots[index - 1 : index + 1]
    if end - start < 2 or (right - left) / (end - start) >= PEAK:
        return knots
    x = left + (right - left - PEAK) * (peak - start) / (end - start - 1)
    new = [(count, at) for count, at in ((peak, x), (peak + 1, x + PEAK)) if start < count < end]
    return [*knots[:index], *new, *knots[index:]]


def _spans(
    measurement: Measurement, first: int, last: int, name: Callable[[Mark], Name]
) -> list[tuple[int, int, Name]]:
    """Start and end of each named stretch between two counts; none has what comes before the first mark."""
    marks = sorted(measurement.timeline.marks, key=lambda mark: mark.event)
    starts = [(next(members).event, called) for called, members in groupby(marks, name)]
    ends = [*(start for start, _ in starts[1:]), len(measurement.timeline)]
    stretches = [
        (max(start, first), min(end, last), called) for (start, called), end in zip(starts, ends, strict=True)
    ]
    return [stretch for stretch in stretches if stretch[0] < stretch[1]]


def thin(
    totals: Sequence[int], first: int, last: int, keep: Sequence[int], most: int = MOST_POINTS
) -> list[int]:
    """Event counts from `first` to `last`: at most `most` of them, or as many as `keep` has.

    In each of many equal stretches the highest and the lowest point survive, so no peak is lost or lowered;
    the ends and the counts in `keep` always survive.
    """
    fixed = {first, last, *(count for count in keep if first <= count <= last)}
    if last - first + 1 <= most:
        return list(range(first, last + 1))
    stretches = max(1, (most - len(fixed)) // 2)
    edges = [first + (last + 1 - first) * k // stretches for k in range(stretches + 1)]
    for start, end in pairwise(edges):
        fixed.add(max(range(start, end), key=totals.__getitem__))
        fixed.add(min(range(start, end), key=totals.__getitem__))
    return sorted(fixed)
