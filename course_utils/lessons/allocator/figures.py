"""Pictures of lesson 10: segments one below the other, each as long as it is large, and their blocks."""

from course_utils.allocator.replay import MemoryBlock, MemorySegment, Replay, check_replay
from course_utils.figures.axes import stop
from course_utils.figures.canvas import INK, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, text_width

from .traces import spelled

FILL, FREE_INK, CACHED_INK = "#009E73", "#A8071A", "#8A8A8A"
LABEL_WIDTH = 118.0
ROW, STEP = 34.0, 46.0
MOST = 14
"""Segments that a picture holds."""


def segments_figure(replayed: Replay, event: int | None = None, title: str | None = None) -> Figure:
    """Each segment after `event` (at the end where it is None) as a bar, and the blocks in it by address.

    Hatched is free: red next to a tensor, grey where the whole segment is empty. Raises TypeError for what is no
    replay, ValueError for an event that it has not reached, and for more segments than a picture holds.
    """
    check_replay(replayed)
    event = len(replayed) if event is None else event
    segments = replayed.blocks_at(event)
    if len(segments) > MOST:
        raise ValueError(f"{len(segments)} segments: this picture holds {MOST}; memory_map(replayed) draws more")
    title = title or totals(replayed, event)
    canvas = Canvas()
    top = canvas.title(title) + 14
    largest = max([segment.bytes for segment in segments], default=1)
    scale = (WIDTH - 2 * MARGIN - LABEL_WIDTH) / largest
    for index, segment in enumerate(segments):
        _row(canvas, segment, top + STEP * index, scale)
    bottom = top + STEP * max(len(segments), 1)
    if not segments:
        canvas.text(MARGIN, top + 20, "nothing is reserved", 13, QUIET)
    told = [stop(title)]
    for number, segment in enumerate(segments, start=1):
        blocks = ", ".join(f"{_name(block)} {spelled(block.bytes)}" for block in segment.blocks)
        told.append(f"Segment {number}, {spelled(segment.bytes)}: {blocks}.")
    return Figure(canvas.svg(bottom, title, " ".join(told)), " ".join(told))


def _name(block: MemoryBlock) -> str:
    return str(block.name) if block.is_allocated else "free"


def totals(replayed: Replay, event: int) -> str:
    """A sentence with the counters after an event."""
    if event == 0:
        return "Before the first event nothing is reserved"
    at = event - 1
    allocated, reserved = spelled(replayed.allocated[at]), spelled(replayed.reserved[at])
    largest = spelled(replayed.largest_free[at])
    return f"{reserved} reserved, {allocated} of it allocated, the largest free block {largest}"


def _row(canvas: Canvas, segment: MemorySegment, y: float, scale: float) -> None:
    pool = "small pool" if segment.small else "expandable" if segment.expandable else "segment"
    canvas.text(MARGIN, y + 15, pool, 12, QUIET)
    canvas.text(MARGIN, y + 30, spelled(segment.bytes), 12)
    left = MARGIN + LABEL_WIDTH
    for block in segment.blocks:
        x = left + (block.address - segment.address) * scale
        _block(canvas, block, x, y, block.bytes * scale, cached=not segment.allocated)
    canvas.rect(left, y, segment.bytes * scale, ROW, "none", stroke=INK, stroke_width=1.4)


def _block(canvas: Canvas, block: MemoryBlock, x: float, y: float, width: float, cached: bool) -> None:
    name, fill = _name(block), FILL if block.is_allocated else "#FFFFFF"
    tip = f"{name}: {spelled(block.bytes)}"
    canvas.rect(x, y, width, ROW, fill, tip, stroke=RULE, stroke_width=0.8, data_block=name)
    if not block.is_allocated:
        canvas.hatch(x, y, width, ROW, CACHED_INK if cached else FREE_INK, gap=7)
    for words in (f"{name} {spelled(block.bytes)}", name):
        if text_width(words, 12) + 6 <= width:
            canvas.halo_text(x + width / 2, y + 21, words, 12, fill, text_anchor="middle")
            return
