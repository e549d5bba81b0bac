"""Causal attention of (b, a, s, h/a) heads: written out, or by one of torch's fused kernels."""

import math

import torch
from torch.nn import functional as F


def causal_mask(tokens: torch.Tensor) -> torch.Tensor:
    """A (s, s) boolean mask that is True where a query may not look: one for all layers, as it does not differ."""
    s = tokens.size(1)
    return torch.ones(s, s, dtype=torch.bool, device=tokens.device).triu(1)


def eager_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, dropout: float
) -> torch.Tensor:
    """softmax(q·kᵀ/√d)·v with every s×s intermediate made for real; grouped keys and values are repeated."""
    k, v = full_width(q, k, v)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(mask, float("-inf"))
    weights = F.dropout(F.softmax(scores, dim=-1), dropout)
    return weights @ v


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: str, dropout: float) -> torch.Tensor:
    """The same attention in one kernel, which writes no s×s matrix; the step's caller allows `kernel` alone.

    The flash and cuDNN kernels take grouped keys and values as they are, the efficient one wants them repeated.
    """
    if kernel == "efficient":
        k, v = full_width(q, k, v)
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)


def full_width(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values repeated until there is one of each for every query head."""
    groups = q.size(1) // k.size(1)
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))
