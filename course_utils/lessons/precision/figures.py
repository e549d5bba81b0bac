"""Lesson 03's drawings: a number's bits, gradients next to fp16's limits, a 16-bit step's data flow."""

from collections.abc import Mapping

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet
from ...palette import INK, OVER, RAISED, RULE, ink_on, stop
from ...units import percent
from .number_formats import EXPONENT, FORMATS, MANTISSA, SIGN, UNUSED, encode, field_color, rounded, spelled

INSIDE = WIDTH - 2 * MARGIN
FIELDS = {
    "sign": SIGN,
    "exponent: range": EXPONENT,
    "mantissa: precision": MANTISSA,
    "stored, not read": UNUSED,
}


def bits_figure(value: float, title: str) -> CourseFigure:
    """`value` in each format, a row of bits each, with the number that is really stored."""
    with look():
        figure = sheet(title, 24 + 56 * len(FORMATS))
        ax = figure.place(MARGIN, 24, INSIDE, 56 * len(FORMATS))
        ax.set(xlim=(0, 32), ylim=(len(FORMATS), 0), xticks=[], yticks=[])
        bare(ax)
        _legend(ax, FIELDS)
        stored = {name: spelled(rounded(name, value), 10) for name in FORMATS}  # fp32's tenth is not 0.1
        for row, (name, form) in enumerate(FORMATS.items()):
            ax.text(0, row + 0.34, name, fontsize=12.5, fontweight="bold")
            ax.text(5, row + 0.34, stored[name], fontsize=12.5)
            colors = [field_color(form, index) for index in range(8 * form.bytes)]
            cells = [(index, 1) for index in range(len(colors))]
            ax.broken_barh(cells, (row + 0.44, 0.5), facecolors=colors, edgecolor="white", linewidth=1)
            for index, bit in enumerate(f"{encode(form, value):0{form.bits}b}"):
                place = {"ha": "center", "va": "center", "fontsize": 12.5}
                ax.text(index + 0.5, row + 0.69, bit, color=ink_on(colors[index]), **place)
    told = "; ".join(f"{name} holds {number}" for name, number in stored.items())
    figure.alt = f"{stop(title)} Bits of {spelled(value)}, row by row: {told}."
    return figure


def _legend(ax: Axes, colors: Mapping[str, str]) -> None:
    """All names in one row above the drawing."""
    swatches = [Patch(facecolor=color, edgecolor=RULE) for color in colors.values()]
    ax.legend(swatches, [*colors], ncols=len(colors), loc="lower left", bbox_to_anchor=(0, 1.02))


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
    counts = [int((sizes == power).sum()) for power in POWERS]
    made = [next(name for name, (end, _) in MADE.items() if power < end) for power in POWERS]
    times = f" times {scale:,.0f}" if scale != 1 else ""
    with look():
        figure = sheet(title, 254)
        ax = figure.place(MARGIN, 6, INSIDE, 206)
        ax.bar(POWERS, counts, 0.8, align="edge", color=[MADE[name][1] for name in made])
        ax.set(xlim=(POWERS.start, POWERS.stop), ylim=(0, 1.15 * max(*counts, 1)), yticks=[])
        ax.set_xticks(POWERS[4::8], [_power_of_two(power) for power in POWERS[4::8]])
        ax.set_xlabel(f"absolute gradients{times}, in powers of two")
        bare(ax, "bottom")
        ax.tick_params(pad=5)
        start = POWERS.start
        for name, (end, _) in MADE.items():
            middle = (start + end) / 2
            ax.text(middle, 1, name, ha="center", va="top", transform=ax.get_xaxis_transform())
            if start != POWERS.start:
                ax.axvline(start, color=INK, linewidth=1.2, linestyle=(0, (4, 2.5)))
            start = end
    share = percent((gradients.mul(scale).half() == 0).float().mean().item())
    figure.alt = f"{stop(title)} Histogram: fp16 turns {share} of the gradients{times} into zero."
    rows = zip(POWERS, counts, made, strict=True)
    numbers = [[f"from {_power_of_two(power)}", f"{count:,}", name] for power, count, name in rows if count]
    figure.rows = [["size", f"gradients{times}", "in fp16"], *numbers]
    return figure


