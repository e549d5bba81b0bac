"""One run in two pictures: its peak as a bar with a GPU's capacity, and its step moment by moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..breakdown import MemoryBreakdown
from ..gpus import Gpu
from ..planning.twin import named
from ..run import TrainingRun
from ..units import format_bytes, percent
from . import stack
from .axes import (
    COLOURS,
    OVER,
    Plot,
    Segment,
    amount,
    amount_with_unit,
    digits_for,
    draw_legend,
    draw_nominal,
    draw_peak,
    largest_kinds,
    words,
)
from .canvas import INK, MARGIN, QUIET, RULE, Canvas, Figure, reflowing, sentence, short, text_width, wrap
from .timelines import TIMELINE_ORDER

NOT_COUNTED = "not counted: what CUDA itself takes (its context, workspaces)"
UNIT = "GB"


def peak_stack(run: TrainingRun, breakdown: MemoryBreakdown, card: Gpu, verdict: str) -> Figure:
    """The run's peak by kind, and a line at what a program gets of the GPU.

    `verdict` continues "It …" in the alt.
    """
    title = peak_title(run, breakdown)
    parts = ", ".join(
        f"{words(kind)} {amount_with_unit(size, UNIT, 2)}" for kind, size in breakdown.items() if size
    )
    return stack(
        {"": breakdown},
        title,
        capacity=card.room,
        capacity_label=told_name(card),
        nominal=card.memory,
        provenance=f"estimated from formulas · {NOT_COUNTED}",
        values_in_legend=True,
        alt=f"Estimate for {title}. It {verdict}. {run}: {parts}.",
    )


def peak_title(run: TrainingRun, breakdown: MemoryBreakdown) -> str:
    """The model, its batch and its peak: "gpt2-xl, 32 × 1,024 tokens: 134.45 GB at the peak, in backward"."""
    several = f"{run.accumulation_steps} micro-batches of " if run.accumulation_steps > 1 else ""
    peak = f"{format_bytes(breakdown.total, UNIT, 2)} at the peak, in {words(breakdown.phase)}"
    trained = f"LoRA r={run.lora_rank}, " if run.lora_rank else ""
    return f"{run.model.name}, {trained}{several}{run.micro_batch} × {run.seq_len:,} tokens: {peak}"


def told_name(card: Gpu) -> str:
    """A card with the memory that a program gets of it, and what the driver lists where that is more."""
    room = format_bytes(card.room, UNIT, 1)
    if card.room == card.memory:
        return f"{card.name}: {room}"
    return f"{card.name}: a program gets {room} of {format_bytes(card.memory, UNIT, 1)} (dashed)"


# The step, moment by moment

PLOT_HEIGHT = 250.0
LABELS = {
    "end of step": "step begins", "forward": "highest", "end of forward": "end", "loss": "highest",
    "after loss": "end", "clipping": "norm", "optimizer step": "highest",
}  # fmt: skip
"""The label under a column, below the name of its phase; others go without "backward of the"."""

# A card of more than so many times the peak is not drawn: the columns would be too small to be told apart.
FAR = 5

PHASES = {"zero_grad": "", "clip": "clipping"}


@dataclass(frozen=True)
class _Columns(Plot):
    """A plot with a column for each of `count` moments."""

    count: int

    @property
    def slot(self) -> float:
        return (self.right - self.left) / self.count

    def center(self, index: int) -> float:
        return self.left + self.slot * (index + 0.5)


@reflowing
def step_columns(moments: Mapping[str, MemoryBreakdown], card: Gpu) -> Figure:
    """The moments of a step, as `moments(run)` gives them: columns stacked by kind, and the card's line.

    The end of a step comes first: it is how the next one begins. Raises ValueError without moments.
    """
    if not moments:
        raise ValueError("a step without moments cannot be drawn")
    rows = in_order(moments)
    peak = max(range(len(rows)), key=lambda index: rows[index].total)
    highest = rows[peak].total
    digits = digits_for(highest, UNIT)
    title = _step_title(rows[peak])
    stacks = [
        [Segment(words(kind), moment[kind], kind) for kind in TIMELINE_ORDER if moment[kind]]
        for moment in rows
    ]
    canvas = Canvas()
    reach = card.memory if card.memory <= FAR * highest else 0
    if canvas.narrow:  # no room for columns
        bars = dict(zip(map(place_words, rows), stacks, strict=True))
        if not reach:
            return stack(bars, title)
        return stack(bars, title, capacity=card.room, capacity_label=told_name(card), nominal=card.memory)
    parts = [part for stacked in stacks for part in stacked]
    y = draw_legend(canvas, parts, canvas.title(title) + 6, UNIT, 0, False)
    _name_card(canvas, card, y, is_drawn=reach > 0)
    top = y + 72
    largest = round(1.12 * max(highest, reach, 1))
    columns = _Columns(canvas, 66.0, canvas.width - 22.0, top, top + PLOT_HEIGHT, largest, len(rows))
    columns.value_axis(UNIT)
    canvas.upright(20, (columns.top + columns.bottom) / 2, f"{UNIT} (10⁹ bytes)")
    canvas.line(columns.left, columns.bottom, columns.right, columns.bottom, RULE)
    borders = ""
    for index, (moment, stacked) in enumerate(zip(rows, stacks, strict=True)):
        borders += _column(columns, index, place_words(moment), stacked, digits)
    canvas.path(borders, stroke="#FFFFFF", stroke_width=1, fill="none")
    for index, moment in enumerate(rows):
        _column_total(columns, index, moment.total, digits, index == peak, moment.total > card.room)
    lines = _column_names(columns, rows)
    if reach:
        columns.limit(card.room)
        if card.memory != card.room:
            y = columns.y(card.memory)
            draw_nominal(canvas, columns.left, y, columns.right, y, card.memory)
    alt = _step_alt(rows, rows[peak], card, title, digits)
    return Figure(canvas.svg(columns.bottom + 12 + 14 * lines, title, alt), alt)


def _step_title(peak: MemoryBreakdown) -> str:
    largest = max(peak, key=lambda kind: peak[kind])
    share = percent(peak[largest] / max(1, peak.total))
    return f"The step is highest at {place_words(peak)}, and {share} of that are {words(largest)}"


def _name_card(canvas: Canvas, card: Gpu, y: float, is_drawn: bool) -> None:
    """Names the card's lines above the plot, where no column can cover the words."""
    if is_drawn:
        canvas.line(MARGIN, y + 14, MARGIN + 24, y + 14, OVER, stroke_width=2)
        canvas.text(MARGIN + 32, y + 18, told_name(card), 12, OVER, font_weight="bold")
    else:
        canvas.text(MARGIN, y + 18, f"{told_name(card).removesuffix(' (dashed)')}, far above", 12, OVER)


