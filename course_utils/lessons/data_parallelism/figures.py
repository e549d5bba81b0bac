"""Pictures of lesson 10: a server's four steps, a ring at one of its steps, buckets in time, bands."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...figures import lines
from ...figures.style import MARGIN, SMALL, WIDTH, CourseFigure, bare, legend, look, sheet, value_axis, wrap
from ...palette import COLOURS, INK, RULE, stop
from .links import Band

SENT = COLOURS["communication"]
ARROW = {"arrowstyle": "-|>", "color": SENT, "linewidth": 2, "mutation_scale": 14}
WHOLE = WIDTH - 2 * MARGIN
SERVER_STEPS = (
    ("1 · compute", "each worker computes the gradient of its own batch", "free", "gradients", None),
    ("2 · push", "every worker sends its gradient to the server", "free", "free", "-|>"),
    ("3 · update", "the server averages, and the optimizer steps there", "optimizer_states", "free", None),
    ("4 · pull", "every worker fetches the new weights", "free", "free", "<|-"),
)
"""A name, what happens, the kinds that color the server and its workers, and arrows from them to it."""


def server_figure(workers: int = 3) -> CourseFigure:
    """A parameter server and two to five workers in four steps."""
    title = f"In two of the four steps, {workers} messages pass through one machine"
    xs = [worker - (workers - 1) / 2 for worker in range(workers)]
    with look():
        figure = sheet(title, 184)
        for index, (name, what, above, below, arrow) in enumerate(SERVER_STEPS):
            ax = figure.place(MARGIN + WHOLE / 4 * index, 24, WHOLE / 4 - 14, 112)
            ax.set(xlim=(-workers / 2, workers / 2), ylim=(-0.2, 1.2), xticks=[], yticks=[])
            ax.set_title(name, fontsize=12, pad=8)
            ax.set_xlabel("\n".join(wrap(what, SMALL, WHOLE / 4 - 8)), fontsize=SMALL, loc="left")
            bare(ax)
            held = [f"G{worker + 1}" if index < 2 else "θ" for worker in range(workers)]
            server = ax.bar(0, 0.36, 0.6 * workers, 0.82, color=COLOURS[above], edgecolor=INK)
            boxes = ax.bar(xs, 0.36, 0.9, -0.18, color=COLOURS[below], edgecolor=INK)
            ax.bar_label(server, ["server"], label_type="center", fontsize=10.5)
            ax.bar_label(boxes, held, label_type="center", fontsize=10.5)
            for x in xs if arrow else []:
                ax.annotate("", (0.45 * x, 0.8), (x, 0.2), arrowprops=ARROW | {"arrowstyle": arrow})
    steps = "; ".join(f"{name}: {what}" for name, what, *_ in SERVER_STEPS)
    figure.alt = f"{stop(title)} A server and {workers} workers. {steps}."
    return figure


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


def overlap_figure(steps: Mapping[str, Mapping[str, Any]], title: str, provenance: str = "") -> CourseFigure:
    """Training steps in time, one below the other: forward, backward, and each bucket from ready to reduced.

    `steps` maps names to the steps that `ddp_training` reports.
    """
    *tops, rows = accumulate((3 + len(step["buckets"]) for step in steps.values()), initial=0)
    with look():
        figure = sheet(title, 15 * rows + 70, provenance)
        ax = figure.place(MARGIN + 106, 26, WHOLE - 106 - 56, 15 * rows)
        ax.set(xlim=(0, 1000 * max(step["end"] for step in steps.values())), ylim=(rows - 1, -1))
        value_axis(ax, "x", "ms since the step began", 8)
        bare(ax, "bottom")
        ax.set_yticks(tops, [*steps], fontsize=12, fontweight="bold", color=INK)
        for top, step in zip(tops, steps.values(), strict=True):
            _one_step(ax, step, top)
        patches = [Patch(color=COLOURS[kind]) for kind in ("activations", "gradients", "communication")]
        legend(ax, patches, ["forward", "backward", "bucket, ready to reduced"])
    told = "; ".join(f"{name}: {1000 * step['end']:.0f} ms" for name, step in steps.items())
    figure.alt = f"{stop(title)} Forward, backward and buckets in time. Steps end, {told}."
    return figure


def _one_step(ax: Axes, step: Mapping[str, Any], top: int) -> None:
    """Forward and backward on one line, buckets below."""
    forward, end = 1000 * step["forward"], 1000 * step["end"]
    ready, done = ([1000 * bucket[when] for bucket in step["buckets"]] for when in ("ready", "done"))
    backward = max(ready, default=end) - forward
    ax.barh(top, forward, 1.6, color=COLOURS["activations"])
    ax.barh(top, backward, 1.6, forward, color=COLOURS["gradients"])
    ax.barh(top + 1.4 + np.arange(len(ready)), np.subtract(done, ready), 0.75, ready, color=SENT)
    ax.vlines(end, top - 0.9, top + 1 + len(ready), INK, (0, (2, 2)), clip_on=False)
    place = {"textcoords": "offset points", "va": "center", "fontweight": "bold"}
    ax.annotate(f"{end:.0f} ms", (end, top), (6, 0), **place)


def band_figure(
    bands: Mapping[str, Mapping[float, Band]],
    dots: Mapping[float, float],
    title: str,
    xlabel: str,
    ylabel: str,
    *,
    log_y: bool = False,
    provenance: str = "",
) -> CourseFigure:
    """Lines with bands of uncertainty, x on a logarithmic axis, and measured dots."""
    # A logarithmic axis has no place for 0, where a band may end: raise those ends to the smallest other one.
    positive = [low for band in bands.values() for low, _, _ in band.values() if low > 0]
    floor = min(positive, default=min(dots.values()))
    series: Any = {"measured": (list(dots), list(dots.values()))}
    ranges = {}
    for name, band in bands.items():
        low, expected, high = zip(*band.values(), strict=True)
        series[name] = (list(band), expected)
        ranges[name] = ([max(floor, value) for value in low], high)
    choices: Any = {"log_x": True, "log_y": log_y, "markers": False, "circles": ["measured"]}
    return lines(series, title, xlabel, ylabel, bands=ranges, provenance=provenance, **choices)
