"""Pictures of lesson 16: a matrix and LoRA's factors, to scale; a code's values under a histogram."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet, text_width
from ...palette import COLOURS, INK, QUIET, number, stop

WEIGHTS = COLOURS["parameters"]  # of all three matrices; the frozen one is hatched


def lora_picture(n_out: int, n_in: int, rank: int) -> CourseFigure:
    """W (n_out, n_in), B (n_out, r) and A (r, n_in), all to one scale."""
    whole = n_out * n_in
    thin = rank * (n_out + n_in)
    learning = number(float(f"{100 * thin / whole:.2g}"))
    title = f"Rank {rank} on a matrix of {n_out:,} × {n_in:,}: {learning} % of its numbers learn"
    gap = 0.62 * max(n_out, n_in)
    width = 2 * n_in + rank + 2 * gap
    one = min(164 / n_out, (WIDTH - 2 * MARGIN - 8) / width)  # points of a number
    with look():
        figure = sheet(title, 56 + n_out * one)
        ax = figure.place((WIDTH - width * one) / 2, 28, width * one, n_out * one)
        ax.set(xlim=(0, width), ylim=(n_out, 0), xticks=[], yticks=[])
        bare(ax)
        _matrix(ax, 0, n_in, n_out, "W, frozen", facecolor="white", edgecolor=WEIGHTS, hatch="////")
        _matrix(ax, n_in + gap, rank, n_out, "B, zero at first", color=WEIGHTS)
        _matrix(ax, n_in + rank + 2 * gap, n_in, rank, "A, Gaussian", color=WEIGHTS)
        for sign, x in (("+", n_in + gap / 2), ("·", n_in + rank + 1.5 * gap)):
            ax.text(x, n_out / 2, sign, ha="center", va="center", fontsize=26)
    figure.alt = (
        f"{stop(title)} "
        f"Drawn to scale: the frozen matrix W, hatched, with {whole:,} numbers, plus B times A. "
        "B is a thin column, zero at first; A is a thin row, Gaussian at first. "
        f"Together {thin:,} numbers learn."
    )
    return figure


def _matrix(ax: Axes, left: float, wide: int, high: int, name: str, **fill: Any) -> None:
    ax.add_patch(Rectangle((left, 0), wide, high, clip_on=False, **fill))
    middle = left + wide / 2
    place = {"textcoords": "offset points", "ha": "center"}
    ax.annotate(name, (middle, 0), (0, 9), fontsize=12.5, fontweight="bold", **place)
    ax.annotate(f"{wide * high:,} numbers", (middle, high), (0, -8), color=QUIET, va="top", **place)


def code_picture(
    values: Sequence[float], codes: Mapping[str, Sequence[float]], title: str, provenance: str = ""
) -> CourseFigure:
    """A histogram of `values` between −1 and 1, and under it each code's values as strokes on its axis."""
    left = MARGIN + 14 + max(text_width(name, 12.5) for name in codes)
    width = WIDTH - left - MARGIN - 8
    high = 40 * len(codes)
    with look():
        figure = sheet(title, 136 + high + 42, provenance)
        weights = figure.place(left, 0, width, 132)
        weights.hist(values, bins=48, range=(-1, 1), rwidth=0.9, color=WEIGHTS)
        weights.set(xlim=(-1, 1), xticks=[], yticks=[])
        bare(weights, "bottom")
        strokes = figure.place(left, 136, width, high)
        strokes.eventplot([*codes.values()], linelengths=0.64, linewidths=2.4, colors=INK, clip_on=False)
        strokes.set(xlim=(-1, 1), ylim=(len(codes) - 0.5, -0.5))
        strokes.set_yticks(range(len(codes)), [*codes], fontsize=12.5, color=INK)
        ticks = (-1, -0.5, 0, 0.5, 1)
        strokes.tick_params("y", pad=10)
        strokes.set_xticks(ticks, [number(tick) for tick in ticks])
        strokes.set_xlabel("weight / its block's largest magnitude")
        bare(strokes)
    told = "; ".join(f"{name}: {len(code)} values" for name, code in codes.items())
    peaks = "A histogram of weights peaks at zero. Strokes on its axis mark each code's values."
    figure.alt = f"{stop(title)} {peaks} {told}."
    return figure
