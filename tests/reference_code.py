"""How the reference code of GPT-2, Llama 3, Mistral, Qwen and Mixtral differs from the course's networks, in
bytes.

Each difference is a small change of the course's network, simulated next to the network as it is. Run this
file to print the table of docs/reference_code.md.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file runs alone

from course_utils.measuring.sources import simulated_run  # noqa: E402
from course_utils.networks import attention, loss_of  # noqa: E402
from course_utils.run import TrainingRun  # noqa: E402

GPT = TrainingRun("gpt2", 8, 1024)
LLAMA = TrainingRun("llama3.2-1b", 4, 2048)
PRECISIONS = ("amp-bf16", "bf16-master")

NETWORK, STEP = "course_utils.networks.transformer", "course_utils.measuring.step"


def rotate_complex(x: torch.Tensor, by: attention.Rotation) -> torch.Tensor:
    """Rotation as a product of complex numbers in fp32; `by` has each angle twice."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    half = by[0].size(-1) // 2
    angles = torch.complex(by[0][:, :half].float(), by[1][:, :half].float())
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)


def eager_in_fp32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, dropout: float, **_: bool
) -> torch.Tensor:
    """Attention written out with a mask that is added, and a softmax in fp32 that is cast back."""
    k, v = attention.full_width(q, k, v)
    added = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask, float("-inf"))
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1)) + added
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def shifted_loss(logits: torch.Tensor, targets: torch.Tensor, upcast: bool = False) -> torch.Tensor:
    """The loss of a contiguous copy of the fp32 logits without each sequence's last."""
    return loss_of(logits.float()[:, :-1].contiguous(), targets[:, :-1].contiguous())


def holding_loss(logits: torch.Tensor, targets: torch.Tensor, upcast: bool = False) -> torch.Tensor:
    """The loss, while a name of the training loop holds the logits until the next ones are there."""
    HELD[:] = [logits]
    return loss_of(logits, targets, upcast)


HELD: list[torch.Tensor] = []

Changes = dict[str, Any]


@contextmanager
def changed(changes: Changes) -> Iterator[None]:
    """The course's network with these of its parts replaced."""
    patches = [patch(name, new) for name, new in changes.items()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
        HELD.clear()


DIFFERENCES: dict[str, tuple[TrainingRun, Changes]] = {
    "logits in fp32": (GPT.replace(logits="fp32"), {}),
    "logits in 16 bits": (LLAMA.replace(logits="compute"), {}),
    "GELU in single operations": (GPT.replace(unfused=True), {}),
    "RMSNorm in single operations": (LLAMA.replace(unfused=True), {}),
    "keys and values repeated": (LLAMA.replace(model=replace(LLAMA.model, repeat_kv=True)), {}),
    "one matrix for q, k and v": (LLAMA.replace(model=replace(LLAMA.model, fused_qkv=True)), {}),
    "rotation in fp32": (LLAMA, {f"{NETWORK}.rotate": rotate_complex}),
    "eager: mask added, softmax in fp32": (
        LLAMA.replace(attention="eager", micro_batch=1),
        {f"{NETWORK}.eager_attention": eager_in_fp32},
    ),
    "logits held by a name": (LLAMA, {f"{STEP}.loss_of": holding_loss}),
    "logits shifted in a copy": (LLAMA, {f"{STEP}.loss_of": shifted_loss}),
}


def peaks(name: str, precision: str) -> tuple[int, int]:
    """Bytes at the simulated peak: of the course's network as it is by default, and with the difference."""
    run, changes = DIFFERENCES[name]
    own = TrainingRun(run.model.name, run.micro_batch, run.seq_len, precision, attention=run.attention)
    anew = simulated_run.__wrapped__  # not what was simulated before, with other parts
    before = simulated_run(own, 2, "").peak
    with changed(changes):
        return before, anew(run.replace(precision=precision), 2, "").peak


def percents(name: str, report: Callable[[str], None] = lambda _: None) -> list[float]:
    """By how many percent the difference moves the peak, for each of PRECISIONS."""
    found = []
    for precision in PRECISIONS:
        before, after = peaks(name, precision)
        found.append(100 * (after / before - 1))
        report(f"{name:36s} {precision:12s} {before:15,} {after - before:+15,} {found[-1]:+6.1f} %")
    return found


if __name__ == "__main__":
    for one in DIFFERENCES:
        percents(one, print)
