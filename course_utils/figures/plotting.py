"""The way out to matplotlib: a figure's data on Axes that a learner can restyle, and save as PNG or PDF.

matplotlib is imported when the first of them is drawn: everything else in the course does without it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from .axes import OVER
from .canvas import INK, QUIET, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOK = Path(__file__).with_name("course.mplstyle")
LAYOUT_FONT = "DejaVu Sans"  # of the look; a lesson's picture names no font
DOTS = 200  # of a saved PNG, per inch

EVENTS = "allocations and frees, in order"

Bar = tuple[float, float, Sequence[tuple[str, float, Mapping[str, Any]]], str]
"""The place and height of a bar in rows, its pieces (name, length, how barh draws it), and words at its end.
"""

Limit = tuple[str, float, str]  # its name, its place, the style of its line
Span = tuple[int, int, str, bool]  # its start and end, its name, and whether it is a phase rather than a step


@contextmanager
def look(styled: bool = True) -> Iterator[None]:
    """matplotlib with our look and nothing of the learner's own settings, which are as before afterwards.

    Its log is silent meanwhile: the first import of all says on stderr, and so in a lesson, that it looks for
    fonts. Raises ImportError where it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError(
            "this is drawn by matplotlib, which is missing: run `python3 -m pip install matplotlib`"
        )
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        from matplotlib import style

        with style.context(LOOK, after_reset=True) if styled else nullcontext():
            yield
    finally:
        log.setLevel(level)


@dataclass(frozen=True)
class Chart:
    """A figure's parts for matplotlib: title, small print, and the function that draws its data on Axes."""

    title: str
    provenance: str
    draw: Callable[["Axes"], object]

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw on `ax`, or on the Axes of a new figure; returns them."""
        if ax is None:
            with look(styled=False):  # pyplot sets up a notebook's display now, which the style would undo
                from matplotlib import pyplot

                drawing = pyplot.figure(figsize=(10, 5), layout="constrained", facecolor="#FFFFFF")
            with look():
                ax = drawing.add_subplot()
        with look():
            self.draw(ax)
            ax.set_title(fill(self.title, 64))
            if self.provenance:
                small = {"fontsize": 8, "color": QUIET, "ha": "right", "va": "top"}
                note = fill(self.provenance, 130)
                ax.annotate(note, (1, 0), (0, -46), "axes fraction", "offset points", **small)
        return ax

    def save(self, path: Path) -> None:
        """Write a PNG or PDF, as the path ends."""
        with look():
            from matplotlib.figure import Figure

            drawing = Figure(layout="constrained")
            self.plot(drawing.add_subplot())
            drawing.savefig(path, dpi=DOTS)


def draw_rows(
    ax: "Axes", names: Sequence[str], bars: Iterable[Bar], xlabel: str, limits: Sequence[Limit] = ()
) -> None:
    """Horizontal bars next to their names, the first on top, and the limits as lines through them."""
    reach = max((limit for _, limit, _ in limits), default=0.0)
    longest = 0
    paper = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1}
    words = {"textcoords": "offset points", "va": "center", "fontsize": 10, "bbox": paper}
    for place, height, pieces, end in bars:
        left = 0.0
        for name, length, style in pieces:
            ax.barh(place, length, height, left, label=name, linewidth=0.8, **style)
            left += length
        ax.annotate(end, (left, place), (6, 0), **words)
        reach = max(reach, left)
        longest = max([longest, *map(len, end.split("\n"))])
    for name, value, style in limits:
        ax.axvline(value, color=OVER, linestyle=style, linewidth=2 if name else 1, label=name)
    ax.set(xlim=(0, (1.05 + 0.014 * longest) * reach or 1), ylim=(len(names) - 0.4, -0.6), xlabel=xlabel)
    finish(ax, "x")
    ax.set_yticks(range(len(names)), [fill(name, 30) for name in names])


def draw_areas(
    ax: "Axes",
    counts: range,
    curves: Mapping[str, tuple[Sequence[float], str]],
    spans: Iterable[Span],
    notes: Iterable[tuple[str, int, float]],
    ylabel: str,
    limits: Sequence[Limit],
) -> None:
    """Areas as steps over the event `counts`, the first lowest: `curves` are values by name, and their color.

    `spans` are named at the top where there is room, `notes` are words with an arrow to their x and y.
    """
    sizes, colors = zip(*curves.values(), strict=True)
    ax.stackplot(counts, *sizes, labels=[*curves], colors=colors, step="post", linewidth=0)
    highest = max([*(sum(at) for at in zip(*sizes, strict=True)), *(limit for _, limit, _ in limits)])
    top = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": 9}
    for start, end, name, is_phase in spans:
        if is_phase:
            height, rule, ink = 0.92, "#C9C9C9", QUIET
        else:
            height, rule, ink = 0.98, "#7A7A7A", INK
        ax.axvline(start, color=rule, linewidth=0.8)
        has_room = end - start > 0.013 * len(name) * len(counts)
        if has_room:
            ax.text((start + end) / 2, height, name, color=ink, **top)
    for name, value, style in limits:
        ax.axhline(value, color=OVER, linestyle=style, linewidth=2, label=name)
    for said, x, y in notes:
        late = x > (counts[0] + counts[-1]) / 2
        arrow = {"arrowstyle": "-|>", "color": INK, "relpos": (int(late), 0), "shrinkB": 0}
        place = {"textcoords": "offset points", "ha": "right" if late else "left"}
        ax.annotate(said, (x, y), (0, 14), fontweight="bold", arrowprops=arrow, **place)
    ax.set(xlim=(counts[0], counts[-1]), ylim=(0, 1.3 * highest), xlabel=EVENTS, ylabel=ylabel)
    finish(ax, "y")


def finish(ax: "Axes", across: Literal["x", "y"], **place: Any) -> None:
    """Grid lines, numbers as the course writes them, and a legend of areas from the top, bars and lines."""
    ax.grid(axis=across)
    ax.set_axisbelow(True)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: number(float(f"{value:.10g}")))
    everything = [*ax.collections[::-1], *ax.containers, *ax.lines]
    drawn = {fill(str(one.get_label()), 26): one for one in everything}
    named = {name: one for name, one in drawn.items() if name and not name.startswith("_")}
    if named:
        place = place or {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        ax.legend(named.values(), named.keys(), **place)
