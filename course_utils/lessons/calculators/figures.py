"""Lesson 13's figures: every calculator's answer beside the others', and one answer mended term by term."""

from collections.abc import Mapping, Sequence

from course_utils.figures import signed, signed_percent
from course_utils.figures.axes import OVER, draw_swatch, stop
from course_utils.figures.canvas import GRID, INK, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, text_width, wrap
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

from .calculators import BLOCKS, COPIES, OUTSIDE, PASSING, SCORES, STATES, Calculator, Truth, calculator, gaps

KIND_OF = {
    STATES: "optimizer_states",
    BLOCKS: "activations",
    SCORES: "activations",
    OUTSIDE: "activations",
    COPIES: "weight_copies",
    PASSING: "temporaries",
}
"""The color of each component; what attention's scores take is hatched, too."""

LEGEND = (
    (STATES, "weights, gradients, states"),
    (BLOCKS, "activations"),
    (SCORES, "attention scores, s×s"),
    (COPIES, "weight copies"),
    (PASSING, "temporaries"),
)

ROW, BAR = 38, 24

SHORT = "#4B3F8F"
"""The color of what is missing, as `OVER` is that of what is too much; neither is a kind of memory."""

WHOLE = "#6B6B6B"

Panel = Mapping[str, Mapping[str, int]]


def side_by_side(
    panels: Mapping[str, Panel],
    title: str,
    peaks: Mapping[str, int] | None = None,
    provenance: str = "",
    word: str = "simulated",
) -> Figure:
    """A panel for each model: a bar for each calculator, cut into components; all panels name the same rows.

    With `peaks`, a step's bytes by panel, a line marks each, and every bar says how far off it is; `word` names those
    bytes. Raises ValueError without any panel, or where panels differ in their rows.
    """
    rows = _rows(panels)
    canvas = Canvas()
    y = _legend(canvas, canvas.title(title) + 8)
    left = MARGIN + 12 + max(text_width(row, 13) for row in rows)
    width = (WIDTH - MARGIN - left - 24 * (len(panels) - 1)) / len(panels)
    top = y + (56 if peaks else 40)  # above its bars a panel has its name, and above its line the step's peak
    for index, row in enumerate(rows):
        canvas.text(left - 10, top + ROW * index + 17, row, 13, text_anchor="end")
    for index, (name, panel) in enumerate(panels.items()):
        ordered = {row: panel[row] for row in rows}
        place = left + index * (width + 24)
        _panel(canvas, name, ordered, place, top, width, (peaks or {}).get(name), word)
    end = canvas.note(provenance, top + ROW * len(rows) + 20)
    alt = _told(panels, title, peaks, word)
    return Figure(canvas.svg(end - (2 if provenance else 8), title, alt), alt)


def _rows(panels: Mapping[str, Panel]) -> list[str]:
    if not panels:
        raise ValueError("nothing to lay side by side")
    rows = list(next(iter(panels.values())))
    if any(set(panel) != set(rows) for panel in panels.values()):
        raise ValueError("all panels need the same rows")
    return rows


def _legend(canvas: Canvas, y: float) -> float:
    x: float = MARGIN
    for component, name in LEGEND:
        draw_swatch(canvas, x, y, 12, 12, KIND_OF[component])
        if component == SCORES:
            canvas.hatch(x, y, 12, 12, "#FFFFFF", 4)
        canvas.text(x + 18, y + 10, name)
        x += 34 + text_width(name, 12)
    return y + 12


