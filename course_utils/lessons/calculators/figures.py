"""Lesson 18's figures: every calculator's answer next to the others, and one corrected term by term."""

from collections.abc import Collection, Mapping, Sequence
from math import log

from ... import TrainingRun, format_bytes, plus_minus
from ...figures import signed, signed_percent
from ...figures.axes import OVER, draw_swatch, legend, stop
from ...figures.canvas import GRID, INK, MARGIN, QUIET, RULE, Canvas, Figure, reflowing, text_width
from .calculators import BLOCKS, COPIES, OUTSIDE, PASSING, SCORES, STATES, Truth, calculator, gaps

KIND_OF = dict.fromkeys((BLOCKS, SCORES, OUTSIDE), "activations")
KIND_OF |= {STATES: "optimizer_states", COPIES: "weight_copies", PASSING: "temporaries"}
"""The color of each component; what attention's scores take is hatched, too."""

LEGEND = (
    (STATES, "weights, gradients, states"), (BLOCKS, "activations"), (SCORES, "attention scores, s×s"),
    (COPIES, "weight copies"), (PASSING, "temporaries"),
)  # fmt: skip

ROW, BAR = 38, 24
SHORT = "#4B3F8F"  # too little, as `OVER` is too much; neither is the color of a kind of memory

Panel = Mapping[str, Mapping[str, int]]


@reflowing
def side_by_side(
    panels: Mapping[str, Panel],
    title: str,
    peaks: Mapping[str, int] | None = None,
    provenance: str = "",
    word: str = "simulated",
) -> Figure:
    """A panel for each model: a bar for each calculator, cut into components; all panels name the same rows.

    With `peaks`, a step's bytes by panel, a line marks each, and every bar says how far off it is; `word`
    names those bytes.
    """
    rows = list(next(iter(panels.values())))
    canvas = Canvas()
    peaks = peaks or {}
    told = []
    below = _legend(canvas, canvas.title(title) + 8)
    left, top = _named_rows(canvas, rows, below + (56 if peaks else 40), ROW, 17)
    all_width = canvas.width - MARGIN - left
    width = (all_width - 24 * (len(panels) - 1)) / len(panels)
    for index, (name, panel) in enumerate(panels.items()):
        peak = peaks.get(name)
        if canvas.narrow:  # one below the other
            if index:
                _, top = _named_rows(canvas, rows, top + ROW * len(rows) + 44, ROW, 17)
            _panel(canvas, name, panel, left, top, all_width, peak, word)
        else:
            _panel(canvas, name, panel, left + index * (width + 24), top, width, peak, word)
        totals = "; ".join(
            f"{row} {format_bytes(sum(parts.values()), 'GB', 0)}" for row, parts in panel.items()
        )
        said = f" {word.capitalize()}: {format_bytes(peaks[name], 'GB', 0)}." if peaks else ""
        told.append(f"{name}: {totals}.{said}")
    alt = f"{stop(title)} Bars by calculator. {' '.join(told)}"
    return _figure(canvas, top + ROW * len(rows) + 20, title, alt, provenance)


def _figure(canvas: Canvas, y: float, title: str, alt: str, provenance: str) -> Figure:
    bottom = canvas.note(provenance, y) - (2 if provenance else 8)
    return Figure(canvas.svg(bottom, title, alt), alt)


def _named_rows(
    canvas: Canvas, names: Sequence[str], top: float, height: float, down: float, bold: Collection[int] = ()
) -> tuple[float, float]:
    """Writes the rows' names, each `down` pixels below its row's top; returns x and y where rows begin."""
    left = MARGIN + 12 + max(text_width(name, 13) for name in names)
    for index, name in enumerate(names):
        weight = "bold" if index in bold else None
        canvas.text(left - 10, top + height * index + down, name, 13, text_anchor="end", font_weight=weight)
    return left, top


def _legend(canvas: Canvas, y: float) -> float:
    def swatch(x: float, y: float, size: float, component: str) -> None:
        draw_swatch(canvas, x, y, size, size, KIND_OF[component])
        if component == SCORES:
            canvas.hatch(x, y, size, size, "#FFFFFF", 4)

    return legend(canvas, LEGEND, y - 2, swatch) - 6


