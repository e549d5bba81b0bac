"""Figure of lesson 06: a schedule at one of its ticks."""

from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...figures import CourseFigure
from ...figures.style import MARGIN, QUIET, RULE, WIDTH, bare, legend, look, sheet, value_axis
from ...palette import COLOURS, stop
from .schedules import Schedule, several

KEPT, CHECKPOINT, DONE = (COLOURS[kind] for kind in ("activations", "parameters", "gradients"))
RUNNING = "#B3261E"
ROOM = WIDTH - 2 * MARGIN


def schedule_figure(schedule: Schedule, at: int) -> CourseFigure:
    """The chain at tick `at` (from 1), and memory up to then."""
    title = schedule_title(schedule, at)
    rows = ceil(schedule.nodes / 16)
    with look():
        figure = sheet(title, 148 + 88 * rows)
        _chain(figure.place(MARGIN, 22, ROOM, 88 * rows), schedule, at, rows)
        _curve(figure.place(MARGIN + 24, 46 + 88 * rows, ROOM - 24, 80), schedule, at)
    tick = schedule.ticks[at - 1]
    checkpoints, kept = (", ".join(map(str, nodes)) or "none" for nodes in (tick.checkpoints, tick.kept))
    figure.alt = (
        f"{stop(title)} Tick {at} of {len(schedule.ticks)}: {tick.words}. "
        f"Values kept: {kept}. Checkpoints: {checkpoints}."
    )
    return figure


def schedule_title(schedule: Schedule, at: int) -> str:
    """The cost of the chain so far; on one line, or the picture would jump while it plays."""
    done = schedule.ticks[:at]
    runs = sum(tick.kind == "f" for tick in done)
    most = max(tick.memory for tick in done)
    kept = f"{several(most, 'value')} kept at most, {done[-1].memory} now"
    return f"{schedule.name.capitalize()}: {kept}; {several(runs, 'run')} of f"


def _chain(ax: Axes, schedule: Schedule, at: int, rows: int) -> None:
    """Rows of nodes, each f above its b, with a checkpoint as a bar at the left of its f."""
    tick = schedule.ticks[at - 1]
    done = {other.node for other in schedule.ticks[:at] if other.kind == "b"} - {tick.node}
    columns = ceil(schedule.nodes / rows)
    row, column = np.divmod(np.arange(schedule.nodes), columns)
    side = min(34, 0.76 * ROOM / columns)
    for kind, down, color, filled in (("f", 0.3, KEPT, tick.kept), ("b", 0.75, DONE, done)):
        fills = [color if node + 1 in filled else "#FFFFFF" for node in range(schedule.nodes)]
        ax.scatter(column, row + down, side**2, fills, edgecolors=RULE, linewidths=1)
        for node in range(schedule.nodes):
            place = column[node], row[node] + down
            ax.text(*place, f"{kind}{node + 1}", fontsize=10, ha="center", va="center_baseline")
            if (kind, node + 1) == (tick.kind, tick.node):
                ax.scatter(*place, side**2, "none", edgecolors=RUNNING, linewidths=3.5)
    marked = np.array(tick.checkpoints, dtype=int) - 1
    ax.plot(column[marked] - 0.5, row[marked] + 0.3, "|", color=CHECKPOINT, ms=36, mew=4, clip_on=False)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows, 0))
    ax.set_axis_off()
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
    value_axis(ax, "x", "tick")
    value_axis(ax, "y", "", nbins=3)
    ax.set(xlim=(0.5, len(schedule.ticks) + 0.5), ylim=(0, schedule.memory))
    bare(ax, "bottom")
    ax.set_title("values kept at each tick", fontsize=11.5, fontweight="normal", color=QUIET)
