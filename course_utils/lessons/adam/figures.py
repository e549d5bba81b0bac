"""Lesson 02's own pictures: walks down a valley, seen from above."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, paper, sheet
from ...palette import stop
from .by_hand import START, Point, Valley, steps_needed

VALLEY = Valley()
LEVELS = (2.0, 8.0, 20.0, 45.0, 80.0, 130.0, 200.0)
WALK, WALL, GOAL = "#B34700", "#B9CBD6", "#00624A"
NOTE = "contour lines of the loss; a dot is a step; the cross is the minimum"


def walks(paths: Mapping[str, Sequence[Point]], title: str, valley: Valley = VALLEY) -> CourseFigure:
    """Draw walks down one valley from above, two panels in a row, each with its name and steps needed.

    Dots are steps; a walk that leaves the picture is cut at its border.
    """
    columns = min(2, len(paths))
    width = (WIDTH - 2 * MARGIN + 16) / columns - 16
    pitch = width / 2 + 46
    corners = np.array([valley.turned(START), valley.turned((START[0], -START[1])), (-2, -2), (2, 2)])
    x, y = (corners.min(axis=0) + corners.max(axis=0)) / 2
    wide, high = np.ptp(corners, axis=0)
    half = 1.8 + max(wide / 2, high)  # a panel is half as high as wide
    with look():
        figure = sheet(title, pitch * math.ceil(len(paths) / columns), NOTE)
        for index, (name, path) in enumerate(paths.items()):
            row, column = divmod(index, columns)
            ax = figure.place(MARGIN + column * (width + 16), row * pitch + 22, width, width / 2)
            ax.set(xlim=(x - half, x + half), ylim=(y - half / 2, y + half / 2))
            for level in LEVELS:
                long = 2 * math.sqrt(2 * level)
                high = long / math.sqrt(valley.steepness)
                ax.add_patch(Ellipse((0, 0), long, high, angle=valley.angle, fill=False, edgecolor=WALL))
            draw_walk(ax, path)
            ax.set_title(name, fontsize=12, color=WALK)
            ax.set_xlabel(outcome(path), loc="left")
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


def draw_walk(ax: Axes, path: Sequence[Point], goal: Point = (0.0, 0.0)) -> None:
    """Draw a walk, its start and the minimum in Axes whose limits are set."""
    bare(ax, *ax.spines)
    ax.set(xticks=[], yticks=[])
    places = np.clip(path, -1e7, 1e7)  # beyond the picture, and no overflow
    ax.plot(*places.T, color=WALK, linewidth=1.4)
    # Dots are short strokes with round ends: markers take many more bytes.
    strokes = np.stack([places, places + (0.004, 0), np.full_like(places, np.nan)], axis=1)
    ax.plot(*strokes.reshape(-1, 2).T, color=WALK, linewidth=4, solid_capstyle="round")
    ax.plot(*goal, "+", color=GOAL, markersize=10, markeredgewidth=2)
    rises = path[:2][-1][1] > path[0][1]  # then its start is named below it
    style = {"ha": "center", "va": "top" if rises else "bottom", "bbox": paper(0)}
    ax.annotate("start", path[0], (0, -5 if rises else 5), textcoords="offset points", **style)
