"""Lesson 04's pictures: what the parameters of models belong to, and a model drawn to scale."""

from collections.abc import Mapping
from math import ceil, log, prod

import numpy as np
from matplotlib.axes import Axes

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet, text_width
from ...models import PRESETS, TransformerConfig, block_shapes, outer_shapes
from ...palette import INK, ink_on, number, stop

# after Paul Tol's muted palette; none is a kind of memory's color, since all of these are parameters
PART_COLOURS = {
    "embedding": "#882255", "positions": "#DDCC77", "attention": "#8CCBC1",
    "MLP": "#332288", "norms": "#117733", "head": "#D98A96",
}  # fmt: skip


def shares(models: Mapping[str, Mapping[str, int]], title: str) -> CourseFigure:
    """Draw one bar for each model, 100 % wide and cut into its parts."""
    seen = [part for part in PART_COLOURS if any(part in parts for parts in models.values())]
    totals = {name: sum(parts.values()) for name, parts in models.items()}
    names = [f"{name}: {spelled(total)}".removeprefix(": ") for name, total in totals.items()]
    left = MARGIN + 8 + max(text_width(name, 12) for name in names)
    width = WIDTH - MARGIN - left
    with look():
        figure = sheet(title, 26 + 40 * len(models))
        ax = figure.place(left, 26, width, 40 * len(models))
        filled = np.zeros(len(models))
        for part in seen:
            sizes = [parts.get(part, 0) / totals[name] for name, parts in models.items()]
            bars = ax.barh(names, sizes, 0.74, filled, color=PART_COLOURS[part], label=part)
            texts = [percent(size, 1) if size * width > 36 else "" for size in sizes]
            style = {"color": ink_on(PART_COLOURS[part]), "fontsize": 11, "fontweight": "bold"}
            ax.bar_label(bars, texts, label_type="center", **style)
            filled += sizes
        ax.set(xlim=(0, 1), ylim=(len(models) - 0.5, -0.5), xticks=[])
        ax.tick_params("y", labelsize=12, labelcolor=INK, pad=8)
        bare(ax, "left")
        ax.legend(ncols=6, loc="lower left", bbox_to_anchor=((MARGIN - left) / width, 1), borderaxespad=0.3)
    table = [[name, *(f"{parts.get(part, 0):,}" for part in seen)] for name, parts in models.items()]
    figure.rows = [["parameters", *seen], *table]
    figure.alt = f"{stop(title)} One bar per model, cut into its parts' shares: {', '.join(names)}."
    return figure


BLOCK, MODEL = 236.0, 264.0
"""Widths in points of the two halves of `to_scale`: one block, and the whole model."""


