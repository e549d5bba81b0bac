"""The meter's picture: memory by the second, redrawn while a loop runs."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ..palette import digits_for, sentence
from ..units import GB, UNITS, format_bytes
from .curves import lines
from .style import CourseFigure

MOST_POINTS = 240


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
    curves = {"allocated": [at.allocated for at in shown], "reserved": [at.reserved for at in shown]}
    if last.driver is not None:
        curves["all programs"] = [at.driver or 0 for at in shown]
    unit = "GB" if max(peak, capacity or 0, *map(max, curves.values())) >= GB else "MB"
    digits = digits_for(peak, unit)
    named = {f"{name} {format_bytes(curve[-1], unit, digits)}": curve for name, curve in curves.items()}
    seconds = [round(at.seconds, 2) for at in shown]
    series = {name: (seconds, [size / UNITS[unit] for size in curve]) for name, curve in named.items()}
    now, most = (format_bytes(size, unit, digits) for size in (last.allocated, peak))
    phase = f" in {last.phase}" if last.phase else ""
    title = f"{now} allocated now{phase}, {about}{most} at the peak"
    level = (f"GPU {format_bytes(capacity, unit, digits)}", capacity / UNITS[unit]) if capacity else None
    filled = next(iter(series))
    bands = {filled: ([0.0] * len(shown), series[filled][1])}
    told = sentence([*named, *([level[0]] if level else [])])
    alt = f"{title}. After {last.seconds:.1f} seconds: {told}. {source}."
    look = {"level": level, "bands": bands, "markers": False}
    return lines(series, title, "seconds", unit, **look, provenance=source, alt=alt)


def thinned(readings: Sequence[Reading]) -> list[Reading]:
    """Keep at most `MOST_POINTS`: the last, and the highest of each stretch, so that no peak is lost."""
    stretch = max(1, ceil((len(readings) - 1) / (MOST_POINTS - 1)))
    groups = [readings[start : start + stretch] for start in range(0, len(readings) - 1, stretch)]
    return [*(max(group, key=lambda one: one.allocated) for group in groups), readings[-1]]
