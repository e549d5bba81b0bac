"""Pictures of lesson 12: segments one below the other, each as long as it is large, and their blocks."""

from typing import Any

from matplotlib.axes import Axes

from ...allocator.replay import MemoryBlock, MemorySegment, Replay, check_replay
from ...figures.memory_maps import write_inside
from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet
from ...palette import COLOURS, INK, OVER, QUIET, RULE, stop
from .traces import spelled

LEFT, STEP, ROW = 90.0, 42.0, 32.0  # points
WIDE = WIDTH - MARGIN - LEFT


def segments_figure(replayed: Replay, event: int | None = None, title: str | None = None) -> CourseFigure:
    """Each segment after `event` (at the end where it is None) as a bar, and the blocks in it by address.

    Hatched is free: red next to a tensor, grey where the whole segment is empty. Raises TypeError for what is
    no replay, ValueError for an event that it has not reached, and where nothing is reserved.
    """
    check_replay(replayed)
    event = len(replayed) if event is None else event
    segments = replayed.blocks_at(event)
    if not segments:
        raise ValueError("nothing is reserved yet, so there is no memory to draw")
    if not title:
        curves = (replayed.reserved, replayed.allocated, replayed.largest_free)
        reserved, allocated, largest = (spelled(curve[event - 1]) for curve in curves)
        title = f"{reserved} reserved, {allocated} of it allocated, the largest free block {largest}"
    told = stop(title)
    longest = max(segment.bytes for segment in segments)
    with look():
        figure = sheet(title, STEP * len(segments))
        ax = figure.place(LEFT, 0, WIDE, STEP * len(segments))
        ax.set(xlim=(0, longest), ylim=(len(segments) - 0.5, -0.5), xticks=[], yticks=[])
        bare(ax)
        for index, segment in enumerate(segments):
            kind = "small pool" if segment.small else "expandable" if segment.expandable else "segment"
            place = {"xycoords": ("axes points", "data"), "va": "center"}
            ax.annotate(f"{kind}\n{spelled(segment.bytes)}", (MARGIN - LEFT, index), color=QUIET, **place)
            _draw(ax, segment, index, WIDE / longest)
            blocks = ", ".join(f"{_name(block)} {spelled(block.bytes)}" for block in segment.blocks)
            told += f" Segment {index + 1}, {spelled(segment.bytes)}: {blocks}."
    figure.alt = told
    return figure


def _name(block: MemoryBlock) -> str:
    return str(block.name) if block.is_allocated else "free"


def _draw(ax: Axes, segment: MemorySegment, y: int, scale: float) -> None:
    """A segment and its blocks, each named as there is room; `scale` are the points of a byte."""
    high = ROW / STEP
    edge = OVER if segment.allocated else RULE
    for block in segment.blocks:
        style: dict[str, Any] = {"facecolor": COLOURS["activations"], "edgecolor": "white"}
        if not block.is_allocated:
            style = {"facecolor": "#FFFFFF", "edgecolor": edge, "hatch": "////"}
        left = block.address - segment.address
        ax.barh(y, block.bytes, high, left, label=_name(block), linewidth=0.8, **style)
        names = (f"{_name(block)} {spelled(block.bytes)}", _name(block))
        middle = left + block.bytes / 2
        write_inside(ax, middle, y, names, block.bytes * scale, style["facecolor"], not block.is_allocated)
    ax.barh(y, segment.bytes, high, color="none", edgecolor=INK, linewidth=1.4, clip_on=False)
