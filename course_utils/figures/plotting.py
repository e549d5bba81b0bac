"""The way out to matplotlib: a figure's data on Axes that a learner can restyle, and save as PNG or PDF.

matplotlib is imported when the first of them is drawn: everything else in the course does without it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from .axes import COLOURS, OVER
from .canvas import GRID, INK, QUIET, RULE, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (10.0, 5.0)  # inches: in points as wide as a lesson's figure
DOTS = 200  # of a saved PNG, per inch

LAYOUT_FONT = "DejaVu Sans"
"""matplotlib brings this font along, so that it lays texts out alike everywhere; a lesson's picture names no font."""

LOOK: dict[Any, Any] = {
    "font.family": [LAYOUT_FONT],
    "font.size": 12,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": RULE,
    "axes.formatter.use_mathtext": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "course",
}

OUTLINED = (COLOURS["cached"], COLOURS["free"])  # too light to be seen on paper without an edge

Piece = tuple[str, float, str]
"""A part of a bar: its name, its length in the axis's unit, its color."""


@contextmanager
def look() -> Iterator[None]:
    """matplotlib with our look and nothing of the learner's own settings, which are as before afterwards.

    Its log is silent meanwhile: the first import of all says on stderr, and so in a lesson, that it looks for fonts.
    """
    with _matplotlib():
        from matplotlib import style

        with style.context(LOOK, after_reset=True):
            yield


