"""Pictures of lesson 16: a matrix and LoRA's factors, to scale; a code's values under a histogram."""

from collections.abc import Mapping, Sequence

import torch

from ...figures.axes import COLOURS, stop
from ...figures.canvas import INK, MARGIN, QUIET, RULE, Canvas, Figure, number, reflowing, text_width

WEIGHTS = COLOURS["parameters"]  # of all three matrices; the frozen one is hatched


@reflowing
def lora_picture(n_out: int, n_in: int, rank: int) -> Figure:
    """W (n_out, n_in), B (n_out, r) and A (r, n_in), all to one scale."""
    whole = n_out * n_in
    thin = rank * (n_out + n_in)
    learning = f"{100 * thin / whole:.2g} % of its numbers learn"
    title = f"Rank {rank} on a matrix of {n_out:,} × {n_in:,}: {learning}"
    canvas = Canvas()
    one = 180.0 / max(n_out, n_in)  # pixels of a number
    height = n_out * one
    width = n_in * one
    thick = max(2.0, rank * one)
    top = canvas.title(title) + 40
    if canvas.narrow:
        left = (canvas.width - width) / 2
        start = 100.0
    else:
        left = 60.0
        start = left + width + 118
    _matrix(canvas, (left, top, width, height), "W, frozen", f"{whole:,} numbers", frozen=True)
    if canvas.narrow:  # the factors below the matrix
        top += height + 74
    canvas.text(start - 74, top + height / 2 + 8, "+", 28, text_anchor="middle")
    _matrix(canvas, (start, top, thick, height), "B, zero at first", f"{n_out * rank:,} numbers")
    canvas.text(start + thick + 43, top + height / 2 + 8, "·", 28, text_anchor="middle")
    _matrix(canvas, (start + thick + 90, top, width, thick), "A, Gaussian", f"{n_in * rank:,} numbers")
    alt = (
        f"{stop(title)} "
        f"Drawn to scale: the frozen matrix W, hatched, with {whole:,} numbers, plus B times A. "
        "B is a thin column, zero at first; A is a thin row, Gaussian at first. "
        f"Together {thin:,} numbers learn."
    )
    return Figure(canvas.svg(top + height + 40, title, alt), alt)


def _matrix(
    canvas: Canvas, box: tuple[float, float, float, float], name: str, size: str, frozen: bool = False
) -> None:
    x, y, width, height = box
    canvas.rect(*box, "#FFFFFF" if frozen else WEIGHTS, stroke=INK, stroke_width=0.8, data_name=name)
    if frozen:
        canvas.hatch(*box, WEIGHTS, gap=8)
    canvas.text(x + width / 2, y - 10, name, 13, text_anchor="middle", font_weight="bold")
    canvas.text(x + width / 2, y + height + 20, size, 12, QUIET, text_anchor="middle")


@reflowing
def code_picture(
    values: Sequence[float], codes: Mapping[str, Sequence[float]], title: str, provenance: str = ""
) -> Figure:
    """A histogram of `values` between −1 and 1, and under it each code's values as strokes on its axis."""
    canvas = Canvas()
    bins = 48
    bottom = canvas.title(title) + 134
    left = MARGIN + 12 + max(text_width(name, 13) for name in codes)
    room = canvas.width - MARGIN - 20 - left
    found = torch.histc(torch.tensor(values, dtype=torch.float64), bins, -1.0, 1.0)
    for index, size in enumerate((120 * found / found.max()).tolist()):  # the highest bar is 120 pixels high
        canvas.rect(left + room * index / bins, bottom - size, room / bins - 1, size, WEIGHTS)
    canvas.line(left, bottom, left + room, bottom, RULE)
    for row, (name, code) in enumerate(codes.items()):
        y = bottom + 14 + 40 * row
        canvas.text(left - 10, y + 17, name, 13, text_anchor="end")
        for value in code:
            x = left + room * (value + 1) / 2
            canvas.line(x, y, x, y + 24, INK, stroke_width=2.4, data_code=value)
    end = bottom + 14 + 40 * len(codes)
    marks = [(left + room * (tick + 1) / 2, end + 12, number(tick)) for tick in (-1, -0.5, 0, 0.5, 1)]
    for x, y, words in (*marks, (left + room / 2, end + 32, "weight / its block's largest magnitude")):
        canvas.text(x, y, words, 12, QUIET, text_anchor="middle")
    told = "; ".join(f"{name}: {len(code)} values" for name, code in codes.items())
    peaks = "A histogram of weights peaks at zero. Strokes on its axis mark each code's values."
    alt = f"{stop(title)} {peaks} {told}."
    return Figure(canvas.svg(canvas.note(provenance, end + 52), title, alt), alt)
