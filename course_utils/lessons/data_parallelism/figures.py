"""Pictures of lesson 08: a server's four steps, a ring at one of its steps, buckets in time, a model and its band."""

from collections.abc import Callable, Mapping, Sequence
from math import hypot, log10
from typing import Any

from course_utils.figures.axes import COLOURS, stop
from course_utils.figures.canvas import (
    GRID,
    INK,
    MARGIN,
    QUIET,
    RULE,
    WIDTH,
    Canvas,
    Figure,
    ink_on,
    number,
    sentence,
    spread,
    text_width,
    ticks,
    wrap,
)

from .links import Band

SENT = COLOURS["communication"]
GREENS = ("#FFFFFF", "#E3F4EC", "#BFE6D5", "#8CCFB4", "#4FAF8A", "#12805C", "#00543B")
"""White for nothing, then darker with each contribution."""

# ---------------------------------------------------------------------------------------------- the parameter server

SERVER_STEPS = (
    ("1 · compute", "each worker computes the gradient of its own batch"),
    ("2 · push", "every worker sends its gradient to the server"),
    ("3 · update", "the server averages, and the optimizer steps there"),
    ("4 · pull", "every worker fetches the new weights"),
)


def server_figure(workers: int = 3) -> Figure:
    """A parameter server and its workers in four steps. ValueError for a number of workers that no picture holds."""
    if not 2 <= workers <= 5:
        raise ValueError(f"{workers} workers: the picture holds 2 to 5")
    title = f"Four steps, and in two of them {workers} messages pass through one machine"
    canvas, wide = Canvas(), (WIDTH - 2 * MARGIN) / 4
    top = canvas.title(title) + 26
    for index, (name, what) in enumerate(SERVER_STEPS):
        x = MARGIN + wide * index
        canvas.text(x, top, name, 13, font_weight="bold")
        for line, part in enumerate(wrap(what, 11, wide - 14)):
            canvas.text(x, top + 184 + 14 * line, part, 11, QUIET)
        _server_and_workers(canvas, x, top, wide - 14, index, workers)
    told = "; ".join(f"{name.replace(' · ', ', ')}: {what}" for name, what in SERVER_STEPS)
    alt = f"{stop(title)} A server above, {workers} workers below. {told[0].upper()}{told[1:]}."
    return Figure(canvas.svg(top + 222, title, alt), alt)


def _server_and_workers(canvas: Canvas, x: float, y: float, wide: float, index: int, workers: int) -> None:
    center, pitch, side = x + wide / 2, wide / workers, min(46.0, wide / workers - 8)
    fill = COLOURS["optimizer_states"] if index == 2 else "#FFFFFF"
    canvas.rect(center - 38, y + 22, 76, 32, fill, stroke=INK, stroke_width=1.2)
    canvas.text(center, y + 43, "server", 12, ink_on(fill), text_anchor="middle")
    for worker in range(workers):
        middle = x + pitch * (worker + 0.5)
        busy = COLOURS["gradients"] if index == 0 else "#FFFFFF"
        canvas.rect(middle - side / 2, y + 130, side, 32, busy, stroke=INK, stroke_width=1.2)
        canvas.text(middle, y + 151, f"G{worker + 1}" if index < 2 else "θ", 12, text_anchor="middle")
        below, above = (middle, y + 126), (center + (worker - (workers - 1) / 2) * 18, y + 58)
        if index == 1:
            _arrow(canvas, *below, *above, COLOURS["communication"])
        elif index == 3:
            _arrow(canvas, *above, *below, COLOURS["parameters"])


def _arrow(canvas: Canvas, x1: float, y1: float, x2: float, y2: float, color: str) -> None:
    length = hypot(x2 - x1, y2 - y1)
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    canvas.line(x1, y1, x2 - 6 * ux, y2 - 6 * uy, color, stroke_width=2.2)
    sides = [(x2 - 9 * ux - turn * uy, y2 - 9 * uy + turn * ux) for turn in (4.5, -4.5)]
    canvas.path(f"{_joined([(x2, y2), *sides])}Z", fill=color)


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _x_axis(
    canvas: Canvas,
    values: Sequence[float],
    x: Callable[[float], float],
    ends: tuple[float, float],
    y: float,
    label: str,
) -> None:
    """A rule at `y` with these values; `x` maps them to pixels."""
    for value in values:
        canvas.line(x(value), y, x(value), y + 5, RULE)
        canvas.text(x(value), y + 20, number(value), 12, QUIET, text_anchor="middle")
    canvas.line(ends[0], y, ends[1], y, RULE)
    canvas.text(sum(ends) / 2, y + 42, label, 12, QUIET, text_anchor="middle")


# ------------------------------------------------------------------------------------------------------------ the ring

CELL = 40.0


