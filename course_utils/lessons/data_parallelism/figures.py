"""Pictures of lesson 10: a server's four steps, a ring at one of its steps, buckets in time, bands."""

from collections.abc import Mapping, Sequence
from math import hypot
from typing import Any

from ...figures import COLOURS, Figure, lines
from ...figures.axes import stop, ticks
from ...figures.canvas import INK, MARGIN, QUIET, RULE, Canvas, ink_on, reflowing, sentence, text_width, wrap
from .links import Band

SENT = COLOURS["communication"]
CELL = 40.0
GREENS = ("#FFFFFF", "#E3F4EC", "#BFE6D5", "#8CCFB4", "#4FAF8A", "#12805C", "#00543B")
"""White for nothing, then darker with each contribution."""
SERVER_STEPS = (
    ("1 · compute", "each worker computes the gradient of its own batch"),
    ("2 · push", "every worker sends its gradient to the server"),
    ("3 · update", "the server averages, and the optimizer steps there"),
    ("4 · pull", "every worker fetches the new weights"),
)


@reflowing
def server_figure(workers: int = 3) -> Figure:
    """A parameter server and two to five workers in four steps."""
    title = f"In two of the four steps, {workers} messages pass through one machine"
    canvas = Canvas()
    columns, step = (2, 238) if canvas.narrow else (4, 0)
    across = (canvas.width - 2 * MARGIN) / columns
    wide = across - 14
    pitch = wide / workers
    side = min(46.0, wide / workers - 8)
    first = canvas.title(title) + 26
    for index, (name, what) in enumerate(SERVER_STEPS):
        x = MARGIN + across * (index % columns)
        top = first + step * (index // columns)
        canvas.text(x, top, name, 13, font_weight="bold")
        for line, part in enumerate(wrap(what, 11, wide)):
            canvas.text(x, top + 184 + 14 * line, part, 11, QUIET)
        center = x + wide / 2
        busy = COLOURS["optimizer_states"] if index == 2 else "#FFFFFF"
        _box(canvas, center, top + 22, 76, "server", busy)
        for worker in range(workers):
            middle = x + pitch * (worker + 0.5)
            holds = f"G{worker + 1}" if index < 2 else "θ"
            fill = COLOURS["gradients"] if index == 0 else "#FFFFFF"
            _box(canvas, middle, top + 130, side, holds, fill)
            below = (middle, top + 126)
            above = (center + (worker - (workers - 1) / 2) * 18, top + 58)
            if index == 1:
                _arrow(canvas, *below, *above, SENT)
            elif index == 3:
                _arrow(canvas, *above, *below, COLOURS["parameters"])
    told = "; ".join(f"{name.replace(' · ', ', ')}: {what}" for name, what in SERVER_STEPS)
    alt = f"{stop(title)} A server above, {workers} workers below. {told}."
    return Figure(canvas.svg(first + step + 222, title, alt), alt)


def _box(canvas: Canvas, center: float, y: float, wide: float, words: str, fill: str) -> None:
    canvas.rect(center - wide / 2, y, wide, 32, fill, stroke=INK, stroke_width=1.2)
    canvas.text(center, y + 21, words, 12, ink_on(fill), text_anchor="middle")


def _arrow(canvas: Canvas, x1: float, y1: float, x2: float, y2: float, color: str) -> None:
    length = hypot(x2 - x1, y2 - y1)
    ux = (x2 - x1) / length
    uy = (y2 - y1) / length
    canvas.line(x1, y1, x2 - 6 * ux, y2 - 6 * uy, color, stroke_width=2.2)
    corners = [(x2, y2), *((x2 - 9 * ux - turn * uy, y2 - 9 * uy + turn * ux) for turn in (4.5, -4.5))]
    canvas.path(f"M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in corners)}Z", fill=color)


@reflowing
def ring_figure(recorded: Sequence[Sequence[Sequence[int]]], step: int) -> Figure:
    """The numbers in each part of each rank after `step` steps of a ring, and the messages of that step.

    `recorded` has the parts of each rank after each step. ValueError for a step that was not recorded.
    """
    ranks = len(recorded)
    last = 2 * (ranks - 1)
    if not 0 <= step < len(recorded[0]):
        raise ValueError(f"step {step}: this ring has steps 0 to {len(recorded[0]) - 1}")
    held = [parts[step] for parts in recorded]
    canvas = Canvas()
    sent: list[tuple[int, int, int]] = []
    title = f"Before the first step: {ranks} ranks, each with {ranks} parts of its own"
    if step:
        # Each rank sends its right neighbor the part that came last; in the first step, its own.
        sent = [(rank, (rank - step + 1) % ranks, (rank + 1) % ranks) for rank in range(ranks)]
        half = "adding up" if step < ranks else "handing out"
        # Rank 0 began with 1, rank 1 with 10, and so on: a complete sum is a row of ones.
        whole = sum(value == int("1" * ranks) for parts in held for value in parts)
        title = f"Step {step} of {last}, {half}: {whole} of {ranks * ranks} parts are complete sums"
    top = canvas.title(title) + 22
    pitch = (canvas.width - 2 * MARGIN) / ranks
    digits = 11 if canvas.narrow else 14
    wide = min(96.0, max(0.54 * pitch, text_width("1" * ranks, digits) + 6))
    _ring_parts(canvas, held, top, pitch, wide, digits)
    _ring_messages(canvas, sent, top, pitch, wide)
    bottom = top + 12 + CELL * ranks
    said = (
        "Each rank began with one digit of its own, 1, 10, 100 and so on: "
        "the digits say whose numbers are in a sum."
    )
    for line in wrap(said, 12, canvas.width - 2 * MARGIN):
        bottom += 18
        canvas.text(MARGIN, bottom + 6, line, 12, QUIET)
    arrows = [f"rank {sender} sends part {part} to rank {receiver}" for sender, part, receiver in sent]
    sums = "; ".join(f"rank {rank} holds {sentence(map(str, parts))}" for rank, parts in enumerate(held))
    told = f"{', '.join(arrows)}. Then {sums}" if arrows else sums
    alt = f"{stop(title)} {told[0].upper()}{told[1:]}."
    return Figure(canvas.svg(bottom + 20, title, alt), alt)


def _ring_parts(
    canvas: Canvas, held: Sequence[Sequence[int]], top: float, pitch: float, wide: float, digits: int
) -> None:
    """Each rank's parts below its name, the greener the more ranks have added to it."""
    ranks = len(held)
    for rank, parts in enumerate(held):
        middle = MARGIN + pitch * (rank + 0.5)
        left = middle - wide / 2
        canvas.text(middle, top, f"rank {rank}", 13, font_weight="bold", text_anchor="middle")
        for part, value in enumerate(parts):
            y = top + 12 + CELL * part
            count = str(value).count("1")
            fill = GREENS[-1] if count == ranks else GREENS[min(count, len(GREENS) - 2)]
            canvas.rect(left, y, wide, CELL - 6, fill, stroke=RULE, stroke_width=1, data_sum=value)
            canvas.text(middle, y + 22, f"{value:0{ranks}d}", digits, ink_on(fill), text_anchor="middle")


def _ring_messages(
    canvas: Canvas, sent: Sequence[tuple[int, int, int]], top: float, pitch: float, wide: float
) -> None:
    """An arrow for each (sender, part, receiver)."""
    for sender, part, receiver in sent:
        y = top + 29 + CELL * part
        left = MARGIN + pitch * (sender + 0.5) + wide / 2 + 3
        right = MARGIN + pitch * (receiver + 0.5) - wide / 2 - 3
        if left > right:  # the last rank's message leaves the picture and comes in again
            _arrow(canvas, left, y, canvas.width - MARGIN + 12, y, SENT)
            left = MARGIN - 12
        _arrow(canvas, left, y, right, y, SENT)


@reflowing
def overlap_figure(steps: Mapping[str, Mapping[str, Any]], title: str, provenance: str = "") -> Figure:
    """Training steps in time, one below the other: forward, backward, and each bucket from ready to reduced.

    `steps` maps names to the steps that `ddp_training` reports.
    """
    canvas = Canvas()
    left = 90.0 if canvas.narrow else 150.0
    right = canvas.width - MARGIN
    above = 20 if canvas.narrow else 0  # where there is no room for a step's name at its left
    y = canvas.title(title) + 30
    most = max(step["end"] for step in steps.values())
    scale = (right - left) / most
    for name, step in steps.items():
        y = _one_step(canvas, name, step, y + above, left, scale)
    for ms in ticks(0, 1000 * most, 4 if canvas.narrow else 8):
        x = left + ms / 1000 * scale
        canvas.line(x, y, x, y + 5, RULE)
        canvas.text(x, y + 20, f"{ms:,g}", 12, QUIET, text_anchor="middle")
    canvas.line(left, y, right, y, RULE)
    canvas.text((left + right) / 2, y + 42, "ms since the step began", 12, QUIET, text_anchor="middle")
    told = "; ".join(f"{name}: {_step_told(step)}" for name, step in steps.items())
    return canvas.figure(y, title, f"{stop(title)} {told[0].upper()}{told[1:]}.", provenance)


def _one_step(
    canvas: Canvas, name: str, step: Mapping[str, Any], y: float, left: float, scale: float
) -> float:
    """Draws forward and backward on one line, buckets below; returns the y below them."""
    computed = max((bucket["ready"] for bucket in step["buckets"]), default=step["end"])
    canvas.text(MARGIN, y - 8 if canvas.narrow else y + 17, name, 13, font_weight="bold")
    for label, start, end, color in (
        ("forward", 0.0, step["forward"], COLOURS["activations"]),
        ("backward", step["forward"], computed, COLOURS["gradients"]),
    ):
        x = left + start * scale
        wide = (end - start) * scale
        canvas.rect(x, y, wide, 24, color)
        if text_width(label, 12) + 6 < wide:
            canvas.text(x + wide / 2, y + 16, label, 12, ink_on(color), text_anchor="middle")
    for row, bucket in enumerate(step["buckets"], 1):
        x = left + bucket["ready"] * scale
        wide = (bucket["done"] - bucket["ready"]) * scale
        canvas.rect(x, y + 15 + 15 * row, max(1.5, wide), 11, SENT)
        canvas.text(x - 5, y + 24.5 + 15 * row, f"bucket {row}", 10.5, QUIET, text_anchor="end")
    end = left + step["end"] * scale
    bottom = y + 34 + 15 * len(step["buckets"])
    canvas.line(end, y - 4, end, bottom - 4, INK, stroke_width=1.5, stroke_dasharray="3 3")
    ms = f"{1000 * step['end']:.0f} ms"
    canvas.halo_text(end - 4, bottom + 8, ms, 12, text_anchor="end", font_weight="bold")
    return bottom + 26


def _step_told(step: Mapping[str, Any]) -> str:
    spans = ", ".join(f"{1000 * b['ready']:.0f} to {1000 * b['done']:.0f}" for b in step["buckets"])
    reduced = f"buckets on their way from {spans} ms" if spans else "nothing exchanged"
    forward = 1000 * step["forward"]
    backward = 1000 * step["end"]
    return f"forward ends at {forward:.0f} ms, backward at {backward:.0f} ms, {reduced}"


def band_figure(
    bands: Mapping[str, Mapping[float, Band]],
    dots: Mapping[float, float],
    title: str,
    xlabel: str,
    ylabel: str,
    *,
    log_y: bool = False,
    provenance: str = "",
) -> Figure:
    """Lines with bands of uncertainty, x on a logarithmic axis, and measured dots."""
    columns = {name: list(zip(*band.values(), strict=True)) for name, band in bands.items()}
    # A logarithmic axis has no place for 0, where a band may end: raise those ends to the smallest other one.
    positive = [value for low, _, _ in columns.values() for value in low if value > 0]
    floor = min(positive, default=min(dots.values()))
    drawn: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    drawn["measured"] = (list(dots), list(dots.values()))
    ranges: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for name, (low, expected, high) in columns.items():
        drawn[name] = (list(bands[name]), expected)
        ranges[name] = ([max(floor, value) for value in low], high)
    look = {"log_x": True, "log_y": log_y, "markers": False, "circles": ["measured"], "bands": ranges}
    return lines(drawn, title, xlabel, ylabel, **look, provenance=provenance)
