"""Lesson 07: gradients of micro-batches added up, four ways to do it wrong, 16-bit accumulators, and paths of θ.

The model is the course's character model of `language_model`, a genuine GPT of 110,656 parameters, on the CPU in fp32.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from ..shared.language_model import batches, language_model

MicroBatch = tuple[torch.Tensor, ...]  # token ids and the ids that should follow them, each (b, s)
IGNORED = -100  # the target of padding, which cross-entropy leaves out: torch's default for `ignore_index`


def micro_batches(count: int, size: int = 4, seq_len: int = 32, seed: int = 0) -> list[MicroBatch]:
    """`count` micro-batches of `size` sequences each, the same for the same `seed`."""
    return list(batches(count, size, seq_len, seed))


def uneven(count: int, size: int = 4, seq_len: int = 32) -> list[MicroBatch]:
    """Micro-batches whose sequences begin with text, an eighth in the first to all in the last; the rest is padding."""
    made: list[MicroBatch] = []
    for index, (tokens, targets) in enumerate(micro_batches(count, size, seq_len)):
        kept = max(1, seq_len * (1 + 7 * index // max(count - 1, 1)) // 8)
        made.append((tokens, targets.masked_fill(torch.arange(seq_len) >= kept, IGNORED)))
    return made


def joined(parts: Iterable[MicroBatch]) -> MicroBatch:
    """All micro-batches as one large batch."""
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def counted_tokens(part: MicroBatch) -> int:
    """Tokens that the loss counts: those that are no padding."""
    return int((part[1] != IGNORED).sum())


def mean_loss(model: torch.nn.Module, part: MicroBatch) -> torch.Tensor:
    """The mean cross-entropy over the tokens that count."""
    tokens, targets = part
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """The gradients that all parameters hold now, as one long vector; zeros where there is none."""
    held = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in held]).clone()


def gradient_of(loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """The gradient of `loss`, as one long vector; gradients that the parameters held before are cleared."""
    model.zero_grad()
    loss.backward()
    return gradient(model)


def relative_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The length of the difference, as a part of the length of `other`."""
    return ((one - other).norm() / other.norm()).item()


Loop = Callable[[torch.nn.Module, torch.optim.Optimizer, Sequence[MicroBatch], int], None]
"""One pass over micro-batches that steps once for every group of k of them."""


def grouped(
    weigh: Callable[[MicroBatch, Sequence[MicroBatch], int, int], float],
    last: bool = True,
    clear: str = "before group",
    size: Callable[[int, int], int] = lambda k, count: k,
) -> Loop:
    """A loop that multiplies each mean loss by `weigh(micro-batch, its group, k, all micro-batches)`.

    With other options it makes mistakes: it does not step on an incomplete last group, it clears gradients "before
    each" micro-batch, "after step", or "never", or its groups have another size.
    """

    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch], k: int) -> None:
        every = size(k, len(parts))
        for first in range(0, len(parts), every):
            group = parts[first : first + every]
            for index, part in enumerate(group):
                if clear == "before each" or (clear == "before group" and index == 0):
                    optimizer.zero_grad()
                (mean_loss(model, part) * weigh(part, group, k, len(parts))).backward()
            if last or len(group) == every:
                optimizer.step()
                if clear == "after step":
                    optimizer.zero_grad()

    return loop


accumulated = grouped(lambda part, group, k, count: counted_tokens(part) / sum(map(counted_tokens, group)))
"""Right for any lengths: a micro-batch weighs as much as it has tokens, and the last group is smaller."""

undivided = grouped(lambda part, group, k, count: 1)  # losses are added up, not averaged
dropped = grouped(lambda part, group, k, count: 1 / k, last=False, clear="after step")  # as the common loop does
by_batches = grouped(lambda part, group, k, count: 1 / len(group))  # a mean of means, however many tokens each has
every_micro_batch = grouped(lambda part, group, k, count: 1, size=lambda k, count: 1)  # small batches, with their noise

