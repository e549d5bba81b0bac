"""Lesson 02's own pictures: walks down a valley, and estimates next to measurements, a pair of bars for each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from course_utils.figures.axes import COLOURS, stop
from course_utils.figures.canvas import INK, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, number, short, text_width

from .by_hand import START, Point, Valley, steps_needed

LEVELS = (2.0, 8.0, 20.0, 45.0, 80.0, 130.0, 200.0)
WALK, WALL, GOAL = "#B34700", "#B9CBD6", "#00624A"


class Frame(NamedTuple):
    """A window on the map: pixels of its corner and size, the map's point at its lower left, pixels a unit."""

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

    def holds(self, point: Point) -> bool:
        """Return True if a point of the map is inside."""
        x, y = self.place(point)
        return self.x <= x <= self.x + self.width and self.y <= y <= self.y + self.height


def frame_of(valley: Valley, x: float, y: float, width: float, height: float) -> Frame:
    """Return a window of at most these pixels, at one scale: it shows the start, the floor, and as far across it."""
    xs, ys = zip(valley.turned(START), valley.turned((START[0], -START[1])), strict=True)
    lows = (min(*xs, 0) - 1.2, min(*ys, -2.4) - 0.6)
    highs = (max(*xs, 0) + 3.4, max(*ys, 2.4) + 0.6)
    scale = min(width / (highs[0] - lows[0]), height / (highs[1] - lows[1]))
    spare = (width / scale - (highs[0] - lows[0])) / 2
    return Frame(x, y, width, scale * (highs[1] - lows[1]), (lows[0] - spare, lows[1]), scale)


