"""Three of PyTorch's optimizers for a handful of numbers: lesson 02's valley can be walked on the website.

This is not PyTorch: it has what that picture needs, by PyTorch's formulas, and a test compares every walk
with PyTorch's. What asks for more fails here and stays a picture.
"""

from collections.abc import Iterable
from math import sqrt
from types import SimpleNamespace
from typing import Any

float64 = "float64"


class Tensor:
    """A list of numbers with a gradient."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = [float(value) for value in values]
        self.grad: Tensor | None = None

    def tolist(self) -> list[float]:
        return list(self.values)


def tensor(values: Iterable[float], dtype: str = float64, requires_grad: bool = False) -> Tensor:
    return Tensor(values)


class Optimizer:
    """One step of a rule for every number; what it keeps from step to step is in `kept`, by number."""

    def __init__(self, places: Iterable[Tensor], lr: float, **options: Any) -> None:
        self.places = list(places)
        self.lr = lr
        self.steps = 0
        self.options = options
        self.kept = [[(0.0, 0.0) for _ in place.values] for place in self.places]

    def step(self) -> None:
        self.steps += 1
        for place, kept in zip(self.places, self.kept, strict=True):
            assert place.grad is not None
            for index, slope in enumerate(place.grad.values):
                moved, kept[index] = self.move(slope, *kept[index], **self.options)
                place.values[index] -= moved


class SGD(Optimizer):
    def move(
        self, slope: float, m: float, v: float, momentum: float = 0.0
    ) -> tuple[float, tuple[float, float]]:
        m = momentum * m + slope
        return self.lr * m, (m, v)


class RMSprop(Optimizer):
    def move(
        self, slope: float, m: float, v: float, alpha: float = 0.99
    ) -> tuple[float, tuple[float, float]]:
        v = alpha * v + (1 - alpha) * slope * slope
        return self.lr * slope / (sqrt(v) + 1e-8), (m, v)


class Adam(Optimizer):
    def move(
        self, slope: float, m: float, v: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> tuple[float, tuple[float, float]]:
        m = m + (1 - betas[0]) * (slope - m)
        v = betas[1] * v + (1 - betas[1]) * slope * slope
        first = 1 - betas[0] ** self.steps
        second = 1 - betas[1] ** self.steps
        return self.lr / first * m / (sqrt(v) / sqrt(second) + 1e-8), (m, v)


optim = SimpleNamespace(Optimizer=Optimizer, SGD=SGD, RMSprop=RMSprop, Adam=Adam)
