"""Figures of lesson 14: each stage's works over time, and the micro-batches that it keeps meanwhile."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...figures import CourseFigure
from ...figures.style import MARGIN, NUMBERED, WIDTH, bare, look, room, sheet, text_width
from ...palette import COLOURS, GRID, INK, QUIET, RULE, number, stop
from .schedules import FORWARD, Pipeline, Work

COLOUR = {"F": COLOURS["activations"], "B": COLOURS["gradients"]}
COLOURS_OF_HALVES = {**COLOUR, "I": COLOURS["gradients"], "W": COLOURS["optimizer_states"]}
SECOND = {**COLOURS_OF_HALVES, "F": "#8FD3BE"}  # of a rank's second chunk
WORDS = {"F": "forward", "B": "backward"}
LEFT = MARGIN + 52
ROW, MEMORY_ROW, SMALL_ROW = 25, 30, 15  # points that a stage's works and its memory are high


def pipeline_figure(pipeline: Pipeline, title: str = "") -> CourseFigure:
    """Each stage's works over time, and under them the micro-batches that it keeps."""
    title = title or pipeline_title(pipeline)
    stages = range(pipeline.stages)
    keeps = [f"at most {number(pipeline.most_kept(stage))}" for stage in stages]
    if pipeline.schedule == "PipeDream":
        keeps = [f"{words} and {pipeline.versions(stage)}" for stage, words in enumerate(keeps)]
    width = WIDTH - LEFT - MARGIN - 8 - max(text_width(words, 11.5) for words in keeps)
    high = 22 + ROW * pipeline.stages + 72
    with look():
        figure = sheet(title, high + MEMORY_ROW * pipeline.stages)
        works = figure.place(LEFT, 22, width, ROW * pipeline.stages)
        memory = figure.place(LEFT, high, width, MEMORY_ROW * pipeline.stages)
        for ax in (works, memory):
            ax.set(xlim=(0, pipeline.span), ylim=(pipeline.stages, 0))
            ax.set_yticks(
                [stage + 0.5 for stage in stages], [f"stage {stage}" for stage in stages], color=INK
            )
        _works(works, pipeline)
        _memory(memory, pipeline, keeps)
    kept = ", ".join(number(pipeline.most_kept(stage)) for stage in stages)
    figure.alt = (
        f"{stop(title)} {pipeline.micro_batches} micro-batches on {pipeline.stages} stages "
        f"take {number(pipeline.span)} units. "
        f"Micro-batches kept at most, from the first stage to the last: {kept}."
    )
    return figure


def schedules_figure(pipelines: Sequence[Pipeline], title: str) -> CourseFigure:
    """The works of several schedules below one another, on one axis of time."""
    span = max(pipeline.span for pipeline in pipelines)
    gap = 26
    high = sum(gap + SMALL_ROW * pipeline.stages for pipeline in pipelines)
    with look():
        figure = sheet(title, high + 58)
        top = 22
        for pipeline in pipelines:
            high = SMALL_ROW * pipeline.stages
            ax = figure.place(LEFT, top, WIDTH - LEFT - MARGIN, high)
            top += high + gap
            ax.set(xlim=(0, span), ylim=(pipeline.stages, 0))
            ax.set_yticks([rank + 0.5 for rank in range(pipeline.stages)])
            ax.set_yticklabels([f"rank {rank}" for rank in range(pipeline.stages)], color=INK, fontsize=9)
            said = f"{pipeline.schedule}: {_costs(pipeline)}"
            ax.set_title(said, fontsize=11.5, fontweight="normal", color=INK, pad=3)
            for rank in range(pipeline.stages):
                _boxes(ax, pipeline.of_stage(rank), rank, pipeline.stages)
            bare(ax, "bottom")
            ax.spines["bottom"].set_visible(False)
            ax.tick_params(axis="x", length=0, labelbottom=False)
        ax = figure.axes[-1]
        ax.spines["bottom"].set_visible(True)
        ax.tick_params(axis="x", length=4, labelbottom=True)
        ax.xaxis.set_major_formatter(NUMBERED)
        ax.set_xlabel("time, in forwards of one micro-batch in a rank's layers")
        names = {"F": "forward", "B": "backward, or its input's half", "W": "its weights' half"}
        patches = [Patch(color=COLOURS_OF_HALVES[kind], label=name) for kind, name in names.items()]
        patches.insert(1, Patch(color=SECOND["F"], label="of the second part"))
        corner = ((MARGIN - LEFT) / room(ax), -42 / (SMALL_ROW * pipelines[-1].stages))
        ax.legend(handles=patches, ncols=4, loc="upper left", bbox_to_anchor=corner, borderaxespad=0)
    said = " ".join(f"{pipeline.schedule}: {_costs(pipeline)}." for pipeline in pipelines)
    figure.alt = f"{stop(title)} {said}"
    return figure


