"""Pictures of lesson 10: a server's four steps, a ring at one of its steps, buckets in time, bands."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ...figures import COLOURS, lines
from ...figures.style import MARGIN, SMALL, WIDTH, CourseFigure, bare, look, paper, sheet, value_axis, wrap
from ...palette import INK, QUIET, RULE, ink_on, sentence, stop
from .links import Band

SENT = COLOURS["communication"]
WHOLE = WIDTH - 2 * MARGIN
GREENS = ("#FFFFFF", "#E3F4EC", "#BFE6D5", "#8CCFB4", "#4FAF8A", "#12805C", "#00543B")
"""White for nothing, then darker with each contribution."""
DIGITS = (
    "Each rank began with one digit of its own, 1, 10, 100 and so on: "
    "the digits say whose numbers are in a sum."
)
SERVER_STEPS = (
    ("1 · compute", "each worker computes the gradient of its own batch", "free", "gradients"),
    ("2 · push", "every worker sends its gradient to the server", "free", "free"),
    ("3 · update", "the server averages, and the optimizer steps there", "optimizer_states", "free"),
    ("4 · pull", "every worker fetches the new weights", "free", "free"),
)
"""A name, what happens, and the kinds that color the server and its workers."""


def server_figure(workers: int = 3) -> CourseFigure:
    """A parameter server and two to five workers in four steps."""
    title = f"In two of the four steps, {workers} messages pass through one machine"
    told = "; ".join(f"{name.replace(' · ', ', ')}: {what}" for name, what, _, _ in SERVER_STEPS)
    with look():
        figure = sheet(title, 184)
        for index, (name, what, _, _) in enumerate(SERVER_STEPS):
            ax = figure.place(MARGIN + WHOLE / 4 * index, 24, WHOLE / 4 - 14, 112)
            ax.set_title(name, fontsize=12, pad=8)
            ax.set_xlabel("\n".join(wrap(what, SMALL, WHOLE / 4 - 8)), fontsize=SMALL, loc="left")
            _server_step(ax, index, workers)
    figure.alt = f"{stop(title)} A server above, {workers} workers below. {told}."
    return figure


def _server_step(ax: Axes, index: int, workers: int) -> None:
    """The server at height 1, the workers at 0, and the messages of the step between them."""
    bare(ax)
    ax.set(xlim=(-workers / 2, workers / 2), ylim=(-0.2, 1.2), xticks=[], yticks=[])
    xs = np.arange(workers) - (workers - 1) / 2
    held = [f"G{worker + 1}" if index < 2 else "θ" for worker in range(workers)]
    above, below = (COLOURS[kind] for kind in SERVER_STEPS[index][2:])
    box = {"height": 0.36, "edgecolor": INK}
    server = ax.bar(0, width=0.6 * workers, bottom=0.82, color=above, **box)
    boxes = ax.bar(xs, width=0.9, bottom=-0.18, color=below, **box)
    ax.bar_label(server, ["server"], label_type="center", fontsize=10.5)
    ax.bar_label(boxes, held, label_type="center", fontsize=10.5)
    if index == 1:
        _arrows(ax, xs, 0.22, -0.55 * xs, 0.56, SENT)
    elif index == 3:
        _arrows(ax, 0.45 * xs, 0.78, 0.55 * xs, -0.56, COLOURS["parameters"])


def _arrows(ax: Axes, xs: Any, ys: Any, right: Any, up: Any, color: str) -> None:
    """Arrows that begin at `xs` and `ys`, and go so far right and up."""
    shape = {"units": "inches", "width": 2 / 72, "headwidth": 4.5, "headlength": 5, "headaxislength": 5}
    ends = np.broadcast_arrays(xs, ys, right, up)
    ax.quiver(*ends, angles="xy", scale_units="xy", scale=1, color=color, **shape)


def ring_figure(recorded: Sequence[Sequence[Sequence[int]]], step: int) -> CourseFigure:
    """The numbers in each part of each rank after `step` steps of a ring, and the messages of that step.

    `recorded` has the parts of each rank after each step. ValueError for a step that was not recorded.
    """
    ranks = len(recorded)
    if not 0 <= step < len(recorded[0]):
        raise ValueError(f"step {step}: this ring has steps 0 to {len(recorded[0]) - 1}")
    held = [parts[step] for parts in recorded]
    told = "; ".join(f"rank {rank} holds {sentence(map(str, parts))}" for rank, parts in enumerate(held))
    title = f"Before the first step: {ranks} ranks, each with {ranks} parts of its own"
    # Each rank sends its right neighbor the part that came last; in the first step, its own.
    sent = [(rank - step + 1) % ranks for rank in range(ranks)] if step else []
    if step:
        # Rank 0 began with 1, rank 1 with 10, and so on: a complete sum is a row of ones.
        whole = sum(value == int("1" * ranks) for parts in held for value in parts)
        half = "adding up" if step < ranks else "handing out"
        title = f"Step {step} of {2 * ranks - 2}, {half}: {whole} of {ranks**2} parts are complete sums"
        arrows = (
            f"rank {rank} sends part {part} to rank {(rank + 1) % ranks}" for rank, part in enumerate(sent)
        )
        told = f"{', '.join(arrows)}. Then {told}"
    with look():
        figure = sheet(title, 62 + 36 * ranks)
        ax = figure.place(MARGIN, 22, WHOLE, 36 * ranks)
        _ring_parts(ax, held)
        if sent:  # the last rank's message leaves the picture, and comes in again at the left
            starts = [*(rank + 0.3 for rank in range(ranks)), -0.5]
            lengths = [0.4] * (ranks - 1) + [0.2, 0.2]
            _arrows(ax, starts, [*sent, sent[-1]], lengths, 0, SENT)
    figure.alt = f"{stop(title)} {told[0].upper()}{told[1:]}."
    return figure


def _ring_parts(ax: Axes, held: Sequence[Sequence[int]]) -> None:
    """Each rank's parts below its name, the greener the more ranks have added to it."""
    ranks = len(held)
    bare(ax)
    ax.set(xlim=(-0.5, ranks - 0.5), ylim=(ranks - 0.5, -0.5), yticks=[])
    ax.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], color=INK, fontweight="bold")
    ax.tick_params(labeltop=True, labelbottom=False)
    ax.set_xlabel("\n".join(wrap(DIGITS, 11.5, WHOLE)), loc="left")
    for rank, parts in enumerate(held):
        counts = [str(value).count("1") for value in parts]
        fills = [GREENS[-1] if count == ranks else GREENS[min(count, len(GREENS) - 2)] for count in counts]
        boxes = ax.barh(range(ranks), 0.56, 0.86, rank - 0.28, color=fills, edgecolor=RULE)
        digits = [f"{value:0{ranks}d}" for value in parts]
        labels = ax.bar_label(boxes, digits, label_type="center", fontsize=min(13, 400 / ranks**2))
        for label, fill in zip(labels, fills, strict=True):
            label.set_color(ink_on(fill))


