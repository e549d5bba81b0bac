"""Pictures of lesson 06: a schedule at one of its ticks, and policies by their memory and their arithmetic."""

from collections.abc import Mapping

from course_utils.figures.axes import COLOURS, stop
from course_utils.figures.canvas import (
    GRID,
    INK,
    MARGIN,
    QUIET,
    RULE,
    WIDTH,
    Canvas,
    Figure,
    ink_on,
    number,
    text_width,
    ticks,
)
from course_utils.units import UNITS

from .schedules import Schedule, Tick

KEPT, CHECKPOINT, DONE, RUNNING = COLOURS["activations"], COLOURS["parameters"], COLOURS["gradients"], "#B3261E"
CURVE = 90.0
"""Pixels: height of the curve of memory under the chain."""


def schedule_figure(schedule: Schedule, at: int | None = None) -> Figure:
    """The chain while tick `at` (from 1) works, the last where it is None: what is kept, and the memory up to then.

    ValueError for a tick that the schedule does not have.
    """
    at = len(schedule.ticks) if at is None else at
    if not 1 <= at <= len(schedule.ticks):
        raise ValueError(f"tick {at}: this schedule has ticks 1 to {len(schedule.ticks)}")
    title = schedule_title(schedule, at)
    canvas = Canvas()
    top = canvas.title(title)
    _legend(canvas, top + 16)
    _chain(canvas, schedule, at, top + 52)
    bottom = _curve(canvas, schedule, at, top + 178)
    alt = f"{stop(title)} A chain of {schedule.nodes} nodes, forward above, backward below. {_told(schedule, at)}"
    return Figure(canvas.svg(bottom + 14, title, alt), alt)


def schedule_title(schedule: Schedule, at: int) -> str:
    """What the schedule has cost up to tick `at`; in all, at its last."""
    done = schedule.ticks[:at]
    runs, most = sum(tick.kind == "f" for tick in done), max(tick.memory for tick in done)
    name = f"{schedule.name[0].upper()}{schedule.name[1:]}"
    if at == len(schedule.ticks):
        return f"{name}: {schedule.nodes} nodes cost {most} values of memory and {runs} runs of f"
    now = f"{done[-1].memory} value{'s' * (done[-1].memory != 1)} kept now"
    return f"{name}: {now}, {most} at most so far, {runs} run{'s' * (runs != 1)} of f so far"


def _told(schedule: Schedule, at: int) -> str:
    tick = schedule.ticks[at - 1]
    again = " again" if tick.again else ""
    kept = ", ".join(map(str, tick.kept)) or "none"
    checkpoints = ", ".join(map(str, tick.checkpoints)) or "none"
    now = f"Tick {at} of {len(schedule.ticks)}: {tick.kind}{tick.node} runs{again}"
    return f"{now}. Values kept: {kept}. Checkpoints: {checkpoints}."


def _legend(canvas: Canvas, y: float) -> None:
    x = float(MARGIN)
    for color, words in ((KEPT, "value kept"), (CHECKPOINT, "checkpoint"), (DONE, "backward done")):
        canvas.rect(x, y - 10, 12, 12, color)
        canvas.text(x + 17, y, words, 12)
        x += 35 + text_width(words, 12)
    canvas.rect(x, y - 10, 12, 12, "#FFFFFF", stroke=RUNNING, stroke_width=3)
    canvas.text(x + 19, y, "at work", 12)


def _chain(canvas: Canvas, schedule: Schedule, at: int, y: float) -> None:
    """Two rows of nodes: f above, with its checkpoint as a bar at its left, and b below."""
    tick = schedule.ticks[at - 1]
    done = {other.node for other in schedule.ticks[:at] if other.kind == "b"} - {tick.node}
    pitch = (WIDTH - 2 * MARGIN) / schedule.nodes
    side = min(34.0, 0.62 * pitch)
    for node in range(1, schedule.nodes + 1):
        x = MARGIN + pitch * (node - 0.5) - side / 2
        if node in tick.checkpoints:
            canvas.rect(x - min(9.0, 0.17 * pitch), y - 3, min(6.0, 0.12 * pitch), side + 6, CHECKPOINT)
        _node(canvas, x, y, side, "f", node, KEPT if node in tick.kept else "#FFFFFF", tick)
        _node(canvas, x, y + 58, side, "b", node, DONE if node in done else "#FFFFFF", tick)


def _node(canvas: Canvas, x: float, y: float, side: float, kind: str, node: int, fill: str, tick: Tick) -> None:
    working = (tick.kind, tick.node) == (kind, node)
    stroke, stroke_width = (RUNNING, 3.5) if working else (RULE, 1)
    canvas.rect(
        x, y, side, side, fill, rx=side / 2, data_node=f"{kind}{node}", stroke=stroke, stroke_width=stroke_width
    )
    size = min(12.0, 0.4 * side)
    if size >= 6:
        canvas.text(x + side / 2, y + side / 2 + 0.36 * size, f"{kind}{node}", size, ink_on(fill), text_anchor="middle")


