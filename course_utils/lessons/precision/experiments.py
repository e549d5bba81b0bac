"""Lesson 03's experiments: updates that vanish, gradients that underflow, loss scaling, and five trainings compared.

Everything runs on the CPU in the genuine 16-bit formats, with matrix products as GPUs compute them: fp32 sums and one
rounding at the end (torch's own in bf16, `language_model.HalfProducts` in fp16).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch

from course_utils.figures import lines
from course_utils.figures.canvas import Figure

from ..shared.language_model import FORMATS, StaticLossScale, Training, language_model, mean_loss, train_language_model


def round_stochastically(values: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
    """Return fp32 `values` as bf16, up or down at random, each with the probability that makes the mean right."""
    # bf16 is the upper half of an fp32's bits: the carry from the lower half comes as often as that is large
    noise = torch.randint(2**16, values.shape, generator=dice, dtype=torch.int32)
    bits = (values.float().view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).bfloat16()


def repeated_update(start: float, update: float, steps: int) -> dict[str, list[float]]:
    """Return a weight after 0, 1, …, `steps` equal updates, for each of five ways to keep it."""
    dice = torch.Generator().manual_seed(0)
    kept = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    kept |= {"bf16, fp32 master": torch.float32, "bf16, stochastic": torch.bfloat16}
    seen = {}
    for name, dtype in kept.items():
        weight, seen[name] = torch.tensor([start], dtype=dtype), [start]
        for _ in range(steps):
            if name == "bf16, stochastic":
                weight = round_stochastically(weight.float() + update, dice)
            else:
                weight = weight + torch.tensor(update, dtype=dtype)
            seen[name].append((weight.bfloat16() if name == "bf16, fp32 master" else weight).item())
    return seen


def update_figure(weights: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw how far the weights of `repeated_update` have come from where they began, as lines by step."""
    series = {name: (range(len(values)), [value - values[0] for value in values]) for name, values in weights.items()}
    return lines(series, title, "updates", "change of the weight", markers=False)


def unmoved_share(update: float, dtype: torch.dtype) -> float:
    """Return the part of the language model's initial matrix weights that adding `update` leaves alone."""
    weights = torch.cat([w.detach().flatten() for w in language_model().parameters() if w.dim() == 2]).to(dtype)
    return (weights + torch.tensor(update, dtype=dtype) == weights).float().mean().item()


def gradients_of(steps: int = 50) -> torch.Tensor:
    """Return all gradients of the language model but zeros, in one row, after `steps` steps of training in fp32."""
    found: list[torch.Tensor] = []

    def keep(step: int, model: torch.nn.Module) -> None:
        if step == steps:
            found.extend(weight.grad.flatten() for weight in model.parameters() if weight.grad is not None)

    train_language_model(steps=steps, watch=keep)
    gradients = torch.cat(found)
    return gradients[gradients != 0]


@dataclass
class DynamicLossScale:
    """Halves the scale when a gradient overflows, doubles it after `interval` steps without: the rule of GradScaler.

    `history` has the scale of each step so far (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).
    """

    scale: float = 2.0**16
    interval: int = 2000
    streak: int = 0
    history: list[float] = field(default_factory=list)

    def update(self, overflowed: bool) -> None:
        """Adapt the scale after a backward pass; `overflowed` if one of its gradients is not finite."""
        self.history.append(self.scale)
        self.streak = 0 if overflowed else self.streak + 1
        if overflowed:
            self.scale /= 2
        elif self.streak == self.interval:
            self.scale, self.streak = 2 * self.scale, 0


def gradscaler_scales(overflows: Sequence[bool], start: float, interval: int) -> list[float]:
    """Return the scale that torch's own GradScaler has after each of these steps, some of which overflow."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=interval)
    scales = []
    for overflowed in overflows:
        scaler.scale(torch.ones(1))
        weight.grad = torch.tensor([float("inf") if overflowed else 1.0])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def scale_figure(history: Sequence[float], title: str) -> Figure:
    """Draw a loss scale by step."""
    steps = range(1, len(history) + 1)
    return lines({"loss scale": (steps, history)}, title, "step", "loss scale", log_y=True, markers=False)


PARTS = 4096  # the loss of the five trainings is divided by this, as for one of so many micro-batches


def five_trainings(steps: int = 100) -> dict[str, Training]:
    """Train the character model in five recipes, from the same weights on the same batches, the loss over `PARTS`.

    AdamW in each. "bf16 alone" keeps everything in bf16, Adam's moments too.
    """
    recipes = {"fp32": "fp32", "fp16, no scaling": "fp16-master", "fp16, scaled": "fp16-master"}
    recipes |= {"bf16 alone": "bf16", "bf16, fp32 master": "bf16-master"}
    trainings = {}
    for name, precision in recipes.items():
        scale = DynamicLossScale(2.0**24 / PARTS) if name == "fp16, scaled" else StaticLossScale(1 / PARTS)
        trainings[name] = train_language_model("adamw", precision, steps, loss_scale=scale)
    return trainings


def loss_figure(trainings: Mapping[str, Training], title: str) -> Figure:
    """Draw the loss by step, each point the mean of the ten steps that end there."""
    series = {}
    for name, each in trainings.items():
        ends = range(10, len(each.losses) + 1)
        series[name] = (ends, [sum(each.losses[end - 10 : end]) / 10 for end in ends])
    return lines(series, title, "step (mean of 10)", "loss in nats a character", markers=False)


def learns_as_well(training: Training, reference: Training) -> bool:
    """Return True if a training ends within 0.15 nats of the reference: other batches change as much."""
    return abs(training.final - reference.final) < 0.15


_trained = cache(train_language_model)


class Late(NamedTuple):
    """Further steps of a trained model: the part of its weights that has not moved, the nats a character it gained."""

    unmoved: float
    gain: float


def late_training(precision: str, rate: float = 1e-5, before: int = 200, steps: int = 100) -> Late:
    """Go on with a model trained for `before` steps in fp32: `steps` more at `rate`, weights and all in `precision`.

    The gain is that of the mean loss over the whole text, against the trained model in the same format.
    """
    model = deepcopy(_trained(steps=before).model).to(FORMATS[precision].weights)
    first = [weight.detach().clone() for weight in model.parameters()]
    loss = mean_loss(deepcopy(model).float())
    train_language_model("adamw", precision, steps, rate=rate, model=model, seed=1)
    same = sum((now == old).sum().item() for now, old in zip(model.parameters(), first, strict=True))
    return Late(same / sum(weight.numel() for weight in first), loss - mean_loss(model.float()))