def _panel(
    canvas: Canvas,
    name: str,
    panel: Panel,
    left: float,
    top: float,
    width: float,
    peak: int | None,
    word: str,
) -> None:
    """One model's bars, each with its total, and the line of its step's peak."""
    totals = {row: sum(parts.values()) for row, parts in panel.items()}
    scale = (width - 78) / max([*totals.values(), peak or 0])
    line = left + (peak or 0) * scale  # where the peak's line is, if there is one
    canvas.text(left, top - (28 if peak else 10), name, 13, font_weight="bold")
    bottom = top + ROW * len(panel) - 6
    canvas.line(left, top - 2, left, bottom, RULE)
    ends = [_bar(canvas, parts, left, top + ROW * index, scale) for index, parts in enumerate(panel.values())]
    if peak:
        said = f"{word} {format_bytes(peak, 'GB', 0)}"
        _peak_line(canvas, line, top - 4, bottom, peak, said, left, left + width, top - 10)
    for index, (row, x) in enumerate(zip(panel, ends, strict=True)):
        y = top + ROW * index
        total = format_bytes(totals[row], "GB", 0)
        at = _label_x(x, total, 12, line)
        canvas.halo_text(at, y + (12 if peak else 17), total, 12, font_weight="bold")
        if peak and totals[row] != peak:
            off = totals[row] - peak
            canvas.halo_text(at, y + 25, signed_percent(off, peak), 11, fill=OVER if off > 0 else SHORT)


def _peak_line(
    canvas: Canvas,
    x: float,
    top: float,
    bottom: float,
    peak: int,
    said: str,
    left: float,
    right: float,
    y: float,
) -> None:
    """The line of a step's peak, and its bytes above it, at y, between left and right."""
    canvas.line(x, top, x, bottom, OVER, stroke_width=2, data_peak=peak)
    half = text_width(said, 12, bold=True) / 2
    middle = min(max(x, left + half), right - half)
    canvas.text(middle, y, said, 12, OVER, text_anchor="middle", font_weight="bold")


def _label_x(end: float, words: str, size: float, line: float) -> float:
    """x of the label of a bar that ends at `end`: right of the peak's line where it would cross that."""
    crosses = end <= line < end + 12 + text_width(words, size, bold=True)
    return line + 7 if crosses else end + 7


def _bar(canvas: Canvas, parts: Mapping[str, int], left: float, y: float, scale: float) -> float:
    """A bar cut into components; returns its right end."""
    x = left
    for component in (STATES, COPIES, BLOCKS, OUTSIDE, SCORES, PASSING):
        size = parts.get(component, 0)
        if size > 0:
            wide = size * scale
            tip = f"{component}: {format_bytes(size, 'GB', 1)}"
            draw_swatch(canvas, x, y, wide, BAR, KIND_OF[component], tip, data_bytes=size)
            if component == SCORES:
                canvas.hatch(x, y, wide, BAR, "#FFFFFF")
            x += wide
    return x


@reflowing
def corrected(
    name: str, terms: Sequence[str], run: TrainingRun, real: Truth, title: str, provenance: str = ""
) -> Figure:
    """One calculator's answer, the chosen terms added back one by one, and the result next to the truth.

    Each row begins where the last one ended. Raises ValueError for an unknown calculator.
    """
    rows = [(f"{name} says", 0, calculator(name).total(run))]
    for term, gap in gaps(name, run, real).items():
        if term in terms:
            rows.append((term, rows[-1][2], rows[-1][2] - gap))
    end_label = "it would say" if len(rows) > 1 else "it says"
    rows.append((end_label, 0, rows[-1][2]))
    canvas = Canvas()
    ends = (0, len(rows) - 1)
    peak = real.peak
    left, top = _named_rows(canvas, [row[0] for row in rows], canvas.title(title) + 34, 32, 16, bold=ends)
    scale = (canvas.width - MARGIN - 120 - left) / max(peak, *(max(row[1:]) for row in rows))
    bottom = top + 32 * len(rows)
    told = []
    canvas.line(left, top - 6, left, bottom, RULE)
    line = left + peak * scale
    said = format_bytes(peak, "GB", 1)
    words = f"{real.word} {said}"
    _peak_line(canvas, line, top - 8, bottom, peak, words, MARGIN, canvas.width - MARGIN, top - 13)
    for index, (label, start, end) in enumerate(rows):
        y = top + 32 * index
        is_whole = index in ends
        if is_whole:
            fill = "#6B6B6B"
        elif end > start:
            fill = SHORT
        else:
            fill = OVER
        x = left + min(start, end) * scale
        width = abs(end - start) * scale
        canvas.rect(x, y, max(width, 1.0), 22, fill, data_from=start, data_to=end)
        if not is_whole:
            canvas.line(left + end * scale, y, left + end * scale, y + 32, INK, stroke_width=1)
        shown = format_bytes(end, "GB", 1) if is_whole else signed(end - start, "GB", 1)
        canvas.halo_text(_label_x(x + width, shown, 13, line), y + 16, shown, 13, font_weight="bold")
        told.append(f"{label} {shown}")
    alt = f"{stop(title)} Step by step: {'; '.join(told)}. {real.word.capitalize()}: {said}."
    return _figure(canvas, bottom + 16, title, alt, provenance)