def _costs(pipeline: Pipeline) -> str:
    idle = f"stages wait {100 * pipeline.idle:.0f} % of the time"
    return f"{idle}; the first keeps {number(pipeline.most_kept(0))} micro-batches"


def _boxes(ax: Axes, works: Sequence[Work], row: int, ranks: int) -> None:
    """One row of boxes, each in the color of its kind; forwards of later chunks are lighter."""
    spans = [(work.start, work.end - work.start) for work in works]
    fills = [(SECOND if work.stage >= ranks else COLOURS_OF_HALVES)[work.kind] for work in works]
    edges = {"facecolors": fills, "edgecolor": "white", "linewidth": 0.8}
    ax.broken_barh(spans, (row + 0.06, 0.88), clip_on=False, **edges)


def pipeline_title(pipeline: Pipeline) -> str:
    """The schedule's costs: its idle part, and what its first stage keeps."""
    kept = pipeline.most_kept(0)
    keeps = f"{number(kept)} micro-batches" if kept > 1 else f"{number(kept)} micro-batch"
    if pipeline.versions(0) > 1:
        keeps += f" and {pipeline.versions(0)} versions of its weights"
    name = f"{pipeline.schedule[0].upper()}{pipeline.schedule[1:]}"
    return f"{name}: stages wait {100 * pipeline.idle:.0f} % of the time; the first keeps {keeps}"


def _works(ax: Axes, pipeline: Pipeline) -> None:
    """One row for each stage; a box is of one micro-batch, or in the naive schedule of the whole batch."""
    numbered = pipeline.schedule != "naive"
    ax.barh(ax.get_yticks(), pipeline.span, 0.88, color="white", edgecolor=GRID)
    for work in pipeline.works:
        label = str(work.micro) if numbered else WORDS[work.kind]
        if text_width(label, 9) + 1.2 <= (work.end - work.start) * room(ax) / pipeline.span:
            middle = (work.start + work.end) / 2
            ax.text(middle, work.stage + 0.5, label, fontsize=9, ha="center", va="center_baseline")
    for stage in range(pipeline.stages):
        _boxes(ax, pipeline.of_stage(stage), stage, pipeline.stages)
    whose = "micro-batch 0, 1, …" if numbered else "the whole batch"
    patches = [Patch(color=COLOUR[kind], label=f"{word} of {whose}") for kind, word in WORDS.items()]
    patches.append(Patch(facecolor="white", edgecolor=RULE, label="waiting"))
    corner = ((MARGIN - LEFT - 6) / room(ax), 1)
    ax.legend(handles=patches, ncols=3, loc="lower left", bbox_to_anchor=corner, borderaxespad=0.5)
    bare(ax, "bottom")
    ax.tick_params(axis="x", length=4)
    ax.xaxis.set_major_formatter(NUMBERED)
    ax.set_xlabel("time, in forwards of one micro-batch on one stage")


def _memory(ax: Axes, pipeline: Pipeline, keeps: list[str]) -> None:
    """A row for each stage, as high as the number that it keeps."""
    most = max(pipeline.most_kept(stage) for stage in range(pipeline.stages))
    for stage, words in enumerate(keeps):
        times, counts = zip(*dict(pipeline.kept(stage)).items(), strict=True)  # a moment's last count
        tops = [stage + 1 - 0.88 * count / most for count in counts[:-1]]
        ax.stairs(tops, times, baseline=stage + 1, fill=True, color=COLOUR[FORWARD])
        ax.axhline(stage + 1, color=RULE, linewidth=0.8)
        end = (pipeline.span, stage + 0.5)
        ax.annotate(words, end, (8, 0), textcoords="offset points", va="center_baseline")
    caption = "micro-batches whose activations are kept"
    if pipeline.schedule == "PipeDream":
        caption += ", and versions of the weights"
    ax.set_title(caption, fontsize=11.5, fontweight="normal", color=QUIET)
    ax.set_xticks([])
    bare(ax)
