"""Learning rates for large batches, lesson 07: schedules, and a small classifier to try them.

All runs with the same batch size and optimizer train together, as one batched product, so that dozens take seconds.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy


def scaled(rate: float, k: float, optimizer: str = "sgd") -> float:
    """The rate for a batch k times larger: k·rate for "sgd" (Goyal et al. 2017), √k·rate for "adam" (Granziol 2022)."""
    return rate * {"sgd": k, "adam": math.sqrt(k)}[optimizer]


def warm_up(t: float, steps: float, peak: float, start: float = 0.0) -> float:
    """The rate of step t: from `start` straight up to `peak` at step `steps`, then flat (Goyal et al. 2017, 2.2)."""
    return peak if t >= steps else start + (peak - start) * t / steps


SMALL, K = 16, 32  # the small batch, and how many times as large the large one is, as with Goyal et al.'s 256 and 8,192
BASE, ADAM_BASE = 0.01, 0.006  # rates at which the small batch learns well, with momentum and with Adam
FACTORS = {"η/2": 0.5, "η": 1.0, "2η": 2.0}

EXAMPLES, TESTS, INPUTS, CLASSES, WIDTH, LAYERS = 8192, 4096, 20, 10, 64, 4
EPOCHS, WARM_EPOCHS = 10, 3
SEEDS = (0, 1, 2)
GAIN = 1.3  # first weights are so much larger than He et al. 2015 advise: steep, as a deep network, it needs a warm-up


class Setting(NamedTuple):
    """One way to train: examples in a batch, peak learning rate, and the rate to warm up from, None for no warm-up."""

    name: str
    batch: int
    rate: float
    warm_from: float | None = None
    optimizer: str = "sgd"


class ErrorRates(NamedTuple):
    """Test errors in percent, one for each seed; guessing gives about 84, as classes differ in size."""

    setting: Setting
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.errors)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds, percent."""
        return stdev(self.errors)


def table() -> list[Setting]:
    """The rows of Goyal et al.'s table with n = SMALL and η = BASE, and one more: the scaled rate without a warm-up."""
    large, root = SMALL * K, math.sqrt(K)
    return [
        *(Setting(f"n, {name}", SMALL, factor * BASE) for name, factor in FACTORS.items()),
        *(Setting(f"{K}n, {K}·{name}", large, factor * K * BASE, factor * BASE) for name, factor in FACTORS.items()),
        Setting(f"{K}n, η", large, BASE),
        Setting(f"{K}n, √{K}·η", large, root * BASE, BASE),
        Setting(f"{K}n, {K}·2η, no warm-up", large, 2 * K * BASE),
    ]


def adam_table() -> list[Setting]:
    """Adam's: the small batch, and the large one unscaled, by √k and by k without a warm-up, and by k with one."""
    factors = {"η": 1.0, f"√{K}·η": math.sqrt(K), f"{K}·η": K}
    large = [Setting(f"{K}n, {name}", SMALL * K, f * ADAM_BASE, optimizer="adam") for name, f in factors.items()]
    warmed = Setting(f"{K}n, {K}·η, warm-up", SMALL * K, K * ADAM_BASE, ADAM_BASE, "adam")
    return [Setting("n, η", SMALL, ADAM_BASE, optimizer="adam"), *large, warmed]


@cache
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, for training first, then for the test: a random network's favorites, after some noise."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES + TESTS, INPUTS, generator=dice)
    first = 1.5 * torch.randn(INPUTS, 32, generator=dice) / math.sqrt(INPUTS)
    second = torch.randn(32, CLASSES, generator=dice)
    scores = torch.tanh(x @ first) @ second + 0.3 * torch.randn(len(x), CLASSES, generator=dice)
    return x, scores.argmax(1)


