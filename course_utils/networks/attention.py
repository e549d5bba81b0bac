"""Causal attention of (b, a, s, h/a) heads: rotary positions, and the kernel.

It is written out or one of torch's own.
"""

import math

import torch
from torch.nn import functional as F

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(tokens: torch.Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosine and sine (s, h/a) of every position's angles, computed in fp32 and kept in `dtype`.

    Su et al. 2021.
    """
    s = tokens.size(1)
    device = tokens.device
    pairs = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(s, device=device, dtype=torch.float32), theta**-pairs)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Queries or keys (b, a, s, h/a) with each pair of elements turned by its position's angle."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_mask(tokens: torch.Tensor) -> torch.Tensor:
    """A (s, s) boolean mask, one for all layers, that is True where a query may not look."""
    s = tokens.size(1)
    return torch.ones(s, s, dtype=torch.bool, device=tokens.device).triu(1)


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    dropout: float,
    upcast: bool = False,
) -> torch.Tensor:
    """softmax(q·kᵀ/√d)·v with every s×s intermediate made for real; grouped keys and values are repeated.

    With `upcast` the softmax is in fp32 and cast back, as in Meta's and transformers' Llama.
    """
    k, v = full_width(q, k, v)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(mask, float("-inf"))
    weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) if upcast else F.softmax(scores, dim=-1)
    weights = F.dropout(weights, dropout)
    return weights @ v


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: str, dropout: float, repeat: bool = False
) -> torch.Tensor:
    """The same in one kernel, which writes no s×s matrix.

    The efficient one wants keys and values repeated.
    """
    if repeat or kernel == "efficient":
        k, v = full_width(q, k, v)
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)


def full_width(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values repeated until there is one of each for every query head."""
    groups = q.size(1) // k.size(1)
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
