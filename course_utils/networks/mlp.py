"""The MLP of a block: two matrices around a GELU (GPT-2), or three around a gate, SwiGLU (Shazeer 2020; Llama)."""

import torch
from torch import nn
from torch.nn import functional as F

from ..models import TransformerConfig


class MLP(nn.Module):
    """`forward` takes (…, h) and returns (…, h), passing through a width of `model.ffn`; `dropout` is of its output."""

    def __init__(self, model: TransformerConfig, dropout: float) -> None:
        super().__init__()
        h, ffn, bias = model.hidden, model.ffn, bool(model.bias)
        self.dropout, self.gated = dropout, model.mlp == "swiglu"
        if self.gated:
            self.gate = nn.Linear(h, ffn, bias=bias)
        self.up = nn.Linear(h, ffn, bias=bias)
        self.down = nn.Linear(ffn, h, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One expression, so that no name keeps a tensor of width ffn alive longer than autograd does.
        if self.gated:
            return F.dropout(self.down(F.silu(self.gate(x)) * self.up(x)), self.dropout)
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), self.dropout)
