"""Lesson 04's picture: what the parameters of models belong to, one bar a model."""

from collections.abc import Mapping

import numpy as np

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet, text_width
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
