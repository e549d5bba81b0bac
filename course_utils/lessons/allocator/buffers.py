"""Lesson 10: buffers as large as all gradients, an operation's own memory, and steps on batches of several lengths."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from course_utils.estimating import estimate
from course_utils.estimating.exact.update import clipping, optimizer_step
from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.measuring.tracker import Tracker
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import round_up

VOCABULARY, HIDDEN, SEQUENCES = 4_000, 32, 4


def flat_buffer_bytes(parameters: float) -> int:
    """Bytes of one flat fp32 buffer for that many gradients (ZeRO, Rajbhandari et al. 2020, section 3.2)."""
    return round(4 * parameters)


def buffer_makers(model: str | TransformerConfig) -> dict[str, int]:
    """Bytes that each part of a step allocates in addition to weights, gradients and states, by name."""
    plain = TrainingRun(model, 1, 128, "amp-bf16")
    masters = plain.replace(precision="bf16-master")
    ranks = plain.replace(world_size=8)

    def step(run: TrainingRun, optimizer: str) -> int:
        return optimizer_step(run.replace(optimizer=optimizer)).get("temporaries", 0)

    return {
        "a flat fp32 buffer": flat_buffer_bytes(plain.model.parameters),
        "AdamW, foreach": step(plain, "adamw-foreach"),
        "AdamW, foreach, fp32 masters": step(masters, "adamw-foreach"),
        "AdamW, for-loop": step(plain, "adamw-loop"),
        "AdamW, fused": step(plain, "adamw-fused"),
        "clip_grad_norm_": clipping(plain.replace(clip_grad_norm=1.0)).get("temporaries", 0),
        "DDP's buckets": estimate(ranks)["communication"],
        "DDP, gradients as bucket views": estimate(ranks.replace(bucket_view=True))["communication"],
    }


def taken_by(operation: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return the result of `operation(*arguments)`, and the most bytes that it had allocated at once on the CPU.

    Its arguments are not counted; sizes are whole blocks of 512 bytes, as on a GPU.
    """
    with torch.autograd.set_multithreading_enabled(False), Tracker("cpu") as tracker:
        result = operation(*arguments)
        peak = tracker.at(tracker.peak_event()).total if tracker.events else 0
    return result, peak


def gradients_of(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Random fp32 gradients with that many elements each, the same for everybody."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


def trained_on(lengths: Sequence[int], multiple: int = 1) -> Measurement:
    """Measure one step of an embedding and a head for each length (tokens), rounded up to `multiple`, on the CPU."""
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