def to_scale(name: str, title: str) -> CourseFigure:
    """Draw the matrices of a model's block, and all of its parameters, as areas. ValueError for experts."""
    model = PRESETS[name]
    if model.experts:
        raise ValueError(f"{name} has experts: too many matrices for this picture")
    square = model.hidden**2
    rows = matrix_rows(model)
    in_block = sum(sum(row.values()) for row in rows) / square
    high = in_block / 4  # a block is 4·h wide
    outer = {TABLES[part]: size / square for part, size in tables(model).items()}
    across = _columns(model.layers, high)
    tall = ceil(model.layers / across) * high
    wide = 4 * across + sum(outer.values()) / tall
    one = min(MODEL / wide, 230 / tall)
    with look():
        figure = sheet(title, 22 + max(BLOCK * high / 4, one * tall))
        block = figure.place(MARGIN, 22, BLOCK, BLOCK * high / 4)
        whole = figure.place(WIDTH - MARGIN - MODEL, 22, one * wide, one * tall)
        _draw_block(block, rows, square, 0, 0, named=True)
        for index in range(model.layers):
            _draw_block(whole, rows, square, 4 * (index % across), high * (index // across))
        _draw_tables(whole, outer, 4 * across, tall, one)
        _head(block, f"one block: {in_block:.3g} h²", 4, high)
        _head(whole, f"all {model.layers} blocks, {', '.join(outer)}", wide, tall)
    sizes = {matrix: size / square for row in rows for matrix, size in row.items()} | outer
    figure.rows = [["matrix", "in h²"], *([name, f"{size:.3g}"] for name, size in sizes.items())]
    what = f"the matrices of one block of {name} as areas; right, all {model.layers} blocks"
    figure.alt = f"{stop(title)} Left, {what} with {' and '.join(outer)}, on one scale."
    return figure


def tables(model: TransformerConfig) -> dict[str, int]:
    """Return the matrices outside the blocks, each by one of the keys of `TABLES`."""
    shapes = {name.partition(".")[0]: shape for name, shape in outer_shapes(model).items()}
    return {part: prod(shapes[part]) for part in TABLES if part in shapes}


TABLES = {"embedding": "words", "positions": "positions", "head": "head"}
"""What `PARTS` and a picture call the matrices outside the blocks."""


def matrix_rows(model: TransformerConfig) -> list[dict[str, int]]:
    """Return a block's matrices in rows of a picture: attention's in one, each of the MLP's in its own."""
    sizes = {name.removesuffix(".weight"): prod(s) for name, s in block_shapes(model).items() if len(s) > 1}
    attention = {name: size for name, size in sizes.items() if name.startswith("attention.")}
    return [attention, *({name: size} for name, size in sizes.items() if name.startswith("mlp."))]


def _columns(layers: int, high: float) -> int:
    """Return how many blocks side by side make a picture about as high as it is wide, with few gaps."""

    def faults(across: int) -> float:
        rows = ceil(layers / across)
        return abs(log(4 * across / (rows * high))) + 6 * (1 - layers / (rows * across))

    return min(range(1, layers + 1), key=faults)


def _head(ax: Axes, text: str, wide: float, tall: float) -> None:
    """Frame a half of the picture, and write over it what it shows."""
    ax.set(xlim=(0, wide), ylim=(tall, 0))
    ax.axis("off")
    ax.annotate(text, (0, 1), (0, 7), "axes fraction", textcoords="offset points")


def _draw_tables(ax: Axes, sizes: Mapping[str, float], left: float, tall: float, one: float) -> None:
    """Draw tables as high as all blocks, each with its name if it is wide enough; a unit has `one` points."""
    colors = {name: part for part, name in TABLES.items()}
    for name, size in sizes.items():
        wide = size / tall
        _rectangle(ax, left, 0, wide, tall, colors[name])
        if one * wide > 12:
            at = {"ha": "center", "va": "center", "rotation": 90, "fontsize": 10.5}
            ink = ink_on(PART_COLOURS[colors[name]])
            ax.text(left + wide / 2, tall / 2, f"{name}: {size:.3g} h²", color=ink, **at)
        left += wide


def _draw_block(
    ax: Axes, rows: list[dict[str, int]], square: int, left: float, top: float, *, named: bool = False
) -> None:
    """Draw the matrices of a block that is 4·h wide; `named` writes what each is."""
    for row in rows:
        whole = sum(row.values())
        tall, x = whole / square / 4, left
        for matrix, size in row.items():
            part, _, name = matrix.partition(".")
            wide = 4 * size / whole
            _rectangle(ax, x, top, wide, tall, "MLP" if part == "mlp" else part)
            if named:
                said = f"{MATRICES[name]}\n{size / square:.3g} h²" if wide > 0.8 else MATRICES[name][0]
                ink = ink_on(PART_COLOURS["MLP" if part == "mlp" else part])
                at = {"ha": "center", "va": "center", "color": ink, "fontsize": 10.5}
                ax.text(x + wide / 2, top + tall / 2, said, **at)
            x += wide
        top += tall


def _rectangle(ax: Axes, left: float, top: float, wide: float, tall: float, part: str) -> None:
    """Fill a rectangle in a part's color, with a white edge."""
    style = {"color": PART_COLOURS[part], "edgecolor": "white", "linewidth": 0.8}
    ax.bar(left, tall, wide, top, align="edge", **style)


MATRICES = {
    "qkv": "queries, keys, values", "q": "queries", "k": "keys", "v": "values", "out": "output",
    "gate": "MLP, gate", "up": "MLP, up", "down": "MLP, down",
}  # fmt: skip
"""What a picture calls the matrices of a block."""


def percent(count: float, whole: float) -> str:
    """Return a share with at most two significant digits: "34 %", "2.9 %", "0.02 %"."""
    return f"{number(float(f'{100 * count / whole:.2g}'))} %"


def spelled(count: int) -> str:
    """Return a number of parameters as people say it: "124 M", "1.56 B"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        value = count / size
        if value >= 0.9995:
            return f"{value:.3g} {letter}"
    return f"{count:,}"