def overlap_figure(steps: Mapping[str, Mapping[str, Any]], title: str, provenance: str = "") -> CourseFigure:
    """Training steps in time, one below the other: forward, backward, and each bucket from ready to reduced.

    `steps` maps names to the steps that `ddp_training` reports.
    """
    high = sum(44 + 15 * len(step["buckets"]) for step in steps.values())
    most = 1000 * max(step["end"] for step in steps.values())
    names = ["\n".join(wrap(name, 12, 96, bold=True)) for name in steps]
    with look():
        figure = sheet(title, high + 54, provenance)
        ax = figure.place(MARGIN + 106, 10, WHOLE - 106 - 56, high)
        ax.set(xlim=(0, most), ylim=(high, 0))
        value_axis(ax, "x", "ms since the step began", 8)
        bare(ax, "bottom")
        tops = [0]
        for step in steps.values():
            tops.append(_one_step(ax, step, tops[-1]))
        ax.set_yticks([top + 12 for top in tops[:-1]], names, fontsize=12, fontweight="bold", color=INK)
    told = "; ".join(f"{name}: {_step_told(step)}" for name, step in steps.items())
    figure.alt = f"{stop(title)} {told[0].upper()}{told[1:]}."
    return figure


def _one_step(ax: Axes, step: Mapping[str, Any], top: int) -> int:
    """Draws forward and backward on one line, buckets below; returns the height below them."""
    spans = [(1000 * bucket["ready"], 1000 * bucket["done"]) for bucket in step["buckets"]]
    forward, end = 1000 * step["forward"], 1000 * step["end"]
    backward = max((ready for ready, _ in spans), default=end) - forward
    fills = [COLOURS["activations"], COLOURS["gradients"]]
    boxes = ax.barh(top + 12, [forward, backward], 24, [0, forward], color=fills)
    parts = zip(("forward", "backward"), (forward, backward), strict=True)
    names = [name if wide > 0.15 * ax.get_xlim()[1] else "" for name, wide in parts]  # as there is room
    ax.bar_label(boxes, names, label_type="center")
    right_of = {"textcoords": "offset points", "va": "center", "bbox": paper(0.5)}
    small = {"fontsize": SMALL, "color": QUIET, "ha": "right"}
    for row, (ready, done) in enumerate(spans):
        y = top + 33 + 15 * row
        ax.barh(y, done - ready, 11, ready, color=SENT, edgecolor=SENT)
        ax.annotate(f"bucket {row + 1}", (ready, y), (-5, 0), **small, **right_of)
    bottom = top + 28 + 15 * len(spans)
    ax.vlines(end, top - 2, bottom, INK, (0, (2, 2)), clip_on=False)
    ax.annotate(f"{end:.0f} ms", (end, top + 12), (6, 0), fontweight="bold", **right_of)
    return bottom + 16


def _step_told(step: Mapping[str, Any]) -> str:
    spans = ", ".join(f"{1000 * b['ready']:.0f} to {1000 * b['done']:.0f}" for b in step["buckets"])
    reduced = f"buckets on their way from {spans} ms" if spans else "nothing exchanged"
    forward, end = 1000 * step["forward"], 1000 * step["end"]
    return f"forward ends at {forward:.0f} ms, backward at {end:.0f} ms, {reduced}"


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
    columns = {name: list(zip(*band.values(), strict=True)) for name, band in bands.items()}
    # A logarithmic axis has no place for 0, where a band may end: raise those ends to the smallest other one.
    positive = [value for low, _, _ in columns.values() for value in low if value > 0]
    floor = min(positive, default=min(dots.values()))
    ranges = {name: ([max(floor, value) for value in low], high) for name, (low, _, high) in columns.items()}
    drawn: Any = {"measured": (list(dots), list(dots.values()))}
    drawn |= {name: (list(bands[name]), expected) for name, (_, expected, _) in columns.items()}
    look = {"log_x": True, "log_y": log_y, "markers": False, "circles": ["measured"], "bands": ranges}
    return lines(drawn, title, xlabel, ylabel, **look, provenance=provenance)
