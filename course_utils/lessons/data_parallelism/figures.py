"""Pictures of lesson 08: a server's four steps, a ring at one of its steps, buckets in time, a model and its band."""

from collections.abc import Mapping, Sequence
from math import log10
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
    for index in range(len(SERVER_STEPS)):
        _server_panel(canvas, MARGIN + wide * index, top, wide - 14, index, workers)
    told = "; ".join(f"{name.replace(' · ', ', ')}: {what}" for name, what in SERVER_STEPS)
    alt = f"{stop(title)} A server above, {workers} workers below. {told[0].upper()}{told[1:]}."
    return Figure(canvas.svg(top + 222, title, alt), alt)


def _server_panel(canvas: Canvas, x: float, y: float, wide: float, index: int, workers: int) -> None:
    name, what = SERVER_STEPS[index]
    canvas.text(x, y, name, 13, font_weight="bold")
    for line, part in enumerate(wrap(what, 11, wide)):
        canvas.text(x, y + 184 + 14 * line, part, 11, QUIET)
    center, pitch, side = x + wide / 2, wide / workers, min(46.0, wide / workers - 8)
    fill = COLOURS["optimizer_states"] if index == 2 else "#FFFFFF"
    canvas.rect(center - 38, y + 22, 76, 32, fill, stroke=INK, stroke_width=1.2)
    canvas.text(center, y + 43, "server", 12, ink_on(fill), text_anchor="middle")
    for worker in range(workers):
        middle = x + pitch * (worker + 0.5)
        busy = COLOURS["gradients"] if index == 0 else "#FFFFFF"
        canvas.rect(middle - side / 2, y + 130, side, 32, busy, stroke=INK, stroke_width=1.2)
        canvas.text(middle, y + 151, f"G{worker + 1}" if index < 2 else "θ", 12, text_anchor="middle")
        ends = (middle, y + 126), (center + (worker - (workers - 1) / 2) * 18, y + 58)
        if index == 1:
            _arrow(canvas, *ends[0], *ends[1], COLOURS["communication"])
        elif index == 3:
            _arrow(canvas, *ends[1], *ends[0], COLOURS["parameters"])


def _arrow(canvas: Canvas, x1: float, y1: float, x2: float, y2: float, color: str) -> None:
    """A line with a head at its end."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    canvas.line(x1, y1, x2 - 6 * ux, y2 - 6 * uy, color, stroke_width=2.2)
    corners = [
        (x2, y2),
        (x2 - 9 * ux - 4.5 * uy, y2 - 9 * uy + 4.5 * ux),
        (x2 - 9 * ux + 4.5 * uy, y2 - 9 * uy - 4.5 * ux),
    ]
    canvas.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners) + "Z", fill=color)


# ------------------------------------------------------------------------------------------------------------ the ring

CELL = 40.0


def ring_figure(found: Sequence[Mapping[str, Any]], step: int) -> Figure:
    """What each part of each rank holds after `step` steps of a recorded ring, and the messages of that step.

    `found` is what the ranks of `lessons.collectives` report. ValueError for a step that was not recorded.
    """
    ranks = len(found)
    last = 2 * (ranks - 1)
    if not 0 <= step <= last:
        raise ValueError(f"step {step}: this ring has steps 0 to {last}")
    title, canvas = ring_title(found, step), Canvas()
    top = canvas.title(title) + 22
    pitch, wide = (WIDTH - 2 * MARGIN) / ranks, min(96.0, 0.52 * (WIDTH - 2 * MARGIN) / ranks)
    for rank, one in enumerate(found):
        x = MARGIN + pitch * (rank + 0.5) - wide / 2
        canvas.text(x + wide / 2, top, f"rank {rank}", 13, font_weight="bold", text_anchor="middle")
        for part, value in enumerate(one["parts"][step]):
            _part(canvas, x, top + 12 + CELL * part, wide, value, ranks)
    for message in (m for one in found for m in one["steps"] if m["step"] == step):
        _message(canvas, message, top, pitch, wide, ranks)
    bottom = top + 12 + CELL * ranks
    canvas.text(MARGIN, bottom + 24, "Each rank began with one digit of its own, 1, 10, 100 and so on: the digits say "
                "whose numbers are in a sum.", 12, QUIET)  # fmt: skip
    alt = f"{stop(title)} {_ring_told(found, step)}"
    return Figure(canvas.svg(bottom + 38, title, alt), alt)


def ring_title(found: Sequence[Mapping[str, Any]], step: int) -> str:
    """What has been reached after `step` steps."""
    ranks = len(found)
    whole = sum(value == _complete(ranks) for one in found for value in one["parts"][step])
    if step == 0:
        return f"Before the first step: {ranks} ranks, each with {ranks} parts of its own"
    half = "adding up" if step < ranks else "handing out"
    return f"Step {step} of {2 * (ranks - 1)}, {half}: {whole} of {ranks * ranks} parts are complete sums"


def _complete(ranks: int) -> int:
    """The number in which every rank's digit is."""
    return sum(10**rank for rank in range(ranks))


