"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): rotary positions, RMSNorm, grouped queries, SwiGLU, no
biases.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..models import TransformerConfig
from .attention import causal_mask, eager_attention, fused_attention
from .recompute import run_blocks

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(tokens: torch.Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosine and sine (s, h/a) of every position's angles, computed in fp32 and kept in `dtype`."""
    s, device = tokens.size(1), tokens.device
    pairs = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(s, device=device, dtype=torch.float32), theta**-pairs)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The type of matrix products on `x`: autocast's where it is on. Rotating by fp32 would make q and k fp32 too."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021): turn each pair of elements by its position's angle."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, model: TransformerConfig, kernel: str) -> None:
        super().__init__()
        self.head_size, self.kernel = model.head_size, kernel
        kv = model.kv_heads * model.head_size
        self.q = nn.Linear(model.hidden, model.hidden, bias=False)
        self.k = nn.Linear(model.hidden, kv, bias=False)
        self.v = nn.Linear(model.hidden, kv, bias=False)
        self.out = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x: torch.Tensor, by: Rotation, mask: torch.Tensor | None) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (part(x).view(b, s, -1, self.head_size).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, by), rotate(k, by)
        y = fused_attention(q, k, v, self.kernel, 0.0) if mask is None else eager_attention(q, k, v, mask, 0.0)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class MLP(nn.Module):
    def __init__(self, model: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, model: TransformerConfig, kernel: str) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(model.hidden)
        self.attention = Attention(model, kernel)
        self.norm2 = nn.RMSNorm(model.hidden)
        self.mlp = MLP(model)

    def forward(self, x: torch.Tensor, by: Rotation, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), by, mask)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """The Llama family. `forward` takes token ids (b, s) and returns logits (b, s, V)."""

    def __init__(self, model: TransformerConfig, attention: str, recompute: str = "none") -> None:
        super().__init__()
        self.attention, self.recompute = attention, recompute
        self.head_size, self.theta = model.head_size, model.rope_theta
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.blocks = nn.ModuleList(Block(model, attention) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight
        self.apply(_initialize)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        by = rotation(tokens, self.head_size, self.theta, compute_dtype(x))
        mask = causal_mask(tokens) if self.attention == "eager" else None
        x = run_blocks(self.blocks, x, (by, mask), self.recompute)
        return self.head(self.norm(x))


def _initialize(module: nn.Module) -> None:
    """Normal initial weights with deviation 0.02."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
