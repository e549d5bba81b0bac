"""Lesson 07: how noisy the gradient of a batch is, and how large a batch is worth it (McCandlish et al. 2018).

One sequence's gradient is G + noise, where G is the gradient over all data and tr(Σ) the noise's mean squared length.
A batch of B averages: E|G_B|² = |G|² + tr(Σ)/B. Signal and noise are equally long at the simple noise scale
B_simple = tr(Σ)/|G|² (their section 2.2), counted in whatever B counts, here sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .accumulation import gradient_of, joined, mean_loss, micro_batches


@dataclass(frozen=True)
class Noise:
    """The squared length of the true gradient, `signal` = |G|², and of one sequence's noise, `noise` = tr(Σ)."""

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """B_simple, in sequences: the batch whose noise is as long as its signal."""
        return self.noise / self.signal

    def squared_length(self, batch: float) -> float:
        """E|G_B|², what the squared length of a batch's gradient is on average."""
        return self.signal + self.noise / batch


def sequence_gradients(model: torch.nn.Module, count: int = 256, seed: int = 1) -> torch.Tensor:
    """The gradient of each of `count` sequences on its own, one a row (fp32)."""
    parts = micro_batches(count, size=1, seed=seed)
    return torch.stack([gradient_of(mean_loss(model, part), model) for part in parts])


def noise_of(gradients: torch.Tensor) -> Noise:
    """Both figures, without bias, from each sequence's own gradient."""
    count = len(gradients)
    mean = gradients.double().mean(0)
    noise = (gradients.square().sum().double() - count * mean.square().sum()).item() / (count - 1)
    return Noise(mean.square().sum().item() - noise / count, noise)


def squared_lengths(gradients: torch.Tensor, sizes: Sequence[int]) -> list[float]:
    """For each batch size, the mean of |G_B|² over the batches that the sequences make, in order."""
    found = []
    for size in sizes:
        whole = len(gradients) // size * size
        means = gradients[:whole].reshape(-1, size, gradients.shape[1]).mean(1)
        found.append(means.square().sum(1).double().mean().item())
    return found


def from_two(small: int, big: int, small_length: float, big_length: float) -> Noise:
    """Both figures from the mean |G_B|² of two batch sizes alone (McCandlish et al. 2018, appendix A.1).

    ValueError unless `big` is larger than `small`.
    """
    if not big > small > 0:
        raise ValueError(f"batches of {small} and {big}: the second has to be the larger one")
    signal = (big * big_length - small * small_length) / (big - small)
    return Noise(signal, (small_length - big_length) / (1 / small - 1 / big))


def progress(batch: float, scale: float) -> float:
    """Part of the best possible step's gain that one step on `batch` makes: 1/(1 + B_noise/B), their section 2.2."""
    return 1 / (1 + scale / batch)


def steps_and_examples(batch: float, scale: float) -> tuple[float, float]:
    """Steps, and examples, to a given loss: both in units of the least possible. Their section 2.3."""
    return 1 + scale / batch, 1 + batch / scale


RATES = (0.005, 0.02, 0.05, 0.12, 0.3)
"""Lengths of steps to try, in gradients."""


def gains(model: torch.nn.Module, sizes: Sequence[int], count: int = 128, draws: int = 8) -> list[float]:
    """How much one step along a batch's gradient lowers the loss, in parts of what a step along that of all can.

    For each of `sizes` the mean over up to `draws` batches, with the rate of `RATES` that is best for that size; the
    loss is that of `count` sequences, from which the batches are drawn, so keep `sizes` well below it.
    """
    rows, everything = sequence_gradients(model, count), joined(micro_batches(count, size=1, seed=1))
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def loss(theta: torch.Tensor) -> float:
        torch.nn.utils.vector_to_parameters(theta, model.parameters())
        with torch.no_grad():
            return mean_loss(model, everything).item()

    def best(size: int) -> float:
        number = min(draws, count // size)
        ways = [rows[index * size : (index + 1) * size].mean(0) for index in range(number)]
        return max(sum(before - loss(start - rate * way) for way in ways) / number for rate in RATES)

    before = loss(start)
    most = best(count)
    found = [best(size) / most for size in sizes]
    loss(start)  # the model as it was
    return found


def rounded(value: float) -> float:
    """The nearest power of two, on a logarithmic scale: what of a noisy figure is the same on every processor."""
    return 2.0 ** round(math.log2(value))
