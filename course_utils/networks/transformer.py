"""One decoder-only transformer for every option of TransformerConfig.

With the options of its family it is GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each
half of a block, biases everywhere, GELU, a tied head; or Llama (Touvron et al. 2023; Grattafiori et al.
2024): rotary positions, RMSNorm, grouped queries, SwiGLU, no biases.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..models import TransformerConfig
from .attention import Rotation, causal_mask, eager_attention, fused_attention, rotate, rotation
from .experts import MLP, Experts
from .recompute import attention_core, run_blocks
from .unfused import UnfusedRMSNorm


class Transformer(nn.Module):
    """`forward` takes token ids (b, s) and returns logits (b, s, V).

    `attention` names the kernel, "eager" for attention written out; `recompute` what backward computes again.
    """

    def __init__(self, model: TransformerConfig, attention: str, recompute: str = "none") -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.recompute = recompute
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        if model.positions == "learned":
            self.positions = nn.Embedding(model.max_positions, model.hidden)
        self.blocks = nn.ModuleList(Block(model, attention, recompute) for _ in range(model.layers))
        self.norm = norm(model)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight
        self.apply(_initialize)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """The head's input: the normed residual stream (b, s, h) after the last block."""
        x = self.embed(tokens)
        x = run_blocks(self.blocks, x, self.shared(tokens, x), self.recompute)  # no name keeps the first x
        return self.norm(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first block's input (b, s, h)."""
        x = self.embedding(tokens)
        if self.model.positions == "learned":
            x = x + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        return F.dropout(x, self.model.dropout)

    def shared(self, tokens: torch.Tensor, x: torch.Tensor) -> tuple[Rotation | None, torch.Tensor | None]:
        """Arguments of every block next to its input: positions' rotation, and eager attention's mask."""
        by = None
        if self.model.positions == "rotary":
            device = x.device.type  # cosines in fp32 would make q and k fp32 where autocast is on
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
            by = rotation(tokens, self.model.head_size, self.model.rope_theta, dtype)
        if self.attention == "eager":
            return by, causal_mask(tokens)
        return by, None


class Block(nn.Module):
    """Attention, then an MLP or a mixture of them, each on a normed copy of the residual stream.

    Each adds its result to the stream.
    """

    def __init__(self, model: TransformerConfig, kernel: str, recompute: str = "none") -> None:
        super().__init__()
        self.norm1 = norm(model)
        self.attention = Attention(model, kernel, recompute)
        self.norm2 = norm(model)
        self.mlp = Experts(model) if model.experts else MLP(model, model.dropout)

    def forward(self, x: torch.Tensor, by: Rotation | None, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), by, mask)
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Causal attention of a heads, whose keys and values may be shared by groups of them.

    Ainslie et al. 2023.
    """

    def __init__(self, model: TransformerConfig, kernel: str, recompute: str = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.kernel = kernel
        self.dropout = model.dropout
        self.head_size = model.head_size
        if kernel == "eager":
            self.core = partial(eager_attention, upcast=model.unfused and model.norm == "rmsnorm")
        else:
            self.core = partial(fused_attention, repeat=model.repeat_kv)
        h = model.hidden
        kv = model.kv
        bias = bool(model.qkv_bias)
        self.widths = [h, kv, kv]
        self.fused = model.fused_qkv
        if self.fused:
            self.qkv = nn.Linear(h, h + 2 * kv, bias=bias)
        else:
            self.q = nn.Linear(h, h, bias=bias)
            self.k = nn.Linear(h, kv, bias=bias)
            self.v = nn.Linear(h, kv, bias=bias)
        self.out = nn.Linear(h, h, bias=bool(model.bias))

    def forward(self, x: torch.Tensor, by: Rotation | None, mask: torch.Tensor | None) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (part.view(b, s, -1, self.head_size).transpose(1, 2) for part in self.project(x))
        if by is not None:
            # In one statement: the old q is freed after k is rotated, and recordings have the order of frees.
            q, k = rotate(q, by), rotate(k, by)
        how = self.kernel if mask is None else mask
        y = attention_core(self.core, self.recompute, q, k, v, how, self.dropout)
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, s, h)), self.dropout)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries (b, s, h), keys and values (b, s, kv): views of one product where one matrix makes all."""
        if self.fused:
            return self.qkv(x).split(self.widths, dim=2)
        return self.q(x), self.k(x), self.v(x)


def norm(model: TransformerConfig) -> nn.Module:
    """The model's norm of h elements.

    torch's RMSNorm has a weight only, its LayerNorm a bias where the model has.
    """
    if model.norm == "layernorm":
        return nn.LayerNorm(model.hidden, bias=bool(model.bias))
    return UnfusedRMSNorm(model.hidden) if model.unfused else nn.RMSNorm(model.hidden)


def _initialize(module: nn.Module) -> None:
    """Initialize as GPT-2 does: weights normal with deviation 0.02, biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
