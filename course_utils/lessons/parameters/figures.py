"""Lesson 04's picture: what the parameters of models belong to, one bar a model."""

from collections.abc import Mapping

from ...figures.axes import legend, stop
from ...figures.canvas import MARGIN, RULE, Canvas, Figure, ink_on, reflowing, text_width

# after Paul Tol's muted palette; none is a kind of memory's color, since all of these are parameters
PART_COLOURS = {
    "embedding": "#882255", "positions": "#DDCC77", "attention": "#8CCBC1",
    "MLP": "#332288", "norms": "#117733", "head": "#D98A96",
}  # fmt: skip
BAR, STEP, TOP = 38, 52, 34


@reflowing
def shares(models: Mapping[str, Mapping[str, int]], title: str) -> Figure:
    """Draw one bar for each model, 100 % wide and cut into its parts."""
    canvas = Canvas()
    entries = [(name, name) for name in PART_COLOURS if any(name in parts for parts in models.values())]

    def swatch(x: float, y: float, size: float, name: str) -> None:
        canvas.rect(x, y, size, size, PART_COLOURS[name])

    top = legend(canvas, entries, canvas.title(title) + 13, swatch) - 18
    totals = {name: sum(parts.values()) for name, parts in models.items()}
    left = MARGIN + 10 + max(text_width(name, 13) for name in models)
    widest = max(text_width(spelled(count), 13, bold=True) for count in totals.values())
    right = canvas.width - MARGIN - 10 - widest
    told = []
    for index, (name, parts) in enumerate(models.items()):
        x = left
        y = top + TOP + STEP * index
        canvas.text(left - 10, y + 24, name, 13, text_anchor="end")
        for part, count in parts.items():
            share = percent(count, totals[name])
            fill = PART_COLOURS[part]
            width = (right - left) / totals[name] * count
            tip = f"{part}: {count:,} ({share})"
            if name:
                tip = f"{name} · {tip}"
            canvas.rect(x, y, width, BAR, fill, tip, data_parameters=count)
            if text_width(share, 12, bold=True) + 8 <= width:
                look = {"text_anchor": "middle", "font_weight": "bold"}
                canvas.text(x + width / 2, y + 24, share, 12, ink_on(fill), **look)
            x += width
        canvas.text(right + 10, y + 24, spelled(totals[name]), 13, font_weight="bold")
        shown = ", ".join(f"{part} {percent(count, totals[name])}" for part, count in parts.items())
        told.append(f"{name}{', ' if name else ''}{spelled(totals[name])} parameters: {shown}")
    bottom = top + TOP + STEP * len(models)
    canvas.line(left, top + TOP - 6, left, bottom - 8, RULE)
    alt = f"{stop(title)} Each bar is one model, cut into parts. {'; '.join(told)}."
    return Figure(canvas.svg(bottom + 4, title, alt), alt)


def percent(count: int, whole: int) -> str:
    """Return a share with at most two significant digits: "34 %", "2.9 %", "0.02 %"."""
    share = 100 * count / whole
    if share >= 9.95:
        return f"{share:.0f} %"
    if share >= 0.95:
        return f"{share:.1f} %"
    return f"{share:.2g} %"


def spelled(count: int) -> str:
    """Return a number of parameters as people say it: "124 M", "1.56 B"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * size:
            value = count / size
            if value < 9.995:
                return f"{value:.2f} {letter}"
            if value < 99.95:
                return f"{value:.1f} {letter}"
            return f"{value:.0f} {letter}"
    return f"{count:,}"