def ring_figure(found: Sequence[Mapping[str, Any]], step: int) -> Figure:
    """The numbers in each part of each rank after `step` steps of a recorded ring, and the messages of that step.

    `found` is the ranks' report by `collectives`. ValueError for a step that was not recorded.
    """
    ranks, last = len(found), 2 * (len(found) - 1)
    if not 0 <= step <= last:
        raise ValueError(f"step {step}: this ring has steps 0 to {last}")
    held = [one["parts"][step] for one in found]
    sent = [message for one in found for message in one["steps"] if message["step"] == step]
    title, canvas = f"Before the first step: {ranks} ranks, each with {ranks} parts of its own", Canvas()
    if step:
        half = "adding up" if step < ranks else "handing out"
        whole = sum(value == int("1" * ranks) for parts in held for value in parts)
        title = f"Step {step} of {last}, {half}: {whole} of {ranks * ranks} parts are complete sums"
    top = canvas.title(title) + 22
    pitch, wide = (WIDTH - 2 * MARGIN) / ranks, min(96.0, 0.52 * (WIDTH - 2 * MARGIN) / ranks)
    for rank, parts in enumerate(held):
        x = MARGIN + pitch * (rank + 0.5) - wide / 2
        canvas.text(x + wide / 2, top, f"rank {rank}", 13, font_weight="bold", text_anchor="middle")
        for part, value in enumerate(parts):
            _part(canvas, x, top + 12 + CELL * part, wide, value, ranks)
    for message in sent:
        _message(canvas, message, top, pitch, wide)
    bottom = top + 12 + CELL * ranks
    canvas.text(MARGIN, bottom + 24, "Each rank began with one digit of its own, 1, 10, 100 and so on: the digits say "
                "whose numbers are in a sum.", 12, QUIET)  # fmt: skip
    arrows = ", ".join(f"rank {m['sender']} sends part {m['chunk']} to rank {m['receiver']}" for m in sent)
    sums = "; ".join(f"rank {rank} holds {sentence(map(str, parts))}" for rank, parts in enumerate(held))
    alt = f"{stop(title)} R{arrows[1:]}. Then {sums}." if arrows else f"{stop(title)} R{sums[1:]}."
    return Figure(canvas.svg(bottom + 38, title, alt), alt)


def _part(canvas: Canvas, x: float, y: float, wide: float, value: int, ranks: int) -> None:
    count = str(value).count("1")
    fill = GREENS[-1] if count == ranks else GREENS[min(count, len(GREENS) - 2)]
    canvas.rect(x, y, wide, CELL - 6, fill, stroke=RULE, stroke_width=1, data_sum=value)
    canvas.text(x + wide / 2, y + 22, f"{value:0{ranks}d}", 14, ink_on(fill), text_anchor="middle")


def _message(canvas: Canvas, message: Mapping[str, Any], top: float, pitch: float, wide: float) -> None:
    """An arrow from the sender's part to the same part of its right neighbor; the last rank's leaves and comes in."""
    y = top + 12 + CELL * message["chunk"] + 17
    left = MARGIN + pitch * (message["sender"] + 0.5) + wide / 2 + 3
    right = MARGIN + pitch * (message["receiver"] + 0.5) - wide / 2 - 3
    if message["receiver"] > message["sender"]:
        _arrow(canvas, left, y, right, y, SENT)
    else:
        _arrow(canvas, left, y, WIDTH - MARGIN + 12, y, SENT)
        _arrow(canvas, MARGIN - 12, y, right, y, SENT)


# --------------------------------------------------------------------------------------------------- buckets in time


def hidden_part(step: Mapping[str, Any]) -> float:
    """The part of a step's transfers, in time, that ran before backward had computed its last gradient."""
    buckets = step["buckets"]
    computed = max(bucket["ready"] for bucket in buckets)
    whole = sum(bucket["done"] - bucket["ready"] for bucket in buckets)
    late = sum(bucket["done"] - max(computed, bucket["ready"]) for bucket in buckets if bucket["done"] > computed)
    return 1 - late / whole


def overlap_figure(steps: Mapping[str, Mapping[str, Any]], title: str, provenance: str = "") -> Figure:
    """Training steps in time, one below the other: forward, backward, and each bucket from ready to reduced.

    `steps` maps names to the steps that `ddp_training` reports. ValueError without any.
    """
    if not steps:
        raise ValueError("a picture of steps needs at least one")
    canvas, left, right = Canvas(), 150.0, WIDTH - MARGIN
    y, most = canvas.title(title) + 30, max(step["end"] for step in steps.values())
    scale = (right - left) / most
    for name, step in steps.items():
        y = _one_step(canvas, name, step, y, left, scale)
    milliseconds = ticks(0, 1000 * most, 8)
    _x_axis(canvas, milliseconds, lambda ms: left + ms / 1000 * scale, (left, right), y, "ms since the step began")
    told = "; ".join(f"{name}: {_step_told(step)}" for name, step in steps.items())
    return canvas.figure(y, title, f"{stop(title)} {told[0].upper()}{told[1:]}.", provenance)


