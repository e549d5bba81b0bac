"""A schedule to step through: controls for the chain, a slider and a play button. Only for notebooks."""

from functools import partial
from typing import Any

import ipywidgets

from ...errors import check_known
from ...interactive.html_bars import Picture
from ...interactive.widgets import LAYOUT, STYLE, SliderBox, dropdown
from .figures import schedule_figure
from .schedules import Schedule, keep_all, keep_every, keep_none, several

EVERY = "keep every k"
KEEP = {"keep all": keep_all, "keep none": keep_none}
SCHEDULES = (*KEEP, EVERY)
MOST = 24  # nodes that can be distinguished in the picture


class SchedulePlayer(SliderBox):
    """A chain under one of the three schedules, tick by tick, with controls for n and k.

    Begins at `tick`, or at the last. In the next cell, `.schedule` is what has been chosen. Raises ValueError
    for an unknown schedule, and for sizes too large for a picture.
    """

    invitation = "A chain to step through: run this cell to play it."

    def __init__(
        self, schedule: str = "keep all", nodes: int = 8, k: int = 3, tick: int | None = None
    ) -> None:
        check_known("schedule", schedule, SCHEDULES)
        if not (2 <= nodes <= MOST and 1 <= k <= MOST):
            raise ValueError(f"nodes is {nodes} and k is {k}: choose at most {MOST}")
        slider = partial(ipywidgets.IntSlider, continuous_update=False, style=STYLE, layout=LAYOUT)
        sliders = {
            "n": slider(nodes, 2, MOST, description="nodes n"),
            "k": slider(k, 1, MOST, description="keep every k"),
            "tick": slider(1, 1, 1, description="tick"),
        }
        self.play = ipywidgets.Play(min=1, value=1, interval=400, description="play")  # milliseconds a tick
        self.play.observe(lambda change: sliders["tick"].set_trait("value", change["new"]), names="value")
        super().__init__({"schedule": dropdown("schedule", SCHEDULES, schedule), **sliders})
        self.children = (self.play, *self.children)
        sliders["tick"].value = tick or sliders["tick"].max

    @property
    def schedule(self) -> Schedule:
        """The schedule that has been chosen."""
        name, n, k = (self.controls[name].value for name in ("schedule", "n", "k"))
        return keep_every(n, min(k, n)) if name == EVERY else KEEP[name](n)

    def update(self, change: Any = None) -> None:
        """Draw; a new chain begins at its end, which has its totals. k can be moved only where it counts."""
        self.controls["k"].disabled = self.controls["schedule"].value != EVERY
        slider = self.controls["tick"]
        most = len(self.schedule.ticks)
        if slider.max != most:
            with slider.hold_trait_notifications():
                slider.max, slider.value = most, most
            self.play.max = most
        super().update(change)

    def redraw(self) -> tuple[Picture, str]:
        schedule = self.schedule
        at = self.controls["tick"].value
        done = schedule.ticks[:at]
        forward = sum(tick.kind == "f" for tick in done)
        again = sum(tick.again for tick in done)
        now = done[-1].words.replace("again", "<b>again</b>")
        work = f"{several(forward, 'run')} of f ({again} repeated) and {len(done) - forward} of b."
        message = f"Tick {at} of {len(schedule.ticks)}: {now}. Work so far: {work}"
        return schedule_figure(schedule, at), message


schedule_player = SchedulePlayer
