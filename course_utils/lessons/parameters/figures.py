"""Lesson 04's picture: what the parameters of models belong to, one bar a model."""

from collections.abc import Mapping

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet, text_width
from ...palette import INK, ink_on, stop

# after Paul Tol's muted palette; none is a kind of memory's color, since all of these are parameters
PART_COLOURS = {
    "embedding": "#882255", "positions": "#DDCC77", "attention": "#8CCBC1",
    "MLP": "#332288", "norms": "#117733", "head": "#D98A96",
}  # fmt: skip
PITCH = 40  # points from bar to bar
LABEL = 36  # points that a share needs inside its part


def shares(models: Mapping[str, Mapping[str, int]], title: str) -> CourseFigure:
    """Draw one bar for each model, 100 % wide and cut into its parts."""
    seen = [part for part in PART_COLOURS if any(part in parts for parts in models.values())]
    totals = {name: sum(parts.values()) for name, parts in models.items()}
    ends = [spelled(total) for total in totals.values()]
    left = MARGIN + 10 + max(text_width(name, 12) for name in models)
    width = WIDTH - MARGIN - left - max(text_width(end, 12, bold=True) + 8 for end in ends)
    high = PITCH * len(models)
    with look():
        figure = sheet(title, 26 + high)
        ax = figure.place(left, 26, width, high)
        filled = [0.0] * len(models)
        bars = []
        for part in seen:
            counts = [(parts.get(part, 0), totals[name]) for name, parts in models.items()]
            sizes = [count / total for count, total in counts]
            texts = [percent(*pair) if pair[0] * width > pair[1] * LABEL else "" for pair in counts]
            bars.append(ax.barh([*models], sizes, 0.74, filled, color=PART_COLOURS[part]))
            style = {"color": ink_on(PART_COLOURS[part]), "fontsize": 11, "fontweight": "bold"}
            ax.bar_label(bars[-1], texts, label_type="center", **style)
            filled = [start + size for start, size in zip(filled, sizes, strict=True)]
        ax.bar_label(bars[-1], ends, padding=8, fontsize=12, fontweight="bold")
        ax.set(xlim=(0, 1), ylim=(len(models) - 0.5, -0.5), xticks=[])
        ax.tick_params("y", labelsize=12, labelcolor=INK, pad=8)
        bare(ax, "left")
        corner = ((MARGIN - left) / width, 1 + 4 / high)
        ax.legend(bars, seen, ncols=len(seen), loc="lower left", bbox_to_anchor=corner)
        told = [told_parts(name, parts, totals[name]) for name, parts in models.items()]
        figure.alt = f"{stop(title)} Each bar is one model, cut into parts. {'; '.join(told)}."
        table = [[name, *(f"{parts.get(part, 0):,}" for part in seen)] for name, parts in models.items()]
        figure.rows = [["parameters", *seen], *table]
        return figure


def told_parts(name: str, parts: Mapping[str, int], total: int) -> str:
    shown = ", ".join(f"{part} {percent(count, total)}" for part, count in parts.items())
    return f"{name}{', ' if name else ''}{spelled(total)} parameters: {shown}"


def percent(count: int, whole: int) -> str:
    """Return a share with at most two significant digits: "34 %", "2.9 %", "0.02 %"."""
    share = 100 * count / whole
    if share >= 9.95:
        return f"{share:.0f} %"
    return f"{share:.1f} %" if share >= 0.95 else f"{share:.2g} %"


def spelled(count: int) -> str:
    """Return a number of parameters as people say it: "124 M", "1.56 B"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        value = count / size
        if value >= 0.9995:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {letter}"
    return f"{count:,}"