@contextmanager
def _matplotlib() -> Iterator[None]:
    if find_spec("matplotlib") is None:
        raise ImportError(
            "this is drawn by matplotlib, which is not installed: run `python3 -m pip install matplotlib`"
        )
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@dataclass(frozen=True)
class Chart:
    """What matplotlib draws of a figure: its title, its small print, and the function that puts its data on Axes."""

    title: str
    provenance: str
    draw: Callable[["Axes"], object]

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw on `ax`, or on the Axes of a new figure; returns them."""
        if ax is None:
            with _matplotlib():  # before the look, as pyplot sets up a notebook's display when it makes a figure
                from matplotlib import pyplot

                drawing = pyplot.figure(figsize=SIZE, layout="constrained", facecolor="#FFFFFF")
            with look():
                ax = drawing.add_subplot()
        with look():
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            self.draw(ax)
            ax.set_title(fill(self.title, 64), fontweight="bold")
            if self.provenance:
                small = {"fontsize": 8, "color": QUIET, "ha": "right", "va": "top"}
                ax.annotate(fill(self.provenance, 130), (1, 0), (0, -46), "axes fraction", "offset points", **small)
        return ax

    def save(self, path: Path) -> None:
        """Write a PNG or PDF, as the path ends."""
        with look():
            from matplotlib.figure import Figure

            drawing = Figure(figsize=SIZE, layout="constrained", facecolor="#FFFFFF")
            self.plot(drawing.add_subplot())
            drawing.savefig(path, dpi=DOTS)


def draw_rows(
    ax: "Axes",
    rows: Sequence[tuple[str, Sequence[Piece], str]],
    xlabel: str,
    limits: Sequence[tuple[str, float, str]] = (),
    legend: bool = True,
) -> None:
    """Horizontal bars, the first on top: name, pieces, words at the end. `limits` are lines: name, value, style."""
    for place, (_, pieces, end) in enumerate(rows):
        left = 0.0
        for name, length, color in pieces:
            edge = RULE if color in OUTLINED else "#FFFFFF"
            ax.barh(place, length, 0.7, left, color=color, edgecolor=edge, linewidth=0.8, label=name)
            left += length
        _write_end(ax, end, left, place, fontweight="bold")
    for name, value, style in limits:
        ax.axvline(value, color=OVER, linestyle=style, linewidth=2 if name else 1, label=name)
    lengths = [sum(length for _, length, _ in pieces) for _, pieces, _ in rows] + [value for _, value, _ in limits]
    _name_rows(ax, [name for name, _, _ in rows], max(lengths), [end for *_, end in rows], xlabel)
    if legend:
        _legend(ax)


def draw_pairs(
    ax: "Axes", pairs: Mapping[str, tuple[float, float, str, str]], names: tuple[str, str], xlabel: str
) -> None:
    """Two bars for each name: estimated and measured lengths, their color, and words on their difference."""
    for place, (first, second, color, said) in enumerate(pairs.values()):
        ax.barh(place - 0.19, first, 0.36, color=f"{color}59", edgecolor=INK, hatch="///", linewidth=0.8)
        ax.barh(place + 0.19, second, 0.36, color=color)
        _write_end(ax, said, max(first, second), place)
    ax.barh(0, 0, color="#FFFFFF", edgecolor=INK, hatch="///", label=names[0])
    ax.barh(0, 0, color="#6B6B6B", label=names[1])
    largest = max((max(pair[:2]) for pair in pairs.values()), default=0)
    _name_rows(ax, [*pairs], largest, [said for *_, said in pairs.values()], xlabel)
    _legend(ax)


def _write_end(ax: "Axes", words: str, x: float, y: float, **more: Any) -> None:
    paper = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1}
    ax.annotate(words, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=10, bbox=paper, **more)


def _name_rows(ax: "Axes", names: Sequence[str], largest: float, ends: Sequence[str], xlabel: str) -> None:
    """Names at the left, numbers below, and room at the right for the words at the ends."""
    longest = max((len(line) for end in ends for line in end.split("\n")), default=0)
    ax.set(xlim=(0, (1.05 + 0.014 * longest) * largest or 1), ylim=(len(names) - 0.4, -0.6), xlabel=xlabel)
    ax.set_yticks(range(len(names)), [fill(name, 30) for name in names])
    ax.grid(axis="x", color=GRID)
    _thousands(ax, "x")


@dataclass(frozen=True)
class Span:
    """A named stretch from one x to another, of a training step or, `inside` it, of a phase."""

    start: int
    end: int
    name: str
    inside: bool


def draw_areas(
    ax: "Axes",
    counts: range,
    curves: Mapping[str, tuple[Sequence[float], str]],
    spans: Sequence[Span],
    notes: Sequence[tuple[str, int, float]],
    labels: tuple[str, str],
    limits: Sequence[tuple[str, float, str]] = (),
) -> None:
    """Areas as steps over the event `counts`, the first lowest: `curves` are values by name, and their color.

    `spans` are named at the top, as far as there is room; `notes` are words with an arrow to the place (x, y).
    """
    sizes, colors = [sizes for sizes, _ in curves.values()], [color for _, color in curves.values()]
    ax.stackplot(counts, *sizes, labels=[*curves], colors=colors, step="post", linewidth=0)
    highest = max([*(sum(at) for at in zip(*sizes, strict=True)), *(limit for _, limit, _ in limits)])
    for span in spans:
        ax.axvline(span.start, color="#C9C9C9" if span.inside else "#7A7A7A", linewidth=0.8)
        if span.end - span.start > 0.013 * len(span.name) * len(counts):
            place = ((span.start + span.end) / 2, 0.92 if span.inside else 0.98)
            look = {"fontsize": 9, "color": QUIET if span.inside else INK, "ha": "center", "va": "top"}
            ax.text(*place, span.name, transform=ax.get_xaxis_transform(), **look)
    for name, value, style in limits:
        ax.axhline(value, color=OVER, linestyle=style, linewidth=2, label=name)
    for said, x, y in notes:
        late = x > (counts[0] + counts[-1]) / 2
        look = {"ha": "right" if late else "left", "fontweight": "bold"}
        arrow = {"arrowstyle": "-|>", "color": INK, "relpos": (int(late), 0), "shrinkB": 0}
        ax.annotate(said, (x, y), (0, 14), textcoords="offset points", arrowprops=arrow, **look)
    ax.set(xlim=(counts[0], counts[-1]), ylim=(0, 1.3 * highest), xlabel=labels[0], ylabel=labels[1])
    ax.grid(axis="y", color=GRID)
    _thousands(ax, "x", "y")
    _legend(ax)


def _legend(ax: "Axes") -> None:
    """Each name once, to the right of the plot: areas as they lie on one another, then bars, then lines."""
    drawn = {fill(str(one.get_label()), 26): one for one in [*ax.collections[::-1], *ax.containers, *ax.lines]}
    named = {name: one for name, one in drawn.items() if name and not name.startswith("_")}
    if named:
        ax.legend(named.values(), named.keys(), loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _thousands(ax: "Axes", *names: str) -> None:
    """Numbers as the course writes them."""
    for name in names:
        getattr(ax, f"{name}axis").set_major_formatter(lambda value, _: number(round(value, 10)))
