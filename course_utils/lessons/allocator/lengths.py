"""Lesson 10: a small language model trained on batches of different lengths, whose allocations are then replayed."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.units import round_up

VOCABULARY, HIDDEN, SEQUENCES = 4_000, 32, 4


def trained_on(lengths: Sequence[int], multiple: int = 1) -> Measurement:
    """Measure one step for each length (tokens), rounded up to `multiple`, on the CPU.

    The model is an embedding and a head, as the logits vary most.
    """
    padded = [round_up(length, multiple) for length in lengths]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY))
        tokens = torch.randint(VOCABULARY, (SEQUENCES, max(padded)))
    optimizer = torch.optim.AdamW(model.parameters())
    remaining = iter(padded)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
        tokens = tokens[:, : next(remaining)]
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return measure(step=step, model=model, optimizer=optimizer, batch=tokens, steps=len(padded), source="cpu")
