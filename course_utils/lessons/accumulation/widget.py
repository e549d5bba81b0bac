"""Sliders over micro-batch, accumulation and learning rate: their path of θ, next to the large batch's."""

import math
from collections.abc import Sequence
from itertools import takewhile

from ...interactive.feedback import divisors
from ...interactive.html_bars import Picture
from ...interactive.widgets import SliderBox, slider
from .figures import theta_paths
from .micro_batches import POINTS, START, LineFit, Point, best_line, path

RATES = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
FAR = 2.0  # a path ends in the picture where it is this many times as far from the minimum as it began


class ThetaSliders(SliderBox):
    """Controls for a path of θ: points per micro-batch, micro-batches per step, learning rate, passes.

    In the next cell, `.path` is what has been chosen.
    """

    invitation = "Sliders for a path of θ: run this cell to use them."

    def __init__(self, size: int = 4, group: int = 25, rate: float = 0.5) -> None:
        self.fit = LineFit()
        self.goal = best_line(self.fit.x, self.fit.y)
        controls = {
            "size": slider("micro-batch", divisors(POINTS), size, continuous=False),
            "group": slider("micro-batches", divisors(POINTS), group, continuous=False),
            "rate": slider("learning rate", RATES, rate, "{:g}".format, continuous=False),
            "passes": slider("passes", (1, 2, 4, 8), 8, continuous=False),
        }
        super().__init__(controls)

    @property
    def path(self) -> list[Point]:
        """The path that has been chosen. ValueError where micro-batches do not make whole steps."""
        size, group, rate, passes = (control.value for control in self.controls.values())
        return path(self.fit, rate, size, passes, group)

    def redraw(self) -> tuple[Picture, str]:
        size, group, rate, passes = (control.value for control in self.controls.values())
        chosen = self.path
        large = path(self.fit, rate, POINTS, passes)
        near = self._near(chosen)
        off = math.dist(chosen[-1], self.goal)
        ending = "and it leaves the picture" if len(near) < len(chosen) else f"{off:.2f} from the minimum"
        name = f"{group} × {size} points per step"
        title = f"{name}, rate {rate:g}: {len(chosen) - 1:,} steps, {ending}"
        figure = theta_paths(
            self.fit.x, self.fit.y, {"all 100 points per step": self._near(large), name: near}, title
        )
        return figure, f"a step learns from <b>{size * group}</b> points; <b>{size}</b> are in memory at once"

    def _near(self, walked: Sequence[Point]) -> list[Point]:
        limit = FAR * math.dist(START, self.goal)
        return list(takewhile(lambda point: math.dist(point, self.goal) < limit, walked))


theta_sliders = ThetaSliders
