"""Heat map of activation memory over micro-batch and sequence length, with a GPU's limit as a line."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_hex
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from ... import TrainingRun, estimate
from ...estimating.formula import activation_bytes, loss_bytes
from ...figures import CourseFigure
from ...figures.style import MARGIN, WIDTH, bare, look, sheet
from ...gpus import Gpu
from ...palette import INK, QUIET, ink_on, number
from ...units import UNITS, format_bytes

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SEQUENCES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384,
             24576, 32768)  # fmt: skip
Point = tuple[int, int]  # b and s
SHADES = LinearSegmentedColormap.from_list("activations", ["#F2FAF7", "#004D3A"])


def kept_bytes(run: TrainingRun) -> int:
    """Bytes that forward and loss keep for backward."""
    return activation_bytes(run) + loss_bytes(run)


def lengths(run: TrainingRun) -> list[int]:
    return [s for s in SEQUENCES if s <= run.model.max_positions]


@lru_cache(maxsize=32)
def cells(run: TrainingRun) -> Mapping[Point, int]:
    """Bytes that `run` keeps at each (b, s) of the map. Cached, so that moving about the map is quick."""
    return {(b, s): kept_bytes(run.replace(micro_batch=b, seq_len=s)) for b in BATCHES for s in lengths(run)}


@lru_cache(maxsize=64)
def limits(run: TrainingRun, memory: int) -> Sequence[int]:
    """The number of BATCHES, for each length of the map, whose estimated peak is at most `memory` bytes."""
    return [
        bisect_right(BATCHES, memory, key=lambda b: estimate(run.replace(micro_batch=b, seq_len=s)).total)
        for s in lengths(run)
    ]


def heat_map(run: TrainingRun, card: Gpu, at: Point) -> CourseFigure:
    """Bytes that forward and loss of `run` keep at many (b, s), and a line above which no step fits.

    The line compares the step's estimated peak with what a program gets of the card. The cell `at` (b, s) is
    framed.
    """
    run = run.replace(micro_batch=1, seq_len=SEQUENCES[0])
    columns = lengths(run)
    sizes = cells(run)
    fitting = limits(run, card.room)
    room = format_bytes(card.room, "GB", 1)
    note = f"estimated from formulas · {card.name}: a program gets {room} · {run.attention} attention"
    note += f", recompute {run.recompute}, {run.precision.name}"
    left, high = MARGIN + 44, 19 * len(BATCHES)
    title = _title(run, card, columns, fitting)
    with look():
        figure = sheet(title, 20 + high + 36, note)
        ax = figure.place(left, 20, WIDTH - MARGIN - left, high)
        _draw_cells(ax, sizes, columns)
        border = withStroke(linewidth=6, foreground="white")
        ax.stairs(fitting, baseline=None, color=INK, linewidth=3, clip_on=False, path_effects=[border])
        corner = (columns.index(at[1]), BATCHES.index(at[0]))
        ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#B3261E", linewidth=3))
    least, most = (format_bytes(size, "GB", 2) for size in (min(sizes.values()), max(sizes.values())))
    figure.alt = f"{title}. A heat map of {least} to {most} of activations; steps fit below a line."
    limit = [str(BATCHES[count - 1]) if count else "–" for count in fitting]
    figure.rows = [["b", *(f"s = {s:,}" for s in columns)]]
    figure.rows += [[str(b), *(_brief(sizes[b, s]) for s in columns)] for b in BATCHES]
    figure.rows += [["largest b that fits", *limit]]
    return figure


def _draw_cells(ax: Axes, sizes: Mapping[Point, int], columns: Sequence[int]) -> None:
    """Cells darker for more bytes, on a logarithmic scale, with GB in every second column."""
    grid = np.array([[sizes[b, s] for s in columns] for b in BATCHES])
    shades = ax.pcolormesh(grid, cmap=SHADES, norm=LogNorm()).to_rgba(grid)
    for (row, half), size in np.ndenumerate(grid[:, ::2]):  # all of them would take a slider too long
        column = 2 * half
        style = {"ha": "center", "va": "center_baseline", "color": ink_on(to_hex(shades[row, column]))}
        ax.text(column + 0.5, row + 0.5, _brief(size), fontsize=9.5, **style)
    shown = range(0, len(columns), 2)
    ax.set_xticks([column + 0.5 for column in shown], [number(columns[column]) for column in shown])
    ax.set_yticks([row + 0.5 for row in range(len(BATCHES))], map(str, BATCHES))
    ax.set(xlabel="sequence length s (tokens)", ylabel="micro-batch b")
    bare(ax)
    caption = "GB of activations; below the line, the whole step fits"
    ax.set_title(caption, fontsize=11.5, fontweight="normal", color=QUIET)


def _brief(size: int) -> str:
    """Gigabytes in at most four characters, as a cell has room for."""
    value = size / UNITS["GB"]
    digits = 0 if value >= 9.95 else 1 if value >= 0.095 else 2
    return f"{value:,.{digits}f}"


def _title(run: TrainingRun, card: Gpu, columns: Sequence[int], fitting: Sequence[int]) -> str:
    if not any(fitting):
        return f"No step of {run.model.name} fits on {card.name} at any length: its states are too large"
    longest, count = max((s, count) for s, count in zip(columns, fitting, strict=True) if count)
    batch = BATCHES[count - 1]
    sequences = "sequence" if batch == 1 else "sequences"
    return f"{card.name} takes {run.model.name} up to {longest:,} tokens, {batch} {sequences} at a time"