def train(settings: Sequence[Setting], seeds: Sequence[int] = SEEDS, epochs: int = EPOCHS) -> list[ErrorRates]:
    """Train and test a classifier for each setting and seed. Rates fall to a tenth halfway and again at 80 %."""
    found: dict[Setting, ErrorRates] = {}
    for group in dict.fromkeys((setting.batch, setting.optimizer) for setting in settings):
        alike = [setting for setting in settings if (setting.batch, setting.optimizer) == group]
        found |= _trained(alike, seeds, epochs)
    return [found[setting] for setting in settings]


def _trained(settings: Sequence[Setting], seeds: Sequence[int], epochs: int) -> dict[Setting, ErrorRates]:
    replicas = [(setting, seed) for setting in settings for seed in seeds]
    weights = _first_weights([seed for _, seed in replicas])
    update = _momentum if settings[0].optimizer == "sgd" else _adam
    states = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    x, y = data()
    for step, (epoch, chosen) in enumerate(_batches(settings[0].batch, epochs), 1):
        out = _network(weights, x[chosen].expand(len(replicas), -1, -1))
        targets = y[chosen].expand(len(replicas), -1)
        loss = cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum") / len(chosen)
        slopes = torch.autograd.grad(loss, weights)
        rates = _rates([setting for setting, _ in replicas], step, epoch, epochs)
        with torch.no_grad():
            for weight, slope, state in zip(weights, slopes, states, strict=True):
                update(weight, slope, state, rates, step)
    with torch.no_grad():  # scores that are not finite favor class 0: a guess
        scores = _network(weights, x[EXAMPLES:].expand(len(replicas), -1, -1)).nan_to_num()
    errors = (100 * (scores.argmax(-1) != y[EXAMPLES:]).double().mean(1)).view(len(settings), -1).tolist()
    return {setting: ErrorRates(setting, tuple(missed)) for setting, missed in zip(settings, errors, strict=True)}


def _first_weights(seeds: Sequence[int]) -> list[torch.Tensor]:
    """Matrices and biases of all layers, one slice for each replica: the same for the same seed."""
    sizes, weights = [INPUTS, *[WIDTH] * (LAYERS - 1), CLASSES], []
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        dice = [torch.Generator().manual_seed(100 * seed + layer) for seed in seeds]
        drawn = torch.stack([torch.randn(inputs, outputs, generator=one) for one in dice])
        weights += [drawn * GAIN * math.sqrt(2 / inputs), torch.zeros(len(seeds), 1, outputs)]
    return [weight.requires_grad_() for weight in weights]


def _network(weights: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for layer in range(0, len(weights), 2):
        x = torch.baddbmm(weights[layer + 1], x.relu() if layer else x, weights[layer])
    return x


def _batches(size: int, epochs: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(epoch, indices) of each batch; every epoch shuffles anew, the same for everybody."""
    for epoch in range(epochs):
        for chosen in torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch)).split(size):
            yield epoch, chosen


def _rates(settings: Sequence[Setting], step: int, epoch: int, epochs: int) -> torch.Tensor:
    """The learning rate of each replica at this step, (replicas, 1, 1)."""
    decay = 1.0 if epoch < epochs * 0.5 else 0.1 if epoch < epochs * 0.8 else 0.01
    warm = WARM_EPOCHS * EXAMPLES // settings[0].batch
    now = [s.rate if s.warm_from is None else warm_up(step, warm, s.rate, s.warm_from) for s in settings]
    return decay * torch.tensor(now).view(-1, 1, 1)


def _momentum(weight: torch.Tensor, slope: torch.Tensor, state: Any, rates: torch.Tensor, step: int) -> None:
    state[0].mul_(0.9).add_(slope)
    weight.sub_(rates * state[0])


def _adam(weight: torch.Tensor, slope: torch.Tensor, state: Any, rates: torch.Tensor, step: int) -> None:
    m, v = state
    m.mul_(0.9).add_(slope, alpha=0.1)
    v.mul_(0.999).addcmul_(slope, slope, value=0.001)
    weight.sub_(rates * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
