"""Code that the ranks of lesson 11 share: a small network in equal layers, its batch, and a clock on every work.

Each layer also waits a fixed time, forward once and backward twice as long. That stands for a GPU at work, which leaves
the processor free: more stages than there are cores can work at once.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from .schedules import BACKWARD, FORWARD, Work

LAYERS, WIDTH, SEQUENCES = 8, 16, 32
SEED = 11

loss = mse_loss


class Layer(nn.Module):
    """tanh(W·x + c), and a pause of `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        time.sleep(self.seconds)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(2 * self.seconds))
        return y


def network(seconds: float = 0.0) -> nn.Sequential:
    """All layers, with the same weights wherever it is called."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.Sequential(*(Layer(seconds) for _ in range(LAYERS)))


def part(rank: int, ranks: int, seconds: float) -> nn.Sequential:
    """One rank's layers of it. A rank's forward pauses `seconds` in all, however many layers it has."""
    each = LAYERS // ranks
    return nn.Sequential(*list(network(seconds / each))[rank * each : (rank + 1) * each])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The batch and its targets, (32, 16) each, the same wherever it is called."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(SEQUENCES, WIDTH, generator=generator), torch.randn(SEQUENCES, WIDTH, generator=generator)


def gradients(layers: nn.Module) -> list[list[float]]:
    """The gradient of each parameter, flat, as JSON can hold it."""
    return [weight.grad.flatten().tolist() for weight in layers.parameters() if weight.grad is not None]


def whole_gradients() -> list[list[float]]:
    """The gradients of one process that runs all layers on the whole batch."""
    layers, (x, target) = network(), batch()
    loss(layers(x), target).backward()
    return gradients(layers)


def difference(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference of two lists of gradients, relative to the largest gradient of `other`."""
    a, b = (torch.tensor([value for row in rows for value in row], dtype=torch.float64) for rows in (one, other))
    return ((a - b).abs().max() / b.abs().max()).item()


class Clock:
    """Notes when a `PipelineStage` begins and ends each forward and backward, and how many batches it keeps."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.forget()
        stage.forward_one_chunk = partial(self._time, FORWARD, stage.forward_one_chunk)
        stage.backward_one_chunk = partial(self._time, BACKWARD, stage.backward_one_chunk)

    def forget(self) -> None:
        """Begin anew: all notes so far were of a rehearsal."""
        self.noted: list[tuple[str, int, float, float]] = []
        self.most_kept = 0

    def _time(self, kind: str, work: Any, micro: int, *arguments: Any, **named: Any) -> Any:
        start = time.monotonic()
        found = work(micro, *arguments, **named)
        self.noted.append((kind, micro, start, time.monotonic()))
        self.most_kept = max(self.most_kept, len(self.stage.fwd_cache))
        return found


def by_schedule(ranks: list[list[Any]]) -> dict[str, list[Any]]:
    """The ranks' results by schedule: GPipe came first, then 1F1B. Empty if no ranks could run."""
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(("GPipe", "1F1B")) if ranks}


def measured_span(noted: list[list[list[Any]]]) -> tuple[float, float]:
    """Seconds from the first work's start to the last one's end, and the part of all ranks' time without work."""
    times = [(start, end) for rank in noted for _, _, start, end in rank]
    span = max(end for _, end in times) - min(start for start, _ in times)
    return span, 1 - sum(end - start for start, end in times) / (span * len(noted))


def works(noted: list[list[list[Any]]]) -> list[Work]:
    """The notes of all ranks' clocks, in milliseconds from the first work's start."""
    zero = min(start for rank in noted for _, _, start, _ in rank)
    return [
        Work(kind, stage, micro, 1e3 * (start - zero), 1e3 * (end - zero))
        for stage, rank in enumerate(noted)
        for kind, micro, start, end in rank
    ]


def in_milliseconds(predicted: Sequence[Work], unit_ms: float) -> list[Work]:
    return [replace(work, start=unit_ms * work.start, end=unit_ms * work.end) for work in predicted]
