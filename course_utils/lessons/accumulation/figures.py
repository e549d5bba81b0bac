"""The figure of lesson 09: paths of θ over the contour lines of their loss."""

import math
from collections.abc import Mapping, Sequence

from ...figures.axes import stop
from ...figures.canvas import MARGIN, Canvas, Figure, reflowing
from ..adam.figures import Frame, draw_walk
from .micro_batches import START, LineFit, Point

PANEL_GAP, INSET = 18.0, 8.0  # pixels between two panels, and from a panel's border to what it shows


@reflowing
def theta_paths(fit: LineFit, paths: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """Paths of θ side by side over the same contour lines, each with its name."""
    canvas = Canvas()
    top = canvas.title(title) + 12
    columns = 1 if canvas.narrow else len(paths)  # on a narrow page, one below the other
    width = (canvas.width - 2 * MARGIN - PANEL_GAP * (columns - 1)) / columns
    rings = [contour(fit, START, part) for part in (1.0, 0.55, 0.25, 0.07)]
    xs, ys = zip(*(point for line in (*rings, *paths.values()) for point in line), strict=True)
    scale = (width - 2 * INSET) / (max(xs) - min(xs))
    height = scale * (max(ys) - min(ys)) + 2 * INSET
    corner = (min(xs) - INSET / scale, min(ys) - INSET / scale)
    for index, (name, walked) in enumerate(paths.items()):
        row, column = divmod(index, columns)
        y = top + 26 + row * (height + 34)
        panel = Frame(MARGIN + column * (width + PANEL_GAP), y, width, height, corner, scale)
        canvas.text(panel.x, y - 10, name, 13, font_weight="bold")
        draw_walk(canvas, panel, rings, walked, fit.best())
    told = "; ".join(f"{name}: {len(walked) - 1} steps" for name, walked in paths.items())
    axes = "horizontal: θ₀, vertical: θ₁; lines of equal loss; the cross is the minimum"
    end = canvas.note(axes, y + height + 20)
    alt = f"{stop(title)} Paths of two parameters over the contour lines of their loss. {told}."
    return Figure(canvas.svg(end - 2, title, alt), alt)


def contour(fit: LineFit, through: Point, part: float) -> list[Point]:
    """The closed line on which the loss is above its minimum by `part` of what it is at `through`."""
    # with the means b of x and c of x², twice the loss above its minimum is p² + 2·b·p·q + c·q²
    b, c, _, _ = fit.moments()
    x, y = fit.best()
    across = through[0] - x
    up = through[1] - y
    radius = math.sqrt(part * (across**2 + 2 * b * across * up + c * up**2))
    below = math.sqrt(c - b * b)  # Cholesky: (p + b·q)² + below²·q² = radius²
    turns = (2 * math.pi * step / 72 for step in range(73))
    ring = ((radius * math.cos(turn), radius * math.sin(turn) / below) for turn in turns)
    return [(x + p - b * q, y + q) for p, q in ring]
