"""Lesson 02's own pictures: walks down a valley, seen from above."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...figures.axes import stop
from ...figures.canvas import MARGIN, QUIET, RULE, Canvas, Figure, attribute_text, reflowing, short
from .by_hand import START, Point, Valley, steps_needed

VALLEY = Valley()
LEVELS = (2.0, 8.0, 20.0, 45.0, 80.0, 130.0, 200.0)
WALK, WALL, GOAL = "#B34700", "#B9CBD6", "#00624A"


class Frame(NamedTuple):
    """A window on the map: pixels of its corner and size, the point at its lower left, pixels per unit."""

    x: float
    y: float
    width: float
    height: float
    low: Point
    scale: float

    def place(self, point: Point) -> Point:
        """Return the pixels of a point of the map."""
        right, up = ((at - low) * self.scale for at, low in zip(point, self.low, strict=True))
        return self.x + right, self.y + self.height - up


def frame_of(valley: Valley, x: float, y: float, width: float, height: float) -> Frame:
    """Return a window of at most these pixels, at one scale: the start, the floor, and as far across it."""
    across_from_start = (START[0], -START[1])
    xs, ys = zip(valley.turned(START), valley.turned(across_from_start), strict=True)
    left = min(*xs, 0) - 1.2
    low = min(*ys, -2.4) - 0.6
    across = max(*xs, 0) + 3.4 - left
    up = max(*ys, 2.4) + 0.6 - low
    scale = min(width / across, height / up)
    return Frame(x, y, width, scale * up, (left - (width / scale - across) / 2, low), scale)


@reflowing
def walks(paths: Mapping[str, Sequence[Point]], title: str, valley: Valley = VALLEY) -> Figure:
    """Draw walks down one valley from above, two panels in a row, each with its name and steps needed.

    Dots are steps; a walk that leaves the picture is cut at its border.
    """
    canvas = Canvas()
    top = canvas.title(title) + 34
    columns = 1 if canvas.narrow else min(2, len(paths))
    first = frame_of(valley, MARGIN, top, (canvas.width - 2 * MARGIN - 16 * (columns - 1)) / columns, 400)
    for index, (name, path) in enumerate(paths.items()):
        row, column = divmod(index, columns)
        frame = first._replace(x=MARGIN + column * (first.width + 16), y=top + row * (first.height + 36))
        canvas.text(frame.x, frame.y - 8, name, 13, WALK, font_weight="bold")
        canvas.text(frame.x + frame.width, frame.y - 8, outcome(path), 12, QUIET, text_anchor="end")
        draw_walk(canvas, frame, contours(valley), path)
    bottom = top + math.ceil(len(paths) / columns) * (first.height + 36) - 36
    end = canvas.note("contour lines of the loss; a dot is a step; the cross is the minimum", bottom + 18)
    told = "; ".join(f"{name}: {outcome(path)}" for name, path in paths.items())
    alt = f"{stop(title)} Walks over the contour lines of a narrow valley. {told}."
    return Figure(canvas.svg(end - 2, title, alt), alt)


def outcome(path: Sequence[Point]) -> str:
    """Return how a walk ended as text."""
    needed = steps_needed(path)
    if needed is not None:
        return f"99 % of the way in {needed:,} steps"
    left = math.hypot(*path[-1]) > math.hypot(*path[0])
    return "leaves the valley" if left else f"not there after {len(path) - 1:,} steps"


def draw_walk(
    canvas: Canvas,
    frame: Frame,
    rings: Iterable[Sequence[Point]],
    path: Sequence[Point],
    goal: Point = (0.0, 0.0),
) -> None:
    """Draw contour lines, the walk, its start and the minimum inside a window; it cuts off what is beyond."""
    canvas.rect(frame.x, frame.y, frame.width, frame.height, "#FFFFFF", stroke=RULE, stroke_width=0.8)
    window = {"x": frame.x, "y": frame.y, "width": frame.width, "height": frame.height}
    # a nested svg clips; its viewBox equals its place, so that points keep the figure's coordinates
    box = " ".join(map(short, window.values()))
    canvas.shapes.append(f'<svg {attribute_text(window)} viewBox="{box}">')
    for ring in rings:
        canvas.path(_line(frame, ring), fill="none", stroke=WALL, stroke_width=1)
    canvas.path(_line(frame, path), fill="none", stroke=WALK, stroke_width=1.6, stroke_linejoin="round")
    canvas.path(
        _line(frame, path, "h0m"),
        stroke=WALK,
        stroke_width=4.8,
        stroke_linecap="round",
        data_steps=len(path) - 1,
    )
    x, y = frame.place(goal)
    canvas.path(f"M{short(x - 6)} {short(y)}h12M{short(x)} {short(y - 6)}v12", stroke=GOAL, stroke_width=2)
    x, y = frame.place(path[0])
    canvas.halo_text(x + 7, y - 7 if path[0][1] >= 0 else y + 17, "start", 12)
    canvas.shapes.append("</svg>")


def contours(valley: Valley) -> list[list[Point]]:
    """Return the lines on which the valley has one of `LEVELS`."""
    turns = [2 * math.pi * step / 72 for step in range(73)]
    radii = [(math.sqrt(2 * level), math.sqrt(2 * level / valley.steepness)) for level in LEVELS]
    return [[valley.turned((x * math.cos(turn), y * math.sin(turn))) for turn in turns] for x, y in radii]


def _line(frame: Frame, points: Iterable[Point], link: str = "l") -> str:
    """SVG's relative steps through the points, each of at least half a pixel; "h0m" as `link` makes dots.

    Relative steps take half the characters of absolute places.
    """
    steps = []
    at_x, at_y = 0.0, 0.0
    for x, y in map(frame.place, points):
        # from the rounded place that was drawn last, so that errors of rounding do not add up
        right = round(x - at_x, 1)
        down = round(y - at_y, 1)
        if abs(right) + abs(down) >= 0.5:
            steps.append(f"{right:g} {down:g}")
            at_x += right
            at_y += down
    return f"m{link.join(steps)}{link[:-1]}"
