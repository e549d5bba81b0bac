"""The memory map: a GPU's memory by address at one event, which shows that free memory lies in pieces."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from .. import palette
from ..allocator.replay import MemoryBlock, MemorySegment, Replay, check_replay
from ..breakdown import KINDS
from ..palette import COLOURS, INK, OVER, RULE, words
from ..units import GB, format_bytes, percent
from . import style
from .style import MARGIN, WIDTH, Drawn

ROWS = 14  # of a map, unless its segments are few and alike: then each has a row of its own
ROW, STEP = 20.0, 24.0  # points of a row, and from one to the next
WIDE = WIDTH - 2 * MARGIN
KEY = 10.5  # points of the font

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

FILLS = COLOURS | {STUCK: "#FFFFFF", BEYOND: "#FFFFFF", UNKNOWN: COLOURS["activations"]}
FREE: dict[str, dict[str, Any]] = {
    STUCK: {"edgecolor": OVER, "hatch": "////"},
    WHOLE: {"edgecolor": RULE, "hatch": "////"},
    BEYOND: {"edgecolor": RULE},
}


Span = tuple[int, str]  # the bytes of a stretch of memory that looks alike, and its look


def memory_map(
    replayed: Replay, event: int | None = None, title: str | None = None, *, ax: Axes | None = None
) -> Drawn:
    """The memory at `event` by address, from left to right.

    Without an event it is the peak, or where memory ran out. Rows follow each other like lines of text.
    Colors are the kinds of memory; hatched is free: red where a tensor in the same segment keeps it from
    being given back, grey where nothing does. Returns the figure, or `ax` if it is given. Raises ValueError
    for an event that the replay has not reached, and where nothing is reserved, TypeError for what is no
    replay.
    """
    check_replay(replayed)
    if event is None:
        event = len(replayed) if replayed.failure is not None else replayed.peak_event
    segments = replayed.blocks_at(event)
    if not segments:
        raise ValueError(
            f"nothing is reserved after event {event}, so there is no memory to draw; choose a later event"
        )
    unit = "GB" if replayed.reserved[event - 1] >= GB else "MB"
    title = title or conclusion(replayed, event)
    spans = _spans(segments, replayed.capacity)
    total = sum(size for size, _ in spans)
    told = _told(spans, unit)
    sizes = [segment.bytes for segment in segments]
    alike = len(set(sizes)) == 1 and total <= ROWS * sizes[0]
    row_bytes = sizes[0] if alike else ceil(total / ROWS)
    note = " · ".join(filter(None, (f"each row is {format_bytes(row_bytes, unit, 2)}", replayed.provenance)))
    names = ["\n".join(style.wrap(name, KEY, 145)) for name in told.values()]
    columns = np.array_split(names, 3)  # as matplotlib splits them
    above = 10 + max(sum(18 + 13 * name.count("\n") for name in column) for column in columns)
    high = STEP * ceil(total / row_bytes)
    with style.look():
        drawn = ax or style.sheet(title, above + high, note).place(MARGIN, above, WIDE, high)
        drawn.set(xlim=(0, WIDE), ylim=(high, 0))
        drawn.axis("off")
        _draw(drawn, spans, sizes, row_bytes / WIDE, unit)
        patches = [Patch(facecolor=FILLS[name], **FREE.get(name, {})) for name in told]
        drawn.legend(
            patches, names, ncols=3, fontsize=KEY, loc="lower left", bbox_to_anchor=(0, 1 + 8 / high)
        )
        when = ", ".join(filter(None, (f"after event {event:,}", replayed.moment(event))))
        alt = f"{palette.stop(title)} A map of memory by address, {when}: {len(segments):,} segments,"
        alt += f" {', '.join(told.values())}."
        if event == len(replayed) and replayed.failure is not None:
            alt += f" {replayed.message[0].upper()}{replayed.message[1:]}"
        return style.finished(drawn, ax, title, alt, note, above=above)


def conclusion(replayed: Replay, event: int) -> str:
    """A sentence on how much is reserved after `event`, in use, and stuck between tensors."""
    at = event - 1
    reserved = replayed.reserved[at]
    stuck = replayed.stuck[at]
    unit = "GB" if reserved >= GB else "MB"
    digits = palette.digits_for(reserved, unit)
    shown = [format_bytes(size, unit, digits) for size in (reserved, replayed.allocated[at], stuck)]
    text = f"{shown[0]} reserved, {shown[1]} of it in use"
    if not stuck:
        return f"{text}; all free memory could be returned to the driver"
    text += f"; {shown[2]} ({percent(stuck / reserved, 1)}) is stuck between tensors"
    return f"{text}, the largest free piece {format_bytes(replayed.largest_free[at], unit, max(digits, 2))}"


def _spans(segments: Sequence[MemorySegment], capacity: int | None) -> list[Span]:
    """Segments one after the other, without the gaps between their addresses; then what the GPU has left."""
    left = (capacity or 0) - sum(segment.bytes for segment in segments)
    spans = [span for segment in segments for block in segment.blocks for span in _looks(block)]
    return [(size, name) for size, name in (*spans, (left, BEYOND)) if size > 0]


def _looks(block: MemoryBlock) -> list[Span]:
    """A block's bytes by how they look; a free one may be stuck on both sides of what could be given back."""
    if block.is_allocated:
        return [(block.bytes, block.kind or UNKNOWN)]
    first, last = block.releasable
    end = block.address + block.bytes
    return [(first - block.address, STUCK), (last - first, WHOLE), (end - last, STUCK)]


