"""Sliders over micro-batch, accumulation and learning rate: the path of θ that they give, beside the large batch's."""

import math
from collections.abc import Sequence

from course_utils.figures.canvas import Figure
from course_utils.interactive.widgets import Explorable, slider

from .figures import theta_paths
from .micro_batches import START, LineFit, Point, path

POINTS = 100
SIZES = tuple(size for size in range(1, POINTS + 1) if POINTS % size == 0)
RATES = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
PASSES = (1, 2, 4, 8)
FAR = 2.0
"""A path ends in the picture where it is this many times as far from the minimum as it began."""


def theta_explorer(size: int = 4, group: int = 25, rate: float = 0.5) -> "ThetaExplorer":
    """Controls for a path of θ: points in a micro-batch, micro-batches in a step, learning rate, passes over the data.

    ValueError for a size or a group that no control offers.
    """
    for name, value in (("size", size), ("group", group)):
        if value not in SIZES:
            raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(str, SIZES))}")
    return ThetaExplorer(size, group, rate)


class ThetaExplorer(Explorable):
    """What `theta_explorer` shows; `.path` is the path that has been chosen."""

    invitation = "Sliders for a path of θ: run this cell to use them."

    def __init__(self, size: int, group: int, rate: float) -> None:
        self.fit = LineFit(POINTS)
        super().__init__(
            {
                "size": slider("micro-batch", SIZES, size),
                "group": slider("micro-batches", SIZES, group),
                "rate": slider("learning rate", RATES, rate, "{:g}".format),
                "passes": slider("passes", PASSES, 8),
            }
        )

    @property
    def path(self) -> list[Point]:
        """The path that has been chosen. ValueError, in words, where micro-batches do not make whole steps."""
        size, group, rate, passes = (self.controls[name].value for name in ("size", "group", "rate", "passes"))
        return path(self.fit, rate, size, passes, group)

    def redraw(self) -> tuple[Figure, str]:
        """Two panels, the large batch at the same rate and the chosen path, and what a step sees."""
        size, group, rate, passes = (self.controls[name].value for name in ("size", "group", "rate", "passes"))
        chosen, large = self.path, path(self.fit, rate, POINTS, passes)
        name = f"{group} × {size} points a step"
        title = f"{name}, rate {rate:g}: {len(chosen) - 1:,} steps, {self._ending(chosen)}"
        figure = theta_paths(self.fit, {"all 100 points a step": self._near(large), name: self._near(chosen)}, title)
        message = f"a step learns from <b>{size * group}</b> points; <b>{size}</b> are in memory at once"
        return figure, message

    def _distance(self, point: Point) -> float:
        return math.dist(point, self.fit.best())

    def _near(self, walked: Sequence[Point]) -> list[Point]:
        """The path up to where it is too far away to be drawn."""
        limit = FAR * self._distance(START)
        far = next((index for index, point in enumerate(walked) if not self._distance(point) < limit), len(walked))
        return list(walked[:far])

    def _ending(self, walked: Sequence[Point]) -> str:
        if len(self._near(walked)) < len(walked):
            return "and it leaves the picture"
        return f"{self._distance(walked[-1]):.2f} from the minimum"