def _power_of_two(power: int) -> str:
    return f"2{str(power).translate(RAISED)}"


HALF, SINGLE = "#D6EEFB", "#FBE3B5"  # colors of what is 16-bit and of what is fp32
ADDED = "multiply in bf16,\nadd in fp32"
BOXES = {
    "x": (0, 0, HALF, "input x"),
    "xW": (1, 0, SINGLE, f"x·Wᵀ:\n{ADDED}"),
    "W": (2, 0, HALF, "weights W"),
    "y": (1, 1, HALF, "output y, rounded"),
    "dyx": (0, 2, SINGLE, f"dyᵀ·x:\n{ADDED}"),
    "dy": (1, 2, HALF, "gradient dL/dy"),
    "dyW": (2, 2, SINGLE, f"dy·W:\n{ADDED}"),
    "dW": (0, 3, HALF, "dL/dW, rounded"),
    "dx": (1, 3, HALF, "dL/dx, rounded:\nto the layer below"),
    "rounded": (2, 3, HALF, "round to bf16: W"),
    "sum": (0, 4, SINGLE, "gradients: add up"),
    "Adam": (1, 4, SINGLE, "Adam: m, v"),
    "masters": (2, 4, SINGLE, "master weights"),
}
"""Column, row, color and words of each box."""
ARROWS = (
    "x > xW", "W > xW", "xW > y", "y > dy", "dy > dyx", "x > dyx", "dy > dyW", "W > dyW", "dyx > dW",
    "dyW > dx", "dW > sum", "sum > Adam", "Adam > masters", "masters > rounded", "rounded > W",
)  # fmt: skip


def flow_figure(title: str) -> CourseFigure:
    """One linear layer's training step with bf16 weights, fp32 gradients and fp32 master weights.

    The recipe of Micikevicius et al. 2018, figure 1, with bf16 for fp16 and gradients added up in fp32.
    """
    with look():
        figure = sheet(title, 386)
        ax = figure.place(MARGIN, 24, INSIDE, 362)
        ax.set(xlim=(0, INSIDE), ylim=(362, 0), xticks=[], yticks=[])
        bare(ax)
        _legend(ax, {"bf16 in memory": HALF, "fp32, in memory or inside the matrix unit": SINGLE})
        boxes, centers = {}, {}
        for name, (column, row, color, words) in BOXES.items():
            x, y = centers[name] = (69 + 185 * column, 29 + 76 * row)
            shape = FancyBboxPatch((x - 64, y - 24), 128, 48, "round,pad=4", facecolor=color, edgecolor=RULE)
            boxes[name] = ax.add_patch(shape)
            ax.text(x, y, words, ha="center", va="center", fontsize=11, linespacing=1.1)
        for start, end in (arrow.split(" > ") for arrow in ARROWS):
            way = "bar,fraction=0.36" if start == "rounded" else "arc3"  # around the boxes between
            style = {"arrowstyle": "-|>", "mutation_scale": 13, "color": INK, "linewidth": 1.3}
            style |= {"patchA": boxes[start], "patchB": boxes[end], "shrinkA": 0, "shrinkB": 1}
            ax.annotate("", centers[end], centers[start], arrowprops={"connectionstyle": way, **style})
    figure.alt = (
        f"{stop(title)} Forward: input x and weights W, both bf16, are multiplied, summed in fp32 and rounded"
        " to the bf16 output y. Backward: the bf16 gradient dL/dy makes two products in the same way, each"
        " rounded to bf16. With x it gives dL/dW, which is added to the fp32 gradients. With W it gives"
        " dL/dx, which goes to the layer below. Adam reads the fp32 gradients, keeps m and v in fp32 and"
        " updates the fp32 master weights, which are rounded to bf16 and become W of the next step."
    )
    return figure
