"""Noise of a batch's gradient, lesson 07, and the batch size that is worth it (McCandlish et al. 2018).

A batch of B sequences has E|G_B|² = |G|² + tr(Σ)/B: signal and noise are equally long at B_simple = tr(Σ)/|G|². What a
step gains depends on B_noise = tr(HΣ)/(GᵀHG), where H holds the loss's second derivatives (their section 2.2).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .micro_batches import gradient_of, joined, mean_loss, micro_batches


class Noise(NamedTuple):
    """The squared length of the true gradient, `signal` = |G|², and of one sequence's noise, `noise` = tr(Σ)."""

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """B_simple, in sequences: the batch whose noise is as long as its signal."""
        return self.noise / self.signal

    def squared_length(self, batch: float) -> float:
        """E|G_B|², the mean squared length of a batch's gradient."""
        return self.signal + self.noise / batch


def sequence_gradients(model: torch.nn.Module, count: int = 256) -> torch.Tensor:
    """The gradient of each of `count` sequences on its own, one a row (fp32)."""
    return torch.stack([gradient_of(mean_loss(model, part), model) for part in micro_batches(count, size=1, seed=1)])


def noise_of(gradients: torch.Tensor) -> Noise:
    """Both figures, without bias, from each sequence's own gradient."""
    count = len(gradients)
    mean = gradients.double().mean(0)
    noise = (gradients.square().sum().double() - count * mean.square().sum()).item() / (count - 1)
    return Noise(mean.square().sum().item() - noise / count, noise)


def squared_lengths(gradients: torch.Tensor, sizes: Sequence[int]) -> list[float]:
    """For each batch size, the mean of |G_B|² over the batches that the sequences make, in order."""
    whole = [gradients[: len(gradients) // size * size].reshape(-1, size, gradients.shape[1]) for size in sizes]
    return [batches.mean(1).square().sum(1).double().mean().item() for batches in whole]


def from_two(small: int, big: int, small_length: float, big_length: float) -> Noise:
    """Both figures from mean |G_B|² of two batches, small and big (McCandlish et al. 2018, A.1)."""
    signal = (big * big_length - small * small_length) / (big - small)
    return Noise(signal, (small_length - big_length) / (1 / small - 1 / big))


def progress(batch: float, scale: float) -> float:
    """Part of the best possible step's gain that one step on `batch` makes: 1/(1 + B_noise/B), their section 2.2."""
    return 1 / (1 + scale / batch)


def steps_and_examples(batch: float, scale: float) -> tuple[float, float]:
    """Steps, and examples, to a given loss: both in units of the least possible. Their section 2.3."""
    return 1 + scale / batch, 1 + batch / scale


STEP = 0.02  # the length of the step that is tried, in gradients: from it and the slope follows the parabola


def gains(model: torch.nn.Module, sizes: Sequence[int], count: int = 128, draws: int = 40) -> list[float]:
    """The fall of the loss in one step along a batch's gradient, in parts of that along the gradient of all.

    For each of `sizes` the mean over `draws` random batches, with the length of step that is best for that size. The
    loss is that of the `count` sequences from which the batches are drawn; it is taken for a parabola along each step.
    """
    rows, everything = sequence_gradients(model, count), joined(micro_batches(count, size=1, seed=1))
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    whole, dice = rows.mean(0), torch.Generator().manual_seed(0)

    def loss(theta: torch.Tensor) -> float:
        torch.nn.utils.vector_to_parameters(theta, model.parameters())
        with torch.no_grad():
            return mean_loss(model, everything).item()

    def best(ways: Sequence[torch.Tensor]) -> float:
        """The top of the parabola slope·r − bend·r²: what steps of the best length r gain on average."""
        slope = sum((whole @ way).item() for way in ways) / len(ways)
        fall = sum(before - loss(start - STEP * way) for way in ways) / len(ways)
        return slope**2 / (4 * (slope * STEP - fall) / STEP**2)

    before = loss(start)
    most = best([whole])
    drawn = [[rows[torch.randint(count, (size,), generator=dice)].mean(0) for _ in range(draws)] for size in sizes]
    found = [best(ways) / most for ways in drawn]
    loss(start)  # the model as it was
    return found


def rounded(value: float) -> float:
    """The nearest power of two: a noisy figure rounded until it is the same everywhere."""
    return 2.0 ** round(math.log2(value))
