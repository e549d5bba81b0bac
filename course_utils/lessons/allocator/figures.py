"""The picture of lesson 12: segments one below the other, each as long as it is large, and their blocks."""

from ...allocator.replay import Replay, check_replay
from ...figures.memory_maps import write_inside
from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, room, sheet
from ...palette import COLOURS, INK, OVER, RULE, stop
from .traces import spelled

FILL = COLOURS["activations"]


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
    names = []
    with look():
        figure = sheet(title, 42 * len(segments))
        ax = figure.place(90, 0, WIDTH - MARGIN - 90, 42 * len(segments))
        longest = max(segment.bytes for segment in segments)
        ax.set(xlim=(0, longest), ylim=(len(segments) - 0.5, -0.5), xticks=[])
        bare(ax)
        for y, segment in enumerate(segments):
            kind = "small pool" if segment.small else "expandable" if segment.expandable else "segment"
            names.append(f"{kind}\n{spelled(segment.bytes)}")
            blocks = []
            for block in segment.blocks:
                name = str(block.name) if block.is_allocated else "free"
                blocks.append(f"{name} {spelled(block.bytes)}")
                left = block.address - segment.address
                (bar,) = ax.barh(y, block.bytes, 0.76, left, color=FILL, edgecolor="white", label=name)
                if not block.is_allocated:
                    bar.set(facecolor="white", edgecolor=OVER if segment.allocated else RULE, hatch="////")
                middle, wide = left + block.bytes / 2, block.bytes * room(ax) / longest
                write_inside(ax, middle, y, (blocks[-1], name), wide, FILL, hatched=not block.is_allocated)
            ax.barh(y, segment.bytes, 0.76, color="none", edgecolor=INK, linewidth=1.4, clip_on=False)
            told += f" Segment {y + 1}, {spelled(segment.bytes)}: {', '.join(blocks)}."
        ax.set_yticks(range(len(segments)), names)
    figure.alt = told
    return figure
