"""Lesson 03's figure: gradients next to fp16's limits."""

import torch

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet
from ...palette import INK, OVER, RAISED, stop
from ...units import percent

INSIDE = WIDTH - 2 * MARGIN

POWERS = range(-44, 22)  # of two, which the histogram shows
MADE = {
    "zero in fp16": (-25, OVER),
    "subnormal": (-14, "#8FD0F7"),
    "normal in fp16": (16, "#0072B2"),
    "infinite": (22, "#E69F00"),
}
"""What fp16 makes of numbers below each power of two."""


def histogram_figure(gradients: torch.Tensor, title: str, scale: float = 1.0) -> CourseFigure:
    """A histogram of `gradients` times `scale`, in powers of two; what fp16 makes zero is red."""
    sizes = torch.log2(gradients.abs() * scale).floor()
    counts = {power: int((sizes == power).sum()) for power in POWERS}
    names = {power: f"2{str(power).translate(RAISED)}" for power in POWERS}
    times = f" times {scale:,.0f}" if scale != 1 else ""
    rows = [["size", f"gradients{times}", "in fp16"]]
    with look():
        figure = sheet(title, 254)
        ax = figure.place(MARGIN, 6, INSIDE, 206)
        ax.set(xlim=(POWERS.start, POWERS.stop), ylim=(0, 1.15 * max(1, *counts.values())), yticks=[])
        ax.set_xticks(POWERS[4::8], [names[power] for power in POWERS[4::8]])
        ax.set_xlabel(f"absolute gradients{times}, in powers of two")
        bare(ax, "bottom")
        start = POWERS.start
        for made, (end, color) in MADE.items():
            inside = [power for power in range(start, end) if counts[power]]
            ax.bar(inside, [counts[power] for power in inside], 0.8, align="edge", color=color)
            ax.text((start + end) / 2, 1, made, ha="center", va="top", transform=ax.get_xaxis_transform())
            if start != POWERS.start:
                ax.axvline(start, color=INK, linewidth=1.2, linestyle=(0, (4, 2.5)))
            rows += [[f"from {names[power]}", f"{counts[power]:,}", made] for power in inside]
            start = end
    share = percent((gradients.mul(scale).half() == 0).float().mean().item())
    figure.alt = f"{stop(title)} Histogram: fp16 turns {share} of the gradients{times} into zero."
    figure.rows = rows
    return figure
