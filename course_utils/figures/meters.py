"""The meter's picture: memory by the second, redrawn several times a second and therefore kept small."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from ..units import GB, format_bytes
from .axes import COLOURS, OVER, Plot, amount, digits_for, largest_kinds, words
from .canvas import (
    INK,
    MARGIN,
    QUIET,
    RULE,
    WIDTH,
    Canvas,
    Figure,
    number,
    sentence,
    short,
    spread,
    text_width,
    ticks,
)

MOST_POINTS = 240
SHORTEST = 2.0  # seconds that the axis covers at least


@dataclass(frozen=True)
class Reading:
    """Bytes read `seconds` after the start. `peak` is the most allocated since its counter was last reset.

    `driver` is what all programs on the GPU have taken together; it and `reserved` are None where they are
    unknown.
    """

    allocated: int
    peak: int
    reserved: int | None = None
    driver: int | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    phase: str | None = None
    seconds: float = 0.0


class MeterMark(NamedTuple):
    """The phase that begins `seconds` after the start."""

    seconds: float
    words: str


class Look(NamedTuple):
    """The place of the plot in the picture and the sizes of its texts, in pixels."""

    left: float = 66.0
    right: float = WIDTH - 190.0
    top: float = 62.0
    bottom: float = 322.0
    title: float = 16.5
    text: float = 12.0
    mark: float = 11.0


LOOK = Look()


@dataclass(frozen=True)
class _Scale(Plot):
    look: Look
    latest: float

    def x(self, seconds: float) -> float:
        return self.left + (self.right - self.left) * seconds / self.latest


def meter_figure(
    samples: Sequence[Reading],
    marks: Sequence[MeterMark],
    capacity: int | None,
    peak: int,
    about: str,
    source: str,
    axis: str,
) -> Figure:
    """Allocated bytes over time, by kind where that is known.

    The picture also shows what is reserved, what the driver says, and the phases. `about` comes before the
    peak ("at least " where it was only sampled). Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there is nothing to draw: the meter has not read anything yet")
    look = LOOK
    last = samples[-1]
    unit = "GB" if max(peak, capacity or 0) >= GB else "MB"
    title = f"{_shown(last.allocated, unit)} allocated now, {about}{_shown(peak, unit)} at the peak"
    highest = max([peak, capacity or 0, *(max(s.reserved or 0, s.driver or 0) for s in samples)])
    canvas = Canvas()
    kept = thinned(samples)
    scale = _Scale(canvas, *look[:4], 1.06 * max(1, highest), look, max(SHORTEST, last.seconds))
    canvas.text(MARGIN, 11.5 + look.title, title, look.title, font_weight="bold")
    scale.value_axis(unit, size=look.text)
    for tick in ticks(0, scale.latest, 8):
        y = look.bottom + 6 + look.text
        canvas.text(scale.x(tick), y, number(tick), look.text, QUIET, text_anchor="middle")
    canvas.text(look.left - 8, look.top - 6, unit, look.text, QUIET, text_anchor="end")
    canvas.text(look.left, look.bottom + 12 + 2 * look.text, axis, look.text, QUIET)
    _areas(kept, scale)
    _line(kept, scale, [sample.reserved for sample in kept], "6 3")
    _line(kept, scale, [sample.driver for sample in kept], "2 3")
    _marks(marks, scale)
    if capacity:
        y = scale.y(capacity)
        canvas.line(look.left, y, look.right, y, OVER, stroke_width=2, data_capacity=capacity)
    _labels(last, capacity, scale, unit)
    end = canvas.note(source, look.bottom + 16 + 3 * look.text)
    alt = f"{title}. {_alt(last, marks, capacity, unit)} {source}."
    return Figure(canvas.svg(end, title, alt), alt)


def thinned(samples: Sequence[Reading]) -> list[Reading]:
    """Samples, at most `MOST_POINTS`: the highest of each stretch, so that no peak is lost, and the last."""
    stretch = max(1, ceil((len(samples) - 1) / (MOST_POINTS - 1)))
    groups = [samples[start : start + stretch] for start in range(0, len(samples) - 1, stretch)]
    return [*(max(group, key=lambda sample: sample.allocated) for group in groups), samples[-1]]