def _panel(
    canvas: Canvas, name: str, panel: Panel, left: float, top: float, width: float, peak: int | None, word: str
) -> None:
    """One model's bars, each with its total, and the line of its step's peak."""
    totals = {row: sum(parts.values()) for row, parts in panel.items()}
    scale = (width - 78) / max([*totals.values(), peak or 0])
    canvas.text(left, top - (28 if peak else 10), name, 13, font_weight="bold")
    if peak:
        said = f"{word} {format_bytes(peak, 'GB', 0)}"
        half = text_width(said, 12, bold=True) / 2
        middle = min(max(left + peak * scale, left + half), left + width - half)
        canvas.text(middle, top - 10, said, 12, OVER, text_anchor="middle", font_weight="bold")
    bottom = top + ROW * len(panel) - 6
    canvas.line(left, top - 2, left, bottom, RULE)
    ends = [_bar(canvas, parts, left, top + ROW * index, scale) for index, parts in enumerate(panel.values())]
    if peak:
        canvas.line(left + peak * scale, top - 4, left + peak * scale, bottom, OVER, stroke_width=2, data_peak=peak)
    for index, (row, x) in enumerate(zip(panel, ends, strict=True)):
        y, total = top + ROW * index, format_bytes(totals[row], "GB", 0)
        at = _beside(x, total, 12, left + (peak or 0) * scale)
        canvas.halo_text(at, y + (12 if peak else 17), total, 12, font_weight="bold")
        if peak and totals[row] != peak:
            off = totals[row] - peak
            canvas.halo_text(at, y + 25, signed_percent(off, peak), 11, fill=OVER if off > 0 else SHORT)


def _beside(end: float, words: str, size: float, line: float) -> float:
    """Where the label of a bar that ends at `end` begins: to the right of the peak's line where it would cross that."""
    return line + 7 if end <= line < end + 12 + text_width(words, size, bold=True) else end + 7


def _bar(canvas: Canvas, parts: Mapping[str, int], left: float, y: float, scale: float) -> float:
    """A bar cut into components; returns its right end."""
    x = left
    for component in (STATES, COPIES, BLOCKS, OUTSIDE, SCORES, PASSING):
        size = parts.get(component, 0)
        if size <= 0:
            continue
        tip = f"{component}: {format_bytes(size, 'GB', 1)}"
        draw_swatch(canvas, x, y, size * scale, BAR, KIND_OF[component], tip, data_bytes=size)
        if component == SCORES:
            canvas.hatch(x, y, size * scale, BAR, "#FFFFFF")
        x += size * scale
    return x


def _told(panels: Mapping[str, Panel], title: str, peaks: Mapping[str, int] | None, word: str) -> str:
    told = []
    for name, panel in panels.items():
        totals = "; ".join(f"{row} {format_bytes(sum(parts.values()), 'GB', 0)}" for row, parts in panel.items())
        peak = f" {word.capitalize()}: {format_bytes(peaks[name], 'GB', 0)}." if peaks else ""
        told.append(f"{name}: {totals}.{peak}")
    return f"{stop(title)} Bars by calculator. {' '.join(told)}"


def mended(
    one: Calculator | str, terms: Sequence[str], run: TrainingRun, real: Truth, title: str, provenance: str = ""
) -> Figure:
    """One calculator's answer, the chosen terms added back one after the other, and what comes of it beside the truth.

    Each row begins where the last one ended. Raises ValueError for an unknown calculator or term.
    """
    one = calculator(one) if isinstance(one, str) else one
    found = gaps(one, run, real)
    steps = [(name, -found[name]) for name in found if name in terms]
    rows = [(f"{one.name} says", 0, one.total(run))]
    for name, change in steps:
        rows.append((name, rows[-1][2], rows[-1][2] + change))
    rows.append(("it would say" if steps else "it says", 0, rows[-1][2]))
    return _waterfall(rows, real.peak, title, provenance, real.word)


def _waterfall(rows: Sequence[tuple[str, int, int]], peak: int, title: str, provenance: str, word: str) -> Figure:
    canvas = Canvas()
    top = canvas.title(title) + 34
    left = MARGIN + 12 + max(text_width(name, 13) for name, _, _ in rows)
    scale = (WIDTH - MARGIN - 120 - left) / max(peak, *(max(row[1:]) for row in rows))
    bottom = top + 32 * len(rows)
    canvas.line(left, top - 6, left, bottom, RULE)
    x, said = left + peak * scale, f"{word} {format_bytes(peak, 'GB', 1)}"
    canvas.line(x, top - 8, x, bottom, OVER, stroke_width=2, data_peak=peak)
    for index, (name, start, end) in enumerate(rows):
        _step(canvas, name, start, end, left, top + 32 * index, scale, index in (0, len(rows) - 1), x)
    half = text_width(said, 12, bold=True) / 2
    place = min(max(x, MARGIN + half), WIDTH - MARGIN - half)
    canvas.text(place, top - 13, said, 12, OVER, text_anchor="middle", font_weight="bold")
    told = "; ".join(_in_words(row, index in (0, len(rows) - 1)) for index, row in enumerate(rows))
    alt = f"{stop(title)} Step by step: {told}. {word.capitalize()}: {format_bytes(peak, 'GB', 1)}."
    end = canvas.note(provenance, bottom + 16)
    return Figure(canvas.svg(end - (2 if provenance else 8), title, alt), alt)


