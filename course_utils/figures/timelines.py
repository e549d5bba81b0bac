"""The timeline: memory by kind after each allocation and free, with the phases of each step named."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, TypeVar

from ..gpus import Gpu
from ..measurement import Mark, Measurement
from ..units import UNITS, format_bytes
from .axes import (
    COLOURS,
    OVER,
    Plot,
    Segment,
    amount,
    digits_for,
    draw_legend,
    draw_peak,
    largest_kinds,
    named_capacity,
    stop,
    words,
)
from .canvas import INK, QUIET, RULE, Canvas, Figure, ink_on, number, reflowing, sentence, short, text_width
from .plotting import EVENTS, Chart, draw_areas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMELINE_ORDER = (
    "parameters", "optimizer_states", "gradients", "weight_copies",
    "workspaces", "inputs", "communication", "activations", "temporaries",
)  # fmt: skip
"""From the bottom: what stays longest lies lowest, so that flat things look flat."""

Name = TypeVar("Name")

MOST_POINTS = 1200  # of a curve: two for each pixel or so; a narrow picture has half of them
PLOT_HEIGHT = 300.0
PEAK = 4.0  # pixels that the peak gets at least, though it last for one event of thousands
NARROWEST = 32.0  # pixels that each phase gets at least, where a third of the width suffices for that
PHASE_WORDS = {
    "forward": ("forward", "fwd"),
    "backward": ("backward", "bwd"),
    "optimizer": ("optimizer", "optim.", "opt"),
}


@reflowing
def timeline(
    measurement: Measurement,
    title: str,
    *,
    unit: str = "GB",
    steps: Sequence[int] | None = None,
    capacity: int | Gpu | None = None,
    capacity_label: str = "",
    letters: Mapping[str, int] | None = None,
) -> Figure:
    """Memory by kind after each allocation and free, with names of the steps, their phases and the peak.

    `steps` picks training steps (1 is the first); without it everything is shown, set-up included. `letters`
    names moments, by how many events have happened, with a pin on the axis. Raises ValueError for what was
    not measured.
    """
    first, last = _window(measurement, steps)
    curves = _shown_curves(measurement, first, last)
    totals = [sum(at) for at in zip(*curves.values(), strict=True)]
    peak = _shown_peak(measurement, totals, first, last)
    canvas = Canvas()
    left = 52.0 if canvas.narrow else 66.0
    right = canvas.width - 26.0
    keep = [peak, min(peak + 1, last), *(mark.event for mark in measurement.timeline.marks)]
    kept = thin(totals, first, last, keep, MOST_POINTS // 2 if canvas.narrow else MOST_POINTS)
    limit, limit_name = named_capacity(capacity, capacity_label, unit)
    largest = max(totals[peak] * 1.17, (limit or 0) * 1.09, 1.0)
    knots = _knots(measurement, first, last, left, right)
    seen = _widened(knots, peak, last)
    view = _View(
        canvas=canvas,
        left=left,
        right=right,
        top=0.0,
        bottom=PLOT_HEIGHT,
        largest=largest,
        measurement=measurement,
        first=first,
        last=last,
        knots=seen,
        unit=unit,
        curves=curves,
        kept=kept,
        peak=peak,
    )
    # The head decides where the plot begins. Which names need a legend does not depend on that.
    top = view.head(title)
    view = replace(view, top=top, bottom=top + PLOT_HEIGHT)
    view.axes([count for count, _ in knots])
    view.phases()
    view.areas()
    named_line = None
    if limit:
        view.limit(limit)
        canvas.halo_text(left + 8, view.y(limit) - 7, limit_name, 12, fill=OVER, font_weight="bold")
        named_line = (view.y(limit), left + 16 + text_width(limit_name, 12, bold=True))
    view.name_peak(totals[peak], named_line)
    view.letters(letters or {}, totals)
    alt = view.alt(title, totals, peak)
    provenance = str(measurement.provenance)
    end = canvas.note(provenance, view.bottom + 62)
    limits = [(limit_name, limit / UNITS[unit], "-")] if limit else []
    notes = {view.told_peak(totals[peak]): peak, **(letters or {})}
    chart = Chart(title, provenance, partial(view.onto, notes, limits))
    return Figure(canvas.svg(end - 2, title, alt), alt, chart=chart)


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


@dataclass(frozen=True)
class _View(Plot):
    """Draws a timeline from the `first` event count shown to the `last`: event counts to x, bytes to y.

    `knots` maps counts to x: evenly within a phase, but with room for every phase, as the loss is a few
    events long and often the peak. `curves` are bytes by kind from the bottom up; element k is what is
    allocated when k events have happened. `kept` are the counts that are drawn; what is allocated at the
    `peak` is drawn until the next event.
    """

    measurement: Measurement
    first: int
    last: int
    knots: Sequence[tuple[int, float]]
    unit: str
    curves: Mapping[str, Sequence[int]]
    kept: Sequence[int]
    peak: int

    def x(self, count: int) -> float:
        index = min(max(1, bisect_left(self.knots, (count, 0.0))), len(self.knots) - 1)
        start, left = self.knots[index - 1]
        end, right = self.knots[index]
        return left + (right - left) * (count - start) / max(1, end - start)

    def phase_spans(self) -> list[tuple[int, int, tuple[int, str]]]:
        """Start and end of each phase shown, with its step and name."""
        return _spans(self.measurement, self.first, self.last, lambda mark: (mark.step, mark.phase))

    def step_spans(self) -> list[tuple[int, int, int]]:
        """Start and end of each step shown, with its number."""
        return _spans(self.measurement, self.first, self.last, lambda mark: mark.step)

    def head(self, title: str) -> float:
        """Draws title and a legend of areas without room for a name; returns the y where the plot begins."""
        y = self.canvas.title(title)
        places = self.places()
        small = list[Segment]()
        for kind, curve in self.curves.items():
            tallest = max(curve[count] for count in self.kept)
            is_visible = PLOT_HEIGHT * tallest >= self.largest  # a pixel high
            if places[kind] is None and is_visible:
                small.append(Segment(words(kind), 1, kind))
        if small:
            y = draw_legend(self.canvas, small, y + 6, self.unit, 0, values=False, left=self.left)
        return 48 + y

    def onto(self, notes: Mapping[str, int], limits: Sequence[tuple[str, float, str]], ax: "Axes") -> None:
        """The same areas by matplotlib; each of the `notes` is at an event count."""
        shown = range(self.first, self.last + 1)
        one = UNITS[self.unit]
        areas = {
            words(kind): ([curve[at] / one for at in shown], COLOURS[kind])
            for kind, curve in self.curves.items()
        }
        spans = [(start, end, phase, True) for start, end, (_, phase) in self.phase_spans()]
        spans += [(start, end, step_name(step), False) for start, end, step in self.step_spans()]
        places = list[tuple[str, int, float]]()
        for name, at in notes.items():
            total = sum(curve[at] for curve in self.curves.values())
            places.append((name, at, total / one))
        draw_areas(ax, shown, areas, spans, places, f"{self.unit} allocated", limits)

    def axes(self, counts: Sequence[int]) -> None:
        self.value_axis(self.unit, 6)
        shown: list[int] = []
        # The last count has its number in any case, others where they are far enough from all before.
        for count in [counts[-1], *counts[:-1]]:
            x = self.x(count)
            if all(abs(x - self.x(other)) > 60 for other in shown):
                shown.append(count)
        for count in sorted(shown):
            x = self.x(count)
            self.canvas.line(x, self.bottom, x, self.bottom + 5, RULE)
            self.canvas.text(x, self.bottom + 20, number(count), 12, QUIET, text_anchor="middle")
        label = EVENTS if self.canvas.narrow else f"{EVENTS} (short phases drawn wider)"
        middle = (self.left + self.right) / 2
        self.canvas.text(middle, self.bottom + 40, label, 12, QUIET, text_anchor="middle")
        x = 14 if self.canvas.narrow else 20
        self.canvas.upright(x, (self.top + self.bottom) / 2, f"{self.unit} allocated")

    def phases(self) -> None:
        for start, end, (_, phase) in self.phase_spans():
            names = PHASE_WORDS.get(phase, (phase,))
            self.span(start, end, names, 5, 11, QUIET, "#C9C9C9", data_phase=phase)
        for start, end, step in self.step_spans():
            names = (step_name(step), str(step) if step else "")
            self.span(start, end, names, 23, 12, INK, "#7A7A7A")

    def span(
        self,
        start: int,
        end: int,
        names: Sequence[str],
        above: int,
        size: int,
        ink: str,
        rule: str,
        **more: str,
    ) -> None:
        """Draws a line where a span starts, and the first of its `names` that has room."""
        left = self.x(start)
        right = self.x(end)
        is_phase = size == 11
        reach = 11 if is_phase else 13
        self.canvas.line(left, self.top - above - reach, left, self.bottom, rule, **more)
        shown = next((name for name in names if text_width(name, 11) <= right - left), "")
        bold = None if is_phase else "bold"
        middle = (left + right) / 2
        self.canvas.text(middle, self.top - above, shown, size, ink, text_anchor="middle", font_weight=bold)

    def edges(self) -> dict[str, list[int]]:
        """The upper edge of each kind's area, in bytes, at the counts that are drawn."""
        edges = {}
        edge = [0] * len(self.kept)
        for kind, curve in self.curves.items():
            edge = [below + curve[count] for below, count in zip(edge, self.kept, strict=True)]
            edges[kind] = edge
        return edges

    def areas(self) -> None:
        """Draws each area down to the axis, the topmost first, so that the next covers all but its band.

        Then names.
        """
        told = {
            "one": UNITS[self.unit],
            "unit": self.unit,
            "digits": digits_for(round(self.largest), self.unit) + 1,
            "scale": self.largest / PLOT_HEIGHT / 100,
            "top": short(self.top),
            "high": short(PLOT_HEIGHT),
            "knots": [[count, round(x, 1)] for count, x in self.knots],
        }
        data = " ".join(f'data-{name}="{value}"' for name, value in told.items())
        self.canvas.shapes.append(f'<g transform="matrix(.1 0 0 -.01 0 {short(self.bottom)})" {data}>')
        for kind, edge in reversed(self.edges().items()):
            # The outline keeps a spike of one event, thinner than a pixel, in sight.
            look = {"fill": COLOURS[kind], "stroke": COLOURS[kind], "vector_effect": "non-scaling-stroke"}
            self.canvas.path(self.area(edge), **look, data_kind=kind)
        self.canvas.shapes.append("</g>")
        self.canvas.line(self.left, self.bottom, self.right, self.bottom, RULE)
        for kind, place in self.places().items():
            if place:
                look = {"fill": ink_on(COLOURS[kind]), "text_anchor": "middle", "font_weight": "bold"}
                self.canvas.text(place[0], place[1] + 4, words(kind), 12.5, **look)

    def area(self, edge: Sequence[int]) -> str:
        """The outline of an area as steps: tenths of a pixel to the right, hundredths up from the axis."""
        points = []
        for count, size in zip(self.kept, edge, strict=True):
            height = round(100 * PLOT_HEIGHT * size / self.largest)
            points.append((round(10 * self.x(count)), height))
            if count == self.peak and count < self.last:
                points.append((round(10 * self.x(count + 1)), height))
        # A point as high as both of its neighbors adds nothing.
        inner = [
            b for a, b, c in zip(points, points[1:], points[2:], strict=False) if not a[1] == b[1] == c[1]
        ]
        outline = [(points[0][0], 0), points[0], *inner, points[-1], (points[-1][0], 0)]
        steps = (_step(x - before, y - under) for (before, under), (x, y) in pairwise(outline))
        return f"m{outline[0][0]} 0l{' '.join(steps)}z"

    def places(self) -> dict[str, tuple[float, float] | None]:
        """The center of the roomiest spot for each area's name, in pixels; None where none is high enough."""
        xs = [self.x(count) for count in self.kept]
        places = {}
        low = [self.y(0)] * len(xs)
        for kind, edge in self.edges().items():
            high = [self.y(size) for size in edge]
            places[kind] = _roomiest(xs, low, high, text_width(words(kind), 12.5, bold=True) + 10)
            low = high
        return places

    def name_peak(self, size: int, limit: tuple[float, float] | None) -> None:
        """Marks and names the peak, clear of the capacity's line.

        `limit` is the line's y, and the x where its name ends.
        """
        label = self.told_peak(size)
        x = (self.x(self.peak) + self.x(min(self.peak + 1, self.last))) / 2
        half = text_width(label, 13, bold=True) / 2
        y = self.y(size)
        draw_peak(self.canvas, x, y, size)
        middle = min(max(x, self.left + half), self.right - half)
        base = y - 13
        if limit:
            line, taken = limit
            crosses = base - 14 < line < base + 5
            if crosses and middle - half > taken:
                base = line - 7
        self.canvas.halo_text(middle, base, label, 13, text_anchor="middle", font_weight="bold")

    def letters(self, letters: Mapping[str, int], totals: Sequence[int]) -> None:
        """A pin for each letter, from the axis to above the curve: there it hides no number."""
        for letter, count in letters.items():
            if not self.first <= count <= self.last:
                raise ValueError(f"{letter} is at event {count}; shown are {self.first} to {self.last}")
            x = self.x(count)
            y = self.y(totals[count]) - 6
            self.canvas.line(x, self.bottom, x, y, "#FFFFFF", stroke_width=4)
            self.canvas.line(x, self.bottom, x, y, INK, stroke_width=1.5, stroke_dasharray="4 3")
            self.canvas.rect(
                x - 9, y - 18, 18, 18, "#FFFFFF", rx=9, stroke=INK, stroke_width=1.5, data_letter=letter
            )
            self.canvas.text(x, y - 4.5, letter, 12, text_anchor="middle", font_weight="bold")

    def told_peak(self, size: int) -> str:
        return f"peak {format_bytes(size, self.unit, digits_for(size, self.unit))}{self.where(self.peak)}"

    def where(self, count: int) -> str:
        """The phase of the event that reached the peak: " in loss", and ", step 2" if several are shown."""
        before = [mark for mark in self.measurement.timeline.marks if mark.event < count]
        if not before:
            return " in set-up"
        mark = max(before, key=lambda mark: mark.event)
        several = len({step for _, _, step in self.step_spans()}) > 1
        if several:
            return f" in {mark.phase}, step {mark.step}"
        return f" in {mark.phase}"

    def alt(self, title: str, totals: Sequence[int], peak: int) -> str:
        digits = digits_for(totals[peak], self.unit)
        at_peak = {kind: curve[peak] for kind, curve in self.curves.items()}
        parts = sentence(
            f"{words(kind)} {amount(at_peak[kind], self.unit, digits)}" for kind in largest_kinds(at_peak)
        )
        return (
            f"{stop(title)} Areas by kind of memory over {self.last - self.first:,} allocations and frees."
            f" The peak is {self.told_peak(totals[peak]).removeprefix('peak ')}: {parts}."
            f" It ends at {format_bytes(totals[self.last], self.unit, digits)}."
            f" {self.measurement.provenance}."
        )