def in_order(moments: Mapping[str, MemoryBreakdown]) -> list[MemoryBreakdown]:
    """The moments as they are drawn: from the beginning of a step, which is the last one's end."""
    last = [moments["end of step"]] if "end of step" in moments else []
    return last + [moment for name, moment in moments.items() if name != "end of step"]


def place_words(peak: MemoryBreakdown) -> str:
    """The place in the step of a moment of `moments(run)`, such as "the backward of the loss"."""
    names = {"forward": "forward", "after loss": "the end of the loss", "clipping": "clipping"}
    return names.get(name_of(peak), f"the {name_of(peak)}")


def name_of(moment: MemoryBreakdown) -> str:
    """The name of a moment, without the operation that its label adds to it."""
    return moment.label.partition(":")[0]


def _column(columns: _Columns, index: int, name: str, parts: Sequence[Segment], digits: int) -> str:
    """Draws a moment's kinds on top of one another; returns the path of the borders between them."""
    width = min(0.74 * columns.slot, 56)
    x = columns.center(index) - width / 2
    below = 0
    borders = ""
    for part in parts:
        y = columns.y(below + part.size)
        height = PLOT_HEIGHT * part.size / columns.largest
        tip = f"{name} · {part.name}: {format_bytes(part.size, UNIT, max(2, digits))}"
        look = {"data_kind": part.kind, "data_moment_bytes": part.size}
        columns.canvas.rect(x, y, width, height, COLOURS[part.kind], tip, **look)
        if below and height >= 2:
            borders += f"M{short(x)} {short(y + height)}h{short(width)}"
        below += part.size
    return borders


def _column_total(
    columns: _Columns, index: int, total: int, digits: int, is_peak: bool, is_over: bool
) -> None:
    x = columns.center(index)
    y = columns.y(total)
    shown = amount(total, UNIT, digits)
    size = 11.0
    if is_peak:
        draw_peak(columns.canvas, x, y, total)
        shown = f"peak {format_bytes(total, UNIT, digits)}"
        size = 13.0
        y -= 9
    half = text_width(shown, size, bold=is_peak) / 2
    x = min(max(x, columns.left + half), columns.canvas.width - 6 - half)
    look = {"fill": OVER if is_over else INK, "font_weight": "bold" if is_peak else None}
    columns.canvas.halo_text(x, y - 5, shown, size, text_anchor="middle", **look)


def _column_names(columns: _Columns, rows: Sequence[MemoryBreakdown]) -> int:
    """Writes names below the columns and phases above; returns how many lines the longest name takes."""
    canvas = columns.canvas
    labels = map(name_of, rows)
    names = [LABELS.get(label, label.removeprefix("backward of the ")) for label in labels]
    wrapped = [wrap(name, 11.5, columns.slot - 2) for name in names]
    for index, lines in enumerate(wrapped):
        x = columns.center(index)
        for line, text in enumerate(lines):
            canvas.text(x, columns.bottom + 16 + 14 * line, text, 11.5, text_anchor="middle")
    for phase, members in groupby(range(len(rows)), lambda index: rows[index].phase):
        inside = list(members)
        left = columns.center(inside[0]) - columns.slot / 2
        right = columns.center(inside[-1]) + columns.slot / 2
        if inside[0]:
            canvas.line(left, columns.top - 30, left, columns.bottom, "#C9C9C9", data_phase=phase)
        name = PHASES.get(phase, words(phase))
        canvas.text((left + right) / 2, columns.top - 20, name, 12, QUIET, text_anchor="middle")
    return max(map(len, wrapped))


def _step_alt(
    rows: Sequence[MemoryBreakdown], peak: MemoryBreakdown, card: Gpu, title: str, digits: int
) -> str:
    told = sentence(f"{place_words(moment)} {amount(moment.total, UNIT, digits)}" for moment in rows)
    parts = sentence(
        f"{words(kind)} {amount_with_unit(peak[kind], UNIT, digits)}" for kind in largest_kinds(peak)
    )
    room = format_bytes(card.room, UNIT, digits)
    above = sum(moment.total > card.room for moment in rows)
    verb = "rises" if above == 1 else "rise"
    rise = f"{above or 'none'} of the {len(rows)} columns {verb} above that"
    return (
        f"{title}. Columns stacked by kind of memory, in {UNIT}: {told}. At the peak: {parts}."
        f" A program gets {room} of {named(card)}; {rise}."
    )
