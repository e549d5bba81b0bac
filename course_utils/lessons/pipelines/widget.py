"""A pipeline with controls: schedule, stages, micro-batches, a backward's duration. For notebooks only."""

from functools import partial

import ipywidgets

from ...interactive.html_bars import Picture
from ...interactive.widgets import LAYOUT, STYLE, SliderBox, dropdown
from ...palette import number
from .figures import pipeline_figure
from .schedules import SCHEDULES, Pipeline, bubble, simulate


class PipelinePlayer(SliderBox):
    """A batch on its way through a pipeline, with controls; afterwards `.pipeline` is what was chosen."""

    invitation = "A pipeline to drive: run this cell to use its sliders."

    def __init__(self, schedule: str = "GPipe", stages: int = 4, micro_batches: int = 8) -> None:
        simulate(schedule, stages, micro_batches)  # refuses what cannot be
        slider = partial(ipywidgets.IntSlider, min=1, continuous_update=False, style=STYLE, layout=LAYOUT)
        controls = {
            "schedule": dropdown("schedule", SCHEDULES, schedule),
            "stages": slider(max=8, value=stages, description="stages"),
            "backward": slider(max=4, value=2, description="backward takes"),
            # More than 24 cannot be told apart in the picture.
            "micro_batches": slider(max=24, value=micro_batches, description="micro-batches"),
        }
        super().__init__(controls)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that has been chosen."""
        schedule, stages, backward, micro_batches = (control.value for control in self.controls.values())
        return simulate(schedule, stages, micro_batches, backward=float(backward))

    def redraw(self) -> tuple[Picture, str]:
        """The pipeline, and its bubble next to the formula's."""
        pipeline = self.pipeline
        formula = bubble(pipeline.stages, pipeline.micro_batches)
        words = "(p − 1)/(m + p − 1)"
        if pipeline.schedule == "naive":
            formula = 1 - 1 / pipeline.stages
            words = "1 − 1/p"
        message = f"{number(pipeline.span)} units, idle {pipeline.idle:.1%}; {words} = {formula:.1%}"
        return pipeline_figure(pipeline), message.replace("%", " %")


pipeline_player = PipelinePlayer
