"""A pipeline with controls: schedule, stages, micro-batches, and how long a backward takes. For notebooks only."""

from html import escape

import ipywidgets

from course_utils.figures.canvas import Figure, number
from course_utils.interactive.widgets import LAYOUT, STYLE, Explorable, dropdown

from .figures import pipeline_figure
from .schedules import SCHEDULES, Pipeline, bubble, simulate

MOST_STAGES, MOST_MICRO_BATCHES = 8, 24
"""More than this cannot be distinguished in the picture."""


def pipeline_player(schedule: str = "GPipe", stages: int = 4, micro_batches: int = 8) -> "PipelinePlayer":
    """A batch on its way through a pipeline, with controls for all that shapes it.

    In the next cell, `.pipeline` is what has been chosen. Raises ValueError for an unknown schedule, or for sizes that
    no picture holds.
    """
    return PipelinePlayer(schedule, stages, micro_batches)


class PipelinePlayer(Explorable):
    """What `pipeline_player` shows."""

    invitation = "A pipeline to drive: run this cell to use its sliders."

    def __init__(self, schedule: str, stages: int, micro_batches: int) -> None:
        simulate(schedule, stages, micro_batches)  # refuses what cannot be
        for name, value, most in (
            ("stages", stages, MOST_STAGES),
            ("micro_batches", micro_batches, MOST_MICRO_BATCHES),
        ):
            if value > most:
                raise ValueError(f"{name} is {value}: the picture holds up to {most}")

        def slider(description: str, most: int, value: int) -> ipywidgets.IntSlider:
            return ipywidgets.IntSlider(
                min=1, max=most, value=value, description=description, style=STYLE, layout=LAYOUT
            )

        super().__init__(
            {
                "schedule": dropdown("schedule", SCHEDULES, schedule),
                "stages": slider("stages", MOST_STAGES, stages),
                "backward": slider("backward takes", 4, 2),
                "micro_batches": slider("micro-batches", MOST_MICRO_BATCHES, micro_batches),
            }
        )

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that has been chosen."""
        schedule, stages, backward, micro_batches = (control.value for control in self.controls.values())
        return simulate(schedule, stages, micro_batches, backward=float(backward))

    def redraw(self) -> tuple[Figure, str]:
        """The pipeline, and its bubble next to the formula's."""
        pipeline = self.pipeline
        formula, words = bubble(pipeline.stages, pipeline.micro_batches), "(p − 1)/(m + p − 1)"
        if pipeline.schedule == "naive":
            formula, words = 1 - 1 / pipeline.stages, "1 − 1/p"
        message = f"{number(pipeline.span)} units, idle {pipeline.idle:.1%}; {words} = {formula:.1%}"
        return pipeline_figure(pipeline), escape(message.replace("%", " %"))