LOOPS: dict[str, Loop] = {  # by the names that figures use; the first one is right
    "accumulated, by tokens": accumulated,
    "not divided": undivided,
    "last group dropped": dropped,
    "averaged over batches": by_batches,
    "a step on each": every_micro_batch,
}


def large_batch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch], k: int) -> None:
    """The reference for all others: each group as one batch, the last with what is left."""
    undivided(model, optimizer, [joined(parts[first : first + k]) for first in range(0, len(parts), k)], 1)


def moved(loop: Loop, parts: Sequence[MicroBatch], k: int, optimizer: str = "sgd") -> torch.Tensor:
    """Move of a fresh model's parameters in one pass with `loop` and "sgd" (rate 0.1) or "adam" (0.001), one vector."""
    make = {"sgd": partial(torch.optim.SGD, lr=0.1), "adam": partial(torch.optim.Adam, lr=1e-3)}[optimizer]
    model = language_model()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    loop(model, make(model.parameters()), parts, k)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before


def distances(parts: Sequence[MicroBatch], k: int, optimizer: str = "sgd") -> dict[str, float]:
    """For each of `LOOPS`, the distance of its pass's end from that of the large batch, in parts of that one's way."""
    right = moved(large_batch, parts, k, optimizer)
    return {name: relative_distance(moved(loop, parts, k, optimizer), right) for name, loop in LOOPS.items()}


def accumulator_errors(counts: Sequence[int], dtype: torch.dtype) -> list[float]:
    """Relative errors of gradients added up over so many micro-batches, rising, rounded to `dtype`, against fp64."""
    model = language_model()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    exact, sums = torch.zeros_like(weights, dtype=torch.float64), torch.zeros_like(weights, dtype=dtype)
    errors = []
    for number, part in enumerate(micro_batches(max(counts)), 1):
        one = gradient_of(mean_loss(model, part), model)
        exact += one
        sums += one.to(dtype)
        if number in counts:
            errors.append(relative_distance(sums.double(), exact))
    return errors


Point = tuple[float, float]
START: Point = (-1.5, 0.5)
POINTS = 100


class LineFit:
    """Fitting y = θ₀ + θ₁·x to 100 noisy points: a loss with two parameters, so that its path can be drawn."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(0)
        self.x = torch.randn(POINTS, generator=dice, dtype=torch.float64)
        self.y = 1.0 + 2.0 * self.x + torch.randn(POINTS, generator=dice, dtype=torch.float64)

    def moments(self, chosen: slice = slice(None)) -> tuple[float, ...]:
        """Means of x, x², y and x·y over the chosen points: the gradient depends on nothing else."""
        x, y = self.x[chosen], self.y[chosen]
        return tuple(mean.mean().item() for mean in (x, x * x, y, x * y))

    def best(self) -> Point:
        """The θ with the least loss: the least-squares line."""
        x, xx, y, xy = self.moments()
        rise = (xy - x * y) / (xx - x * x)
        return y - rise * x, rise


def slope(theta: Point, moments: Sequence[float]) -> Point:
    """The gradient of ½·mean of (θ₀ + θ₁·x − y)², by θ₀ and by θ₁, from the means of x, x², y and x·y."""
    x, xx, y, xy = moments
    return theta[0] + theta[1] * x - y, theta[0] * x + theta[1] * xx - xy


def path(fit: LineFit, rate: float, size: int, passes: int, group: int = 1) -> list[Point]:
    """The path of θ: micro-batches of `size` points in order, a step along the mean of each `group`, or ValueError."""
    if POINTS % (size * group):
        raise ValueError(f"{POINTS} points are no whole number of {group} micro-batches of {size}")
    walked, parts = [START], [fit.moments(slice(start, start + size)) for start in range(0, POINTS, size)]
    for _ in range(passes):
        for first in range(0, len(parts), group):
            slopes = [slope(walked[-1], part) for part in parts[first : first + group]]
            step = [sum(part) / group for part in zip(*slopes, strict=True)]
            walked.append((walked[-1][0] - rate * step[0], walked[-1][1] - rate * step[1]))
    return walked
