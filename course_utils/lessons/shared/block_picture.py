"""A picture of a block: operations are nodes, tensors edges with format and bytes; kept ones are filled."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from ...figures import COLOURS, CourseFigure
from ...figures.style import WIDTH, bare, look, sheet
from ...palette import INK, QUIET, RULE
from ...units import format_bytes
from .block_trace import Made, Trace, trace
from .compiled_trace import compiled_trace

if TYPE_CHECKING:
    import torch

ROW = 19.0  # points
NODES, BARS, WIDE, FORMATS, UNITS, SIZES = 78.0, 252.0, 112.0, 374.0, 452.0, 526.0  # points from the left
LONGEST = 29  # characters of an operation's name
SMALL = 0.1  # bytes per s·b·h, below which a tensor gets no row: statistics, logsumexp, random state


def draw_block(
    block: "Callable[[torch.Tensor], torch.Tensor]", x: "torch.Tensor", title: str = "", compile: bool = False
) -> CourseFigure:
    """Run block(x) once, and draw its operations, the tensors that they make, and what autograd keeps.

    `block` is a module or a function of x, in any format and on any device; call this inside autocast, if
    the block runs there. With `compile` it is compiled first, and only what its kernels write is drawn.
    """
    traced = compiled_trace(block, x) if compile else trace(block, x)
    return block_picture(traced, title)


def block_picture(traced: Trace, title: str = "", provenance: str = "") -> CourseFigure:
    """The picture of a block that was traced, eager or compiled; `.rows` has the small tensors, too."""
    shown = list(_rows(traced))
    units = traced.kept / traced.numbers
    title = title or f"Backward needs {format_bytes(traced.kept, 'MB', 1)} of this block: {units:.1f} · s·b·h"
    places = {step: row for row, (step, made) in enumerate(shown) if made is traced.operations[step].makes[0]}
    small = sum(one.bytes for _, one in _tensors(traced) if one.kept and _is_small(one, traced))
    note = f"filled: kept for backward · too small for a row: {format_bytes(small, 'MB', 2)} more"
    with look():
        figure = sheet(title, ROW * (len(shown) + 1) + 8, " · ".join(filter(None, [note, provenance])))
        ax = figure.place(0, 0, WIDTH, ROW * (len(shown) + 1) + 8)
        ax.set(xlim=(0, WIDTH), ylim=(len(shown) + 0.4, -1))
        bare(ax)
        ax.set_axis_off()
        for place, name in ((FORMATS, "format"), (UNITS, "· s·b·h"), (SIZES, "MB")):
            ax.text(place, -0.6, name, ha="right" if place > FORMATS else "left", fontsize=10, color=QUIET)
        _draw_edges(ax, traced, places)
        _draw_rows(ax, traced, shown, places)
    figure.alt = (
        f"{title}. A block's {len(traced.operations) - 1} operations from top to bottom, with their tensors."
    )
    figure.rows = [["operation", "format", "shape", "bytes", "kept"]]
    for step, made in _tensors(traced):
        shape = "×".join(map(str, made.shape))
        name = _name(traced, step)
        figure.rows.append([name, made.dtype, shape, f"{made.bytes:,}", "kept" if made.kept else "freed"])
    return figure


def _tensors(traced: Trace) -> Iterator[tuple[int, Made]]:
    for number, step in enumerate(traced.operations):
        for made in step.makes:
            yield number, made


def _rows(traced: Trace) -> Iterator[tuple[int, Made]]:
    """The tensors that get a row: an operation's first one, and what else is not small."""
    for number, made in _tensors(traced):
        if made is traced.operations[number].makes[0] or not _is_small(made, traced):
            yield number, made


def _is_small(made: Made, traced: Trace) -> bool:
    return made.bytes < SMALL * traced.numbers


def _name(traced: Trace, number: int) -> str:
    step = traced.operations[number]
    return f"{step.module}: {step.name}" if step.module else step.name


def _short_name(traced: Trace, number: int) -> str:
    """An operation's name; where that is too long for its place, without the first of several operators."""
    name = _name(traced, number)
    module, colon, operators = name.rpartition(": ")
    while len(name) > LONGEST and " + " in operators:
        operators = operators.partition(" + ")[2]
        name = f"{module}{colon}… + {operators}"
    return name


def _draw_edges(ax: Axes, traced: Trace, places: dict[int, int]) -> None:
    """Each tensor's way from the node that makes it to the nodes that read it; one that skips nodes bends."""
    for number, step in enumerate(traced.operations):
        for source in step.reads:
            kept = traced.operations[source].makes[0].kept
            style: Any = {"color": COLOURS["activations"], "linewidth": 2.5} if kept else {"color": RULE}
            start, end = (NODES, places[source]), (NODES, places[number])
            rows = places[number] - places[source]
            # matplotlib's unit is the arc's length; half of that is how far it goes to the left
            far = min(58.0, 12 + 2.5 * rows)
            bend = 0.0 if number == source + 1 else min(0.6, 2 * far / (ROW * rows))
            arrow: Any = {
                "arrowstyle": "-|>",
                "mutation_scale": 9,
                "shrinkA": 5,
                "shrinkB": 5,
                "zorder": 1 + kept,
            }
            way = f"arc3,rad={bend}"
            ax.add_patch(FancyArrowPatch(start, end, connectionstyle=way, **arrow, **style))


def _draw_rows(ax: Axes, traced: Trace, shown: list[tuple[int, Made]], places: dict[int, int]) -> None:
    """Nodes with their names, and for each tensor a bar as long as its bytes, its format and its size."""
    longest = max(made.bytes for _, made in shown)
    for row, (number, made) in enumerate(shown):
        if places[number] == row:
            ax.plot(NODES, row, "o", color="white", markeredgecolor=INK, markersize=7, zorder=3)
            ax.text(NODES + 10, row, _short_name(traced, number), va="center", fontsize=10.5)
        else:
            also = "its mask" if made.dtype == "bool" else "its other tensor"
            ax.text(NODES + 22, row, also, va="center", fontsize=10.5, color=QUIET)
        fill = COLOURS["activations"] if made.kept else "white"
        edge = COLOURS["activations"] if made.kept else RULE
        length = max(1.5, WIDE * made.bytes / longest)
        ax.add_patch(Rectangle((BARS, row - 0.32), length, 0.64, facecolor=fill, edgecolor=edge))
        place = {"va": "center", "fontsize": 10.5, "color": INK if made.kept else QUIET}
        ax.text(FORMATS, row, made.dtype, **place)
        ax.text(UNITS, row, f"{made.bytes / traced.numbers:.3g}", ha="right", **place)
        ax.text(SIZES, row, format_bytes(made.bytes, "MB", 2).split()[0], ha="right", **place)