def _shown(size: int, unit: str) -> str:
    return format_bytes(size, unit, digits_for(size, unit))


def _areas(samples: Sequence[Reading], scale: _Scale) -> None:
    known = [kind for kind in COLOURS if any(sample.kinds.get(kind) for sample in samples)]
    floor = [0] * len(samples)
    allocated = [sample.allocated for sample in samples]
    for kind in known:
        top = [low + sample.kinds.get(kind, 0) for low, sample in zip(floor, samples, strict=True)]
        _area(samples, scale, floor, top, COLOURS[kind], kind)
        floor = top
    if known:
        _line(samples, scale, allocated)
    else:
        _area(samples, scale, floor, allocated, COLOURS["temporaries"], "allocated")


def _area(
    samples: Sequence[Reading], scale: _Scale, low: Sequence[int], high: Sequence[int], fill: str, name: str
) -> None:
    path = "L".join([*_points(samples, scale, high), *reversed(_points(samples, scale, low))])
    scale.canvas.path(f"M{path}Z", fill=fill, data_kind=name, data_bytes=high[-1] - low[-1])


def _line(
    samples: Sequence[Reading], scale: _Scale, sizes: Sequence[int | None], dashes: str | None = None
) -> None:
    if known := _points(samples, scale, sizes):
        look = {"fill": "none", "stroke": INK, "stroke_width": 1.5, "stroke_dasharray": dashes}
        scale.canvas.path("M" + "L".join(known), **look)


def _points(samples: Sequence[Reading], scale: _Scale, sizes: Sequence[int | None]) -> list[str]:
    both = zip(samples, sizes, strict=True)
    return [f"{short(scale.x(one.seconds))} {short(scale.y(size))}" for one, size in both if size is not None]


def _marks(marks: Sequence[MeterMark], scale: _Scale) -> None:
    look = scale.look
    canvas = scale.canvas
    free = look.left  # where the last name ends
    for mark in marks:
        x = scale.x(min(mark.seconds, scale.latest))
        wide = text_width(mark.words, look.mark)
        canvas.line(x, look.top, x, look.bottom, RULE, stroke_width=1, data_mark=mark.words)
        if x >= free and x + wide <= look.right:
            canvas.halo_text(x + 3, look.top - 6, words(mark.words), look.mark)
            free = x + wide + 6


def _labels(last: Reading, capacity: int | None, scale: _Scale, unit: str) -> None:
    """Direct labels at the right: the kinds in the middle of their areas, the lines at their ends."""
    look = scale.look
    wanted: list[tuple[float, str, str]] = []
    floor = 0
    for kind in COLOURS:
        size = last.kinds.get(kind, 0)
        if size > 0.02 * scale.largest:
            shown = amount(size, unit, digits_for(size, unit))
            wanted.append((scale.y(floor + size / 2), f"{words(kind)} {shown}", INK))
        floor += size
    lines = {"allocated": last.allocated, "reserved – –": last.reserved, "driver ····": last.driver}
    for name, size in lines.items():
        if size is not None:
            wanted.append((scale.y(size), f"{name} {_shown(size, unit)}", INK))
    if capacity:
        wanted.append((scale.y(capacity), f"GPU {_shown(capacity, unit)}", OVER))
    places = spread([y for y, _, _ in wanted], 1.25 * look.text, look.top, look.bottom)
    for y, (_, text, color) in zip(places, wanted, strict=True):
        scale.canvas.text(look.right + 8, y + look.text / 3, text, look.text, color)


def _alt(last: Reading, marks: Sequence[MeterMark], capacity: int | None, unit: str) -> str:
    parts = [f"{last.seconds:.1f} seconds so far"]
    if last.reserved is not None:
        parts.append(f"{_shown(last.reserved, unit)} reserved")
    if last.driver is not None:
        parts.append(f"{_shown(last.driver, unit)} taken by all programs")
    if capacity:
        parts.append(f"the GPU has {_shown(capacity, unit)}")
    kinds = largest_kinds(last.kinds, 3)
    if kinds:
        parts.append(f"most of it {sentence(map(words, kinds))}")
    begun = f" The last phase is {marks[-1].words}." if marks else ""
    return f"{sentence(parts)}.{begun}"
