"""Figures of lesson 06: a schedule at one of its ticks, and policies by their memory and their arithmetic."""

from collections.abc import Mapping
from typing import Any

from course_utils.figures.axes import COLOURS, Plot, legend, stop
from course_utils.figures.canvas import GRID, INK, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, ink_on, number, ticks
from course_utils.units import UNITS

from .schedules import Schedule

KEPT, CHECKPOINT, DONE, RUNNING = COLOURS["activations"], COLOURS["parameters"], COLOURS["gradients"], "#B3261E"
BORDER: dict[str, Any] = {"stroke": RULE, "stroke_width": 1}
CURVE = 90.0  # pixels: height of the curve of memory under the chain


def schedule_figure(schedule: Schedule, at: int | None = None) -> Figure:
    """The chain while tick `at` (from 1; None: the last) works, and memory up to then. ValueError for another."""
    at = len(schedule.ticks) if at is None else at
    if not 1 <= at <= len(schedule.ticks):
        raise ValueError(f"tick {at}: this schedule has ticks 1 to {len(schedule.ticks)}")
    title, canvas = schedule_title(schedule, at), Canvas()
    top = canvas.title(title)
    fills = {"value kept": KEPT, "checkpoint": CHECKPOINT, "backward done": DONE}
    looks: dict[str, dict[str, Any]] = {words: {"fill": fill} for words, fill in fills.items()}
    looks["at work"] = {"fill": "#FFFFFF", "stroke": RUNNING, "stroke_width": 3}
    entries = zip(looks, looks, strict=True)
    legend(canvas, entries, top + 4, lambda x, y, size, words: canvas.rect(x, y, size, size, **looks[words]))
    _chain(canvas, schedule, at, top + 52)
    bottom = _curve(canvas, schedule, at, top + 178)
    tick = schedule.ticks[at - 1]
    checkpoints, kept = (", ".join(map(str, nodes)) or "none" for nodes in (tick.checkpoints, tick.kept))
    alt = (
        f"{stop(title)} A chain of {schedule.nodes} nodes, forward above, backward below. Tick {at} of "
        f"{len(schedule.ticks)}: {tick.words}. Values kept: {kept}. Checkpoints: {checkpoints}."
    )
    return Figure(canvas.svg(bottom + 14, title, alt), alt)


def schedule_title(schedule: Schedule, at: int) -> str:
    """Costs of the schedule up to tick `at`; in all, at its last."""
    done = schedule.ticks[:at]
    runs, most = sum(tick.kind == "f" for tick in done), max(tick.memory for tick in done)
    name = f"{schedule.name[0].upper()}{schedule.name[1:]}"
    if at == len(schedule.ticks):
        return f"{name}: {schedule.nodes} nodes cost {most} values of memory and {runs} runs of f"
    now = f"{done[-1].memory} value{'s' * (done[-1].memory != 1)} kept now"
    return f"{name}: {now}, {most} at most so far, {runs} run{'s' * (runs != 1)} of f so far"


def _chain(canvas: Canvas, schedule: Schedule, at: int, y: float) -> None:
    """Two rows of nodes: f above, with its checkpoint as a bar at its left, and b below."""
    tick = schedule.ticks[at - 1]
    done = {other.node for other in schedule.ticks[:at] if other.kind == "b"} - {tick.node}
    pitch = (WIDTH - 2 * MARGIN) / schedule.nodes
    side = min(34.0, 0.62 * pitch)
    size = min(12.0, 0.4 * side)
    for node in range(1, schedule.nodes + 1):
        x = MARGIN + pitch * (node - 0.5) - side / 2
        if node in tick.checkpoints:
            canvas.rect(x - min(9.0, 0.17 * pitch), y - 3, min(6.0, 0.12 * pitch), side + 6, CHECKPOINT)
        for kind, top, color, filled in (("f", y, KEPT, tick.kept), ("b", y + 58, DONE, done)):
            fill, name = color if node in filled else "#FFFFFF", f"{kind}{node}"
            at_work = tick.kind == kind and tick.node == node
            look: dict[str, Any] = {"stroke": RUNNING, "stroke_width": 3.5} if at_work else BORDER
            canvas.rect(x, top, side, side, fill, rx=side / 2, data_node=name, **look)
            if size >= 6:
                place = x + side / 2, top + side / 2 + 0.36 * size
                canvas.text(*place, name, size, ink_on(fill), text_anchor="middle")


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


def pareto(points: Mapping[str, tuple[float, int]], title: str, provenance: str = "", unit: str = "GB") -> Figure:
    """Policies as dots, percent of arithmetic added against bytes at the peak; a line joins the Pareto front's."""
    if not points:
        raise ValueError("a Pareto front needs at least one policy")
    front, canvas = pareto_front(points), Canvas()
    top = canvas.title(title) + 34
    left, right, bottom = 76.0, WIDTH - 250.0, top + 290
    most_x, most_y = max(x for x, _ in points.values()) or 1, max(y for _, y in points.values())

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / most_x, bottom - 280 * y / most_y

    Plot(canvas, left, right, bottom - 280, bottom, most_y).value_axis(unit, 6)
    for tick in ticks(0, most_x, 6):
        canvas.text(place(tick, 0)[0], bottom + 20, f"{number(tick)} %", 12, QUIET, text_anchor="middle")
    canvas.line(left, bottom, right, bottom, RULE)
    canvas.text(MARGIN, bottom - 306, f"peak in {unit}", 12, QUIET)
    words = "arithmetic run again, in percent of the step's"
    canvas.text((left + right) / 2, bottom + 42, words, 12, QUIET, text_anchor="middle")
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in sorted(place(*points[name]) for name in front))
    canvas.path(f"M{path}", fill="none", stroke=KEPT, stroke_width=2.2)
    spots = {name: place(*point) for name, point in points.items()}
    for name, (x, y) in spots.items():
        canvas.rect(x - 6, y - 6, 12, 12, KEPT if name in front else "#FFFFFF", rx=6, stroke=INK, stroke_width=1.2)
    taken: list[tuple[float, float]] = []
    for name, (x, y) in sorted(spots.items(), key=lambda item: item[1][1]):
        while any(abs(y - other) < 15 and abs(x - near) < 170 for near, other in taken):
            y += 3  # the name above would touch this one
        taken.append((x, y))
        canvas.halo_text(x + 12, y - 3, f"{name}: {points[name][1] / UNITS[unit]:.1f} {unit}", 12.5)
    told = "; ".join(f"{name} {x:.2g} % and {y / UNITS[unit]:.1f} {unit}" for name, (x, y) in points.items())
    alt = f"{stop(title)} Dots of added arithmetic and peak: {told}. On the front: {', '.join(front)}."
    return Figure(canvas.svg(canvas.note(provenance, bottom + 62), title, alt), alt)


def pareto_front(points: Mapping[str, tuple[float, int]]) -> list[str]:
    """The names of those that no other equals or beats in both without being the same, in the order given."""
    beaten = lambda x, y: any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())  # noqa: E731
    return [name for name, point in points.items() if not beaten(*point)]
