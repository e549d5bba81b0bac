"""Lesson 02: a narrow valley to walk down, four optimizers for one coordinate, and Adam by hand on tensors."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from course_utils.errors import check_known
from course_utils.measurement import Measurement
from course_utils.measuring.carrying import tensors_in

Point = tuple[float, float]

START: Point = (-10.0, 2.0)
"""Far out along the valley and up one wall, in its own axes."""


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
    (x, y), turn = point, math.radians(degrees)
    return x * math.cos(turn) - y * math.sin(turn), x * math.sin(turn) + y * math.cos(turn)


@dataclass
class Memory:
    """The states of one coordinate that an optimizer keeps from step to step."""

    m: float = 0.0
    v: float = 0.0


class Knobs(NamedTuple):
    """The choices: the learning rate η, how much of m and of v is kept from step to step (β1, β2), and ε."""

    rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


def gradient_descent(g: float, memory: Memory, step: int, knobs: Knobs) -> float:
    """Return how far to go against the gradient g: η·g. Remembers nothing."""
    return knobs.rate * g


def momentum(g: float, memory: Memory, step: int, knobs: Knobs) -> float:
    """Return η·m, m being the sum of all gradients, older ones fading by β1 a step (Polyak 1964, in torch's form)."""
    memory.m = knobs.beta1 * memory.m + g
    return knobs.rate * memory.m


def rmsprop(g: float, memory: Memory, step: int, knobs: Knobs) -> float:
    """Return η·g/(√v + ε), v being the running mean of g² (Tieleman and Hinton 2012, lecture 6.5)."""
    memory.v = knobs.beta2 * memory.v + (1 - knobs.beta2) * g * g
    return knobs.rate * g / (math.sqrt(memory.v) + knobs.epsilon)


def adam(g: float, memory: Memory, step: int, knobs: Knobs) -> float:
    """Return η·m̂/(√v̂ + ε), both running means corrected for their start at zero (Kingma and Ba 2015, algorithm 1)."""
    memory.m = knobs.beta1 * memory.m + (1 - knobs.beta1) * g
    memory.v = knobs.beta2 * memory.v + (1 - knobs.beta2) * g * g
    m_hat = memory.m / (1 - knobs.beta1**step)
    v_hat = memory.v / (1 - knobs.beta2**step)
    return knobs.rate * m_hat / (math.sqrt(v_hat) + knobs.epsilon)


Rule = Callable[[float, Memory, int, Knobs], float]

RULES: dict[str, Rule] = {"gradient descent": gradient_descent, "momentum": momentum, "RMSProp": rmsprop, "Adam": adam}


def trajectory(
    rule: str, rate: float, steps: int = 100, *, beta1: float = 0.9, beta2: float = 0.999, valley: Valley | None = None
) -> list[Point]:
    """Return the places that an optimizer of `RULES` visits on the map, the start first; fewer if it leaves for good.

    Raises ValueError for an unknown rule, a rate that is not above 0, and a β outside of 0 to 1.
    """
    check_known("optimizer", rule, RULES)
    if not (rate > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"a learning rate of {rate}, β1 {beta1}, β2 {beta2}: η is above 0, a β at least 0 and below 1")
    valley, knobs, memories = valley or Valley(), Knobs(rate, beta1, beta2), (Memory(), Memory())
    path = [valley.turned(START)]
    for step in range(1, steps + 1):
        (x, y), slopes = path[-1], valley.slope(path[-1])
        dx, dy = (RULES[rule](g, memory, step, knobs) for g, memory in zip(slopes, memories, strict=True))
        path.append((x - dx, y - dy))
        if math.hypot(*path[-1]) > 1e6:
            break
    return path


def steps_needed(path: Sequence[Point]) -> int | None:
    """Return after how many steps a walk stays within 1 % of its first distance from the floor; None if never."""
    goal = 0.01 * math.hypot(*path[0]) * (1 + 1e-9)  # up to the last bits of rounding
    outside = [step for step, point in enumerate(path) if math.hypot(*point) > goal]
    return outside[-1] + 1 if outside and outside[-1] + 1 < len(path) else None


def first_updates(count: int, corrected: bool = True) -> list[float]:
    """Return the lengths of Adam's first updates, in learning rates, at β1 = 0.9, β2 = 0.999 and gradients of 1."""
    raw = [(1 - 0.9**step) / math.sqrt(1 - 0.999**step) for step in range(1, count + 1)]  # means of ones, from zero
    return [1.0] * count if corrected else raw


def mean_update(rule: str, gradients: Sequence[float]) -> float:
    """Return the mean length, in learning rates, of the updates that a rule makes of one coordinate's gradients."""
    memory, knobs = Memory(), Knobs(rate=1)
    return sum(abs(RULES[rule](g, memory, step, knobs)) for step, g in enumerate(gradients, 1)) / len(gradients)


@torch.no_grad()
def adamw_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: int,
    rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Update one tensor in place as AdamW does (Loshchilov and Hutter 2019, algorithm 2); `step` is 1 at first."""
    weight.mul_(1 - rate * weight_decay)  # AdamW: decay the weight itself, not by way of the gradient
    m.mul_(beta1).add_(gradient, alpha=1 - beta1)  # which way, on average
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)  # how large, on average, squared
    m_hat = m / (1 - beta1**step)  # both began at zero: make up for it
    v_hat = v / (1 - beta2**step)
    weight.sub_(rate * m_hat / (v_hat.sqrt() + epsilon))


class HandAdamW:
    """AdamW in plain tensors: two states for each parameter, made when the first gradient is there."""

    def __init__(self, parameters: Sequence[torch.Tensor], rate: float = 1e-3) -> None:
        self.parameters, self.rate, self.steps = list(parameters), rate, 0
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self) -> None:
        """Update every parameter from its gradient."""
        if not self.steps:
            self.states = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self.parameters]
        self.steps += 1
        for weight, (m, v) in zip(self.parameters, self.states, strict=True):
            if weight.grad is not None:
                adamw_step(weight, weight.grad, m, v, self.steps, self.rate)


def kept_bytes(optimizer: Any) -> int:
    """Return the bytes of all that an optimizer keeps besides parameters and gradients; torch's or one of your own."""
    return sum(tensor.untyped_storage().nbytes() for tensor in kept_tensors(optimizer))


def kept_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps besides parameters and their gradients, one for each storage."""
    things: Any = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else vars(optimizer)
    found = list(tensors_in(things, set()))
    gradients = [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    theirs = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    kept = {t.untyped_storage().data_ptr(): t for t in found if not isinstance(t, torch.nn.Parameter)}
    return [tensor for place, tensor in kept.items() if place not in theirs]


def kept_by_name(optimizer: torch.optim.Optimizer) -> Mapping[str, int]:
    """Return the bytes of a torch optimizer's states, by the names that it gives them ("exp_avg", …)."""
    sizes: Counter[str] = Counter()
    for state in optimizer.state.values():
        sizes.update({name: tensor.untyped_storage().nbytes() for name, tensor in state.items()})
    return dict(sizes)


def step_temporaries(measured: Measurement) -> int:
    """Return the bytes that come and go in the optimizer's step at its fullest; 0 if it allocates nothing."""
    return measured.phase_peaks.get("optimizer", {}).get("temporaries", 0)
