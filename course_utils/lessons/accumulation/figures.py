"""The figure of lesson 09: paths of θ over the contour lines of their loss."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...figures.style import MARGIN, WIDTH, CourseFigure, look, sheet, wrap
from ...palette import stop
from ..adam.figures import WALL, draw_walk
from .micro_batches import Point, best_line

NOTE = "horizontal: θ₀, vertical: θ₁; lines of equal loss; the cross is the minimum"


def theta_paths(
    x: torch.Tensor, y: torch.Tensor, paths: Mapping[str, Sequence[Point]], title: str
) -> CourseFigure:
    """Paths of θ side by side over the contour lines of the points' loss, each with its name."""
    pitch = (WIDTH - 2 * MARGIN + 14) / len(paths)
    size = pitch - 14
    best = best_line(x, y)
    reach = 1.1 * max(math.dist(point, best) for path in paths.values() for point in path)
    xlim, ylim = ((middle - reach, middle + reach) for middle in best)
    theta_0, theta_1 = np.meshgrid(np.linspace(*xlim, 61), np.linspace(*ylim, 61))
    lines = theta_0[..., None] + theta_1[..., None] * x.numpy()
    loss = np.square(lines - y.numpy()).mean(axis=-1)
    with look():
        figure = sheet(title, 36 + size, NOTE)
        for index, (name, path) in enumerate(paths.items()):
            ax = figure.place(MARGIN + index * pitch, 36, size, size)
            ax.set(xlim=xlim, ylim=ylim)
            ax.set_title("\n".join(wrap(name, 10.5, size, bold=True)), fontsize=10.5)
            ax.contour(theta_0, theta_1, loss, colors=WALL, linewidths=1)
            draw_walk(ax, path, best)
    told = "; ".join(f"{name}: {len(path) - 1} steps" for name, path in paths.items())
    figure.alt = f"{stop(title)} Paths of two parameters over the contour lines of their loss. {told}."
    return figure
