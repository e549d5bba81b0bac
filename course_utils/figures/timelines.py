"""The timeline: memory by kind after each allocation and free, with the phases of each step named."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

from ..gpus import Gpu
from ..measurement import Mark, Measurement
from ..units import UNITS, format_bytes
from .axes import COLOURS, OVER, Segment, amount, digits_for, draw_legend, named_capacity, stop, words  # fmt: skip
from .canvas import INK, QUIET, RULE, WIDTH, Canvas, Figure, ink_on, number, sentence, short, text_width, ticks

TIMELINE_ORDER = (
    "parameters", "optimizer_states", "gradients", "weight_copies",
    "workspaces", "inputs", "communication", "activations", "temporaries",
)  # fmt: skip
"""From the bottom: what stays longest lies lowest, so that flat things look flat."""

Name = TypeVar("Name")

MOST_POINTS = 1500
PLOT = (66.0, WIDTH - 22.0)
PLOT_HEIGHT = 300.0
NARROWEST = 32.0
"""Pixels that each phase gets at least, where a third of the width suffices for that."""
PHASE_WORDS = {
    "forward": ("forward", "fwd"), "backward": ("backward", "bwd"), "optimizer": ("optimizer", "optim.", "opt"),
}  # fmt: skip


def timeline(
    measurement: Measurement,
    title: str,
    *,
    unit: str = "GB",
    steps: Sequence[int] | None = None,
    capacity: int | Gpu | None = None,
    capacity_label: str = "",
    letters: Mapping[str, int] | None = None,
    alt: str | None = None,
) -> Figure:
    """Memory by kind after each allocation and free, with the phases of each step and the peak named in the picture.

    `steps` picks training steps (1 is the first); without it everything is shown, set-up included. `letters` names
    moments, by how many events have happened, with a pin on the axis. Raises ValueError for steps that were not
    measured, for a timeline without events, and for a letter outside what is shown.
    """
    window = _window(measurement, steps)
    curves = {
        kind: curve
        for kind, curve in _ordered_curves(measurement).items()
        if any(curve[window.first : window.last + 1])
    }
    totals = [sum(at) for at in zip(*curves.values(), strict=True)]
    peak = _peak_count(measurement, totals, window)
    kept = thin(totals, window.first, window.last, [peak, *(mark.event for mark in measurement.timeline.marks)])
    alt = alt or _timeline_alt(measurement, title, curves, totals, peak, window, unit)
    limit, limit_name = named_capacity(capacity, capacity_label, unit)
    canvas, view = Canvas(), _View(_knots(measurement, window), 0.0, max(totals[peak] * 1.17, (limit or 0) * 1.09, 1.0))
    view = replace(view, top=_timeline_head(canvas, measurement, title, curves, kept, view, totals[peak], unit))
    _timeline_axes(canvas, view, unit)
    _timeline_phases(canvas, measurement, view)
    _timeline_areas(canvas, curves, kept, view)
    if limit:
        _timeline_limit(canvas, view, limit, limit_name)
    taken = PLOT[0] + 16 + text_width(limit_name, 12, bold=True)
    _timeline_peak(canvas, measurement, view, peak, totals[peak], unit, (view.y(limit), taken) if limit else None)
    _timeline_letters(canvas, letters or {}, totals, view)
    end = canvas.note(str(measurement.provenance), view.bottom + 62)
    return Figure(canvas.svg(end - 2, title, alt), alt)


@dataclass(frozen=True)
class _Window:
    """The part of a timeline that is shown, as event counts: from `first` to `last` events having happened."""

    first: int
    last: int


@dataclass(frozen=True)
class _View:
    """Event counts and bytes to pixels.

    `knots` maps counts to x: evenly within a phase, but with room for every phase, or the loss, a few events long and
    often the peak, would be thinner than a pixel.
    """

    knots: Sequence[tuple[int, float]]
    top: float
    largest: float

    @property
    def window(self) -> _Window:
        return _Window(self.knots[0][0], self.knots[-1][0])

    @property
    def bottom(self) -> float:
        return self.top + PLOT_HEIGHT

    def x(self, count: int) -> float:
        index = min(max(1, bisect_left(self.knots, (count, 0.0))), len(self.knots) - 1)
        (start, left), (end, right) = self.knots[index - 1], self.knots[index]
        return left + (right - left) * (count - start) / max(1, end - start)

    def y(self, size: float) -> float:
        return self.bottom - PLOT_HEIGHT * size / self.largest


def _knots(measurement: Measurement, window: _Window) -> list[tuple[int, float]]:
    left, right = PLOT
    starts = {
        window.first,
        *(start for start, _, _ in _spans(measurement, window, lambda mark: (mark.step, mark.phase))),
    }
    counts = sorted({*starts, window.last})
    shares = [end - start for start, end in pairwise(counts)]
    least = min(NARROWEST, (right - left) / 3 / max(1, len(shares)))
    wide = [max(least, (right - left) * share / max(1, window.last - window.first)) for share in shares]
    spare = right - left - least * len(wide)
    beyond = sum(width - least for width in wide) or 1.0
    widths = [least + (width - least) * spare / beyond for width in wide]
    return list(zip(counts, accumulate(widths, initial=left), strict=True))


def _window(measurement: Measurement, steps: Sequence[int] | None) -> _Window:
    marks, events = measurement.timeline.marks, len(measurement.timeline)
    if not events:
        raise ValueError("this timeline holds no events, so there is nothing to draw")
    if steps is None:
        return _Window(0, events)
    known = {mark.step for mark in marks}
    if not steps or not set(steps) <= known:
        raise ValueError(f"steps {list(steps)} asked for; measured were {sorted(known)}")
    first = min(mark.event for mark in marks if mark.step in steps)
    after = [mark.event for mark in marks if mark.event > first and mark.step > max(steps)]
    return _Window(first, min(after, default=events))


def _ordered_curves(measurement: Measurement) -> dict[str, list[int]]:
    """Bytes by kind, from the bottom up; element k is what is allocated when k events have happened."""
    curves = measurement.timeline.curves()
    return {kind: [0, *curves[kind]] for kind in TIMELINE_ORDER if kind in curves}


def _peak_count(measurement: Measurement, totals: Sequence[int], window: _Window) -> int:
    shown = range(window.first, window.last + 1)
    highest = max(totals[count] for count in shown)
    if measurement.peak_event in shown and totals[measurement.peak_event] == highest:
        return measurement.peak_event
    return next(count for count in shown if totals[count] == highest)


def thin(totals: Sequence[int], first: int, last: int, keep: Sequence[int] = (), most: int = MOST_POINTS) -> list[int]:
    """At most `most` (or as many as there are in `keep`) event counts of `first` to `last` that keep the curve's looks.

    In each of many equal stretches the highest and the lowest point survive, so no peak is lost or lowered; the ends
    and the counts in `keep` always survive.
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


