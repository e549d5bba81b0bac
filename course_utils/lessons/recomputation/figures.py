"""Figures of lesson 06: a schedule at one of its ticks, and policies by their memory and their cost."""

from collections.abc import Mapping
from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...figures import CourseFigure, lines
from ...figures.style import MARGIN, QUIET, RULE, WIDTH, Drawn, bare, legend, look, sheet, value_axis
from ...palette import COLOURS, number, stop
from ...units import GB
from .schedules import Schedule, several

KEPT, CHECKPOINT, DONE = (COLOURS[kind] for kind in ("activations", "parameters", "gradients"))
RUNNING = "#B3261E"
ROOM = WIDTH - 2 * MARGIN
MOST_IN_ROW = 16  # nodes
PAIR, CURVE = 88, 80  # points that a row of nodes and the curve are high


def schedule_figure(schedule: Schedule, at: int) -> CourseFigure:
    """The chain at tick `at` (from 1), and memory up to then."""
    title = schedule_title(schedule, at)
    rows = ceil(schedule.nodes / MOST_IN_ROW)
    top = 46 + PAIR * rows
    with look():
        figure = sheet(title, top + CURVE + 22)
        _chain(figure.place(MARGIN, 22, ROOM, PAIR * rows), schedule, at, rows)
        _curve(figure.place(MARGIN + 24, top, ROOM - 24, CURVE), schedule, at)
    tick = schedule.ticks[at - 1]
    checkpoints, kept = (", ".join(map(str, nodes)) or "none" for nodes in (tick.checkpoints, tick.kept))
    now = (
        f"Tick {at} of {len(schedule.ticks)}: {tick.words}. Values kept: {kept}. Checkpoints: {checkpoints}."
    )
    figure.alt = f"{stop(title)} A chain of {schedule.nodes} nodes, forward above, backward below. {now}"
    return figure


def schedule_title(schedule: Schedule, at: int) -> str:
    """The cost of the chain; up to the last tick on one line, or the picture would jump while it plays."""
    done = schedule.ticks[:at]
    runs = sum(tick.kind == "f" for tick in done)
    most = max(tick.memory for tick in done)
    name = schedule.name.capitalize()
    if at == len(schedule.ticks):
        return f"{name}: {schedule.nodes} nodes keep at most {most} values and take {runs} runs of f"
    now = several(done[-1].memory, "value")
    return f"{name}: {now} kept now, {most} at most, {several(runs, 'run')} of f so far"


def _chain(ax: Axes, schedule: Schedule, at: int, rows: int) -> None:
    """Rows of nodes, each f above its b, with a checkpoint as a bar at the left of its f."""
    tick = schedule.ticks[at - 1]
    done = {other.node for other in schedule.ticks[:at] if other.kind == "b"} - {tick.node}
    row, column = np.divmod(np.arange(schedule.nodes), ceil(schedule.nodes / rows))
    pitch = ROOM / (column.max() + 1)
    side = min(34, 0.76 * pitch)
    xs = pitch * (column + 0.5)
    for kind, down, color, filled in (("f", 26, KEPT, tick.kept), ("b", 66, DONE, done)):
        ys = PAIR * row + down
        fills = [color if node + 1 in filled else "#FFFFFF" for node in range(schedule.nodes)]
        ax.scatter(xs, ys, side**2, fills, edgecolors=RULE, linewidths=1)
        for node, (x, y) in enumerate(zip(xs, ys, strict=True), 1):
            ax.text(x, y, f"{kind}{node}", fontsize=10, ha="center", va="center_baseline")
        if tick.kind == kind:
            place = (xs[tick.node - 1], ys[tick.node - 1])
            ax.scatter(*place, side**2, "none", edgecolors=RUNNING, linewidths=3.5)
    marked = np.array(tick.checkpoints, dtype=int) - 1
    bars = {"markersize": side + 6, "markeredgewidth": 4, "clip_on": False}
    ax.plot(xs[marked] - side / 2 - 4, PAIR * row[marked] + 26, "|", color=CHECKPOINT, **bars)
    ax.set(xlim=(0, ROOM), ylim=(PAIR * rows, 0), xticks=[], yticks=[])
    bare(ax)
    patches = [Patch(color=color) for color in (KEPT, CHECKPOINT, DONE)]
    patches.append(Patch(facecolor="white", edgecolor=RUNNING, linewidth=2.5))
    legend(ax, patches, ["value kept", "checkpoint", "backward done", "running"])


def _curve(ax: Axes, schedule: Schedule, at: int) -> None:
    """Memory at each tick so far: checkpoints, and above them the values kept."""
    checkpoints = [len(tick.checkpoints) for tick in schedule.ticks[:at]]
    totals = [tick.memory for tick in schedule.ticks[:at]]
    edges = np.arange(at + 1) + 0.5
    ax.stairs(checkpoints, edges, fill=True, color=CHECKPOINT)
    ax.stairs(totals, edges, baseline=checkpoints, fill=True, color=KEPT)
    if len(schedule.ticks) < 150:
        ax.vlines(edges[1:-1], 0, totals[1:], "white", linewidth=0.8)
    value_axis(ax, "x", "tick")
    value_axis(ax, "y", "", nbins=3)
    ax.grid(visible=False, axis="x")
    ax.set(xlim=(0.5, len(schedule.ticks) + 0.5), ylim=(0, schedule.memory))
    bare(ax, "bottom")
    ax.set_title("values kept at each tick", fontsize=11.5, fontweight="normal", color=QUIET)


ARITHMETIC = "repeated arithmetic, in percent of the step's"


def pareto(
    points: Mapping[str, tuple[float, int]], title: str, cost: str = ARITHMETIC, provenance: str = ""
) -> Drawn:
    """Up to five policies as circles: percent of `cost` added, bytes at the peak. A line joins the front."""
    front = pareto_front(points)
    circles = {
        f"{name}: {peak / GB:.1f} GB": ([round(x, 1)], [peak / GB]) for name, (x, peak) in points.items()
    }
    xs, peaks = zip(*sorted(points[name] for name in front), strict=True)
    costs = {name: number(float(f"{x:.2g}")) for name, (x, _) in points.items()}
    told = "; ".join(f"{name} {costs[name]} % and {peak / GB:.1f} GB" for name, (_, peak) in points.items())
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
