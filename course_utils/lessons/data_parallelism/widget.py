"""A recorded ring to step through: a slider and a play button for its steps. For notebooks only."""

from collections.abc import Sequence

import ipywidgets

from ...interactive.html_bars import Picture
from ...interactive.widgets import LAYOUT, STYLE, SliderBox
from .figures import ring_figure


class RingPlayer(SliderBox):
    """The parts of each rank after each step of a ring, from `step` on. ValueError for an unrecorded step."""

    invitation = "A ring to step through: run this cell to play it."

    def __init__(self, recorded: Sequence[Sequence[Sequence[int]]], step: int = 1) -> None:
        ring_figure(recorded, step)  # refuses a step that is not there: a slider would silently move it
        self.recorded = recorded
        last = len(recorded[0]) - 1
        slider = ipywidgets.IntSlider(
            step, 0, last, description="step", continuous_update=False, style=STYLE, layout=LAYOUT
        )
        super().__init__({"step": slider})
        # The interval is the milliseconds of a step.
        self.play = ipywidgets.Play(min=0, max=last, value=0, interval=1200, description="play")
        self.play.observe(lambda change: slider.set_trait("value", change["new"]), names="value")
        self.children = (self.play, *self.children)

    def redraw(self) -> tuple[Picture, str]:
        step = self.controls["step"].value
        said = "Nothing sent yet."
        if step:
            said = f"{len(self.recorded)} messages at once, one from each rank to its right neighbor."
        return ring_figure(self.recorded, step), said


ring_player = RingPlayer