def _stacked(curves: Mapping[str, Sequence[int]], counts: Sequence[int]) -> dict[str, list[int]]:
    """For each kind the upper edge of its area, in bytes, at the given event counts."""
    edges, below = {}, [0] * len(counts)
    for kind, curve in curves.items():
        below = [low + curve[count] for low, count in zip(below, counts, strict=True)]
        edges[kind] = below
    return edges


def _timeline_head(
    canvas: Canvas,
    measurement: Measurement,
    title: str,
    curves: Mapping[str, Sequence[int]],
    kept: Sequence[int],
    view: _View,
    peak: int,
    unit: str,
) -> float:
    """Draws title and, for areas too small for a name inside, a legend; returns the y where the plot begins."""
    y = canvas.title(title)
    tallest = {kind: PLOT_HEIGHT * max(curve[count] for count in kept) / view.largest for kind, curve in curves.items()}
    places = _places(curves, kept, view)
    left_over = [kind for kind in curves if places[kind] is None and tallest[kind] >= 1]
    if left_over:
        parts = [Segment(words(kind), 1, kind) for kind in left_over]
        y = draw_legend(canvas, parts, y + 6, unit, 0, values=False, left=PLOT[0])
    return y + 48


def _timeline_axes(canvas: Canvas, view: _View, unit: str) -> None:
    left, right = PLOT
    for tick in ticks(0, view.largest / UNITS[unit], 6):
        y = view.y(tick * UNITS[unit])
        canvas.line(left, y, right, y)
        canvas.text(left - 8, y + 4, number(tick), 12, QUIET, text_anchor="end")
    for tick in _event_ticks(view):
        canvas.line(view.x(tick), view.bottom, view.x(tick), view.bottom + 5, RULE)
        canvas.text(view.x(tick), view.bottom + 20, number(tick), 12, QUIET, text_anchor="middle")
    label = "allocations and frees, in order (short phases drawn wider)"
    canvas.text((left + right) / 2, view.bottom + 40, label, 12, QUIET, text_anchor="middle")
    middle = (view.top + view.bottom) / 2
    canvas.text(
        20, middle, f"{unit} allocated", 12, QUIET, text_anchor="middle", transform=f"rotate(-90 20 {short(middle)})"
    )


def _event_ticks(view: _View) -> list[int]:
    """Event counts at the knots that leave room for their numbers, the last one always."""
    shown: list[int] = []
    for count, x in [view.knots[-1], *view.knots[:-1]]:
        if all(abs(x - view.x(other)) > 60 for other in shown):
            shown.append(count)
    return sorted(shown)


