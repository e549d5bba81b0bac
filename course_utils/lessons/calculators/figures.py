"""Lesson 18's figures: every calculator's answer next to the others, and one corrected term by term."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from ... import TrainingRun, format_bytes, plus_minus
from ...figures.style import MARGIN, SMALL, WIDTH, CourseFigure, bare, look, sheet, wrap
from ...palette import COLOURS, GRID, INK, OVER, RULE, sentence, signed, signed_percent, stop
from .calculators import BLOCKS, COPIES, OUTSIDE, PASSING, SCORES, STATES, Truth, calculator, gaps

PARTS = {
    STATES: ("optimizer_states", "weights, gradients, states"),
    COPIES: ("weight_copies", "weight copies"),
    BLOCKS: ("activations", "activations"),
    OUTSIDE: ("activations", ""),
    SCORES: ("activations", "attention scores, s×s"),  # hatched, too
    PASSING: ("temporaries", "temporaries"),
}
"""The color of each component and its name in the legend, in the order of a bar."""

SHORT = "#4B3F8F"  # too little, as `OVER` is too much; neither is the color of a kind of memory
SIGNED = LinearSegmentedColormap.from_list("signed", [SHORT, "white", OVER])
NAMES = 174.0  # points left of the bars, for the names of rows


def side_by_side(
    panels: Mapping[str, Mapping[str, Mapping[str, int]]],
    title: str,
    peaks: Mapping[str, int] = {},
    provenance: str = "",
    word: str = "simulated",
) -> CourseFigure:
    """A panel for each model: a bar for each calculator, cut into components; all panels name the same rows.

    With `peaks`, a step's bytes by panel, a line marks each, and every bar says how far off it is; `word`
    names those bytes.
    """
    names = [*next(iter(panels.values()))]
    above = 82 if peaks else 64
    wide = (WIDTH - NAMES) / len(panels)
    table = [["", *PARTS, "total"]]
    with look():
        figure = sheet(title, above + 34 * len(names), provenance)
        for index, (model, panel) in enumerate(panels.items()):
            ax = _rows(figure, names, NAMES + wide * index, above, wide - 68, 34)
            ax.set_title(model, fontsize=12)
            ax.tick_params(labelleft=index == 0)
            sizes = np.array([[parts.get(part, 0) for part in PARTS] for parts in panel.values()])
            _panel(ax, sizes, peaks.get(model, 0), word)
            for name, row in zip(names, sizes, strict=True):
                table.append([f"{model}, {name}", *map(_gb, [*row, row.sum()])])
        corner = (MARGIN / WIDTH, 1 - figure.body / figure.bbox.height)
        components = figure.axes[0].get_legend_handles_labels()
        figure.legend(*components, loc="upper left", bbox_to_anchor=corner, ncols=3)
    figure.alt = f"{stop(title)} Bars by calculator for {sentence(panels)}, cut into components."
    figure.rows = table
    return figure


def _gb(size: int) -> str:
    return format_bytes(size, "GB", 0)


def _rows(
    figure: CourseFigure, names: Sequence[str], left: float, top: float, width: float, pitch: float
) -> Axes:
    """Axes with a row for each name, which is at its left."""
    ax = figure.place(left, top, width, pitch * len(names))
    lines = ["\n".join(wrap(name, 11.5, left - MARGIN - 8)) for name in names]
    ax.set_yticks(range(len(names)), lines, color=INK)
    ax.set(ylim=(len(names) - 0.5, -0.5), xticks=[])
    ax.margins(x=0)
    ax.xaxis.tick_top()
    bare(ax, "left")
    return ax


def _panel(ax: Axes, sizes: np.ndarray, peak: int, word: str) -> None:
    """One model's bars, a row of `sizes` each, with their totals, and the line of its step's peak."""
    for index, (part, (kind, name)) in enumerate(PARTS.items()):
        starts = sizes[:, :index].sum(axis=1)
        fill = {"color": COLOURS[kind], "hatch": "/////" if part == SCORES else "", "edgecolor": "white"}
        ax.barh(range(len(sizes)), sizes[:, index], 0.64, starts, linewidth=0, label=name, **fill)
    if peak:
        _mark(ax, peak, f"{word} {_gb(peak)}")
    for row, total in enumerate(sizes.sum(axis=1)):
        off = total - peak if peak else 0
        _at_right(ax, row - 0.2 if off else row, _gb(total), fontweight="bold")
        if off:
            color = OVER if off > 0 else SHORT
            _at_right(ax, row + 0.2, signed_percent(off, peak), color=color, fontsize=10.5)


def _mark(ax: Axes, peak: int, words: str) -> None:
    """The line of a step's peak, named above it."""
    ax.axvline(peak, color=OVER, linewidth=2, clip_on=False)
    ax.set_xticks([peak], [words], color=OVER, fontweight="bold")


def _at_right(ax: Axes, row: float, words: str, **style: Any) -> None:
    """Words in a column right of the bars."""
    ax.annotate(words, (1, row), (8, 0), ("axes fraction", "data"), "offset points", va="center", **style)


