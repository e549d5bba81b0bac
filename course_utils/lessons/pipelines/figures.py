"""Figures of lesson 14: each stage's works over time, and the micro-batches that it keeps meanwhile."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...figures import CourseFigure
from ...figures.style import NUMBERED, bare, look, room, sheet, text_width
from ...palette import COLOURS, GRID, INK, QUIET, RULE, number, sentence, stop
from .schedules import FORWARD, Pipeline

COLOUR = {"F": COLOURS["activations"], "B": COLOURS["gradients"]}


def pipeline_figure(pipeline: Pipeline, title: str = "") -> CourseFigure:
    """Each stage's works over time, and under them the micro-batches that it keeps."""
    title = title or pipeline_title(pipeline)
    stages = range(pipeline.stages)
    kept = [pipeline.most_kept(stage) for stage in stages]
    with look():
        figure = sheet(title, 94 + 55 * len(stages))
        works = figure.place(68, 22, 390, 25 * len(stages))
        memory = figure.place(68, 94 + 25 * len(stages), 390, 30 * len(stages))
        for ax in (works, memory):
            ax.set(xlim=(0, pipeline.span), ylim=(len(stages) - 0.5, -0.5))
            ax.set_yticks(stages, [f"stage {stage}" for stage in stages], color=INK)
        _works(works, pipeline)
        _memory(memory, pipeline, kept)
    figure.alt = (
        f"{stop(title)} {pipeline.micro_batches} micro-batches on {pipeline.stages} stages take"
        f" {number(pipeline.span)} units. The stages keep at most {sentence(map(str, kept))} of them."
    )
    return figure


def pipeline_title(pipeline: Pipeline) -> str:
    """The schedule's costs: its idle part, and what its first stage keeps."""
    name = pipeline.schedule.replace("naive", "Naive")
    keeps = f"the first keeps {pipeline.most_kept(0)} of {pipeline.micro_batches} micro-batches"
    if pipeline.versions(0) > 1:
        keeps += f" and {pipeline.versions(0)} versions of its weights"
    return f"{name}: stages wait {100 * pipeline.idle:.0f} % of the time; {keeps}"


def _works(ax: Axes, pipeline: Pipeline) -> None:
    """One row for each stage; a box is of one micro-batch, or in the naive schedule of the whole batch."""
    ax.barh(ax.get_yticks(), pipeline.span, 0.88, color="white", edgecolor=GRID)
    whose = "the whole batch" if pipeline.schedule == "naive" else "micro-batch 0, 1, …"
    for work in pipeline.works:
        style = {"color": COLOUR[work.kind], "edgecolor": "white", "linewidth": 0.8, "clip_on": False}
        wide = work.end - work.start
        ax.barh(work.stage, wide, 0.88, work.start, **style)
        label = str(work.micro) if work.micro >= 0 else ""
        if text_width(label, 9) + 1.2 <= wide * room(ax) / pipeline.span:
            middle = work.start + wide / 2
            ax.text(middle, work.stage, label, fontsize=9, ha="center", va="center_baseline")
    patches = [*(Patch(color=color) for color in COLOUR.values()), Patch(facecolor="white", edgecolor=RULE)]
    names = [f"forward of {whose}", "its backward", "waiting"]
    ax.legend(patches, names, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.5)
    bare(ax, "bottom")
    ax.xaxis.set_major_formatter(NUMBERED)
    ax.set_xlabel("time, in forwards of one micro-batch on one stage")


def _memory(ax: Axes, pipeline: Pipeline, kept: Sequence[int]) -> None:
    """A row for each stage, as high as the number that it keeps."""
    versions = pipeline.schedule == "PipeDream"
    for stage, most in enumerate(kept):
        times, counts = zip(*dict(pipeline.kept(stage)).items(), strict=True)  # a moment's last count
        tops = [stage + 0.5 - 0.88 * count / max(kept) for count in counts[:-1]]
        ax.stairs(tops, times, baseline=stage + 0.5, fill=True, color=COLOUR[FORWARD])
        ax.axhline(stage + 0.5, color=RULE, linewidth=0.8)
        words = f"at most {most}, {pipeline.versions(stage)}" if versions else f"at most {most}"
        ax.text(1.02, stage, words, va="center_baseline", transform=ax.get_yaxis_transform())
    caption = "micro-batches whose activations are kept" + ", and versions of the weights" * versions
    ax.set_title(caption, fontsize=11.5, fontweight="normal", color=QUIET)
    ax.set_xticks([])
    bare(ax)