def _timeline_phases(canvas: Canvas, measurement: Measurement, view: _View) -> None:
    """Names steps and phases above the plot, with a line where each begins."""
    for start, end, name in _spans(measurement, view.window, lambda mark: (mark.step, mark.phase)):
        canvas.line(view.x(start), view.top - 16, view.x(start), view.bottom, "#C9C9C9", data_phase=name[1])
        shown = _fitting(PHASE_WORDS.get(name[1], (name[1],)), view.x(end) - view.x(start))
        canvas.text((view.x(start) + view.x(end)) / 2, view.top - 5, shown, 11, QUIET, text_anchor="middle")
    for start, end, step in _spans(measurement, view.window, lambda mark: mark.step):
        canvas.line(view.x(start), view.top - 36, view.x(start), view.bottom, "#7A7A7A")
        shown = _fitting((f"step {step}", f"{step}") if step else ("set-up",), view.x(end) - view.x(start))
        canvas.text(
            (view.x(start) + view.x(end)) / 2, view.top - 23, shown, 12, text_anchor="middle", font_weight="bold"
        )


def _spans(measurement: Measurement, window: _Window, name: Callable[[Mark], Name]) -> list[tuple[int, int, Name]]:
    """Where each named stretch of the window starts and ends; what comes before the first mark has no name."""
    starts: list[tuple[int, Name]] = []
    for mark in sorted(measurement.timeline.marks, key=lambda mark: mark.event):
        if not starts or starts[-1][1] != name(mark):
            starts.append((mark.event, name(mark)))
    ends = [*(start for start, _ in starts[1:]), len(measurement.timeline)]
    stretches = [(start, end, called) for (start, called), end in zip(starts, ends, strict=True)]
    clipped = [(max(start, window.first), min(end, window.last), called) for start, end, called in stretches]
    return [(start, end, called) for start, end, called in clipped if start < end]


def _fitting(choices: Sequence[str], width: float) -> str:
    return next((choice for choice in choices if text_width(choice, 11) <= width), "")


def _timeline_areas(canvas: Canvas, curves: Mapping[str, Sequence[int]], kept: Sequence[int], view: _View) -> None:
    """Draws each area down to the axis, the topmost first, so that the next covers all but its band; then names."""
    for kind, edge in reversed(_stacked(curves, kept).items()):
        # The outline keeps a spike of one event, thinner than a pixel, in sight.
        color = COLOURS[kind]
        canvas.path(_area(kept, edge, view), fill=color, stroke=color, stroke_width=1, data_kind=kind)
    canvas.line(PLOT[0], view.bottom, PLOT[1], view.bottom, RULE)
    for kind, place in _places(curves, kept, view).items():
        if place:
            x, y = place
            canvas.text(x, y + 4, words(kind), 12.5, ink_on(COLOURS[kind]), text_anchor="middle", font_weight="bold")


def _area(counts: Sequence[int], edge: Sequence[int], view: _View) -> str:
    points = [(short(view.x(count)), short(view.y(size))) for count, size in zip(counts, edge, strict=True)]
    inner = [b for a, b, c in zip(points, points[1:], points[2:], strict=False) if not a[1] == b[1] == c[1]]
    path = " ".join(f"{x} {y}" for x, y in [points[0], *inner, points[-1]])
    return f"M{points[0][0]} {short(view.bottom)}L{path} {points[-1][0]} {short(view.bottom)}Z"


def _places(
    curves: Mapping[str, Sequence[int]], kept: Sequence[int], view: _View
) -> dict[str, tuple[float, float] | None]:
    """The center of the roomiest spot for each area's name, in pixels, or None where no spot is high enough."""
    xs = [view.x(count) for count in kept]
    places: dict[str, tuple[float, float] | None] = {}
    below = [0] * len(kept)
    for kind, edge in _stacked(curves, kept).items():
        low, high = [view.y(size) for size in below], [view.y(size) for size in edge]
        places[kind] = _roomiest(xs, low, high, text_width(words(kind), 12.5, bold=True) + 10)
        below = edge
    return places


COLUMN = 4.0


def _roomiest(
    xs: Sequence[float], low: Sequence[float], high: Sequence[float], width: float
) -> tuple[float, float] | None:
    """Where a box of `width` and a line's height fits best between two edges, given in pixels downward."""
    left, right = PLOT
    columns = int((right - left) / COLUMN)
    floors, roofs = _columns(xs, low, columns, min), _columns(xs, high, columns, max)
    span = int(width / COLUMN) + 1
    best = (16.0, None)
    for start in range(columns - span):
        floor, roof = min(floors[start : start + span]), max(roofs[start : start + span])
        if floor - roof > best[0]:
            best = (floor - roof, (left + (start + span / 2) * COLUMN, (floor + roof) / 2))
    return best[1]


