"""Heat map of activation memory over micro-batch and sequence length, with a GPU's limit as a line."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, log

from ... import TrainingRun, estimate
from ...estimating.formula import activation_bytes, loss_bytes
from ...figures.canvas import INK, MARGIN, QUIET, Canvas, Figure, ink_on, number, reflowing
from ...gpus import Gpu
from ...units import UNITS, format_bytes

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SEQUENCES = (
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
    12288,
    16384,
    24576,
    32768,
)
Point = tuple[int, int]  # b and s
LIGHT = (0xF2, 0xFA, 0xF7)
DARK = (0x00, 0x4D, 0x3A)
FRAME = "#B3261E"
LEFT = MARGIN + 46.0
CELL_HEIGHT = 23


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


@reflowing
def heat_map(run: TrainingRun, card: Gpu, at: Point) -> Figure:
    """Bytes that forward and loss of `run` keep at many (b, s), and a line above which no step fits.

    The line compares the step's estimated peak with what a program gets of the card. The cell `at` (b, s) is
    framed.
    """
    run = run.replace(micro_batch=1, seq_len=SEQUENCES[0])
    columns = lengths(run)
    sizes = cells(run)
    fitting = limits(run, card.room)
    title = _title(run, card, columns, fitting)
    canvas = Canvas()
    top = canvas.title(title) + 24
    right = canvas.width - MARGIN
    bottom = top + CELL_HEIGHT * len(BATCHES)
    width = (right - LEFT) / len(columns)
    canvas.text(MARGIN, top - 8, "GB of activations; below the line, the whole step fits", 12, QUIET)
    xs = {s: LEFT + width * column for column, s in enumerate(columns)}
    ys = {b: bottom - CELL_HEIGHT * (row + 1) for row, b in enumerate(BATCHES)}
    _draw_cells(canvas, sizes, xs, ys, width)
    x, y = xs[at[1]], ys[at[0]]
    look = {"fill_opacity": 0, "stroke": FRAME, "stroke_width": 3.5, "data_at": f"{at[0]},{at[1]}"}
    canvas.rect(x + 1, y + 1, width - 2, CELL_HEIGHT - 2, FRAME, **look)
    for b, y in ys.items():
        canvas.text(LEFT - 8, y + 16, number(b), 12, QUIET, text_anchor="end")
    for s, x in list(xs.items())[:: ceil(45 / width)]:  # as many lengths as there is room for
        canvas.text(x + width / 2, bottom + 17, number(s), 11, QUIET, text_anchor="middle")
    middle = (LEFT + right) / 2
    canvas.text(middle, bottom + 36, "sequence length s (tokens)", 12, QUIET, text_anchor="middle")
    canvas.upright(MARGIN + 8, (top + bottom) / 2, "micro-batch b")
    _draw_limit(canvas, fitting, bottom, width)
    room = format_bytes(card.room, "GB", 1)
    note = f"estimated from formulas · {card.name}: a program gets {room} · {run.attention} attention"
    end = canvas.note(f"{note}, recompute {run.recompute}, {run.precision.name}", bottom + 58)
    counts = zip(columns, fitting, strict=True)
    line = ", ".join(f"{BATCHES[count - 1] if count else 'none'} at {s:,}" for s, count in counts)
    smallest = format_bytes(min(sizes.values()), "GB", 2)
    largest = format_bytes(max(sizes.values()), "GB", 2)
    alt = (
        f"{title}. A heat map of {smallest} to {largest} of activations. Largest b that fits: {line} tokens."
    )
    return Figure(canvas.svg(end + 2, title, alt), alt)


def _draw_cells(
    canvas: Canvas, sizes: Mapping[Point, int], xs: Mapping[int, float], ys: Mapping[int, float], width: float
) -> None:
    """Draw a rectangle per (b, s), darker for more bytes on a logarithmic scale, with GB where they fit."""
    low = log(min(sizes.values()))
    high = log(max(sizes.values()))
    for (b, s), size in sizes.items():
        x, y = xs[s], ys[b]
        part = (log(size) - low) / (high - low)
        mixed = [round(light + (dark - light) * part) for light, dark in zip(LIGHT, DARK, strict=True)]
        color = "#" + "".join(f"{channel:02X}" for channel in mixed)
        tip = f"b = {b}, s = {s:,}: {format_bytes(size, 'GB', 2)}"
        canvas.rect(x, y, width, CELL_HEIGHT, color, tip, data_bytes=size)
        if width > 26:  # as wide as a number of four characters
            canvas.text(x + width / 2, y + 16, _brief(size), 11, ink_on(color), text_anchor="middle")


def _draw_limit(canvas: Canvas, fitting: Sequence[int], bottom: float, width: float) -> None:
    """Draw stairs above the cells that fit, `fitting` of them in each column, on a white border."""
    stairs = [(column + end, count) for column, count in enumerate(fitting) for end in (0, 1)]
    path = "L".join(f"{LEFT + width * end:.1f} {bottom - CELL_HEIGHT * count:.1f}" for end, count in stairs)
    canvas.path(f"M{path}", stroke="#FFFFFF", stroke_width=6, fill="none")
    canvas.path(f"M{path}", stroke=INK, stroke_width=3, fill="none", data_limit="yes")


def _brief(size: int) -> str:
    """Gigabytes in at most four characters, as a cell has room for."""
    value = size / UNITS["GB"]
    if value >= 9.95:
        return f"{value:,.0f}"
    if value >= 0.095:
        return f"{value:.1f}"
    return f"{value:.2f}"


def _title(run: TrainingRun, card: Gpu, columns: Sequence[int], fitting: Sequence[int]) -> str:
    if not any(fitting):
        return f"No step of {run.model.name} fits on {card.name} at any length: its states are too large"
    longest, count = max((s, count) for s, count in zip(columns, fitting, strict=True) if count)
    batch = BATCHES[count - 1]
    sequences = "sequence" if batch == 1 else "sequences"
    return f"{card.name} takes {run.model.name} up to {longest:,} tokens, {batch} {sequences} at a time"
