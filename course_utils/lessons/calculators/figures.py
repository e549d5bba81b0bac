"""Lesson 18's figure: every calculator's errors, term by term."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from ... import TrainingRun, plus_minus
from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet, wrap
from ...measurement import Measurement
from ...palette import GRID, INK, OVER, stop
from .calculators import gaps

SHORT = "#4B3F8F"  # too little, as `OVER` is too much; neither is the color of a kind of memory
SIGNED = LinearSegmentedColormap.from_list("signed", [SHORT, "white", OVER])
NAMES = 140.0  # points left of the cells, for the names of rows


def gap_map(run: TrainingRun, measured: Measurement, title: str) -> CourseFigure:
    """Each calculator's terms as cells, signed GB, the deeper the color the larger the share of the peak."""
    table = gaps(run, measured)
    heads = [*next(iter(table.values())), "all"]
    sizes = np.array([[*found.values(), sum(found.values())] for found in table.values()])
    shares = np.clip(sizes / measured.peak, -1, 1)
    depths = np.sign(shares) * np.sqrt(abs(shares))
    shown = [[plus_minus(size / 1e9, 1) if abs(size) >= 5e7 else "0" for size in row] for row in sizes]
    with look():
        figure = sheet(title, 106 + 30 * len(table), str(measured.provenance))
        ax = _rows(figure, [*table], 104, 30)
        places = [range(size) for size in sizes.T.shape]
        ax.pcolormesh(*places, depths, cmap=SIGNED, vmin=-1, vmax=1, alpha=0.5, edgecolor=GRID)
        ax.set_xticks(places[0], heads, rotation=38, ha="left", rotation_mode="anchor")
        bare(ax)
        for (row, column), words in np.ndenumerate(shown):
            ax.text(column, row, words, fontsize=10.5, ha="center", va="center")
    figure.alt = f"{stop(title)} A map of {len(table)} calculators and {len(heads) - 1} terms, in signed GB."
    figure.rows = [["GB", *heads], *([name, *row] for name, row in zip(table, shown, strict=True))]
    return figure


def _rows(figure: CourseFigure, names: Sequence[str], top: float, pitch: float) -> Axes:
    """Axes with a row for each name, which is at its left."""
    ax = figure.place(NAMES, top, WIDTH - MARGIN - NAMES, pitch * len(names))
    lines = ["\n".join(wrap(name, 11.5, NAMES - MARGIN - 8)) for name in names]
    ax.set_yticks(range(len(names)), lines, color=INK)
    ax.set(ylim=(len(names) - 0.5, -0.5), xticks=[])
    ax.margins(x=0)
    ax.xaxis.tick_top()
    return ax
