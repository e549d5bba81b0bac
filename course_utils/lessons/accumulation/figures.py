"""Figures of lesson 07: paths of θ over the contour lines of their loss, and our trainings next to published ones."""

import math
from collections.abc import Iterable, Mapping, Sequence

from course_utils.figures.axes import COLOURS, stop
from course_utils.figures.canvas import (
    INK,
    MARGIN,
    QUIET,
    RULE,
    WIDTH,
    Canvas,
    Figure,
    number,
    short,
    text_width,
    ticks,
)

from ..adam.figures import GOAL, WALK, WALL, Frame
from .large_batches import ErrorRates
from .micro_batches import START, LineFit, Point
from .published_batches import Published

PANEL_GAP, INSET = 18.0, 8.0  # pixels between two panels, and from a panel's border to what it shows


def theta_paths(fit: LineFit, paths: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """Paths of θ side by side over the same contour lines, each with its name. ValueError without any path."""
    if not paths:
        raise ValueError("theta_paths needs at least one path")
    canvas = Canvas()
    top = canvas.title(title) + 12
    width = (WIDTH - 2 * MARGIN - PANEL_GAP * (len(paths) - 1)) / len(paths)
    rings = [contour(fit, START, part) for part in (1.0, 0.55, 0.25, 0.07)]
    points = [point for line in [*rings, *paths.values()] for point in line]
    lows, highs = ([choose(point[axis] for point in points) for axis in (0, 1)] for choose in (min, max))
    scale = (width - 2 * INSET) / (highs[0] - lows[0])
    height = scale * (highs[1] - lows[1]) + 2 * INSET
    corner = (lows[0] - INSET / scale, lows[1] - INSET / scale)
    for index, (name, walked) in enumerate(paths.items()):
        panel = Frame(MARGIN + index * (width + PANEL_GAP), top + 26, width, height, corner, scale)
        canvas.text(panel.x, top + 16, name, 13, font_weight="bold")
        canvas.rect(panel.x, panel.y, width, height, "#FFFFFF", stroke=RULE, stroke_width=0.8)
        for ring in rings:
            canvas.path(_line(map(panel.place, ring)), fill="none", stroke=WALL, stroke_width=1)
        _walk(canvas, [panel.place(point) for point in walked], panel.place(fit.best()))
    told = "; ".join(f"{name}: {len(walked) - 1} steps" for name, walked in paths.items())
    axes = "across θ₀, up θ₁; contour lines of the loss; the cross is its minimum"
    canvas.text(MARGIN, top + height + 46, axes, 11, QUIET)
    alt = f"{stop(title)} Paths of two parameters over the contour lines of their loss. {told}."
    return Figure(canvas.svg(top + height + 58, title, alt), alt)


def contour(fit: LineFit, through: Point, part: float) -> list[Point]:
    """The closed line on which the loss is above its minimum by `part` of what it is at `through`."""
    a, b, c = fit.curvature()
    x, y = fit.best()
    across, up = through[0] - x, through[1] - y
    height = part * (a * across**2 + 2 * b * across * up + c * up**2)
    below = math.sqrt(c - b * b / a)  # Cholesky: a·(p + b/a·q)² + below²·q² = height
    ring = []
    for turn in (2 * math.pi * step / 96 for step in range(97)):
        q = math.sqrt(height) * math.sin(turn) / below
        ring.append((x + math.sqrt(height / a) * math.cos(turn) - b / a * q, y + q))
    return ring


def _line(places: Iterable[Point]) -> str:
    return "M" + "L".join(f"{short(x)} {short(y)}" for x, y in places)


def _walk(canvas: Canvas, places: Sequence[Point], goal: Point) -> None:
    canvas.path(_line(places), fill="none", stroke=WALK, stroke_width=1.3, stroke_linejoin="round")
    radius = 3.0 if len(places) < 40 else 1.6
    circle = f"a{radius} {radius} 0 1 0 {2 * radius} 0a{radius} {radius} 0 1 0 -{2 * radius} 0"
    dots = "".join(f"M{short(x - radius)} {short(y)}{circle}" for x, y in places)
    canvas.path(dots, fill=WALK, data_steps=len(places) - 1)
    x, y = goal
    canvas.path(f"M{short(x - 7)} {short(y)}h14M{short(x)} {short(y - 7)}v14", stroke=GOAL, stroke_width=2)
    x, y = places[0]
    canvas.halo_text(x + 7, y + 17, "start", 12)


def beside(theirs: Sequence[Published | None], ours: Sequence[ErrorRates], title: str, provenance: str = "") -> Figure:
    """Test errors in percent, published (None: not there) and ours, with deviations. ValueError unless paired."""
    if not ours or len(theirs) != len(ours):
        raise ValueError(f"{len(theirs)} published rows next to {len(ours)} of ours: they go in pairs, at least one")
    canvas = Canvas()
    top = canvas.title(title) + 34
    label = max(text_width(outcome.setting.name, 13) for outcome in ours) + MARGIN + 10
    half = (WIDTH - label - MARGIN) / 2
    most = 1.05 * max([outcome.mean + outcome.spread for outcome in ours] + [row.error for row in theirs if row])
    bottom = top + 32 * len(ours)
    heads = ("Goyal et al., ResNet-50 on ImageNet", "here, the small classifier")
    for left, head in zip((label, label + half), heads, strict=True):
        canvas.text(left, top - 14, head, 12.5, font_weight="bold")
        for tick in ticks(0, most, 5):
            x = left + (half - 60) * tick / most
            canvas.line(x, top - 6, x, bottom)
            canvas.text(x, bottom + 16, number(tick), 11, QUIET, text_anchor="middle")
    for index, (row, outcome) in enumerate(zip(theirs, ours, strict=True)):
        y = top + 32 * index
        canvas.text(label - 10, y + 16, outcome.setting.name, 13, text_anchor="end")
        if row:
            _bar(canvas, label, y, (half - 60) / most, row.error, row.spread, 2)
        else:
            canvas.text(label + 6, y + 16, "not in their table", 12, QUIET)
        _bar(canvas, label + half, y, (half - 60) / most, outcome.mean, outcome.spread, 1)
    canvas.text(label, bottom + 34, "test error, %; lines: one standard deviation to either side", 11, QUIET)
    told = "; ".join(
        f"{outcome.setting.name}: {f'{row.error:.2f}' if row else 'not published'} and {outcome.mean:.1f}"
        for row, outcome in zip(theirs, ours, strict=True)
    )
    alt = f"{stop(title)} Test errors in percent, published and here: {told}."
    end = canvas.note(provenance, bottom + 54)
    return Figure(canvas.svg(end - (2 if provenance else 8), title, alt), alt)


def _bar(canvas: Canvas, x: float, y: float, scale: float, mean: float, spread: float, digits: int) -> None:
    canvas.rect(x, y + 2, mean * scale, 20, COLOURS["gradients"], data_value=mean)
    canvas.line((x + (mean - spread) * scale), y + 12, x + (mean + spread) * scale, y + 12, INK, stroke_width=1.5)
    canvas.text(x + (mean + spread) * scale + 6, y + 17, f"{mean:.{digits}f}", 12.5, font_weight="bold")
