"""Lesson 02: a narrow valley, PyTorch's optimizers that walk down it."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...errors import check_known

Point = tuple[float, float]
START: Point = (-10.0, 2.0)  # far out along the valley and up one wall, in its own axes


class Valley(NamedTuple):
    """The loss ½·(x² + steepness·y²), turned by `angle` degrees."""

    steepness: float = 25.0
    angle: float = 0.0

    def turned(self, point: Point) -> Point:
        """Return where a point given in the valley's own axes lies on the map."""
        return _rotate(point, self.angle)

    def slope(self, point: Point) -> Point:
        """Return the gradient at a point of the map."""
        x, y = _rotate(point, -self.angle)
        return _rotate((x, self.steepness * y), self.angle)


def _rotate(point: Point, degrees: float) -> Point:
    (x, y) = point
    turn = math.radians(degrees)
    return x * math.cos(turn) - y * math.sin(turn), x * math.sin(turn) + y * math.cos(turn)


RULES: dict[str, Callable[[list[torch.Tensor], float, float, float], torch.optim.Optimizer]] = {
    "gradient descent": lambda place, rate, beta1, beta2: torch.optim.SGD(place, rate),
    "momentum": lambda place, rate, beta1, beta2: torch.optim.SGD(place, rate, momentum=beta1),
    "RMSProp": lambda place, rate, beta1, beta2: torch.optim.RMSprop(place, rate, alpha=beta2),
    "Adam": lambda place, rate, beta1, beta2: torch.optim.Adam(place, rate, betas=(beta1, beta2)),
}


def trajectory(
    rule: str,
    rate: float,
    steps: int = 100,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    valley: Valley | None = None,
) -> list[Point]:
    """Return the places that an optimizer of `RULES` visits, the start first; fewer if it leaves for good.

    Raises ValueError for an unknown rule, a rate that is not above 0, and a β outside of 0 to 1.
    """
    check_known("optimizer", rule, RULES)
    if not (rate > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            f"learning rate {rate}, β1 {beta1}, β2 {beta2}: η must be above 0, β at least 0 and below 1"
        )
    valley = valley or Valley()
    path = [valley.turned(START)]
    place = torch.tensor(path[0], dtype=torch.float64, requires_grad=True)
    optimizer = RULES[rule]([place], rate, beta1, beta2)
    for _ in range(steps):
        place.grad = torch.tensor(valley.slope(path[-1]), dtype=torch.float64)
        optimizer.step()
        x, y = place.tolist()
        path.append((x, y))
        if math.hypot(x, y) > 1e6:
            break
    return path


def steps_needed(path: Sequence[Point]) -> int | None:
    """Return the steps until a walk stays within 1 % of its first distance from the minimum, or None."""
    goal = 0.01 * math.hypot(*path[0]) * (1 + 1e-9)  # up to the last bits of rounding
    outside = [step for step, point in enumerate(path) if math.hypot(*point) > goal]
    if not outside or outside[-1] + 1 == len(path):
        return None
    return outside[-1] + 1
