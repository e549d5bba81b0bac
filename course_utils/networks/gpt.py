"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm first, biases everywhere, GELU, tied head."""

import torch
from torch import nn
from torch.nn import functional as F

from ..models import TransformerConfig
from .attention import causal_mask, eager_attention, fused_attention
from .recompute import run_blocks


class Attention(nn.Module):
    def __init__(self, model: TransformerConfig, kernel: str) -> None:
        super().__init__()
        self.heads, self.dropout, self.kernel = model.heads, model.dropout, kernel
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.out = nn.Linear(model.hidden, model.hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(h, dim=2))
        drop = self.dropout
        y = fused_attention(q, k, v, self.kernel, drop) if mask is None else eager_attention(q, k, v, mask, drop)
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, s, h)), self.dropout)


class MLP(nn.Module):
    def __init__(self, model: TransformerConfig) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.up = nn.Linear(model.hidden, model.ffn)
        self.down = nn.Linear(model.ffn, model.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), self.dropout)


class Block(nn.Module):
    def __init__(self, model: TransformerConfig, kernel: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.hidden)
        self.attention = Attention(model, kernel)
        self.norm2 = nn.LayerNorm(model.hidden)
        self.mlp = MLP(model)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The GPT-2 family. `forward` takes token ids (b, s) and returns logits (b, s, V)."""

    def __init__(self, model: TransformerConfig, attention: str, recompute: str = "none") -> None:
        super().__init__()
        self.attention, self.recompute, self.dropout = attention, recompute, model.dropout
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.positions = nn.Embedding(model.max_positions, model.hidden)
        self.blocks = nn.ModuleList(Block(model, attention) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight
        self.apply(_initialize)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = F.dropout(self.embedding(tokens) + self.positions(positions), self.dropout)
        mask = causal_mask(tokens) if self.attention == "eager" else None
        x = run_blocks(self.blocks, x, (mask,), self.recompute)
        return self.head(self.norm(x))


def _initialize(module: nn.Module) -> None:
    """GPT-2's initial weights: normal with deviation 0.02, biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