def _step(
    canvas: Canvas, name: str, start: int, end: int, left: float, y: float, scale: float, whole: bool, line: float
) -> None:
    """A whole bar from zero, or a change that begins where the row above ended; the peak's line is at `line`."""
    fill = WHOLE if whole else SHORT if end > start else OVER
    canvas.text(left - 10, y + 16, name, 13, text_anchor="end", font_weight="bold" if whole else None)
    x, width = left + min(start, end) * scale, abs(end - start) * scale
    canvas.rect(x, y, max(width, 1.0), 22, fill, data_from=start, data_to=end)
    if not whole:
        canvas.line(left + end * scale, y, left + end * scale, y + 32, INK, stroke_width=1)
    shown = format_bytes(end, "GB", 1) if whole else signed(end - start, "GB", 1)
    canvas.halo_text(_beside(x + width, shown, 13, line), y + 16, shown, 13, font_weight="bold")


def _in_words(row: tuple[str, int, int], whole: bool) -> str:
    name, start, end = row
    return f"{name} {format_bytes(end, 'GB', 1) if whole else signed(end - start, 'GB', 1)}"


def gap_map(table: Mapping[str, Mapping[str, int]], peak: int, title: str, provenance: str = "") -> Figure:
    """Each calculator's terms as cells, signed GB, the deeper the color the larger the share of the peak.

    `table` maps calculators to signed bytes by term. Raises ValueError without any.
    """
    if not table:
        raise ValueError("no calculator to show")
    canvas, terms = Canvas(), list(next(iter(table.values())))
    left = MARGIN + 12 + max(text_width(name, 13) for name in table)
    width = (WIDTH - MARGIN - left) / (len(terms) + 1)
    top = canvas.title(title) + 52
    for column, name in enumerate([*terms, "all"]):
        for line, words in enumerate(wrap(name, 11, width - 4)):
            canvas.text(left + width * (column + 0.5), top - 34 + 13 * line, words, 11, QUIET, text_anchor="middle")
    for row, (name, found) in enumerate(table.items()):
        y = top + 30 * row
        canvas.text(left - 10, y + 18, name, 13, text_anchor="end")
        for column, size in enumerate([*found.values(), sum(found.values())]):
            _cell(canvas, left + width * column, y, width, size, peak, column == len(terms))
    bottom = top + 30 * len(table)
    told = "; ".join(f"{name}: {_terms_in_words(found)}" for name, found in table.items())
    alt = f"{stop(title)} Signed differences, answer minus the step's peak. {told}."
    end = canvas.note(provenance, bottom + 16)
    return Figure(canvas.svg(end - (2 if provenance else 8), title, alt), alt)


def _terms_in_words(found: Mapping[str, int]) -> str:
    return ", ".join(f"{term} {signed(size, 'GB', 1)}" for term, size in found.items() if size)


def _cell(canvas: Canvas, x: float, y: float, width: float, size: int, peak: int, bold: bool) -> None:
    share = min(1.0, abs(size) / peak)
    fill = OVER if size > 0 else SHORT
    canvas.rect(x + 1, y + 1, width - 2, 28, "#FFFFFF", stroke=GRID, stroke_width=1)
    canvas.rect(x + 1, y + 1, width - 2, 28, fill, fill_opacity=0.6 * share**0.5, data_bytes=size)
    shown = "0" if abs(size) < 5e7 else f"{'+' if size > 0 else '−'}{abs(size) / 1e9:.1f}"
    weight = "bold" if bold else None
    canvas.text(x + width / 2, y + 19, shown, 12, text_anchor="middle", font_weight=weight)