def _part(canvas: Canvas, x: float, y: float, wide: float, value: int, ranks: int) -> None:
    count = str(value).count("1")
    fill = GREENS[-1] if count == ranks else GREENS[min(count, len(GREENS) - 2)]
    canvas.rect(x, y, wide, CELL - 6, fill, stroke=RULE, stroke_width=1, data_sum=value)
    canvas.text(x + wide / 2, y + 22, f"{value:0{ranks}d}", 14, ink_on(fill), text_anchor="middle")


def _message(canvas: Canvas, message: Mapping[str, Any], top: float, pitch: float, wide: float, ranks: int) -> None:
    """An arrow from the sender's part to the same part of its right neighbor; the last rank's leaves and comes in."""
    y = top + 12 + CELL * message["chunk"] + 17
    left = MARGIN + pitch * (message["sender"] + 0.5) + wide / 2 + 3
    right = MARGIN + pitch * (message["receiver"] + 0.5) - wide / 2 - 3
    if message["receiver"] > message["sender"]:
        _arrow(canvas, left, y, right, y, SENT)
    else:
        _arrow(canvas, left, y, WIDTH - MARGIN + 12, y, SENT)
        _arrow(canvas, MARGIN - 12, y, right, y, SENT)


def _ring_told(found: Sequence[Mapping[str, Any]], step: int) -> str:
    sent = [m for one in found for m in one["steps"] if m["step"] == step]
    arrows = ", ".join(f"rank {m['sender']} sends part {m['chunk']} to rank {m['receiver']}" for m in sent)
    held = "; ".join(f"rank {rank} holds {sentence(map(str, one['parts'][step]))}" for rank, one in enumerate(found))
    return f"{arrows[0].upper()}{arrows[1:]}. Then {held}." if arrows else f"{held[0].upper()}{held[1:]}."


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

    `steps` maps names to what `lessons.ddp_training` reports. ValueError without any.
    """
    if not steps:
        raise ValueError("a picture of steps needs at least one")
    canvas, left, right = Canvas(), 150.0, WIDTH - MARGIN
    y, most = canvas.title(title) + 30, max(step["end"] for step in steps.values())
    scale = (right - left) / most
    for name, step in steps.items():
        y = _one_step(canvas, name, step, y, left, scale)
    for tick in ticks(0, 1000 * most, 8):
        x = left + tick / 1000 * scale
        canvas.line(x, y, x, y + 5, RULE)
        canvas.text(x, y + 20, number(tick), 12, QUIET, text_anchor="middle")
    canvas.line(left, y, right, y, RULE)
    canvas.text((left + right) / 2, y + 40, "ms since the step began", 12, QUIET, text_anchor="middle")
    told = "; ".join(f"{name}: {_step_told(step)}" for name, step in steps.items())
    alt = f"{stop(title)} {told[0].upper()}{told[1:]}."
    end = canvas.note(provenance, y + 60)
    return Figure(canvas.svg(end, title, alt), alt)


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
    floor = min(y for y in ys if y > 0) if log_y else 0.0
    place = _Place(left, right, top, bottom, min(xs), max(xs), floor, max(ys), log_y)
    _band_axes(canvas, place, xlabel, ylabel)
    for index, band in enumerate(bands.values()):
        _band(canvas, place, band, BANDS[index % 2])
    _band_names(canvas, place, bands)
    for x, y in dots.items():
        canvas.rect(place.x(x) - 4.5, place.y(y) - 4.5, 9, 9, INK, rx=4.5, data_measured=y)
    alt = f"{stop(title)} {_bands_told(bands, dots, xlabel, ylabel)}"
    end = canvas.note(provenance, bottom + 62)
    return Figure(canvas.svg(end + (0 if provenance else 4), title, alt), alt)


class _Place:
    """Values to pixels: x logarithmic, y linear from zero or logarithmic from `floor`."""

    def __init__(self, left: float, right: float, top: float, bottom: float, *rest: Any) -> None:
        self.left, self.right, self.top, self.bottom = left, right, top, bottom
        self.first, self.last, self.floor, self.most, self.log_y = rest

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * log10(value / self.first) / log10(self.last / self.first)

    def y(self, value: float) -> float:
        share = value / self.most
        if self.log_y:
            share = log10(max(value, self.floor) / self.floor) / log10(self.most / self.floor)
        return self.bottom - (self.bottom - self.top) * share


def _band_axes(canvas: Canvas, place: _Place, xlabel: str, ylabel: str) -> None:
    tens = [10.0**power for power in range(-9, 13)]
    for value in tens if place.log_y else ticks(0, place.most, 5):
        if place.floor <= value <= place.most:
            y = place.y(value)
            canvas.line(place.left, y, place.right, y, GRID)
            canvas.text(place.left - 8, y + 4, number(value), 12, QUIET, text_anchor="end")
    for value in tens:
        if place.first <= value <= place.last:
            x = place.x(value)
            canvas.line(x, place.bottom, x, place.bottom + 5, RULE)
            canvas.text(x, place.bottom + 20, number(value), 12, QUIET, text_anchor="middle")
    canvas.line(place.left, place.bottom, place.right, place.bottom, RULE)
    canvas.text(MARGIN, place.top - 14, ylabel, 12, QUIET)
    canvas.text((place.left + place.right) / 2, place.bottom + 42, xlabel, 12, QUIET, text_anchor="middle")


BANDS = ("#0072B2", "#B34700")


def _band(canvas: Canvas, place: _Place, band: Mapping[float, Band], color: str) -> None:
    lower = [(place.x(x), place.y(low)) for x, (low, _, _) in band.items()]
    upper = [(place.x(x), place.y(high)) for x, (_, _, high) in band.items()]
    middle = [(place.x(x), place.y(value)) for x, (_, value, _) in band.items()]
    canvas.path(_joined([*lower, *reversed(upper)]) + "Z", fill=color, fill_opacity=0.18)
    canvas.path(_joined(middle), fill="none", stroke=color, stroke_width=2.2)


def _band_names(canvas: Canvas, place: _Place, bands: Mapping[str, Mapping[float, Band]]) -> None:
    """Each line's name at its end, moved up or down where two would overlap."""
    ends = [list(band.items())[-1] for band in bands.values()]
    heights = spread([place.y(value) for _, (_, value, _) in ends], 16, place.top, place.bottom)
    for index, (name, (x, _), y) in enumerate(zip(bands, ends, heights, strict=True)):
        canvas.halo_text(place.x(x) + 8, y + 4, name, 12.5, fill=BANDS[index % 2], font_weight="bold")


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _bands_told(
    bands: Mapping[str, Mapping[float, Band]], dots: Mapping[float, float], xlabel: str, ylabel: str
) -> str:
    told = []
    for name, band in bands.items():
        x, (low, value, high) = list(band.items())[-1]
        told.append(f"{name} reaches {value:.3g}, between {low:.3g} and {high:.3g}, at {number(round(x))}")
    seen = f" Measured: {', '.join(f'{y:.3g} at {number(x)}' for x, y in dots.items())}." if dots else ""
    return f"Shown is {ylabel} against {xlabel}: {'; '.join(told)}.{seen}"