def corrected(
    name: str, terms: Sequence[str], run: TrainingRun, real: Truth, title: str, provenance: str = ""
) -> CourseFigure:
    """One calculator's answer, the chosen terms added back one by one, and the result next to the truth.

    Each row begins where the last one ended. Raises ValueError for an unknown calculator.
    """
    changes = {term: -gap for term, gap in gaps(name, run, real).items() if term in terms}
    ends = [*accumulate(changes.values(), initial=calculator(name).total(run))]
    first, last, peak = (format_bytes(size, "GB", 1) for size in (ends[0], ends[-1], real.peak))
    names = [f"{name} says", *changes, "it would say" if changes else "it says"]
    sizes = [ends[0], *changes.values(), ends[-1]]
    fills = ["#6B6B6B", *(SHORT if size > 0 else OVER for size in changes.values()), "#6B6B6B"]
    shown = [first, *(signed(size, "GB", 1) for size in changes.values()), last]
    with look():
        figure = sheet(title, 28 + 30 * len(names), provenance)
        ax = _rows(figure, names, NAMES, 26, WIDTH - NAMES - 92, 30)
        ax.barh(range(len(names)), sizes, 0.68, [0, *ends[:-1], 0], color=fills)
        ax.vlines(ends, range(len(ends)), range(1, len(names)), INK, linewidth=1)
        _mark(ax, real.peak, f"{real.word} {peak}")
        for row, size in enumerate(shown):
            _at_right(ax, row, size, fontweight="bold")
    figure.alt = f"{stop(title)} Step by step from {first} to {last}; {real.word}: {peak}."
    figure.rows = [["", "bytes"], *zip(names, shown, strict=True)]
    return figure


def gap_map(
    table: Mapping[str, Mapping[str, int]], peak: int, title: str, provenance: str = ""
) -> CourseFigure:
    """Each calculator's terms as cells, signed GB, the deeper the color the larger the share of the peak.

    `table` maps calculators to signed bytes by term.
    """
    heads = [*next(iter(table.values())), "all"]
    sizes = np.array([[*found.values(), sum(found.values())] for found in table.values()])
    shares = np.clip(sizes / peak, -1, 1)
    depths = np.sign(shares) * np.sqrt(abs(shares))
    shown = [[plus_minus(size / 1e9, 1) if abs(size) >= 5e7 else "0" for size in row] for row in sizes]
    with look():
        figure = sheet(title, 106 + 30 * len(table), provenance)
        ax = _rows(figure, [*table], 140, 104, WIDTH - MARGIN - 140, 30)
        places = [range(size) for size in sizes.T.shape]
        ax.pcolormesh(*places, depths, cmap=SIGNED, vmin=-1, vmax=1, alpha=0.5, edgecolor=GRID)
        ax.set_xticks(places[0], heads, rotation=38, ha="left", rotation_mode="anchor")
        bare(ax)
        for (row, column), words in np.ndenumerate(shown):
            ax.text(column, row, words, fontsize=10.5, ha="center", va="center")
    figure.alt = f"{stop(title)} A map of {len(table)} calculators and {len(heads) - 1} terms, in signed GB."
    figure.rows = [["GB", *heads], *([name, *row] for name, row in zip(table, shown, strict=True))]
    return figure


def strips(
    ratios: Mapping[str, Mapping[str, float]], title: str, provenance: str, rings: Collection[str]
) -> CourseFigure:
    """A row of dots for each name, at answer / truth on a logarithmic axis; rings where in `rings`."""
    dots = [(ratio, row, key) for row, found in enumerate(ratios.values()) for key, ratio in found.items()]
    xs, ys, keys = zip(*dots, strict=True)
    edges = [OVER if ratio > 1 else SHORT for ratio in xs]
    fills = ["white" if key in rings else edge for key, edge in zip(keys, edges, strict=True)]
    marks = (0.2, 0.5, 0.75, 1, 1.5, 2, 3, 5)
    with look():
        figure = sheet(title, 26 * len(ratios) + 28, provenance)
        ax = _rows(figure, [*ratios], 200, 26, WIDTH - MARGIN - 200, 26)
        ax.set_xscale("log")
        ax.set_xticks(marks, [f"{plus_minus(100 * (ratio - 1))} %" for ratio in marks], fontsize=SMALL)
        ax.minorticks_off()
        ax.set_xlim(min(xs) / 1.06, max(xs) * 1.06)
        bare(ax)
        ax.grid(axis="x")
        ax.axvline(1, color=RULE, linewidth=1)
        ax.scatter(xs, ys, 80, fills, edgecolors=edges, zorder=3)
    ends = sentence(f"{plus_minus(100 * (ratio - 1), 1)} %" for ratio in (min(xs), max(xs)))
    figure.alt = f"{stop(title)} Errors of {len(xs)} answers, a row for each formula, between {ends}."
    return figure
