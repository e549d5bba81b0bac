"""Lesson 03's own drawings: gradients as a histogram with fp16's floor, and the data flow of a 16-bit training step."""

from collections.abc import Sequence

import torch

from course_utils.figures.axes import OVER, stop
from course_utils.figures.canvas import INK, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure
from course_utils.units import percent


def lost_share(gradients: torch.Tensor, scale: float = 1.0) -> float:
    """Part of these gradients, from 0 to 1, that fp16 turns into zero when they are multiplied by `scale` first."""
    return (gradients.mul(scale).half() == 0).float().mean().item()


def histogram_figure(gradients: torch.Tensor, title: str, scale: float = 1.0) -> Figure:
    """How many of `gradients`, times `scale`, have which size, in powers of two; what fp16 makes zero is red."""
    canvas = Canvas()
    top = canvas.title(title) + 44
    bottom = top + 190
    _size_bars(canvas, torch.log2(gradients.abs() * scale).floor(), bottom)
    for power in range(LOWEST + 4, HIGHEST, 8):
        canvas.text(_at(power), bottom + 18, f"2^{power}".replace("-", "−"), 12, QUIET, text_anchor="middle")
        canvas.line(_at(power), bottom, _at(power), bottom + 4, RULE)
    _fp16_limits(canvas, top, bottom)
    canvas.line(LEFT, bottom, RIGHT, bottom, RULE)
    times = f" times {scale:,.0f}" if scale != 1 else ""
    canvas.text((LEFT + RIGHT) / 2, bottom + 38, f"absolute gradients{times}, in powers of two", 12, QUIET,
                text_anchor="middle")  # fmt: skip
    share = percent(lost_share(gradients, scale))
    alt = f"{stop(title)} Histogram: fp16 turns {share} of the gradients{times} into zero."
    return Figure(canvas.svg(bottom + 48, title, alt), alt)


LOWEST, HIGHEST = -44, 18
"""Powers of two that the histogram's axis spans."""

LEFT, RIGHT = float(MARGIN + 8), float(WIDTH - MARGIN - 8)


def _at(power: float) -> float:
    return LEFT + (RIGHT - LEFT) / (HIGHEST - LOWEST) * (power - LOWEST)


def _size_bars(canvas: Canvas, sizes: torch.Tensor, bottom: float) -> None:
    """A bar for each power of two, colored by what fp16 makes of such numbers."""
    counts = {power: int((sizes == power).sum()) for power in range(LOWEST, HIGHEST)}
    for power, count in counts.items():
        height = 180 * count / max(*counts.values(), 1)
        small = OVER if power < -25 else "#8FD0F7" if power < -14 else "#0072B2"
        color = "#E69F00" if power >= 16 else small
        wide = _at(LOWEST + 1) - _at(LOWEST) - 2
        canvas.rect(_at(power) + 1, bottom - height, wide, height, color, f"{count:,} of 2^{power}")


def _fp16_limits(canvas: Canvas, top: float, bottom: float) -> None:
    """Where fp16 begins, where its normal numbers begin, and where it ends."""
    for power in (-25, -14, 16):
        canvas.line(_at(power), top - 14, _at(power), bottom, INK, stroke_width=1.2, stroke_dasharray="5 3")
    limits = {"zero in fp16": (-25, "end", -6), "subnormal": (-19.5, "middle", 0), "normal in fp16": (-14, "start", 6)}
    for name, (power, anchor, aside) in limits.items():
        canvas.text(_at(power) + aside, top - 4, name, 12, text_anchor=anchor)
    canvas.text(_at(16) - 6, top - 20, "infinite above", 12, text_anchor="end")


# -------------------------------------------------------------------------------------------------------- the data flow

HALF, SINGLE = "#D6EEFB", "#FBE3B5"
"""Colors of what is 16-bit and of what is fp32."""


