"""Lesson 03's drawings: a histogram of gradients with fp16's floor, and the data flow of a 16-bit step."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch

from ...figures.axes import OVER, legend, stop
from ...figures.canvas import INK, MARGIN, QUIET, RULE, Canvas, Figure, reflowing
from ...units import percent


@reflowing
def histogram_figure(gradients: torch.Tensor, title: str, scale: float = 1.0) -> Figure:
    """Draw a histogram of `gradients` times `scale`, in powers of two; what fp16 makes zero is red."""
    canvas = Canvas()
    right = canvas.width - LEFT

    def at(power: float) -> float:
        return LEFT + (right - LEFT) / (HIGHEST - LOWEST) * (power - LOWEST)

    top = canvas.title(title) + 44
    bottom = top + 190
    sizes = torch.log2(gradients.abs() * scale).floor()
    counts = {power: int((sizes == power).sum()) for power in range(LOWEST, HIGHEST)}
    # what fp16 makes of numbers below each power: zero, subnormal, normal, infinite
    colors = {-25: OVER, -14: "#8FD0F7", 16: "#0072B2", HIGHEST: "#E69F00"}
    for power, count in counts.items():
        height = 180 * count / max(*counts.values(), 1)
        color = next(color for end, color in colors.items() if power < end)
        wide = at(LOWEST + 1) - at(LOWEST) - 2
        canvas.rect(at(power) + 1, bottom - height, wide, height, color, f"{count:,} of 2^{power}")
    for power in range(LOWEST + 4, HIGHEST, 16 if canvas.narrow else 8):
        canvas.text(at(power), bottom + 18, f"2^{power}".replace("-", "−"), 12, QUIET, text_anchor="middle")
        canvas.line(at(power), bottom, at(power), bottom + 4, RULE)
    for power in (-25, -14, 16):
        canvas.line(at(power), top - 14, at(power), bottom, INK, stroke_width=1.2, stroke_dasharray="5 3")
    limits = {
        "zero in fp16": (-25, "end", -6),
        "subnormal": (-19.5, "middle", 0),
        "normal in fp16": (-14, "start", 6),
    }
    for name, (power, anchor, aside) in limits.items():
        y = top - 20 if canvas.narrow and anchor == "middle" else top - 4
        canvas.text(at(power) + aside, y, name, 12, text_anchor=anchor)
    canvas.text(at(16) - 6, top - 20, "infinite above", 12, text_anchor="end")
    canvas.line(LEFT, bottom, right, bottom, RULE)
    times = f" times {scale:,.0f}" if scale != 1 else ""
    axis = f"absolute gradients{times}, in powers of two"
    canvas.text((LEFT + right) / 2, bottom + 38, axis, 12, QUIET, text_anchor="middle")
    share = percent((gradients.mul(scale).half() == 0).float().mean().item())
    alt = f"{stop(title)} Histogram: fp16 turns {share} of the gradients{times} into zero."
    return Figure(canvas.svg(bottom + 48, title, alt), alt)


LOWEST, HIGHEST = -44, 18  # powers of two that the histogram's axis spans
LEFT = float(MARGIN + 8)

HALF, SINGLE = "#D6EEFB", "#FBE3B5"  # colors of what is 16-bit and of what is fp32


@reflowing
def flow_figure(title: str) -> Figure:
    """Draw one linear layer's training step with bf16 weights, fp32 gradients and fp32 master weights.

    The recipe of Micikevicius et al. 2018, figure 1, with bf16 for fp16 and gradients added up in fp32.
    """
    canvas = Canvas()
    colors = {HALF: "bf16 in memory", SINGLE: "fp32, in memory or inside the matrix unit"}

    def swatch(x: float, y: float, size: float, color: str) -> None:
        canvas.rect(x, y, size, size, color, stroke=RULE, stroke_width=0.7)

    y = canvas.title(title) + 6
    top = 10 + legend(canvas, colors.items(), y, swatch)
    for words, form, wide, narrow in FLOW["boxes"]:
        x, y = narrow if canvas.narrow else wide
        _box(canvas, x, top + y, words, HALF if form == "bf16" else SINGLE)
    for corners in FLOW["arrows"]["narrow" if canvas.narrow else "wide"]:
        _arrow(canvas, [(x, top + y) for x, y in corners])
    alt = (
        f"{stop(title)} Forward: input x and weights W, both bf16, are multiplied, summed in fp32 and rounded"
        " to the bf16 output y. Backward: the bf16 gradient dL/dy makes two products in the same way, each"
        " rounded to bf16. With x it gives dL/dW, which is added to the fp32 gradients. With W it gives"
        " dL/dx, which goes to the layer below. Adam reads the fp32 gradients, keeps m and v in fp32 and"
        " updates the fp32 master weights, which are rounded to bf16 and become W of the next step."
    )
    return Figure(canvas.svg(top + (600 if canvas.narrow else 376), title, alt), alt)


BOX_WIDTH, BOX_HEIGHT = 140, 52
FLOW = tomllib.loads(Path(__file__).with_name("flow.toml").read_text(encoding="utf-8"))


def _box(canvas: Canvas, x: float, y: float, words: str, color: str) -> None:
    canvas.rect(x, y, BOX_WIDTH, BOX_HEIGHT, color, stroke=RULE, stroke_width=1, rx=5)
    texts = words.split("\n")
    for index, text in enumerate(texts):
        baseline = y + BOX_HEIGHT / 2 + 4.5 + 15 * (index - (len(texts) - 1) / 2)
        canvas.text(x + BOX_WIDTH / 2, baseline, text, 12, text_anchor="middle")


def _arrow(canvas: Canvas, corners: Sequence[tuple[float, float]]) -> None:
    way = "L".join(f"{x:.0f} {y:.0f}" for x, y in corners)
    canvas.path(f"M{way}", stroke=INK, stroke_width=1.3, fill="none")
    (x0, y0), (x, y) = corners[-2:]
    # the last line's direction, along one axis: each is −1, 0 or 1
    dx = (x > x0) - (x < x0)
    dy = (y > y0) - (y < y0)
    sides = "L".join(f"{x - 8 * dx - side * dy:.0f} {y - 8 * dy - side * dx:.0f}" for side in (4, -4))
    canvas.path(f"M{x:.0f} {y:.0f}L{sides}Z", fill=INK)
