"""The memory map: a GPU's memory by address at one event, which shows that free memory lies in pieces."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import NamedTuple

from ..breakdown import KINDS
from ..figures.axes import COLOURS, amount_with_unit, digits_for, legend, stop, words
from ..figures.canvas import INK, MARGIN, RULE, Canvas, Figure, ink_on, reflowing, text_width
from ..units import GB, format_bytes, percent
from .replay import MemoryBlock, MemorySegment, Replay, check_replay

ROWS = 14  # of a map, unless its segments are few and alike: then each has a row of its own
ROW_HEIGHT = 24  # pixels
ROW_STEP = 29  # pixels from one row to the next
FINEST = 3.0  # pixels: neighbors narrower than this are drawn as one, in the color of what most of them is
WORTH_A_TIP = 20.0  # pixels: what is narrower is hard to point at, and thousands of tips make a picture large

STUCK = "stuck"
WHOLE = "cached"
BEYOND = "beyond"
UNKNOWN = "tensors"
LOOKS = {kind: words(kind) for kind in KINDS} | {
    UNKNOWN: "tensors",
    STUCK: "free, but stuck between tensors",
    WHOLE: "free, could be returned to the driver",
    BEYOND: "not reserved",
}
"""Each look of a stretch of memory and its name in the legend, in the legend's order."""

FILLS = COLOURS | {STUCK: "#FFFFFF", BEYOND: "#FFFFFF", UNKNOWN: "#009E73"}
HATCHES = {STUCK: "#A8071A", WHOLE: "#B5B5B5"}


@reflowing
def memory_map(replayed: Replay, event: int | None = None, title: str | None = None) -> Figure:
    """The memory at `event` by address, from left to right.

    Without an event it is the peak, or where memory ran out. Rows follow each other like lines of text.
    Colors are the kinds of memory; hatched is free: red where a tensor in the same segment keeps it from
    being given back, grey where nothing does. Raises ValueError for an event that the replay has not reached,
    and where nothing is reserved, TypeError for what is no replay.
    """
    check_replay(replayed)
    event = telling_event(replayed) if event is None else event
    segments = replayed.blocks_at(event)
    if not segments:
        raise ValueError(
            f"nothing is reserved after event {event}, so there is no memory to draw; choose a later event"
        )
    unit = "GB" if replayed.reserved[event - 1] >= GB else "MB"
    spans = list(_spans(segments, replayed.capacity))
    title = title or conclusion(replayed, event)
    told = _told(spans, unit)
    alt = _alt(replayed, event, title, len(segments), told.values())
    canvas = Canvas()

    def swatch(x: float, y: float, size: float, look: str) -> None:
        _fill(canvas, x, y, size, size, look, stroke_width=1)

    top = legend(canvas, told.items(), canvas.title(title) + 6, swatch, quiet=[BEYOND]) + 14
    row_bytes = bytes_in_a_row([segment.bytes for segment in segments], spans[-1].end)
    for span in _merged(spans, FINEST * row_bytes / (canvas.width - 2 * MARGIN)):
        _draw(canvas, span, top, row_bytes, unit)
    bottom = top + ROW_STEP * ceil(spans[-1].end / row_bytes)
    note = " · ".join(filter(None, (f"each row is {format_bytes(row_bytes, unit, 2)}", replayed.provenance)))
    return Figure(canvas.svg(canvas.note(note, bottom + 12) - 2, title, alt), alt)


def bytes_in_a_row(segments: Sequence[int], total: int) -> int:
    """Bytes in a row of the map: one segment where all are alike and few, else a share of `total`."""
    alike = len(set(segments)) == 1 and total <= ROWS * segments[0]
    return segments[0] if alike else ceil(total / ROWS)


def conclusion(replayed: Replay, event: int) -> str:
    """A sentence on how much is reserved after `event`, in use, and stuck between tensors."""
    at = event - 1
    reserved = replayed.reserved[at]
    stuck = replayed.stuck[at]
    unit = "GB" if reserved >= GB else "MB"
    digits = digits_for(reserved, unit)
    shown = [format_bytes(size, unit, digits) for size in (reserved, replayed.allocated[at], stuck)]
    text = f"{shown[0]} reserved, {shown[1]} of it in use"
    if not stuck:
        return f"{text}; all free memory could be returned to the driver"
    text += f"; {shown[2]} ({percent(stuck / reserved, 1)}) is stuck between tensors"
    return f"{text}, the largest free piece {format_bytes(replayed.largest_free[at], unit, max(digits, 2))}"


def telling_event(replayed: Replay) -> int:
    """The event at which memory ran out; without one that of the peak."""
    return len(replayed) if replayed.failure is not None else replayed.peak_event


class _Span(NamedTuple):
    """A stretch of memory that looks alike: the byte of the map at which it starts, and what it is."""

    start: int
    bytes: int
    look: str
    tip: str = ""
    begins_segment: bool = False

    @property
    def end(self) -> int:
        return self.start + self.bytes


def _spans(segments: Iterable[MemorySegment], capacity: int | None) -> Iterator[_Span]:
    """Segments one after the other, without the gaps between their addresses; then what the GPU has left."""
    start = 0
    for segment in segments:
        for position, block in enumerate(segment.blocks):
            for number, (size, look) in enumerate(_looks(block)):
                begins_segment = position == 0 and number == 0
                yield _Span(start, size, look, _tip(block, look, size), begins_segment)
                start += size
    if capacity is not None and capacity > start:
        yield _Span(start, capacity - start, BEYOND, f"not reserved: {format_bytes(capacity - start)}", True)


