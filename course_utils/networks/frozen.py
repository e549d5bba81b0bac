"""Frozen weights stored in 16, 8 or 4 bits, and made 16-bit again for each product.

That happens in forward and in backward.

Eight bits: whole numbers from −127 to 127 and one fp32 scale for each output row (absmax; Dettmers et al.
2022, "LLM.int8()"). Four bits: NF4 (Dettmers et al. 2023, QLoRA): the nearest of 16 values for each number,
two to a byte, and one fp32 scale, the largest magnitude, for each block of 64 numbers.
"""

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

NF4_BLOCK = 64  # Numbers that share one scale


@lru_cache(maxsize=1)
def nf4_code() -> tuple[float, ...]:
    """NF4's 16 values from −1 to 1: quantiles of the normal distribution over the last of them.

    They are evenly spaced in probability.

    Eight probabilities from δ to ½ and nine from ½ to 1 − δ share the ½, so that zero is exact; δ is the mean
    of 1/32 and 1/30 (Dettmers et al. 2023, section 3, as Yoshida 2023 writes it out).
    """
    end = (1 / 32 + 1 / 30) / 2
    below = [end + (0.5 - end) * step / 7 for step in range(8)]
    above = [0.5 + (0.5 - end) * step / 8 for step in range(1, 9)]
    quantiles = [NormalDist().inv_cdf(probability) for probability in (*below, *above)]
    return tuple(quantile / quantiles[-1] for quantile in quantiles)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 numbers (n_out, n_in), fp32 scales (n_out)): a weight is its number times its row's scale."""
    scale = weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scale.unsqueeze(1)).round().to(torch.int8), scale


def quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8, two codes to a byte, and fp32 scales, one for 64 numbers).

    The last block is filled up with zeros.
    """
    flat = weight.float().flatten()
    missing = -flat.numel() % NF4_BLOCK  # up to a whole block
    blocks = F.pad(flat, (0, missing)).view(-1, NF4_BLOCK)
    scale = blocks.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    code = torch.tensor(nf4_code(), device=weight.device)
    borders = (code[1:] + code[:-1]) / 2
    # The borders lie halfway between two values, so the place of a number is that of the nearest.
    return pack(torch.bucketize(blocks / scale.unsqueeze(1), borders)), scale


def pack(codes: torch.Tensor) -> torch.Tensor:
    """An even count of whole numbers below 16, two to a byte; the first of each two is the higher half."""
    first, second = codes.to(torch.uint8).view(-1, 2).unbind(dim=1)
    return first * 16 + second


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The numbers that `pack` packed, as uint8 in one dimension."""
    return torch.stack((packed // 16, packed % 16), dim=1).flatten()


def nf4_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(256, 2): the two NF4 values of each byte."""
    codes = unpack(torch.arange(256, dtype=torch.uint8, device=device))
    return torch.tensor(nf4_code(), device=device)[codes.int()].view(256, 2).to(dtype)


class FrozenLinear(nn.Module):
    """A linear layer that does not learn, its weight in 8 or 4 bits.

    Buffers: `weight` (int8, or uint8 with two codes to a byte) and `scale` (fp32); with 4 bits also `pairs`,
    the values of each byte, one tensor for all layers. `dtype` is what it computes in.
    """

    def __init__(
        self, linear: nn.Linear, bits: int, dtype: torch.dtype, pairs: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = dtype
        quantize = quantize_rows if bits == 8 else quantize_nf4
        stored, scale = quantize(linear.weight.detach())
        self.weight = nn.Buffer(stored)
        self.scale = nn.Buffer(scale)
        self.pairs: torch.Tensor | None
        self.register_buffer("pairs", pairs)
        self.bias = None if linear.bias is None else _frozen(linear.bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x.to(self.dtype), self)

    def dense_weight(self) -> torch.Tensor:
        """The weight (n_out, n_in) of the stored numbers, in `dtype`."""
        if self.pairs is None:
            return self.weight.to(self.dtype).mul_(self.scale.unsqueeze(1))
        values = (
            self.pairs.index_select(0, self.weight.int()).view(-1, NF4_BLOCK).mul_(self.scale.unsqueeze(1))
        )
        count = self.out_features * self.in_features
        return values.flatten()[:count].view(self.out_features, self.in_features)


class _Product(torch.autograd.Function):
    """x·Wᵀ + bias that keeps neither x, as W does not learn, nor the 16-bit W: backward makes that again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dense_weight(), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient @ ctx.layer.dense_weight(), None


def freeze(network: nn.Module, bits: int, dtype: torch.dtype) -> None:
    """Freeze `network`: the blocks' matrices in `bits` (16, 8 or 4), all else in the 16-bit `dtype`.

    Products compute in `dtype`.
    """
    modules = network.get_submodule("blocks").modules()
    layers = [(module, name, layer) for module in modules for name, layer in module.named_children()]
    pairs = nf4_pairs(dtype, next(network.parameters()).device) if bits == 4 else None
    for module, name, layer in layers:
        if bits < 16 and isinstance(layer, nn.Linear):
            setattr(module, name, FrozenLinear(layer, bits, dtype, pairs))
    # New parameters in place of the old: a simulated one cannot be given data of another type.
    frozen: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            frozen.setdefault(id(weight), _frozen(weight, dtype))
            setattr(module, name, frozen[id(weight)])


def _frozen(weight: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(dtype), requires_grad=False)
