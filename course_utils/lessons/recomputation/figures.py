"""Figures of lesson 06: a schedule at one of its ticks, and policies by their memory and their cost."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from ...figures import lines
from ...figures.axes import COLOURS, legend, stop
from ...figures.canvas import GRID, MARGIN, QUIET, RULE, Canvas, Figure, ink_on, number, reflowing, ticks
from ...units import GB
from .schedules import Schedule, several

KEPT = COLOURS["activations"]
CHECKPOINT = COLOURS["parameters"]
DONE = COLOURS["gradients"]
RUNNING = "#B3261E"
# in pixels: the curve's height, that of two rows, and the least width of a node
CURVE = 90.0
PAIR = 104.0
LEAST_PITCH = 40.0


@reflowing
def schedule_figure(schedule: Schedule, at: int) -> Figure:
    """The chain at tick `at` (from 1), and memory up to then."""
    title = schedule_title(schedule, at)
    canvas = Canvas()
    top = canvas.title(title)
    fills = {"value kept": KEPT, "checkpoint": CHECKPOINT, "backward done": DONE}
    looks: dict[str, dict[str, Any]] = {words: {"fill": fill} for words, fill in fills.items()}
    looks["running"] = {"fill": "#FFFFFF", "stroke": RUNNING, "stroke_width": 3}

    def swatch(x: float, y: float, size: float, words: str) -> None:
        canvas.rect(x, y, size, size, **looks[words])

    top = legend(canvas, zip(looks, looks, strict=True), top + 4, swatch)
    bottom = _curve(canvas, schedule, at, _chain(canvas, schedule, at, top + 24) + 34)
    tick = schedule.ticks[at - 1]
    checkpoints, kept = (", ".join(map(str, nodes)) or "none" for nodes in (tick.checkpoints, tick.kept))
    now = (
        f"Tick {at} of {len(schedule.ticks)}: {tick.words}. Values kept: {kept}. Checkpoints: {checkpoints}."
    )
    alt = f"{stop(title)} A chain of {schedule.nodes} nodes, forward above, backward below. {now}"
    return Figure(canvas.svg(bottom + 14, title, alt), alt)


def schedule_title(schedule: Schedule, at: int) -> str:
    done = schedule.ticks[:at]
    runs = sum(tick.kind == "f" for tick in done)
    most = max(tick.memory for tick in done)
    name = schedule.name.capitalize()
    if at == len(schedule.ticks):
        return f"{name}: {schedule.nodes} nodes keep at most {most} values and take {runs} runs of f"
    now = several(done[-1].memory, "value")
    return f"{name}: {now} kept now, {most} at most so far, {several(runs, 'run')} of f so far"


def _chain(canvas: Canvas, schedule: Schedule, at: int, y: float) -> float:
    """Two rows of nodes: f above, a checkpoint as a bar at its left, and b below. Returns the y below them.

    A chain too long for the picture goes on below, in as many such pairs of rows as it needs.
    """
    tick = schedule.ticks[at - 1]
    done = {other.node for other in schedule.ticks[:at] if other.kind == "b"} - {tick.node}
    room = canvas.width - 2 * MARGIN
    rows = ceil(schedule.nodes * LEAST_PITCH / room)
    in_row = ceil(schedule.nodes / rows)
    pitch = room / in_row
    side = min(34.0, 0.66 * pitch)
    for node in range(1, schedule.nodes + 1):
        x = MARGIN + pitch * ((node - 1) % in_row + 0.5) - side / 2
        row = (node - 1) // in_row
        if node in tick.checkpoints:
            canvas.rect(x - 7, y + PAIR * row - 3, 4, side + 6, CHECKPOINT)
        for kind, top, color, filled in (("f", y, KEPT, tick.kept), ("b", y + 46, DONE, done)):
            top += PAIR * row
            fill = color if node in filled else "#FFFFFF"
            name = f"{kind}{node}"
            look: dict[str, Any] = {"rx": side / 2, "data_node": name, "stroke": RULE, "stroke_width": 1}
            if (tick.kind, tick.node) == (kind, node):
                look |= {"stroke": RUNNING, "stroke_width": 3.5}
            canvas.rect(x, top, side, side, fill, **look)
            canvas.text(x + side / 2, top + side / 2 + 4, name, 11, ink_on(fill), text_anchor="middle")
    return y + PAIR * rows


def _curve(canvas: Canvas, schedule: Schedule, at: int, top: float) -> float:
    """Memory at each tick so far, as bars with checkpoints below; returns the y below it."""
    left = MARGIN + 34.0
    bottom = top + CURVE
    right = canvas.width - MARGIN
    pitch = (right - left) / len(schedule.ticks)
    one = CURVE / max(schedule.memory, 1)
    canvas.text(MARGIN, top - 10, "values kept at each tick", 12, QUIET)
    for tick in dict.fromkeys(round(value) for value in ticks(0, schedule.memory, 3)):
        canvas.line(left, bottom - tick * one, right, bottom - tick * one, GRID)
        canvas.text(left - 7, bottom - tick * one + 4, number(tick), 11, QUIET, text_anchor="end")
    for index, tick in enumerate(schedule.ticks[:at]):
        low = one * len(tick.checkpoints)
        high = one * len(tick.kept)
        x = left + pitch * index
        width = max(0.6, pitch - (1 if pitch > 3 else 0))
        canvas.rect(x, bottom - low, width, low, CHECKPOINT)
        canvas.rect(x, bottom - low - high, width, high, KEPT)
    canvas.line(left, bottom, right, bottom, RULE)
    return bottom


ARITHMETIC = "repeated arithmetic, in percent of the step's"


def pareto(
    points: Mapping[str, tuple[float, int]], title: str, cost: str = ARITHMETIC, provenance: str = ""
) -> Figure:
    """Up to five policies as circles: percent of `cost` added, bytes at the peak. A line joins the front."""
    front = pareto_front(points)
    circles = {
        f"{name}: {peak / GB:.1f} GB": ([round(x, 1)], [peak / GB]) for name, (x, peak) in points.items()
    }
    xs, peaks = zip(*sorted(points[name] for name in front), strict=True)
    told = "; ".join(f"{name} {x:.2g} % and {peak / GB:.1f} GB" for name, (x, peak) in points.items())
    alt = (
        f"{stop(title)} Circles show the cost ({cost}) and the peak: {told}. "
        f"On the front: {', '.join(front)}."
    )
    drawn = {"front": (xs, [peak / GB for peak in peaks]), **circles}
    options = {"markers": False, "circles": circles, "provenance": provenance, "alt": alt}
    return lines(drawn, title, cost, "peak in GB", **options)


def pareto_front(points: Mapping[str, tuple[float, int]]) -> list[str]:
    """The names of those that no other equals or beats in both without being the same, in the order given."""

    def is_beaten(x: float, y: int) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())

    return [name for name, point in points.items() if not is_beaten(*point)]
