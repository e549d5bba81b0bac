"""Lesson 18's figures: every calculator's answer next to the others, and one corrected term by term."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from ... import TrainingRun, format_bytes, plus_minus
from ...figures import COLOURS
from ...figures.style import MARGIN, SMALL, WIDTH, CourseFigure, bare, look, room, sheet, text_width, wrap
from ...palette import GRID, INK, OVER, RULE, signed, signed_percent, stop
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
MARKS = (0.2, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)

Panel = Mapping[str, Mapping[str, int]]


def side_by_side(
    panels: Mapping[str, Panel],
    title: str,
    peaks: Mapping[str, int] | None = None,
    provenance: str = "",
    word: str = "simulated",
) -> CourseFigure:
    """A panel for each model: a bar for each calculator, cut into components; all panels name the same rows.

    With `peaks`, a step's bytes by panel, a line marks each, and every bar says how far off it is; `word`
    names those bytes.
    """
    peaks = peaks or {}
    rows = [row.replace(" (", "\n(") for row in next(iter(panels.values()))]
    above = 82 if peaks else 64
    told = []
    table = [["", *PARTS, "total"]]
    with look():
        figure = sheet(title, above + 34 * len(rows), provenance)
        whole = _rows(figure, rows, above, 34)
        bare(whole)
        for index, (name, panel) in enumerate(panels.items()):
            ax = whole.inset_axes((index / len(panels), 0, 1 / len(panels) - 0.03, 1), sharey=whole)
            ax.set_title(name, fontsize=12, pad=24 if peaks else 8)
            _panel(ax, panel, peaks.get(name), word)
            for row, parts in panel.items():
                sizes = (_gb(parts.get(part, 0)) for part in PARTS)
                table.append([f"{name}, {row}", *sizes, _gb(sum(parts.values()))])
            totals = "; ".join(f"{row} {_gb(sum(parts.values()))}" for row, parts in panel.items())
            said = f" {word.capitalize()}: {_gb(peaks[name])}." if peaks else ""
            told.append(f"{name}: {totals}.{said}")
        corner = (MARGIN / WIDTH, 1 - figure.body / figure.bbox.height)
        figure.legend(*ax.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=corner, ncols=3)
    figure.alt = f"{stop(title)} Bars by calculator. {' '.join(told)}"
    figure.rows = table
    return figure


def _gb(size: int) -> str:
    return format_bytes(size, "GB", 0)


def _rows(figure: CourseFigure, names: Sequence[str], top: float, pitch: float, wide: float = 117) -> Axes:
    """Axes with a row for each name, which stands at its left."""
    lines = [[line for part in name.split("\n") for line in wrap(part, 11.5, wide)] for name in names]
    left = MARGIN + 8 + max(text_width(line, 11.5, bold=True) for one in lines for line in one)
    ax = figure.place(left, top, WIDTH - MARGIN - left, pitch * len(names))
    ax.set(ylim=(len(names) - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(len(names)), ["\n".join(one) for one in lines], color=INK)
    bare(ax, "left")
    return ax


def _panel(ax: Axes, panel: Panel, peak: int | None, word: str) -> None:
    """One model's bars, each with its total, and the line of its step's peak."""
    bare(ax, "left")
    ax.tick_params(labelleft=False)
    totals = [sum(parts.values()) for parts in panel.values()]
    _scale(ax, max(totals), peak, f"{word} {_gb(peak or 0)}")
    ends = np.zeros(len(panel))
    for part, (kind, name) in PARTS.items():
        sizes = np.array([parts.get(part, 0) for parts in panel.values()])
        look: Any = {"color": COLOURS[kind], "hatch": "/////" if part == SCORES else "", "linewidth": 0}
        ax.barh(range(len(panel)), sizes, 0.64, ends, edgecolor="white", label=name, **look)
        ends += sizes
    for row, total in enumerate(totals):
        off = total - peak if peak else 0
        _label(ax, row, total, _gb(total), peak, up=6 if off else 0)
        if off:
            small = {"color": OVER if off > 0 else SHORT, "fontsize": 10.5, "fontweight": "normal"}
            _label(ax, row, total, signed_percent(off, peak or 0), peak, up=-7, **small)


def _scale(ax: Axes, largest: int, peak: int | None, said: str) -> None:
    """An axis with room for words right of its bars, and the line of a step's peak, with words above it."""
    end = max(largest, peak or 0) * room(ax) / (room(ax) - 66)
    ax.set(xlim=(0, end), xticks=[])
    if peak:
        ax.axvline(peak, color=OVER, linewidth=2)
        half = text_width(said, 11.5, bold=True) / 2 / room(ax)
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
        x = min(max(peak / end, half), 1 - half)
        ax.annotate(said, (x, 1), (0, 6), color=OVER, fontweight="bold", **place)


def _label(ax: Axes, row: int, end: int, words: str, peak: int | None, up: int = 0, **style: Any) -> None:
    """Words right of a bar's end, or of the peak's line where they would cross that."""
    reach = end + (text_width(words, 11.5, bold=True) + 12) / room(ax) * ax.get_xlim()[1]
    x = peak if peak and end <= peak < reach else end
    style = {"fontweight": "bold", **style}
    ax.annotate(words, (x, row), (6, up), textcoords="offset points", va="center", **style)


