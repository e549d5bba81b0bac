"""The picture of lesson 16: a matrix and LoRA's factors, to scale."""

from ...figures.style import MARGIN, WIDTH, CourseFigure, look, sheet
from ...palette import COLOURS, stop
from ..parameters.figures import percent

WEIGHTS = COLOURS["parameters"]


def lora_picture(n_out: int, n_in: int, rank: int) -> CourseFigure:
    """W (n_out, n_in), B (n_out, r) and A (r, n_in), all to one scale."""
    learning = rank * (n_out + n_in)
    share = percent(learning, n_out * n_in)
    title = f"Rank {rank} on a matrix of {n_out:,} × {n_in:,}: {share} of its numbers learn"
    gap = 0.62 * max(n_out, n_in)
    width = 2 * n_in + rank + 2 * gap
    points = min(164, (WIDTH - 2 * MARGIN) / width * n_out)
    matrices = {
        "W, frozen": (0, n_in, n_out),
        "B, zero at first": (n_in + gap, rank, n_out),
        "A, Gaussian": (n_in + rank + 2 * gap, n_in, rank),
    }
    with look():
        figure = sheet(title, 42 + points)
        ax = figure.place(MARGIN, 42, WIDTH - 2 * MARGIN, points)
        ax.set(xlim=(0, width), ylim=(n_out, 0), aspect="equal")
        ax.set_axis_off()
        for name, (left, wide, high) in matrices.items():
            (drawn,) = ax.bar(left, high, wide, align="edge", color=WEIGHTS, edgecolor=WEIGHTS, clip_on=False)
            if name == "W, frozen":
                drawn.set(facecolor="white", hatch="////")
            words = f"{name}\n{wide * high:,} numbers"
            ax.annotate(words, (left + wide / 2, 0), (0, 8), textcoords="offset points", ha="center")
        ax.text(n_in + gap / 2, n_out / 2, "+", ha="center", va="center", fontsize=26)
        ax.text(n_in + rank + 1.5 * gap, n_out / 2, "·", ha="center", va="center", fontsize=26)
    figure.alt = (
        f"{stop(title)} Drawn to scale: the frozen W, hatched, plus B times A, a thin column and a thin row:"
        f" only their {learning:,} numbers learn."
    )
    return figure
