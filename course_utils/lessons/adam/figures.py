"""Lesson 02's own pictures: walks down a valley, seen from above."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, paper, sheet
from ...palette import QUIET, stop
from .by_hand import START, Point, Valley, steps_needed

VALLEY = Valley()
LEVELS = (2.0, 8.0, 20.0, 45.0, 80.0, 130.0, 200.0)
WALK, WALL, GOAL = "#B34700", "#B9CBD6", "#00624A"
HIGHEST = 320.0  # points of a panel
GAP = 16.0  # between panels
HEAD = 40.0  # above each one, for its name and its outcome
NOTE = "contour lines of the loss; a dot is a step; the cross is the minimum"


def walks(paths: Mapping[str, Sequence[Point]], title: str, valley: Valley = VALLEY) -> CourseFigure:
    """Draw walks down one valley from above, two panels in a row, each with its name and steps needed.

    Dots are steps; a walk that leaves the picture is cut at its border.
    """
    columns = min(2, len(paths))
    width = (WIDTH - 2 * MARGIN - GAP * (columns - 1)) / columns
    xlim, ylim, height = window(valley, width)
    pitch = HEAD + height
    with look():
        figure = sheet(title, pitch * math.ceil(len(paths) / columns), NOTE)
        for index, (name, path) in enumerate(paths.items()):
            row, column = divmod(index, columns)
            ax = figure.place(MARGIN + column * (width + GAP), row * pitch + HEAD, width, height)
            ax.set(xlim=xlim, ylim=ylim)
            draw_valley(ax, valley)
            draw_walk(ax, path)
            ax.set_title(outcome(path), fontsize=11, fontweight="normal", color=QUIET)
            place = {"xycoords": "axes fraction", "textcoords": "offset points", "fontweight": "bold"}
            ax.annotate(name, (0, 1), (0, 22), fontsize=12, color=WALK, **place)
        told = "; ".join(f"{name}: {outcome(path)}" for name, path in paths.items())
        figure.alt = f"{stop(title)} Walks over the contour lines of a narrow valley. {told}."
        return figure


def outcome(path: Sequence[Point]) -> str:
    """Return how a walk ended as text."""
    needed = steps_needed(path)
    if needed is not None:
        return f"99 % of the way in {needed:,} steps"
    left = math.hypot(*path[-1]) > math.hypot(*path[0])
    return "leaves the valley" if left else f"not there after {len(path) - 1:,} steps"


def window(valley: Valley, width: float) -> tuple[Point, Point, float]:
    """Limits of x and y at one scale, with the start, the floor and as far across it, and the height."""
    corners = valley.turned(START), valley.turned((START[0], -START[1]))
    xs, ys = zip(*corners, (0, 0), strict=True)
    left, right = min(xs) - 1.2, max(xs) + 3.4
    low, high = min(*ys, -2.4) - 1.2, max(*ys, 2.4) + 1.2
    height = min(HIGHEST, width * (high - low) / (right - left))
    spare = width / height * (high - low) - (right - left)
    return (left - spare / 2, right + spare / 2), (low, high), height


def draw_valley(ax: Axes, valley: Valley) -> None:
    """Draw the lines on which the valley has one of `LEVELS`: ellipses, smooth at any steepness."""
    for level in LEVELS:
        long = 2 * math.sqrt(2 * level)
        high = long / math.sqrt(valley.steepness)
        ax.add_patch(Ellipse((0, 0), long, high, angle=valley.angle, fill=False, edgecolor=WALL))


def draw_walk(ax: Axes, path: Sequence[Point], goal: Point = (0.0, 0.0)) -> None:
    """Draw a walk, its start and the minimum in Axes whose limits are set."""
    bare(ax, *ax.spines)
    ax.set(xticks=[], yticks=[])
    wide = np.ptp(ax.get_xlim())
    places = np.clip(path, -1e6 * wide, 1e6 * wide)  # beyond the picture, and no overflow
    ax.plot(*places.T, color=WALK, linewidth=1.4)
    # Dots are short strokes with round ends, one for steps that look the same: markers take many more bytes.
    short = 5e-4 * wide
    dots = np.unique(np.round(places / short), axis=0) * short
    strokes = np.stack([dots, dots + (short, 0), np.full_like(dots, np.nan)], axis=1)
    ax.plot(*strokes.reshape(-1, 2).T, color=WALK, linewidth=4, solid_capstyle="round")
    ax.plot(*goal, "+", color=GOAL, markersize=10, markeredgewidth=2)
    away = 5 if path[:2][-1][1] <= path[0][1] else -5
    style = {"ha": "center", "va": "bottom" if away > 0 else "top", "bbox": paper(0)}
    ax.annotate("start", path[0], (0, away), textcoords="offset points", fontsize=11, **style)
