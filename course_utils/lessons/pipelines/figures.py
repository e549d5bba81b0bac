"""Figures of lesson 14: each stage's works over time, and the micro-batches that it keeps meanwhile."""

from itertools import groupby, pairwise
from typing import Any

from ...figures import COLOURS, Figure
from ...figures.axes import legend, stop
from ...figures.canvas import GRID, MARGIN, QUIET, RULE, Canvas, ink_on, number, reflowing, text_width, ticks
from .schedules import FORWARD, Pipeline

COLOUR = {"F": COLOURS["activations"], "B": COLOURS["gradients"]}
WORDS = {"F": "forward", "B": "backward"}
ROW = 26.0
MEMORY_ROW = 30.0
LEFT = MARGIN + 66.0


@reflowing
def pipeline_figure(pipeline: Pipeline, title: str = "") -> Figure:
    """Each stage's works over time, and under them the micro-batches that it keeps."""
    canvas = Canvas()
    title = title or pipeline_title(pipeline)
    top = canvas.title(title)
    numbered = pipeline.schedule != "naive"
    top = _legend(canvas, top + 16, numbered)
    scale = (canvas.width - MARGIN - 96 - LEFT) / pipeline.span
    bottom = _works(canvas, pipeline, top + 12, scale, numbered)
    _axis(canvas, pipeline.span, scale, bottom, "time, in forwards of one micro-batch on one stage")
    bottom = _memory(canvas, pipeline, bottom + 62, scale)
    kept = ", ".join(str(pipeline.most_kept(stage)) for stage in range(pipeline.stages))
    alt = (
        f"{stop(title)} {pipeline.micro_batches} micro-batches on {pipeline.stages} stages "
        f"take {number(pipeline.span)} units. "
        f"Micro-batches kept at most, from the first stage to the last: {kept}."
    )
    return Figure(canvas.svg(bottom + 8, title, alt), alt)


def pipeline_title(pipeline: Pipeline) -> str:
    """The schedule's costs: its idle part, and what its first stage keeps."""
    kept = pipeline.most_kept(0)
    keeps = f"{kept} micro-batches" if kept > 1 else f"{kept} micro-batch"
    if pipeline.versions(0) > 1:
        keeps += f" and {pipeline.versions(0)} versions of its weights"
    name = f"{pipeline.schedule[0].upper()}{pipeline.schedule[1:]}"
    return f"{name}: stages wait {100 * pipeline.idle:.0f} % of the time; the first keeps {keeps}"


def _legend(canvas: Canvas, y: float, numbered: bool) -> float:
    """A box is of one micro-batch where it is `numbered`, else of the whole batch."""
    whose = "micro-batch in the box" if numbered else "whole batch"
    looks: dict[str, dict[str, Any]] = {}
    for kind, word in WORDS.items():
        looks[f"{word} of the {whose}"] = {"fill": COLOUR[kind]}
    looks["waiting"] = {"fill": "#FFFFFF", "stroke": RULE, "stroke_width": 1}

    def swatch(x: float, y: float, size: float, words: str) -> None:
        canvas.rect(x, y, size, size, **looks[words])

    entries = zip(looks, looks, strict=True)
    return legend(canvas, entries, y - 12, swatch)


def _works(canvas: Canvas, pipeline: Pipeline, top: float, scale: float, numbered: bool) -> float:
    """One row for each stage; returns the y below them."""
    for stage in range(pipeline.stages):
        y = top + stage * (ROW + 4)
        canvas.text(LEFT - 8, y + 17, f"stage {stage}", 12, text_anchor="end")
        canvas.rect(LEFT, y, pipeline.span * scale, ROW, "#FFFFFF", stroke=GRID, stroke_width=1)
        for work in pipeline.of_stage(stage):
            x = LEFT + work.start * scale
            width = (work.end - work.start) * scale
            fill = COLOUR[work.kind]
            canvas.rect(x, y, max(width - 0.8, 0.4), ROW, fill, data_work=f"{work.kind}{work.micro}")
            label = str(work.micro) if numbered else WORDS[work.kind]
            if text_width(label, 11) + 2 <= width:
                canvas.text(x + width / 2, y + 17, label, 11, ink_on(fill), text_anchor="middle")
    return top + pipeline.stages * (ROW + 4)


def _axis(canvas: Canvas, span: float, scale: float, y: float, unit: str) -> None:
    canvas.line(LEFT, y + 2, LEFT + span * scale, y + 2, RULE)
    for tick in ticks(0, span, 4 if canvas.narrow else 8):
        canvas.line(LEFT + tick * scale, y + 2, LEFT + tick * scale, y + 7, RULE)
        canvas.text(LEFT + tick * scale, y + 20, number(tick), 11, QUIET, text_anchor="middle")
    canvas.text(LEFT + span * scale / 2, y + 36, unit, 12, QUIET, text_anchor="middle")


def _memory(canvas: Canvas, pipeline: Pipeline, top: float, scale: float) -> float:
    """Draw per stage a row whose height over time is the number that it keeps; returns the y below them."""
    keeps_versions = pipeline.schedule == "PipeDream"
    title = "micro-batches whose activations are kept"
    if keeps_versions:
        title += ", and versions of the weights"
    canvas.text(MARGIN, top, title, 12, QUIET)
    most = max(pipeline.most_kept(stage) for stage in range(pipeline.stages))
    for stage in range(pipeline.stages):
        base = top + 12 + (stage + 1) * (MEMORY_ROW + 4)
        canvas.text(LEFT - 8, base - 6, f"stage {stage}", 12, text_anchor="end")
        for start, end, count in _levels(pipeline, stage):
            height = count / most * MEMORY_ROW
            canvas.rect(LEFT + start * scale, base - height, (end - start) * scale, height, COLOUR[FORWARD])
        canvas.line(LEFT, base, LEFT + pipeline.span * scale, base, RULE)
        words = f"at most {pipeline.most_kept(stage)}"
        if keeps_versions:
            words += f" and {pipeline.versions(stage)}"
        canvas.text(LEFT + pipeline.span * scale + 8, base - 6, words, 12)
    return top + 12 + pipeline.stages * (MEMORY_ROW + 4) + 8


def _levels(pipeline: Pipeline, stage: int) -> list[tuple[float, float, int]]:
    """(from, to, micro-batches kept) wherever that is not 0."""
    at_last = dict(pipeline.kept(stage)).items()  # of several changes at a moment, the last counts
    changes = [next(same) for _, same in groupby(at_last, key=lambda change: change[1])]
    return [(start, end, count) for (start, count), (end, _) in pairwise(changes) if count]