def flow_figure(title: str) -> Figure:
    """One linear layer's training step with bf16 weights, fp32 gradients and fp32 master weights, as boxes and arrows.

    The recipe of Micikevicius et al. 2018, figure 1, with bf16 for fp16 and gradients added up in fp32.
    """
    canvas = Canvas()
    top = canvas.title(title) + 34
    boxes = {
        "x": (20, top, "input x", HALF), "W": (20, top + 80, "weights W", HALF),
        "forward": (215, top + 40, "x·Wᵀ: multiply in bf16, add in fp32", SINGLE),
        "y": (455, top + 40, "output y, rounded", HALF), "dy": (680, top + 40, "gradient dL/dy", HALF),
        "dW product": (455, top + 140, "dyᵀ·x: multiply in bf16, add in fp32", SINGLE),
        "dW": (215, top + 140, "dL/dW, rounded", HALF), "grad": (20, top + 180, "gradients: add up", SINGLE),
        "dx product": (455, top + 210, "dy·W: multiply in bf16, add in fp32", SINGLE),
        "dx": (215, top + 210, "dL/dx, rounded: to the layer below", HALF),
        "adam": (215, top + 290, "Adam: m, v", SINGLE), "master": (455, top + 290, "master weights", SINGLE),
        "cast": (680, top + 290, "round to bf16: W", HALF),
    }  # fmt: skip
    for x, y, words, color in boxes.values():
        _box(canvas, x, y, words, color)
    for path in _arrows(top):
        _arrow(canvas, path)
    y = top - 16
    for x, name, color in ((20, "bf16 in memory", HALF), (160, "fp32, in memory or inside the matrix unit", SINGLE)):
        canvas.rect(x, y - 10, 13, 13, color, stroke=RULE, stroke_width=0.7)
        canvas.text(x + 19, y + 1, name)
    alt = (
        f"{stop(title)} Forward: input x and weights W, both bf16, are multiplied, added up in fp32 and rounded to the "
        "bf16 output y. Backward: the bf16 gradient dL/dy makes two products in the same way, each rounded to bf16. "
        "With x it gives dL/dW, which is added to the fp32 gradients. With W it gives dL/dx, which goes to the layer "
        "below. Adam reads the fp32 gradients, keeps m and v in fp32 and updates the fp32 master weights, which are "
        "rounded to bf16 and become W of the next step."
    )
    return Figure(canvas.svg(top + 368, title, alt), alt)


BOX_WIDTH, BOX_HEIGHT = 170, 44


def _box(canvas: Canvas, x: float, y: float, words: str, color: str) -> None:
    canvas.rect(x, y, BOX_WIDTH, BOX_HEIGHT, color, stroke=RULE, stroke_width=1, rx=5)
    first, _, rest = words.partition(": ") if ": " in words else (words, "", "")
    lines = [first + ":", rest] if rest and len(words) > 24 else [words]
    if len(words) > 24 and not rest:
        head, _, tail = words.partition(", ")
        lines = [head + ",", tail]
    for index, line in enumerate(lines):
        size = 12 if len(line) < 26 else 10
        offset = 27 if len(lines) == 1 else 18 + 16 * index
        canvas.text(x + BOX_WIDTH / 2, y + offset, line, size, text_anchor="middle")


def _arrows(top: float) -> list[Sequence[tuple[float, float]]]:
    """Each arrow as the corners that it passes, its head at the last."""
    return [
        [(190, top + 22), (202, top + 22), (202, top + 54), (213, top + 54)],
        [(190, top + 98), (202, top + 98), (202, top + 70), (213, top + 70)],
        [(385, top + 62), (453, top + 62)],
        [(625, top + 62), (678, top + 62)],
        [(755, top + 84), (755, top + 162), (627, top + 162)],
        [(775, top + 84), (775, top + 232), (627, top + 232)],
        [(190, top + 10), (432, top + 10), (432, top + 116), (540, top + 116), (540, top + 138)],
        [(190, top + 114), (408, top + 114), (408, top + 222), (453, top + 222)],
        [(455, top + 162), (387, top + 162)],
        [(455, top + 240), (387, top + 240)],
        [(215, top + 172), (203, top + 172), (203, top + 202), (192, top + 202)],
        [(105, top + 224), (105, top + 312), (213, top + 312)],
        [(385, top + 312), (453, top + 312)],
        [(625, top + 312), (678, top + 312)],
        [(765, top + 334), (765, top + 354), (8, top + 354), (8, top + 102), (18, top + 102)],
    ]


def _arrow(canvas: Canvas, corners: Sequence[tuple[float, float]]) -> None:
    data = "M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in corners)
    canvas.path(data, stroke=INK, stroke_width=1.3, fill="none")
    (x0, y0), (x, y) = corners[-2], corners[-1]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    back, side = 8, 4
    canvas.path(
        f"M{x:.0f} {y:.0f}L{x - back * dx - side * dy:.0f} {y - back * dy - side * dx:.0f}"
        f"L{x - back * dx + side * dy:.0f} {y - back * dy + side * dx:.0f}Z",
        fill=INK,
    )
