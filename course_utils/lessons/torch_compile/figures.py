"""Figures of lesson 07: a graph cut between forward and backward, and memory against time as recorded."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ...errors import check_known
from ...figures import CourseFigure, lines
from ...figures.style import WIDTH, bare, look, sheet
from ...palette import COLOURS, INK, QUIET, RULE
from ...units import format_bytes
from .partition import Node, Partition, partition
from .recorded import FRONT, WHERE

if TYPE_CHECKING:
    import torch

ROW = 46.0  # points
HALF = WIDTH / 2
FORWARD, BACKWARD = 104.0, 176.0  # points from the left edge of a half
KEPT, AGAIN = COLOURS["activations"], COLOURS["gradients"]


def front_figure(title: str, groups: dict[str, list[str]]) -> CourseFigure:
    """Milliseconds of a step over its peak in GB: a line for each group of choices of FRONT."""
    for choices in groups.values():
        for choice in choices:
            check_known("choice", choice, FRONT)
    points = {
        name: ([FRONT[one]["peak"] / 1e9 for one in choices], [FRONT[one]["ms"] for one in choices])
        for name, choices in groups.items()
    }
    return lines(points, title, "GB at the peak", "ms of a step", provenance=f"GPT-2, b = 16, {WHERE}")


def draw_cuts(function: "Callable[..., torch.Tensor]", *inputs: "torch.Tensor") -> CourseFigure:
    """Draw function(x, *weights) with what crosses to backward, by autograd and by torch.compile."""
    both = [partition(function, *inputs, compiled=compiled) for compiled in (False, True)]
    eager, compiled = (format_bytes(one.bytes, "MB", 1) for one in both)
    title = f"Autograd keeps {eager} for backward, the compiler {compiled}"
    again = both[1].again
    repeated = ", ".join(both[1].nodes[number].name for number in again) or "nothing"
    height = ROW * max(one.turn for one in both) + 24
    with look():
        figure = sheet(title, height, "filled: kept for backward · ring: computed again in backward")
        for number, (name, cut) in enumerate(zip(("autograd", "torch.compile"), both, strict=True)):
            ax = figure.place(number * HALF, 0, HALF, height)
            ax.set(xlim=(0, HALF), ylim=(height, 0))
            bare(ax)
            ax.set_axis_off()
            _draw_half(ax, cut, f"{name}: {len(cut.kept)} tensors")
    figure.alt = f"{title}. In backward the compiled function computes again: {repeated}."
    figure.rows = [["operation of forward", "bytes", "autograd", "torch.compile"]]
    for number, node in enumerate(both[0].nodes[: both[0].turn]):
        told = ["kept" if number in cut.kept else "freed" for cut in both]
        figure.rows.append([node.name, f"{node.bytes:,}", *told])
    return figure


def _draw_half(ax: Axes, cut: Partition, heading: str) -> None:
    """Forward goes down on the left, backward up on the right; what is kept crosses from left to right."""
    ax.text(FORWARD, 24, "forward ↓", ha="right", fontsize=10, color=QUIET)
    ax.text(BACKWARD, 24, "backward ↑", fontsize=10, color=QUIET)
    ax.text((FORWARD + BACKWARD) / 2, 8, heading, ha="center", fontsize=11.5)
    bottom = 50 + ROW * (cut.turn - 1)
    backward = range(cut.turn, len(cut.nodes) - 1)  # without the last sum, of x's gradients
    step = (bottom - 50) / (len(backward) - 1)
    places = {number: (FORWARD, 50 + ROW * number) for number in range(cut.turn)}
    places |= {number: (BACKWARD, bottom - step * row) for row, number in enumerate(backward)}
    for number in places:
        node = cut.nodes[number]
        for source in node.reads:
            if source in places:
                crosses = source < cut.turn <= number
                _draw_edge(ax, places[source], places[number], crosses, bends=number > source + 1)
        _draw_node(ax, node, places[number], number in cut.kept, number in cut.again, number < cut.turn)


def _draw_edge(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], crosses: bool, bends: bool
) -> None:
    arrow: Any = {"arrowstyle": "-|>", "mutation_scale": 8, "shrinkA": 5, "shrinkB": 5}
    if crosses:
        ax.add_patch(FancyArrowPatch(start, end, color=KEPT, linewidth=2, zorder=1, **arrow))
        return
    way = f"arc3,rad={-0.3 if bends else 0}"
    ax.add_patch(FancyArrowPatch(start, end, color=RULE, connectionstyle=way, zorder=0, **arrow))


def _draw_node(
    ax: Axes, node: Node, place: tuple[float, float], kept: bool, again: bool, forward: bool
) -> None:
    x, y = place
    fill = KEPT if kept else "white"
    ax.plot(x, y, "o", color=fill, markeredgecolor=INK, markersize=8, zorder=3)
    if again:
        ax.plot(x, y, "o", color="none", markeredgecolor=AGAIN, markersize=16, markeredgewidth=2, zorder=3)
    side: Any = {"ha": "right"} if forward else {"ha": "left"}
    away = -10 if forward else 10
    ax.text(x + away, y, node.name + (", again" if again else ""), va="center", fontsize=10, **side)
    if kept:
        size = format_bytes(node.bytes, "MB", 1)
        ax.text(x + away, y + 13, size, va="center", fontsize=10, color=QUIET, **side)
