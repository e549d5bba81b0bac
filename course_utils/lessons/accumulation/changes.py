"""Lesson 07's changes: a step that accumulates gradients, as it was and as somebody has changed it."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.measuring.differences import Difference, difference
from course_utils.measuring.simulated import availability

CAUSES = ("batch", "graphs", "logits", "nothing", "validation")

V, S = 2048, 128  # the vocabulary, and tokens in a sequence


def _step_with(change: str, k: int) -> Any:
    """A training step with `k` micro-batches, with one of the `CAUSES` in it."""
    kept: list[Any] = []

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        seen, waiting = list[Any](), torch.zeros(())
        for tokens, targets in zip(*(part.chunk(k) for part in batch), strict=True):
            logits = model(tokens)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) / k
            if change == "logits":
                seen.append(logits.float().detach())
            if change == "graphs":
                waiting = waiting + loss
            else:
                loss.backward()
        if change == "graphs":
            waiting.backward()
        optimizer.step()
        optimizer.zero_grad()
        if change == "validation":
            kept.append(model(batch[0][:1]).mean())

    return step


@cache
def _measured(change: str, k: int, sequences: int) -> Measurement:
    """Three steps of a small language model in bf16; simulated, or on the CPU where no GPU can be simulated."""
    model = nn.Sequential(nn.Embedding(V, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, V)).bfloat16()
    batch = [torch.zeros(sequences * (2 if change == "batch" else 1), S, dtype=torch.long) for _ in range(2)]
    source, optimizer = "simulated" if availability()[0] else "cpu", torch.optim.SGD(model.parameters())
    step = _step_with(change, k)
    return measure(step=step, model=model, optimizer=optimizer, batch=batch, source=source, steps=3)


def changed(change: str, k: int = 4, sequences: int = 8) -> Difference:
    """What one of the `CAUSES` does to the peak of a step with `k` micro-batches."""
    return difference(_measured("nothing", k, sequences), _measured(change, k, sequences))
