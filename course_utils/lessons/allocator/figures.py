"""The pictures of lesson 12: segments one below the other, each as long as it is large, and their blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from ...allocator.replay import Replay, check_replay
from ...figures.memory_maps import FILLS, FREE, STUCK, UNKNOWN, WHOLE, write_inside
from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, room, sheet
from ...palette import INK, stop
from ...units import MiB
from .traces import spelled

ROW, HEAD, LEFT = 34, 24, 90  # points of a segment's row, of a panel's heading, of the segments' names

Row = tuple[str, list[tuple[str, int, str]]]
"""A segment's name, and its blocks by address: words, bytes and a look of the memory map."""


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
    rows: list[Row] = []
    for segment in segments:
        name = "small pool" if segment.small else "expandable" if segment.expandable else "segment"
        free = STUCK if segment.allocated else WHOLE
        blocks = [
            (str(block.name), block.bytes, UNKNOWN) if block.is_allocated else ("free", block.bytes, free)
            for block in segment.blocks
        ]
        rows.append((name, blocks))
    return _panels({"": rows}, title)


def snapshot_panels(
    snapshots: Mapping[str, Mapping[str, Any]],
    names: Mapping[int, tuple[str, str]],
    title: str,
    least: int = 0,
    provenance: str = "",
) -> CourseFigure:
    """A panel for each of torch's memory snapshots: its segments of at least `least` bytes, and their blocks.

    `names` says what tensors of so many bytes are, and their kind of memory. Other neighboring tensors are
    drawn as one block. Hatched is free: red next to a tensor, grey where the whole segment is empty. Raises
    ValueError where no segment is so large.
    """
    panels = {}
    for moment, snapshot in snapshots.items():
        large = [segment for segment in snapshot["segments"] if segment["total_size"] >= least]
        panels[moment] = [("segment", _named(segment, names)) for segment in large]
    if not any(panels.values()):
        raise ValueError(f"no snapshot has a segment of {spelled(least)} or more: choose a smaller `least`")
    return _panels(panels, title, provenance)


def _named(segment: Mapping[str, Any], names: Mapping[int, tuple[str, str]]) -> list[tuple[str, int, str]]:
    """The blocks of a snapshot's segment; tensors without a name are joined with their neighbors."""
    free = STUCK if segment["active_size"] else WHOLE
    found: list[tuple[str, int, str]] = []
    for block in segment["blocks"]:
        if block["state"] == "inactive":
            words, kind = "free", free
        else:
            words, kind = names.get(block["requested_size"], ("others", UNKNOWN))
        size = block["size"]
        if words == "others" and found and found[-1][0] == words:
            size += found.pop()[1]
        found.append((words, size, kind))
    return found


def _panels(panels: Mapping[str, Sequence[Row]], title: str, provenance: str = "") -> CourseFigure:
    """Panels one below the other, in one scale; a panel without a name has no heading."""
    heads = [HEAD if moment else 0 for moment in panels]
    highs = [ROW * len(rows) for rows in panels.values()]
    longest = max(sum(size for _, size, _ in blocks) for rows in panels.values() for _, blocks in rows)
    told = stop(title)
    with look():
        figure = sheet(title, sum(heads) + sum(highs), provenance)
        top = 0
        for (moment, rows), head, high in zip(panels.items(), heads, highs, strict=True):
            top += head
            ax = figure.place(LEFT, top, WIDTH - MARGIN - LEFT, high)
            top += high
            ax.set(xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5), xticks=[])
            bare(ax)
            if moment:
                ax.set_title(moment, loc="left", x=(MARGIN - LEFT) / room(ax), fontsize=12, pad=4)
                told += f" {stop(moment)}"
            told += _draw(ax, rows, longest)
    figure.alt = told
    return figure


def _draw(ax: Axes, rows: Sequence[Row], longest: int) -> str:
    """Draw segments and their blocks; returns them in words."""
    told = ""
    names = []
    for y, (name, blocks) in enumerate(rows):
        whole = sum(size for _, size, _ in blocks)
        names.append(f"{name}\n{spelled(whole)}")
        left = 0
        labels = []
        for words, size, kind in blocks:
            (bar,) = ax.barh(y, size, 0.76, left, color=FILLS[kind], label=words)
            bar.set(**{"edgecolor": "white"} | FREE.get(kind, {}))
            labels.append(f"{words} {_shown(size)}")
            wide = size * room(ax) / longest
            place = (left + size / 2, y)
            write_inside(ax, *place, (labels[-1], words), wide, FILLS[kind], kind in FREE)
            left += size
        ax.barh(y, whole, 0.76, color="none", edgecolor=INK, linewidth=1.4, clip_on=False)
        told += f" Segment {y + 1}, {spelled(whole)}: {', '.join(labels)}."
    ax.set_yticks(range(len(rows)), names)
    return told


def _shown(size: int) -> str:
    """A size as short as it can be read: whole MiB from 100 MiB on."""
    return f"{size / MiB:.0f} MiB" if size >= 100 * MiB else spelled(size)