def _step(right: int, up: int) -> str:
    """A step of a path: two numbers, where the sign of the second is all that has to part them."""
    return f"{right} {up}" if up >= 0 else f"{right}{up}"


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


def _knots(
    measurement: Measurement, first: int, last: int, left: float, right: float
) -> list[tuple[int, float]]:
    """The counts at which phases begin, and their x: wider than a phase's share where it is short."""
    spans = _spans(measurement, first, last, lambda mark: (mark.step, mark.phase))
    counts = sorted({first, *(start for start, _, _ in spans), last})
    shares = [end - start for start, end in pairwise(counts)]
    least = min(NARROWEST, (right - left) / 3 / max(1, len(shares)))
    # Short phases get `least`. That is too much in all, so what others have beyond `least` is scaled down.
    wide = [max(least, (right - left) * share / max(1, last - first)) for share in shares]
    spare = right - left - least * len(wide)
    beyond = sum(width - least for width in wide) or 1.0
    widths = [least + (width - least) * spare / beyond for width in wide]
    return list(zip(counts, accumulate(widths, initial=left), strict=True))


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


def _roomiest(
    xs: Sequence[float], low: Sequence[float], high: Sequence[float], width: float
) -> tuple[float, float] | None:
    """The center of the best place for a box of `width` and a line's height between two edges.

    All are in pixels, downward, so the `low` edge is the larger number.
    """
    roomiest = 16.0  # a line's height
    center: tuple[float, float] | None = None
    for start in range(int(xs[0]), int(xs[-1] - width), 4):
        inside = slice(max(0, bisect_left(xs, start) - 1), bisect_left(xs, start + width) + 1)
        floor = min(low[inside])
        roof = max(high[inside])
        if floor - roof > roomiest:
            roomiest = floor - roof
            center = (start + width / 2, (floor + roof) / 2)
    return center
