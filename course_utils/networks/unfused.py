"""GELU and RMSNorm in single operations, as transformers writes GPT-2's and Llama's.

The numbers are the same, the tensors more.
"""

import math

import torch
from torch import nn


class UnfusedRMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) over the last of h elements, computed in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        square = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(square + torch.finfo(dtype).eps)).to(dtype)


def unfused_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU's approximation by tanh (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
