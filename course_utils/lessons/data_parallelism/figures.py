"""The picture of lesson 10: a ring at one of its steps."""

from collections.abc import Sequence

from matplotlib import colormaps

from ...figures.style import MARGIN, WIDTH, CourseFigure, bare, look, sheet
from ...palette import COLOURS, INK, RULE, stop

SENT = COLOURS["communication"]
ARROW = {"arrowstyle": "-|>", "color": SENT, "linewidth": 2, "mutation_scale": 14}
WHOLE = WIDTH - 2 * MARGIN


def ring_figure(recorded: Sequence[Sequence[Sequence[int]]], step: int) -> CourseFigure:
    """The numbers in each part of each rank after `step` steps of a ring, and the messages of that step.

    `recorded` has the parts of each rank after each step. ValueError for a step that was not recorded.
    """
    ranks = len(recorded)
    if not 0 <= step < len(recorded[0]):
        raise ValueError(f"step {step}: this ring has steps 0 to {len(recorded[0]) - 1}")
    digits = [[f"{value:0{ranks}d}" for value in parts[step]] for parts in recorded]
    complete = sum(parts.count("1" * ranks) for parts in digits)
    # Each rank sends its right neighbor the part that came last; in the first step, its own.
    sent = [(rank - step + 1) % ranks for rank in range(ranks)]
    title = f"Before the first step: {ranks} ranks, each with {ranks} parts of its own"
    told = "none yet"
    if step:
        half = "adding up" if step < ranks else "handing out"
        title = f"Step {step} of {2 * ranks - 2}, {half}: {complete} of {ranks**2} parts are complete sums"
        told = ", ".join(f"rank {rank} sends part {part}" for rank, part in enumerate(sent))
    names = [f"rank {rank}" for rank in range(ranks)]
    table = [[f"part {row}", *shown] for row, shown in enumerate(zip(*digits, strict=True))]
    about = "Rank 0 began with 1, rank 1 with 10 and so on: the digits say whose numbers are in a sum."
    with look():
        figure = sheet(title, 46 + 36 * ranks)
        ax = figure.place(MARGIN, 22, WHOLE, 36 * ranks)
        ax.set(xlim=(-0.7, ranks - 0.3), ylim=(ranks - 0.5, -0.5), yticks=[])
        ax.set_xticks(range(ranks), names, color=INK, fontweight="bold")
        ax.xaxis.tick_top()
        ax.set_xlabel(about, loc="left")
        bare(ax)
        for rank, parts in enumerate(digits):
            for row, shown in enumerate(parts):
                share = shown.count("1") / ranks
                fill = colormaps["Greens"](0.95 if share == 1 else 0.6 * share)
                style = {"color": "white" if share == 1 else INK, "fontsize": min(13, 400 / ranks**2)}
                ax.barh(row, 0.6, 0.86, rank - 0.3, color=fill, edgecolor=RULE)
                ax.text(rank, row, shown, ha="center", va="center", **style)
        for rank in range(-1, ranks if step else -1):  # the last one's message comes in again at the left
            ax.annotate("", (rank + 0.7, sent[rank]), (rank + 0.3, sent[rank]), arrowprops=ARROW)
    figure.alt = f"{stop(title)} Messages: {told}."
    figure.rows = [["", *names], *table]
    return figure