def _one_step(canvas: Canvas, name: str, step: Mapping[str, Any], y: float, left: float, scale: float) -> float:
    """Forward and backward on one line, buckets below; returns the y below them."""
    computed = max((bucket["ready"] for bucket in step["buckets"]), default=step["end"])
    canvas.text(MARGIN, y + 17, name, 13, font_weight="bold")
    for label, start, end, color in (
        ("forward", 0.0, step["forward"], COLOURS["activations"]),
        ("backward", step["forward"], computed, COLOURS["gradients"]),
    ):
        x, wide = left + start * scale, (end - start) * scale
        canvas.rect(x, y, wide, 24, color, f"{label}: {1000 * (end - start):.1f} ms")
        if text_width(label, 12) + 6 < wide:
            canvas.text(x + wide / 2, y + 16, label, 12, ink_on(color), text_anchor="middle")
    for row, bucket in enumerate(step["buckets"]):
        x, wide = left + bucket["ready"] * scale, max(1.5, (bucket["done"] - bucket["ready"]) * scale)
        tip = f"bucket {row + 1}: {bucket['size']:,} bytes, {1000 * (bucket['done'] - bucket['ready']):.1f} ms"
        canvas.rect(x, y + 30 + 15 * row, wide, 11, SENT, tip)
        canvas.text(x - 5, y + 39.5 + 15 * row, f"bucket {row + 1}", 10.5, QUIET, text_anchor="end")
    end = left + step["end"] * scale
    bottom = y + 34 + 15 * len(step["buckets"])
    canvas.line(end, y - 4, end, bottom - 4, INK, stroke_width=1.5, stroke_dasharray="3 3")
    canvas.halo_text(end - 4, bottom + 8, f"{1000 * step['end']:.0f} ms", 12, text_anchor="end", font_weight="bold")
    return bottom + 26


def _step_told(step: Mapping[str, Any]) -> str:
    forward, end = 1000 * step["forward"], 1000 * step["end"]
    spans = ", ".join(f"{1000 * b['ready']:.0f} to {1000 * b['done']:.0f}" for b in step["buckets"])
    reduced = f", buckets on their way from {spans} ms" if spans else ", nothing exchanged"
    return f"forward ends at {forward:.0f} ms, backward at {end:.0f} ms{reduced}"


# ------------------------------------------------------------------------------------------------- a model and its band

BANDS = ("#0072B2", "#B34700")


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
    """Lines with bands of uncertainty, x on a logarithmic axis, and measured dots. ValueError without a line."""
    if not bands:
        raise ValueError("a picture of bands needs at least one")
    canvas, left, right = Canvas(), 78.0, WIDTH - 190.0
    top = canvas.title(title) + 34
    bottom = top + 270
    xs = [x for band in bands.values() for x in band]
    ys = [y for band in bands.values() for low, _, high in band.values() for y in (low, high)] + list(dots.values())
    first, last, floor, most = min(xs), max(xs), min(y for y in ys if y > 0) if log_y else 0.0, max(ys)

    def x_of(value: float) -> float:
        return left + (right - left) * log10(value / first) / log10(last / first)

    def y_of(value: float) -> float:
        share = log10(max(value, floor) / floor) / log10(most / floor) if log_y else value / most
        return bottom - (bottom - top) * share

    tens = [10.0**power for power in range(-9, 13)]
    for value in tens if log_y else ticks(0, most, 5):
        if floor <= value <= most:
            canvas.line(left, y_of(value), right, y_of(value), GRID)
            canvas.text(left - 8, y_of(value) + 4, number(value), 12, QUIET, text_anchor="end")
    _x_axis(canvas, [value for value in tens if first <= value <= last], x_of, (left, right), bottom, xlabel)
    canvas.text(MARGIN, top - 14, ylabel, 12, QUIET)
    ends = [list(band.items())[-1] for band in bands.values()]
    heights = spread([y_of(value) for _, (_, value, _) in ends], 16, top, bottom)  # names do not overlap
    for index, (name, band) in enumerate(bands.items()):
        low, middle, high = ([(x_of(x), y_of(three[which])) for x, three in band.items()] for which in range(3))
        color = BANDS[index % 2]
        canvas.path(_joined([*low, *reversed(high)]) + "Z", fill=color, fill_opacity=0.18)
        canvas.path(_joined(middle), fill="none", stroke=color, stroke_width=2.2)
        x, y = x_of(ends[index][0]) + 8, heights[index] + 4
        canvas.halo_text(x, y, name, 12.5, fill=color, font_weight="bold")
    for value, measured in dots.items():
        canvas.rect(x_of(value) - 4.5, y_of(measured) - 4.5, 9, 9, INK, rx=4.5, data_measured=measured)
    told = "; ".join(
        f"{name} reaches {value:.3g}, between {low:.3g} and {high:.3g}, at {number(round(x))}"
        for name, (x, (low, value, high)) in zip(bands, ends, strict=True)
    )
    seen = f" Measured: {', '.join(f'{y:.3g} at {number(x)}' for x, y in dots.items())}." if dots else ""
    return canvas.figure(bottom, title, f"{stop(title)} Shown is {ylabel} against {xlabel}: {told}.{seen}", provenance)