def _told(spans: Iterable[_Span], unit: str) -> dict[str, str]:
    """The looks that occur, in the legend's order, each with its name and its bytes in all."""
    totals = dict.fromkeys(LOOKS, 0)
    for span in spans:
        totals[span.look] += span.bytes
    return {look: f"{LOOKS[look]} {amount_with_unit(size, unit, 2)}" for look, size in totals.items() if size}


def _alt(replayed: Replay, event: int, title: str, segments: int, told: Iterable[str]) -> str:
    moment = replayed.moment(event)
    where = f"A map of the GPU's memory by address after event {event:,}"
    if moment:
        where += f" ({moment})"
    alt = f"{stop(title)} {where}: {segments:,} segments, {', '.join(told)}."
    if event == len(replayed) and replayed.failure is not None:
        alt += f" {replayed.message[0].upper()}{replayed.message[1:]}"
    return alt


def _looks(block: MemoryBlock) -> Iterator[tuple[int, str]]:
    """A block's bytes by how they look.

    A free one may be stuck at both ends of the pages that could be given back.
    """
    if block.is_allocated:
        yield block.bytes, block.kind or UNKNOWN
        return
    first, last = block.releasable
    end = block.address + block.bytes
    for size, look in ((first - block.address, STUCK), (last - first, WHOLE), (end - last, STUCK)):
        if size:
            yield size, look


def _tip(block: MemoryBlock, look: str, size: int) -> str:
    made = block.allocation
    if made:
        return f"{LOOKS[look]}: {format_bytes(size)}, {made.operation} in {made.module or 'the network'}"
    name = f" {block.name}" if block.is_allocated else ""
    return f"{LOOKS[look]}{name}: {format_bytes(size)}"


def _merged(spans: Iterable[_Span], least: float) -> Iterator[_Span]:
    """The same stretch, in which narrow neighbors are joined.

    Those narrower than `least` bytes are joined where they begin in the same `least`.
    """

    def place(span: _Span) -> float:
        if span.bytes < least:
            return span.start // least
        return -1 - span.start  # no other span has this one, so a wide span is never joined

    for _, alike in groupby(spans, place):
        crowd = list(alike)
        if len(crowd) == 1:
            yield crowd[0]
            continue
        by_look = Counter[str]()
        for span in crowd:
            by_look[span.look] += span.bytes
        most = by_look.most_common(1)[0][0]
        size = by_look.total()
        tip = f"{len(crowd)} blocks, most of them {LOOKS[most]}: {format_bytes(size)}"
        yield _Span(crowd[0].start, size, most, tip, crowd[0].begins_segment)


def _draw(canvas: Canvas, span: _Span, top: float, row_bytes: int, unit: str) -> None:
    """Draw a span on every row that it reaches; where it begins, with a line and its name."""
    one = (canvas.width - 2 * MARGIN) / row_bytes  # pixels of a byte
    for row in range(span.start // row_bytes, (span.end - 1) // row_bytes + 1):
        first = max(span.start, row * row_bytes)
        last = min(span.end, (row + 1) * row_bytes)
        left = MARGIN + one * (first - row * row_bytes)
        width = one * (last - first)
        y = top + ROW_STEP * row
        tip = span.tip if width >= WORTH_A_TIP else ""
        _fill(canvas, left, y, width, ROW_HEIGHT, span.look, tip, data_look=span.look, stroke_width=0.5)
        if first > span.start:
            continue
        if width >= 3:
            _draw_begin(canvas, left, y, span.begins_segment)
        _draw_name(canvas, span, left, y, width, unit)


def _draw_begin(canvas: Canvas, x: float, y: float, begins_segment: bool) -> None:
    """A line where a span begins: thin and white, or black and longer where a segment begins."""
    if begins_segment:
        canvas.line(x, y - 3, x, y + ROW_HEIGHT + 3, INK, stroke_width=0.8)
    else:
        canvas.line(x, y, x, y + ROW_HEIGHT, "#FFFFFF", stroke_width=0.8)


def _draw_name(canvas: Canvas, span: _Span, left: float, y: float, width: float, unit: str) -> None:
    """The span's name and size, its size alone, or nothing, as there is room."""
    size = format_bytes(span.bytes, unit, 2)
    name = "free" if span.look in (STUCK, WHOLE) else LOOKS[span.look]
    shown = next((text for text in (f"{name} {size}", size) if text_width(text, 11) + 8 <= width), "")
    if shown:
        fill = FILLS[span.look]
        middle = left + width / 2
        canvas.halo_text(middle, y + 16, shown, 11, fill, fill=ink_on(fill), text_anchor="middle")


def _fill(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    height: float,
    look: str,
    tip: str = "",
    *,
    stroke_width: float,
    **more: str,
) -> None:
    outline = {}
    if look in (STUCK, WHOLE, BEYOND):
        outline = {"stroke": RULE, "stroke_width": stroke_width}
    canvas.rect(x, y, width, height, FILLS[look], tip, **more, **outline)
    if look in HATCHES and width >= 2:
        canvas.hatch(x, y, width, height, HATCHES[look], gap=5)
