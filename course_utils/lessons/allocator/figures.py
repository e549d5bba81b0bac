"""Pictures of lesson 12: segments one below the other, each as long as it is large, and their blocks."""

from ...allocator.replay import MemoryBlock, MemorySegment, Replay, check_replay
from ...figures.axes import stop
from ...figures.canvas import INK, MARGIN, QUIET, RULE, Canvas, Figure, ink_on, reflowing, text_width
from .traces import spelled

FILL, FREE_INK, CACHED_INK = "#009E73", "#A8071A", "#8A8A8A"
LABEL_WIDTH, ROW, STEP = 84.0, 34.0, 46.0


@reflowing
def segments_figure(replayed: Replay, event: int | None = None, title: str | None = None) -> Figure:
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
    canvas = Canvas()
    told = stop(title)
    top = canvas.title(title) + 14
    scale = (canvas.width - 2 * MARGIN - LABEL_WIDTH) / max(segment.bytes for segment in segments)
    for index, segment in enumerate(segments):
        _row(canvas, segment, top + STEP * index, scale)
        blocks = ", ".join(f"{_name(block)} {spelled(block.bytes)}" for block in segment.blocks)
        told += f" Segment {index + 1}, {spelled(segment.bytes)}: {blocks}."
    return Figure(canvas.svg(top + STEP * len(segments), title, told), told)


def _name(block: MemoryBlock) -> str:
    return str(block.name) if block.is_allocated else "free"


def _row(canvas: Canvas, segment: MemorySegment, y: float, scale: float) -> None:
    if segment.small:
        kind = "small pool"
    elif segment.expandable:
        kind = "expandable"
    else:
        kind = "segment"
    canvas.text(MARGIN, y + 15, kind, 12, QUIET)
    canvas.text(MARGIN, y + 30, spelled(segment.bytes), 12)
    left = MARGIN + LABEL_WIDTH
    free_ink = FREE_INK if segment.allocated else CACHED_INK
    for block in segment.blocks:
        x = left + (block.address - segment.address) * scale
        width = block.bytes * scale
        name = _name(block)
        fill = FILL if block.is_allocated else "#FFFFFF"
        tip = f"{name}: {spelled(block.bytes)}"
        canvas.rect(x, y, width, ROW, fill, tip, stroke=RULE, stroke_width=0.8, data_block=name)
        if not block.is_allocated:
            canvas.hatch(x, y, width, ROW, free_ink, gap=7)
        middle = x + width / 2
        for words in (f"{name} {spelled(block.bytes)}", name):
            if text_width(words, 12) + 6 <= width:
                canvas.halo_text(middle, y + 21, words, 12, fill, fill=ink_on(fill), text_anchor="middle")
                break
    canvas.rect(left, y, segment.bytes * scale, ROW, "none", stroke=INK, stroke_width=1.4)