def _told(spans: Iterable[Span], unit: str) -> dict[str, str]:
    """The looks that occur, in the legend's order, each with its name and its bytes in all."""
    totals = dict.fromkeys(LOOKS, 0)
    for size, name in spans:
        totals[name] += size
    return {
        name: f"{LOOKS[name]} {palette.amount_with_unit(size, unit, 2)}"
        for name, size in totals.items()
        if size
    }


def _draw(ax: Axes, spans: Sequence[Span], segments: Sequence[int], point: float, unit: str) -> None:
    """Each point of a row in the look of what lies at its middle; lines and names where there is room.

    `point` are the bytes of one.
    """
    ends = np.cumsum([size for size, _ in spans])
    middles = np.arange(point / 2, ends[-1], point)
    at = np.searchsorted(ends, middles, "right")  # the span of each point
    looks = np.array([name for _, name in spans])[at]
    starts, widths = _runs(looks)
    for name in np.unique(looks):
        chosen = looks[starts] == name
        _fill(ax, name, starts[chosen], widths[chosen])
    for edges, color, high in ((ends, "white", ROW), (np.cumsum(segments), INK, ROW + 4)):
        begins = np.searchsorted(middles, [0, *edges])
        rows, left = np.divmod(begins[np.diff(begins, append=len(at)) >= 3], WIDE)
        # One line with gaps: a picture of many lines is large.
        ys = np.add.outer(STEP * (rows + 0.5), [-high / 2, high / 2, np.nan]).ravel()
        ax.plot(np.repeat(left, 3), ys, color=color, linewidth=0.8, clip_on=False)
    starts, widths = _runs(at)
    widest = {at[starts[run]]: run for run in np.argsort(widths)}  # of a span on several rows
    for index, run in widest.items():
        _name(ax, spans[index], starts[run], widths[run], unit)


def _runs(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The starts of runs of the same code, at the latest with a row, and their lengths, both in points."""
    new = np.append(True, codes[1:] != codes[:-1])
    new[::WIDE] = True
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=len(codes))


def _fill(ax: Axes, name: str, starts: np.ndarray, widths: np.ndarray) -> None:
    """Boxes of one look, as a single outline: thousands of them would make a picture large."""
    rows, left = np.divmod(starts, WIDE)
    right = left + widths
    top = STEP * rows + (STEP - ROW) / 2
    bottom = top + ROW
    corners = np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
    boxes = Path.make_compound_path_from_polys(corners.transpose(2, 0, 1))
    edge = {"linewidth": 0.6, **FREE[name]} if name in FREE else {"linewidth": 0}
    ax.add_patch(PathPatch(boxes, facecolor=FILLS[name], label=name, **edge))


def _name(ax: Axes, span: Span, start: int, width: int, unit: str) -> None:
    size, name = span
    amount = format_bytes(size, unit, 2)
    said = "free" if name in (STUCK, WHOLE) else LOOKS[name]
    row, left = divmod(start, WIDE)
    place = (left + width / 2, STEP * (row + 0.5))
    write_inside(ax, *place, (f"{said} {amount}", amount), width, FILLS[name], hatched=name in (STUCK, WHOLE))


def write_inside(
    ax: Axes, x: float, y: float, texts: Iterable[str], width: float, fill: str, hatched: bool = False
) -> None:
    """The first of `texts` with room in `width` points, centered; nothing if there is none."""
    said = next((text for text in texts if style.text_width(text, KEY) <= width - 4), "")
    ground = style.paper(1) if said and hatched else None
    ax.text(x, y, said, ha="center", va="center", fontsize=KEY, color=palette.ink_on(fill), bbox=ground)