def _columns(xs: Sequence[float], ys: Sequence[float], columns: int, worst: Callable) -> list[float]:
    """The tightest y in each column of pixels, of the points in it and of the line through them at its edges."""
    left = PLOT[0]
    at_edge = [_interpolate(xs, ys, left + k * COLUMN) for k in range(columns + 1)]
    inside: list[list[float]] = [[at_edge[k], at_edge[k + 1]] for k in range(columns)]
    for x, y in zip(xs, ys, strict=True):
        inside[min(columns - 1, int((x - left) / COLUMN))].append(y)
    return [worst(column) for column in inside]


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    right = min(max(1, bisect_left(xs, x)), len(xs) - 1)
    gap = xs[right] - xs[right - 1]
    share = (x - xs[right - 1]) / gap if gap else 0.0
    return ys[right - 1] + (ys[right] - ys[right - 1]) * share


def _timeline_limit(canvas: Canvas, view: _View, limit: int, name: str) -> None:
    y = view.y(limit)
    canvas.line(PLOT[0], y, PLOT[1], y, "#FFFFFF", stroke_width=5)
    canvas.line(PLOT[0], y, PLOT[1], y, OVER, stroke_width=2, data_capacity=limit)
    canvas.halo_text(PLOT[0] + 8, y - 7, name, 12, fill=OVER, font_weight="bold")


def _timeline_peak(
    canvas: Canvas,
    measurement: Measurement,
    view: _View,
    peak: int,
    size: int,
    unit: str,
    limit: tuple[float, float] | None,
) -> None:
    """A mark on the peak and its name, which moves above the capacity's line where that would cross it.

    `limit` is the line's y and the x where its own name ends.
    """
    label = f"peak {format_bytes(size, unit, digits_for(size, unit))}{_where(measurement, peak, view.window)}"
    half, x, y = text_width(label, 13, bold=True) / 2, view.x(peak), view.y(size)
    canvas.path(f"M{short(x)} {short(y)}m-5 -8h10l-5 7z", fill=INK, data_peak=size)
    middle, base = min(max(x, PLOT[0] + half), PLOT[1] - half), y - 13
    if limit and base - 14 < limit[0] < base + 5 and middle - half > limit[1]:
        base = limit[0] - 7
    canvas.halo_text(middle, base, label, 13, text_anchor="middle", font_weight="bold")


def _timeline_letters(canvas: Canvas, letters: Mapping[str, int], totals: Sequence[int], view: _View) -> None:
    """A pin for each letter: from the axis up to the curve, above which the letter stands: it hides no number there."""
    for letter, count in letters.items():
        if not view.window.first <= count <= view.window.last:
            raise ValueError(f"{letter} is at event {count}; shown are {view.window.first} to {view.window.last}")
        x, y = view.x(count), view.y(totals[count]) - 6
        canvas.line(x, view.bottom, x, y, "#FFFFFF", stroke_width=4)
        canvas.line(x, view.bottom, x, y, INK, stroke_width=1.5, stroke_dasharray="4 3")
        canvas.rect(x - 9, y - 18, 18, 18, "#FFFFFF", rx=9, stroke=INK, stroke_width=1.5, data_letter=letter)
        canvas.text(x, y - 4.5, letter, 12, text_anchor="middle", font_weight="bold")


def _where(measurement: Measurement, peak: int, window: _Window) -> str:
    """The phase of the event that reached the peak: " in loss, step 2"; the step only where several are shown."""
    before = [mark for mark in measurement.timeline.marks if mark.event < peak]
    if not before:
        return " in set-up"
    mark = max(before, key=lambda mark: mark.event)
    several = len({step for _, _, step in _spans(measurement, window, lambda mark: mark.step)}) > 1
    return f" in {mark.phase}" + (f", step {mark.step}" if several else "")


def _timeline_alt(
    measurement: Measurement,
    title: str,
    curves: Mapping[str, Sequence[int]],
    totals: Sequence[int],
    peak: int,
    window: _Window,
    unit: str,
) -> str:
    digits = digits_for(totals[peak], unit)
    by_size = sorted(((curve[peak], kind) for kind, curve in curves.items() if curve[peak]), reverse=True)[:4]
    parts = sentence(f"{words(kind)} {amount(size, unit, digits)}" for size, kind in by_size)
    return (
        f"{stop(title)} Areas by kind of memory over {window.last - window.first:,} allocations and frees. The peak is "
        f"{format_bytes(totals[peak], unit, digits)}{_where(measurement, peak, window)}: {parts}. "
        f"It ends at {format_bytes(totals[window.last], unit, digits)}. {measurement.provenance}."
    )
