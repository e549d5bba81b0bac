"""Heat map of activation memory over micro-batch and sequence length, with a GPU's limit as a line."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import log
from typing import NamedTuple

from course_utils import estimate
from course_utils.estimating.exact.activations import activation_bytes, loss_saved, sum_bytes
from course_utils.figures.canvas import INK, MARGIN, QUIET, WIDTH, Canvas, Figure, ink_on, number
from course_utils.gpus import Gpu, gpu
from course_utils.run import TrainingRun
from course_utils.units import UNITS, format_bytes

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SEQUENCES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
Point = tuple[int, int]  # b and s

LIGHT, DARK, FRAME = (0xF2, 0xFA, 0xF7), (0x00, 0x4D, 0x3A), "#B3261E"
CELL_HEIGHT = 27


def kept_bytes(run: TrainingRun) -> int:
    """Bytes that forward and loss keep for backward, nothing else counted."""
    return activation_bytes(run) + sum_bytes(loss_saved(run))


def largest_fitting(run: TrainingRun, memory: int) -> int:
    """Number of BATCHES, smallest first, whose step has an estimated peak of no more than `memory` bytes."""
    return bisect_right(BATCHES, memory, key=lambda b: estimate(run.replace(micro_batch=b)).total)


def lengths(run: TrainingRun) -> list[int]:
    """The sequence lengths that the run's model takes."""
    return [s for s in SEQUENCES if s <= run.model.max_positions]


@lru_cache(maxsize=32)
def cells(run: TrainingRun) -> Mapping[Point, int]:
    """Bytes that `run` keeps at each (b, s) of the map. Cached, so that moving about the map is quick."""
    return {(b, s): kept_bytes(run.replace(micro_batch=b, seq_len=s)) for b in BATCHES for s in lengths(run)}


@lru_cache(maxsize=64)
def limits(run: TrainingRun, memory: int) -> Sequence[int]:
    """For each length of the map, the number of BATCHES that fit into `memory` bytes."""
    return [largest_fitting(run.replace(seq_len=s), memory) for s in lengths(run)]


def heat_map(run: TrainingRun, card: str | Gpu, at: Point | None = None) -> Figure:
    """Bytes that forward and loss of `run` keep at many (b, s), and a line above which the whole step no longer fits.

    The line compares the step's estimated peak with what a program gets of the card. The cell `at` (b, s) is framed.
    """
    card = gpu(card) if isinstance(card, str) else card
    run = run.replace(micro_batch=1, seq_len=SEQUENCES[0])
    columns, sizes, fitting = lengths(run), cells(run), limits(run, card.room)
    title = _title(run, card, columns, fitting)
    canvas = Canvas()
    top = canvas.title(title) + 24
    canvas.text(MARGIN, top - 8, "GB of activations; below the line, the whole step fits", 12, QUIET)
    left, bottom = MARGIN + 46.0, top + CELL_HEIGHT * len(BATCHES)
    grid = _Grid(columns, left, bottom, (WIDTH - MARGIN - left) / len(columns))
    _paint(canvas, sizes, grid)
    _axes(canvas, grid)
    _limit(canvas, fitting, grid)
    if at is not None and at in sizes:
        x, y = grid.corner(at)
        look = {"fill_opacity": 0, "stroke": FRAME, "stroke_width": 3.5, "data_at": f"{at[0]},{at[1]}"}
        canvas.rect(x + 1, y + 1, grid.width - 2, CELL_HEIGHT - 2, FRAME, **look)
    room = format_bytes(card.room, "GB", 1)
    note = f"estimated from formulas · {card.name}: a program gets {room} · {run.attention} attention"
    end = canvas.note(f"{note}, recompute {run.recompute}, {run.precision.name}", bottom + 58)
    line = ", ".join(f"{BATCHES[n - 1] if n else 'none'} at {s:,}" for s, n in zip(columns, fitting, strict=True))
    smallest, largest = (format_bytes(choose(sizes.values()), "GB", 2) for choose in (min, max))
    alt = f"{title}. A heat map from {smallest} to {largest} of activations; the largest that fits: {line} tokens."
    return Figure(canvas.svg(end + 2, title, alt), alt)


class _Grid(NamedTuple):
    columns: Sequence[int]
    left: float
    bottom: float
    width: float

    def corner(self, at: Point) -> tuple[float, float]:
        row, column = BATCHES.index(at[0]), self.columns.index(at[1])
        return self.left + self.width * column, self.bottom - CELL_HEIGHT * (row + 1)


def _paint(canvas: Canvas, sizes: Mapping[Point, int], grid: _Grid) -> None:
    """Each cell in its color, with its number."""
    low, high = log(min(sizes.values())), log(max(sizes.values()))
    for at, size in sizes.items():
        x, y = grid.corner(at)
        part = (log(size) - low) / ((high - low) or 1)
        color = "#" + "".join(f"{round(a + (b - a) * part):02X}" for a, b in zip(LIGHT, DARK, strict=True))
        tip = f"b = {at[0]}, s = {at[1]:,}: {format_bytes(size, 'GB', 2)}"
        canvas.rect(x, y, grid.width, CELL_HEIGHT, color, tip, data_bytes=size)
        canvas.text(x + grid.width / 2, y + 18, _brief(size), 11, ink_on(color), text_anchor="middle")


def _axes(canvas: Canvas, grid: _Grid) -> None:
    columns, left, bottom, width = grid
    for row, b in enumerate(BATCHES):
        canvas.text(left - 8, bottom - CELL_HEIGHT * row - 9, number(b), 12, QUIET, text_anchor="end")
    for column, s in enumerate(columns):
        canvas.text(left + width * (column + 0.5), bottom + 17, number(s), 11, QUIET, text_anchor="middle")
    canvas.text((left + WIDTH - MARGIN) / 2, bottom + 36, "sequence length s (tokens)", 12, INK, text_anchor="middle")
    x, y = MARGIN + 8.0, bottom - CELL_HEIGHT * len(BATCHES) / 2
    canvas.text(x, y, "micro-batch b", 12, INK, text_anchor="middle", transform=f"rotate(-90 {x:.0f} {y:.0f})")


def _limit(canvas: Canvas, fitting: Sequence[int], grid: _Grid) -> None:
    """A staircase above the largest micro-batch that fits, column by column."""
    corners = []
    for column, count in enumerate(fitting):
        y = grid.bottom - CELL_HEIGHT * count
        corners += [f"{grid.left + grid.width * end:.1f} {y:.1f}" for end in (column, column + 1)]
    path = f"M{'L'.join(corners)}"
    canvas.path(path, stroke="#FFFFFF", stroke_width=6, fill="none")
    canvas.path(path, stroke=INK, stroke_width=3, fill="none", data_limit="yes")


def _brief(size: int) -> str:
    """Gigabytes in at most four characters, as a cell has room for."""
    value = size / UNITS["GB"]
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def _title(run: TrainingRun, card: Gpu, columns: Sequence[int], fitting: Sequence[int]) -> str:
    if not any(fitting):
        return f"{card.name} fits no step of {run.model.name}, whatever the length: its states are too large"
    longest, count = max((s, count) for s, count in zip(columns, fitting, strict=True) if count)
    few = f"{BATCHES[count - 1]} sequence{'s' * (count > 1)} at a time"
    return f"{card.name} takes {run.model.name} up to {longest:,} tokens, {few}"