def _curve(canvas: Canvas, schedule: Schedule, at: int, top: float) -> float:
    """Memory at each tick so far, as bars with checkpoints below; returns the y below it."""
    left, bottom, right = MARGIN + 34.0, top + CURVE, WIDTH - MARGIN
    pitch, one = (right - left) / len(schedule.ticks), CURVE / max(schedule.memory, 1)
    canvas.text(MARGIN, top - 10, "values kept at each tick", 12, QUIET)
    for tick in dict.fromkeys(round(value) for value in ticks(0, schedule.memory, 3)):
        canvas.line(left, bottom - tick * one, right, bottom - tick * one, GRID)
        canvas.text(left - 7, bottom - tick * one + 4, number(tick), 11, QUIET, text_anchor="end")
    for index, tick in enumerate(schedule.ticks[:at]):
        low, high = one * len(tick.checkpoints), one * len(tick.kept)
        x, width = left + pitch * index, max(0.6, pitch - (1 if pitch > 3 else 0))
        canvas.rect(x, bottom - low, width, low, CHECKPOINT)
        canvas.rect(x, bottom - low - high, width, high, KEPT)
    canvas.line(left, bottom, right, bottom, RULE)
    return bottom


# ------------------------------------------------------------------------------------------------------ policies


def pareto(points: Mapping[str, tuple[float, int]], title: str, provenance: str = "", unit: str = "GB") -> Figure:
    """Each policy as a dot: percent of the step's arithmetic that it adds against bytes at its peak.

    Policies that no other beats in both are joined by a line: the Pareto front. ValueError without any.
    """
    if not points:
        raise ValueError("a Pareto front needs at least one policy")
    front, canvas = pareto_front(points), Canvas()
    top = canvas.title(title) + 34
    left, right, bottom = 76.0, WIDTH - 250.0, top + 290
    most_x, most_y = max(x for x, _ in points.values()) or 1, max(y for _, y in points.values())
    place = {name: (left + (right - left) * x / most_x, bottom - 280 * y / most_y) for name, (x, y) in points.items()}
    _pareto_axes(canvas, (left, right, bottom), most_x, most_y, unit)
    joined = sorted(place[name] for name in front)
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in joined)
    canvas.path(f"M{path}", fill="none", stroke=KEPT, stroke_width=2.2)
    for name, (x, y) in place.items():
        canvas.rect(x - 6, y - 6, 12, 12, KEPT if name in front else "#FFFFFF", rx=6, stroke=INK, stroke_width=1.2)
    _dot_names(canvas, points, place, unit)
    told = "; ".join(f"{name} {x:.2g} % and {y / UNITS[unit]:.1f} {unit}" for name, (x, y) in points.items())
    alt = f"{stop(title)} Dots of added arithmetic and peak: {told}. On the front: {', '.join(front)}."
    end = canvas.note(provenance, bottom + 62)
    return Figure(canvas.svg(end, title, alt), alt)


def _pareto_axes(canvas: Canvas, place: tuple[float, float, float], most_x: float, most_y: float, unit: str) -> None:
    left, right, bottom = place
    for tick in ticks(0, most_y / UNITS[unit], 6):
        y = bottom - 280 * tick * UNITS[unit] / most_y
        canvas.line(left, y, right, y, GRID)
        canvas.text(left - 8, y + 4, number(tick), 12, QUIET, text_anchor="end")
    for tick in ticks(0, most_x, 6):
        x = left + (right - left) * tick / most_x
        canvas.text(x, bottom + 20, f"{number(tick)} %", 12, QUIET, text_anchor="middle")
    canvas.line(left, bottom, right, bottom, RULE)
    canvas.text(MARGIN, bottom - 306, f"peak in {unit}", 12, QUIET)
    words = "arithmetic run again, in percent of the step's"
    canvas.text((left + right) / 2, bottom + 42, words, 12, QUIET, text_anchor="middle")


def _dot_names(
    canvas: Canvas, points: Mapping[str, tuple[float, int]], place: Mapping[str, tuple[float, float]], unit: str
) -> None:
    """Each name right of its dot, moved down where the one above would touch it."""
    taken: list[tuple[float, float]] = []
    for name, (x, y) in sorted(place.items(), key=lambda item: item[1][1]):
        while any(abs(y - other) < 15 and abs(x - near) < 170 for near, other in taken):
            y += 3
        taken.append((x, y))
        canvas.halo_text(x + 12, y - 3, f"{name}: {points[name][1] / UNITS[unit]:.1f} {unit}", 12.5)


def pareto_front(points: Mapping[str, tuple[float, int]]) -> list[str]:
    """The names of those that no other equals or beats in both without being the same, in the order given."""

    def beaten(name: str) -> bool:
        x, y = points[name]
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())

    return [name for name in points if not beaten(name)]
