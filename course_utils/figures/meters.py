"""The meter's picture: memory by the second, redrawn while a loop runs and therefore kept small."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ..units import GB, format_bytes
from .axes import COLOURS, Plot, digits_for, draw_limit
from .canvas import INK, QUIET, Canvas, Figure, number, sentence, short, spread, ticks

MOST_POINTS = 240
SHORTEST = 2.0  # seconds that the axis covers at least
TOP, BOTTOM, RIGHT_OF_PLOT = 62.0, 322.0, 190.0  # pixels


class Reading(NamedTuple):
    """Bytes read `seconds` after the start. `peak` is the most allocated since its counter was last reset.

    `driver` is what all programs on the GPU have taken together, or None where that is unknown. `phase` says
    what the step is doing, where that is known.
    """

    allocated: int
    peak: int
    reserved: int
    driver: int | None = None
    phase: str = ""
    seconds: float = 0.0


def meter_figure(
    readings: Sequence[Reading], capacity: int | None, peak: int, about: str, source: str
) -> Figure:
    """Allocated, reserved and all of the GPU's memory over time; `about` precedes the peak ("at least ")."""
    last = readings[-1]
    highest = max(peak, capacity or 0, *(max(one.reserved, one.driver or 0) for one in readings))
    unit = "GB" if highest >= GB else "MB"
    digits = digits_for(peak, unit)
    phase = f" in {last.phase}" if last.phase else ""
    now, most = (format_bytes(size, unit, digits) for size in (last.allocated, peak))
    title = f"{now} allocated now{phase}, {about}{most} at the peak"

    canvas = Canvas()
    canvas.title(title)
    right = canvas.width - RIGHT_OF_PLOT
    plot = Plot(canvas, 66.0, right, TOP, BOTTOM, 1.06 * max(highest, 1))
    latest = max(SHORTEST, last.seconds)
    scale = (plot.right - plot.left) / latest
    plot.value_axis(unit)
    for tick in ticks(0, latest, 8):
        canvas.text(plot.left + scale * tick, BOTTOM + 18, number(tick), 12, QUIET, text_anchor="middle")
    canvas.text(plot.left, BOTTOM + 36, f"{unit} by seconds", 12, QUIET)

    sizes = {"allocated": last.allocated, "reserved – –": last.reserved}
    shown = thinned(readings)
    xs = [plot.left + scale * one.seconds for one in shown]
    outline = _path(xs, [plot.y(one.allocated) for one in shown])
    area = f"M{short(plot.left)} {short(BOTTOM)}L{outline}L{short(xs[-1])} {short(BOTTOM)}Z"
    canvas.path(area, fill=COLOURS["temporaries"], data_bytes=last.allocated)
    look = {"fill": "none", "stroke": INK, "stroke_width": 1.5}
    canvas.path(f"M{outline}", **look)
    canvas.path(f"M{_path(xs, [plot.y(one.reserved) for one in shown])}", **look, stroke_dasharray="6 3")
    if last.driver is not None:
        sizes["all programs ···"] = last.driver
        driver = [plot.y(one.driver or 0) for one in shown]
        canvas.path(f"M{_path(xs, driver)}", **look, stroke_dasharray="2 3")
    if capacity:
        sizes["GPU"] = capacity
        draw_limit(canvas, plot.left, plot.y(capacity), right, plot.y(capacity), capacity)

    labels = [f"{name} {format_bytes(size, unit, digits)}" for name, size in sizes.items()]
    places = spread([plot.y(size) for size in sizes.values()], 15, TOP, BOTTOM)
    for y, label in zip(places, labels, strict=True):
        canvas.text(right + 8, y + 4, label)
    end = canvas.note(source, BOTTOM + 52)
    alt = f"{title}. After {last.seconds:.1f} seconds: {sentence(labels)}. {source}."
    return Figure(canvas.svg(end, title, alt), alt)


def thinned(readings: Sequence[Reading]) -> list[Reading]:
    """Keep at most `MOST_POINTS`: the last, and the highest of each stretch, so that no peak is lost."""
    stretch = max(1, ceil((len(readings) - 1) / (MOST_POINTS - 1)))
    groups = [readings[start : start + stretch] for start in range(0, len(readings) - 1, stretch)]
    return [*(max(group, key=lambda one: one.allocated) for group in groups), readings[-1]]


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "L".join(f"{short(x)} {short(y)}" for x, y in zip(xs, ys, strict=True))