@reflowing
def gap_map(table: Mapping[str, Mapping[str, int]], peak: int, title: str, provenance: str = "") -> Figure:
    """Each calculator's terms as cells, signed GB, the deeper the color the larger the share of the peak.

    `table` maps calculators to signed bytes by term.
    """
    canvas = Canvas()
    terms = list(next(iter(table.values())))
    told = []
    # Where their upright names end.
    heads = canvas.title(title) + 16 + max(text_width(name, 12) for name in terms)
    height = 50 if canvas.narrow else 30
    if canvas.narrow:  # a calculator's name stands above its row
        left = float(MARGIN)
        top = heads + 26
        for row, name in enumerate(table):
            canvas.text(left, top + height * row - 5, name, 13)
    else:
        left, top = _named_rows(canvas, list(table), heads + 10, height, 18)
    width = (canvas.width - MARGIN - left) / (len(terms) + 1)
    for column, name in enumerate([*terms, "all"]):
        canvas.upright(left + width * (column + 0.5) + 4, heads - text_width(name, 12) / 2, name)
    for row, (name, found) in enumerate(table.items()):
        for column, size in enumerate([*found.values(), sum(found.values())]):
            x = left + width * column
            y = top + height * row
            fill = OVER if size > 0 else SHORT
            cell = (x + 1, y + 1, width - 2, 28)
            deep = 0.5 * min(1.0, abs(size) / peak) ** 0.5
            canvas.rect(*cell, fill, fill_opacity=deep, stroke=GRID, data_bytes=size)
            sign = "+" if size > 0 else "−"
            shown = "0" if abs(size) < 5e7 else f"{sign}{abs(size) / 1e9:.1f}"
            canvas.text(x + width / 2, y + 19, shown, 11, text_anchor="middle")
        sizes = [f"{term} {signed(size, 'GB', 1)}" for term, size in found.items() if size]
        told.append(f"{name}: {', '.join(sizes)}")
    alt = f"{stop(title)} Signed differences, answer minus the step's peak. {'; '.join(told)}."
    return _figure(canvas, top + height * len(table) + 16, title, alt, provenance)


@reflowing
def strips(
    ratios: Mapping[str, Mapping[str, float]], title: str, provenance: str, rings: Collection[str]
) -> Figure:
    """A row of dots for each name, at answer / truth on a logarithmic axis; rings where in `rings`."""
    canvas = Canvas()
    told = []
    every = [ratio for found in ratios.values() for ratio in found.values()]
    left, top = _named_rows(canvas, list(ratios), canvas.title(title) + 8, 26, 18)
    bottom = top + 26 * len(ratios)
    low = min(every)
    high = max(every)
    scale = (canvas.width - MARGIN - 24 - left) / log(high / low)
    marks = [ratio for ratio in (0.2, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0) if low <= ratio <= high]
    place = {ratio: left + 12 + log(ratio / low) * scale for ratio in (*every, *marks)}
    for ratio in marks:
        canvas.line(place[ratio], top, place[ratio], bottom, RULE if ratio == 1 else GRID)
        error = f"{plus_minus(100 * (ratio - 1))} %"
        canvas.text(place[ratio], bottom + 16, error, 12, QUIET, text_anchor="middle")
    for row, (name, found) in enumerate(ratios.items()):
        errors = [100 * (ratio - 1) for ratio in found.values()]
        if errors:
            told.append(f"{name} {plus_minus(min(errors), 1)} to {plus_minus(max(errors), 1)} %")
        else:
            told.append(f"{name} no answer")
        for key, ratio in found.items():
            color = OVER if ratio > 1 else SHORT
            fill = "#FFFFFF" if key in rings else color
            spot = (place[ratio] - 5, top + 26 * row + 8, 10, 10)
            canvas.rect(*spot, fill, key, rx=5, stroke=color, data_ratio=ratio)
    alt = f"{stop(title)} Errors of answers, {'; '.join(told)}."
    return _figure(canvas, bottom + 36, title, alt, provenance)