def walks(paths: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """Draw walks down one valley from above, two panels in a row, each with its name and the steps that it needed.

    Dots are steps; a walk that leaves the picture is cut at its border. Raises ValueError without any path.
    """
    if not paths:
        raise ValueError("walks needs at least one path")
    canvas, valley = Canvas(), Valley()
    top = bottom = canvas.title(title) + 12
    columns = 1 if len(paths) == 1 else 2
    width = (WIDTH - 2 * MARGIN - 16 * (columns - 1)) / columns
    for index, (name, path) in enumerate(paths.items()):
        row, column = divmod(index, columns)
        if row and column == 0:
            top = bottom + 14
        frame = frame_of(valley, MARGIN + column * (width + 16), top + 22, width, 400)
        canvas.text(frame.x, top + 14, name, 13, WALK, font_weight="bold")
        canvas.text(frame.x + width, top + 14, outcome(path), 12, QUIET, text_anchor="end")
        draw_walk(canvas, frame, valley, path)
        bottom = frame.y + frame.height
    canvas.text(MARGIN, bottom + 18, "contour lines of the loss; a dot is a step; the cross is the minimum", 11, QUIET)
    told = "; ".join(f"{name}: {outcome(path)}" for name, path in paths.items())
    alt = f"{stop(title)} Walks over the contour lines of a narrow valley. {told}."
    return Figure(canvas.svg(bottom + 30, title, alt), alt)


def outcome(path: Sequence[Point]) -> str:
    """Return how a walk ended as text."""
    needed = steps_needed(path)
    if needed is not None:
        return f"99 % of the way in {needed:,} steps"
    left = math.hypot(*path[-1]) > math.hypot(*path[0])
    return "leaves the valley" if left else f"not there after {len(path) - 1:,} steps"


def draw_walk(canvas: Canvas, frame: Frame, valley: Valley, path: Sequence[Point]) -> None:
    """Draw contour lines, the walk, its start and the minimum inside a window."""
    canvas.rect(frame.x, frame.y, frame.width, frame.height, "#FFFFFF", stroke=RULE, stroke_width=0.8)
    for level in LEVELS:
        for data in _inside(frame, _contour(valley, level)):
            canvas.path(data, fill="none", stroke=WALL, stroke_width=1)
    for data in _inside(frame, path):
        canvas.path(data, fill="none", stroke=WALK, stroke_width=1.6, stroke_linejoin="round")
    dots = [frame.place(point) for point in path if frame.holds(point)]
    circles = "".join(f"M{short(x - 2.4)} {short(y)}a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0 -4.8 0" for x, y in dots)
    canvas.path(circles, fill=WALK, data_steps=len(path) - 1)
    x, y = frame.place((0.0, 0.0))
    canvas.path(f"M{short(x - 6)} {short(y)}h12M{short(x)} {short(y - 6)}v12", stroke=GOAL, stroke_width=2)
    x, y = frame.place(path[0])
    canvas.halo_text(x + 7, y - 7 if path[0][1] >= 0 else y + 17, "start", 12)


def _contour(valley: Valley, level: float) -> list[Point]:
    along, across = math.sqrt(2 * level), math.sqrt(2 * level / valley.steepness)
    turns = (2 * math.pi * step / 96 for step in range(97))
    return [valley.turned((along * math.cos(turn), across * math.sin(turn))) for turn in turns]


def _inside(frame: Frame, points: Iterable[Point]) -> list[str]:
    """The parts of a line that lie inside the window, cut exactly at its border, as data of SVG paths."""
    pieces: list[list[Point]] = []
    for one, other in pairwise(map(frame.place, points)):
        cut = _cut(frame, one, other)
        if cut and pieces and pieces[-1][-1] == cut[0]:
            pieces[-1].append(cut[1])
        elif cut:
            pieces.append([*cut])
    return ["M" + "L".join(f"{short(float(x))} {short(float(y))}" for x, y in piece) for piece in pieces]


def _cut(frame: Frame, one: Point, other: Point) -> tuple[Point, Point] | None:
    """The part of a segment inside the window, after Liang and Barsky 1984; None if there is none."""
    enter, leave = 0.0, 1.0
    box = ((frame.x, frame.x + frame.width), (frame.y, frame.y + frame.height))
    for start, end, (low, high) in zip(one, other, box, strict=True):
        if start != end:
            first, last = sorted(((low - start) / (end - start), (high - start) / (end - start)))
            enter, leave = max(enter, first), min(leave, last)
        elif not low <= start <= high:
            return None
    if enter > leave:
        return None
    at = [(one[0] + t * (other[0] - one[0]), one[1] + t * (other[1] - one[1])) for t in (enter, leave)]
    return (one if enter == 0 else at[0]), (other if leave == 1 else at[1])


# --------------------------------------------------------------------------------------- an estimate, a measurement


def pairs(
    values: Mapping[str, tuple[float, float]],
    title: str,
    unit: str,
    *,
    kind: str = "optimizer_states",
    provenance: str = "",
    word: str = "measured",
) -> Figure:
    """Draw for each name its estimate above (hatched) and its measurement below, as plain numbers in `unit`.

    `word` is what the lower bars are: "measured", "simulated" or "recorded". Raises ValueError for no values or one
    below zero.
    """
    if not values or any(value < 0 for pair in values.values() for value in pair):
        raise ValueError("pairs need at least one value, and none below zero")
    canvas = Canvas()
    top = canvas.title(title) + 22
    _bar(canvas, MARGIN, top - 10, 22, 10, edge=1)
    canvas.text(MARGIN + 29, top, "estimated", 12)
    _bar(canvas, MARGIN + 115, top - 10, 22, 10, kind)
    canvas.text(MARGIN + 144, top, word, 12)
    left = MARGIN + 12 + max(text_width(name, 13) for name in values)
    shown = {name: _shown(pair, unit) for name, pair in values.items()}
    room = WIDTH - left - MARGIN - 14 - max(text_width(text, 13, bold=True) for text in shown.values())
    largest = max(value for pair in values.values() for value in pair) or 1
    for index, (name, pair) in enumerate(values.items()):
        y = top + 18 + 38 * index
        canvas.text(left - 10, y + 18, name, 13, text_anchor="end")
        _bar(canvas, left, y, room * pair[0] / largest, 12, data_estimated=pair[0])
        _bar(canvas, left, y + 14, room * pair[1] / largest, 12, kind, data_measured=pair[1])
        canvas.text(left + room * max(pair) / largest + 8, y + 18, shown[name], 13, font_weight="bold")
    bottom = top + 18 + 38 * len(values)
    canvas.line(left, top + 12, left, bottom - 4, RULE)
    alt = f"{stop(title)} Bars, estimated and {word}: {'; '.join(f'{n} {text}' for n, text in shown.items())}."
    end = canvas.note(provenance, bottom + 16)
    return Figure(canvas.svg(end - (2 if provenance else 8), title, alt), alt)


def _bar(
    canvas: Canvas, x: float, y: float, width: float, height: float, kind: str = "", edge: float = 0.8, **more: Any
) -> None:
    if kind:
        canvas.rect(x, y, width, height, COLOURS[kind], **more)
    else:
        canvas.rect(x, y, width, height, "#FFFFFF", stroke=INK, stroke_width=edge, **more)
        canvas.hatch(x, y, width, height, INK)


def _shown(pair: tuple[float, float], unit: str) -> str:
    first, second = (f"{number(round(value, 2))}" for value in pair)
    return f"{first} {unit}" if first == second else f"{first} and {second} {unit}"