def corrected(
    name: str, terms: Sequence[str], run: TrainingRun, real: Truth, title: str, provenance: str = ""
) -> CourseFigure:
    """One calculator's answer, the chosen terms added back one by one, and the result next to the truth.

    Each row begins where the last one ended. Raises ValueError for an unknown calculator.
    """
    rows = [(f"{name} says", 0, calculator(name).total(run))]
    for term, gap in gaps(name, run, real).items():
        if term in terms:
            rows.append((term, rows[-1][2], rows[-1][2] - gap))
    rows.append(("it would say" if len(rows) > 1 else "it says", 0, rows[-1][2]))
    said = format_bytes(real.peak, "GB", 1)
    told = []
    with look():
        figure = sheet(title, 28 + 30 * len(rows), provenance)
        ax = _rows(figure, [row[0] for row in rows], 26, 30, 170)
        _scale(ax, max(row[2] for row in rows), real.peak, f"{real.word} {said}")
        for row, (label, start, end) in enumerate(rows):
            whole = row in (0, len(rows) - 1)
            fill = "#6B6B6B" if whole else SHORT if end > start else OVER
            ax.barh(row, end - start, 0.68, start, color=fill, edgecolor=fill)
            if whole:
                ax.get_yticklabels()[row].set_fontweight("bold")
            else:
                ax.vlines(end, row - 0.34, row + 0.66, INK, linewidth=1)
            shown = format_bytes(end, "GB", 1) if whole else signed(end - start, "GB", 1)
            _label(ax, row, max(start, end), shown, real.peak)
            told.append(f"{label} {shown}")
    figure.alt = f"{stop(title)} Step by step: {'; '.join(told)}. {real.word.capitalize()}: {said}."
    return figure


def gap_map(
    table: Mapping[str, Mapping[str, int]], peak: int, title: str, provenance: str = ""
) -> CourseFigure:
    """Each calculator's terms as cells, signed GB, the deeper the color the larger the share of the peak.

    `table` maps calculators to signed bytes by term.
    """
    heads = [*next(iter(table.values())), "all"]
    sizes = np.array([[*found.values(), sum(found.values())] for found in table.values()])
    deep = np.sign(sizes) * np.minimum(1, abs(sizes) / peak) ** 0.5
    with look():
        figure = sheet(title, 106 + 30 * len(table), provenance)
        ax = _rows(figure, list(table), 104, 30)
        cells = ax.pcolormesh(range(len(heads)), range(len(table)), deep, cmap=SIGNED, vmin=-1, vmax=1)
        cells.set(alpha=0.5, edgecolor=GRID)
        ax.set_xticks(range(len(heads)), heads, rotation=38, ha="left", rotation_mode="anchor")
        ax.tick_params(labeltop=True, labelbottom=False)
        bare(ax)
        for (row, column), size in np.ndenumerate(sizes):
            shown = plus_minus(size / 1e9, 1) if abs(size) >= 5e7 else "0"
            ax.text(column, row, shown, fontsize=10.5, ha="center", va="center")
    told = []
    for name, found in table.items():
        terms = (f"{term} {signed(size, 'GB', 1)}" for term, size in found.items() if size)
        told.append(f"{name}: {', '.join(terms)}")
    figure.alt = f"{stop(title)} Signed differences, answer minus the step's peak. {'; '.join(told)}."
    return figure


def strips(
    ratios: Mapping[str, Mapping[str, float]], title: str, provenance: str, rings: Collection[str]
) -> CourseFigure:
    """A row of dots for each name, at answer / truth on a logarithmic axis; rings where in `rings`."""
    dots = [(ratio, row, key) for row, found in enumerate(ratios.values()) for key, ratio in found.items()]
    xs, ys, keys = zip(*dots, strict=True)
    edges = [OVER if ratio > 1 else SHORT for ratio in xs]
    fills = ["white" if key in rings else edge for key, edge in zip(keys, edges, strict=True)]
    marks = [ratio for ratio in MARKS if min(xs) <= ratio <= max(xs)]
    with look():
        figure = sheet(title, 26 * len(ratios) + 30, provenance)
        ax = _rows(figure, list(ratios), 6, 26, 200)
        ax.set(xscale="log", xlim=(min(xs) / 1.06, max(xs) * 1.06))
        ax.set_xticks(marks, [f"{plus_minus(100 * (ratio - 1))} %" for ratio in marks], fontsize=SMALL)
        ax.minorticks_off()
        bare(ax)
        ax.grid(axis="x")
        ax.axvline(1, color=RULE, linewidth=1)
        ax.scatter(xs, ys, 80, fills, edgecolors=edges, zorder=3)
    told = []
    for name, found in ratios.items():
        errors = [plus_minus(100 * (ratio - 1), 1) for ratio in sorted(found.values())]
        told.append(f"{name} {errors[0]} to {errors[-1]} %" if errors else f"{name} no answer")
    figure.alt = f"{stop(title)} Errors of answers, {'; '.join(told)}."
    return figure
