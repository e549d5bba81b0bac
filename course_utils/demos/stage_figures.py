"""Pictures for the stage: bars in type that can be read from the back row."""

from collections.abc import Mapping, Sequence

from ..allocator.replay import MemoryBlock, MemorySegment
from ..breakdown import MemoryBreakdown
from ..figures.axes import COLOURS, OVER, amount, digits_for, draw_swatch, legend, segments_of, words
from ..figures.canvas import INK, MARGIN, WIDTH, Canvas, Figure, ink_on, text_width, wrap
from ..units import GB, format_bytes

TYPE = 20.0  # pixels of the letters; the course's other pictures have 12
BAR = 40.0  # pixels of a bar's height
STEP = 62.0  # pixels from one bar to the next


def stage_bars(
    rows: Mapping[str, MemoryBreakdown], title: str, room: int, notes: Mapping[str, str]
) -> Figure:
    """Breakdowns as bars with notes below them, and a line at `room`, the bytes of the GPU's memory."""
    canvas = Canvas()
    lines = wrap(title, 24, WIDTH - 2 * MARGIN, bold=True)
    for index, line in enumerate(lines):
        canvas.text(MARGIN, 32 + 30 * index, line, 24, font_weight="bold")
    top = 40.0 + 30 * len(lines)
    left = MARGIN + max(text_width(label, TYPE) for label in rows) + 12
    widest = max(text_width(format_bytes(row.total), TYPE, bold=True) for row in rows.values())
    scale = (WIDTH - MARGIN - widest - 12 - left) / max(room, *(row.total for row in rows.values()))
    step = STEP + (14 if notes else 0)
    bottom = top + step * len(rows)
    for index, (label, row) in enumerate(rows.items()):
        _row(canvas, label, row, top + step * index, left, scale, room)
        canvas.text(left, top + step * index + BAR + 20, notes.get(label, ""), 17)
    x = left + room * scale
    canvas.line(x, top - 8, x, bottom, OVER, stroke_width=3, data_capacity=room)
    canvas.halo_text(x - 6, bottom + 8, f"GPU {format_bytes(room)}", 17, fill=OVER, text_anchor="end")
    shown = [kind for kind in COLOURS if any(row.get(kind, 0) > row.total / 50 for row in rows.values())]
    entries = [(kind, words(kind)) for kind in shown]

    def swatch(x: float, y: float, size: float, kind: str) -> None:
        draw_swatch(canvas, x, y, size, size, kind)

    end = legend(canvas, entries, bottom + 16, swatch, scale=1.5)
    told = "; ".join(_row_told(label, row, notes.get(label, "")) for label, row in rows.items())
    alt = f"{title}. {told}. The GPU has {format_bytes(room)}."
    return Figure(canvas.svg(end + 8, title, alt), alt)


def _row(
    canvas: Canvas, label: str, row: MemoryBreakdown, y: float, left: float, scale: float, room: int
) -> None:
    canvas.text(left - 12, y + BAR / 2 + 7, label, TYPE, text_anchor="end")
    x = left
    unit = "GB" if row.total >= GB else "MB"
    for part in segments_of(row):
        width = part.size * scale
        tip = f"{part.name}: {format_bytes(part.size)}"
        look = {"data_kind": part.kind, "data_bytes": part.size}
        draw_swatch(canvas, x, y, width, BAR, part.kind, tip, **look)
        shown = amount(part.size, unit, digits_for(part.size, unit))
        if text_width(shown, 17) + 8 <= width:
            ink = ink_on(COLOURS[part.kind])
            canvas.text(x + width / 2, y + BAR / 2 + 6, shown, 17, ink, text_anchor="middle")
        x += width
    color = OVER if row.total > room else INK
    total = format_bytes(row.total)
    line = left + room * scale
    if x < line < x + 18 + text_width(total, TYPE, bold=True):
        x = line  # or the line of the GPU's memory would cross the number
    canvas.halo_text(x + 10, y + BAR / 2 + 7, total, TYPE, fill=color, font_weight="bold")


def _row_told(label: str, row: MemoryBreakdown, note: str) -> str:
    parts = sorted(segments_of(row), key=lambda part: -part.size)[:3]
    kinds = ", ".join(f"{part.name} {format_bytes(part.size)}" for part in parts)
    if note:
        kinds += f"; {note}"
    return f"{label or 'In all'} {format_bytes(row.total)} ({kinds})"


def stage_segments(segments: Sequence[MemorySegment], title: str, room: int) -> Figure:
    """The allocator's segments as bars, free parts hatched; last, what the driver has of the GPU's `room`."""
    canvas = Canvas()
    left = MARGIN + text_width("with the driver", TYPE) + 12
    canvas.text(MARGIN, 32, title, 24, font_weight="bold")
    unused = room - sum(segment.bytes for segment in segments)
    scale = (WIDTH - MARGIN - left) / max(unused, *(segment.bytes for segment in segments))
    told = list[str]()
    y = 56.0
    for number, segment in enumerate(segments, start=1):
        canvas.text(left - 12, y + BAR / 2 + 7, f"segment {number}", TYPE, text_anchor="end")
        for block in segment.blocks:
            _block(canvas, left + (block.address - segment.address) * scale, y, block, scale)
        told.append(f"segment {number}: {', '.join(map(_name, segment.blocks))}")
        y += 50
    canvas.text(left - 12, y + BAR / 2 + 7, "with the driver", TYPE, text_anchor="end")
    canvas.rect(left, y, unused * scale, BAR, "none", stroke=INK, stroke_width=1.5, stroke_dasharray="4 3")
    canvas.halo_text(left + 8, y + BAR / 2 + 7, format_bytes(unused), TYPE)
    alt = f"{title}. {'; '.join(told)}; {format_bytes(unused)} with the driver."
    return Figure(canvas.svg(y + BAR + 16, title, alt), alt)


def _block(canvas: Canvas, x: float, y: float, block: MemoryBlock, scale: float) -> None:
    width = block.bytes * scale
    kind = "optimizer_states" if str(block.name).startswith("state") else "activations"
    fill = COLOURS[kind] if block.is_allocated else "#FFFFFF"
    canvas.rect(x, y, width, BAR, fill, stroke=INK, stroke_width=1.5, data_block=block.name or "free")
    if not block.is_allocated:
        canvas.hatch(x, y, width, BAR, OVER, gap=10)
    name = _name(block)
    if text_width(name, TYPE) + 12 <= width:
        middle = x + width / 2
        ink = ink_on(fill)
        canvas.halo_text(middle, y + BAR / 2 + 7, name, TYPE, fill, fill=ink, text_anchor="middle")


def _name(block: MemoryBlock) -> str:
    name = block.name if block.is_allocated else "free"
    return f"{name}: {format_bytes(block.bytes)}"
