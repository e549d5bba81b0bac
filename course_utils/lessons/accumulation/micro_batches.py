"""Micro-batches and their loss, for the exercises of lesson 08; and the paths of θ that lesson 09 draws."""

from collections.abc import Sequence

import torch

MicroBatch = tuple[torch.Tensor, ...]  # token ids and the ids that should follow them, each (b, s)
IGNORED = -100  # the target of padding, which cross-entropy leaves out: torch's default for `ignore_index`
Point = tuple[float, float]
START: Point = (-1.5, 0.5)
POINTS = 100


def mean_loss(model: torch.nn.Module, part: MicroBatch) -> torch.Tensor:
    """The mean cross-entropy over the tokens that count."""
    tokens, targets = part
    return torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )


class LineFit:
    """Fitting y = θ₀ + θ₁·x to lesson 09's 100 noisy points: two parameters have a path to draw."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(0)
        self.x = torch.randn(POINTS, generator=dice, dtype=torch.float64)
        self.y = 1.0 + 2.0 * self.x + torch.randn(POINTS, generator=dice, dtype=torch.float64)

    def moments(self, chosen: slice = slice(None)) -> tuple[float, ...]:
        """Means of x, x², y and x·y over the chosen points: the gradient depends on nothing else."""
        x, y = self.x[chosen], self.y[chosen]
        return tuple(mean.mean().item() for mean in (x, x * x, y, x * y))


def best_line(x: torch.Tensor, y: torch.Tensor) -> Point:
    """The θ with the least loss: the least-squares line."""
    rise = ((x * y).mean() - x.mean() * y.mean()) / (x.square().mean() - x.mean().square())
    return (y.mean() - rise * x.mean()).item(), rise.item()


def slope(theta: Point, moments: Sequence[float]) -> Point:
    """The gradient of ½·mean of (θ₀ + θ₁·x − y)², by θ₀ and by θ₁, from the means of x, x², y and x·y."""
    x, xx, y, xy = moments
    return theta[0] + theta[1] * x - y, theta[0] * x + theta[1] * xx - xy


def path(fit: LineFit, rate: float, size: int, passes: int, group: int = 1) -> list[Point]:
    """The path of θ: micro-batches of `size` points in order, a step along the mean of each `group`.

    Raises ValueError where the points do not divide into such steps.
    """
    if POINTS % (size * group):
        raise ValueError(f"{POINTS} points do not divide into steps of {group} micro-batches of {size}")
    walked = [START]
    parts = [fit.moments(slice(start, start + size)) for start in range(0, POINTS, size)]
    for first in [*range(0, len(parts), group)] * passes:
        slopes = [slope(walked[-1], part) for part in parts[first : first + group]]
        step = [sum(part) / group for part in zip(*slopes, strict=True)]
        walked.append((walked[-1][0] - rate * step[0], walked[-1][1] - rate * step[1]))
    return walked
