"""The meter's picture: memory by the second, redrawn while a loop runs and therefore kept simple."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ..palette import COLOURS, INK, OVER, digits_for, sentence
from ..units import GB, UNITS, format_bytes
from .curves import spread
from .style import MARGIN, WIDTH, CourseFigure, look, sheet, text_width, value_axis

MOST_POINTS = 240
SHORTEST = 2.0  # seconds that the axis covers at least
LEFT, HIGH = 62.0, 240.0  # points


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
) -> CourseFigure:
    """Allocated, reserved and all of the GPU's memory over time; `about` precedes the peak ("at least ")."""
    last = readings[-1]
    shown = thinned(readings)
    curves = {"allocated": [at.allocated for at in shown], "reserved – –": [at.reserved for at in shown]}
    if last.driver is not None:
        curves["all programs ···"] = [at.driver or 0 for at in shown]
    sizes = {name: curve[-1] for name, curve in curves.items()} | ({"GPU": capacity} if capacity else {})
    highest = max(1, peak, capacity or 0, *map(max, curves.values()))
    unit = "GB" if highest >= GB else "MB"
    one = UNITS[unit]
    digits = digits_for(peak, unit)
    now, most, *ends = (format_bytes(size, unit, digits) for size in (last.allocated, peak, *sizes.values()))
    labels = {name: f"{name} {end}" for name, end in zip(sizes, ends, strict=True)}
    phase = f" in {last.phase}" if last.phase else ""
    title = f"{now} allocated now{phase}, {about}{most} at the peak"
    right = MARGIN + 8 + max(text_width(label, 11.5) for label in labels.values())
    with look():
        figure = sheet(title, 10 + HIGH + 41, source)
        ax = figure.place(LEFT, 10, WIDTH - LEFT - right, HIGH)
        ax.set(xlim=(0, max(SHORTEST, last.seconds)), ylim=(0, 1.06 * highest / one))
        value_axis(ax, "y", unit)
        value_axis(ax, "x", "seconds")
        seconds = [at.seconds for at in shown]
        for (name, curve), dashes in zip(curves.items(), ("-", "--", ":"), strict=False):
            ax.plot(seconds, [size / one for size in curve], dashes, color=INK, linewidth=1.5, label=name)
        allocated = [size / one for size in curves["allocated"]]
        ax.fill_between(seconds, allocated, color=COLOURS["temporaries"], linewidth=0)
        if capacity:
            ax.axhline(capacity / one, color=OVER, linewidth=2, label="GPU")
        middles = {name: size / (1.06 * highest) for name, size in sizes.items()}
        for name, y in spread(middles, dict.fromkeys(middles, 15 / HIGH)).items():
            place = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center"}
            ax.annotate(labels[name], (1, y), (8, 0), color=OVER if name == "GPU" else INK, **place)
    figure.alt = f"{title}. After {last.seconds:.1f} seconds: {sentence(labels.values())}. {source}."
    return figure


def thinned(readings: Sequence[Reading]) -> list[Reading]:
    """Keep at most `MOST_POINTS`: the last, and the highest of each stretch, so that no peak is lost."""
    stretch = max(1, ceil((len(readings) - 1) / (MOST_POINTS - 1)))
    groups = [readings[start : start + stretch] for start in range(0, len(readings) - 1, stretch)]
    return [*(max(group, key=lambda one: one.allocated) for group in groups), readings[-1]]
