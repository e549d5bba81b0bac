"""A pipeline to drive: schedule, stages, micro-batches, and how long a backward takes. For notebooks only."""

from html import escape

import ipywidgets

from course_utils.figures.canvas import Figure, number
from course_utils.interactive.widgets import LAYOUT, STYLE, Explorable, dropdown

from .figures import pipeline_figure
from .schedules import SCHEDULES, Pipeline, bubble, simulate

MOST_STAGES, MOST_MICRO_BATCHES = 8, 24
"""More than this cannot be told apart in the picture."""


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
        sizes = (("stages", stages, MOST_STAGES), ("micro_batches", micro_batches, MOST_MICRO_BATCHES))
        for name, value, most in sizes:
            if value > most:
                raise ValueError(f"{name} is {value}: the picture holds up to {most}")
        look = {"style": STYLE, "layout": LAYOUT}
        slider = ipywidgets.IntSlider
        super().__init__(
            {
                "schedule": dropdown("schedule", SCHEDULES, schedule),
                "stages": slider(min=1, max=MOST_STAGES, value=stages, description="stages", **look),
                "backward": slider(min=1, max=4, value=2, description="backward takes", **look),
                "micro_batches": slider(
                    min=1, max=MOST_MICRO_BATCHES, value=micro_batches, description="micro-batches", **look
                ),
            }
        )

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that has been chosen."""
        chosen = {name: control.value for name, control in self.controls.items()}
        return simulate(
            chosen["schedule"], chosen["stages"], chosen["micro_batches"], backward=float(chosen["backward"])
        )

    def redraw(self) -> tuple[Figure, str]:
        """The pipeline, and its bubble beside the formula's."""
        pipeline = self.pipeline
        p, m = (1, 1) if pipeline.schedule == "naive" else (pipeline.stages, pipeline.micro_batches)
        formula = bubble(p, m) if pipeline.schedule != "naive" else 1 - 1 / pipeline.stages
        words = "1 − 1/p" if pipeline.schedule == "naive" else "(p − 1)/(m + p − 1)"
        message = f"{number(pipeline.span)} units, idle {pipeline.idle:.1%}; {words} = {formula:.1%}"
        return pipeline_figure(pipeline), escape(message.replace("%", " %"))
