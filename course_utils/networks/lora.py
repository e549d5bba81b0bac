"""LoRA (Hu et al. 2022): a weight is frozen, and a product of two thin matrices trained next to it."""

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from .frozen import FrozenLinear


class LoraLinear(nn.Module):
    """y = base(x) + (x·Aᵀ)·Bᵀ with A (r, n_in) Gaussian and B (n_out, r) zero: at first nothing is added.

    alpha is r, so that nothing is scaled. `base` is frozen. There is no dropout.
    """

    def __init__(self, base: nn.Linear | FrozenLinear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        device = base.weight.device
        self.A = nn.Parameter(torch.empty(rank, base.in_features, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=device))
        nn.init.normal_(self.A, std=1 / math.sqrt(base.in_features))  # x·Aᵀ is then as large as x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        learned = F.linear(F.linear(x, self.A), self.B)
        return self.base(x) + learned


def add_lora(network: nn.Module, rank: int, targets: Sequence[str], dtype: torch.dtype) -> None:
    """Freeze every parameter of `network` and add LoRA's factors to the layers named `targets` in each block.

    The factors are of `dtype` and are called `blocks.N.attention.T.A` and `.B`, or `blocks.N.mlp.T.…`.
    """
    network.requires_grad_(False)
    halves = []
    for block in network.get_submodule("blocks").children():
        halves += [block.get_submodule("attention"), block.get_submodule("mlp")]
    for target, half in product(targets, halves):
        if hasattr(half, target):
            setattr(half, target, LoraLinear(getattr(half, target), rank, dtype))
