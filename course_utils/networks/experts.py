"""The MLP of a block, and a mixture of experts, in which every token visits k of a block's E MLPs."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..models import TransformerConfig
from .unfused import unfused_gelu


class MLP(nn.Module):
    """Two matrices around a GELU (GPT-2), or three around a gate, SwiGLU (Shazeer 2020; Llama).

    `forward` takes (…, h) and returns (…, h), passing through a width of `model.ffn`; `dropout` is of its
    output.
    """

    def __init__(self, model: TransformerConfig, dropout: float) -> None:
        super().__init__()
        h = model.hidden
        ffn = model.ffn
        bias = bool(model.bias)
        self.dropout = dropout
        self.gated = model.mlp == "swiglu"
        self.gelu = unfused_gelu if model.unfused else partial(F.gelu, approximate="tanh")
        if self.gated:
            self.gate = nn.Linear(h, ffn, bias=bias)
        self.up = nn.Linear(h, ffn, bias=bias)
        self.down = nn.Linear(ffn, h, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One expression, so that no name keeps a tensor of width ffn alive longer than autograd does.
        if self.gated:
            return F.dropout(self.down(F.silu(self.gate(x)) * self.up(x)), self.dropout)
        return F.dropout(self.down(self.gelu(self.up(x))), self.dropout)


class Experts(nn.Module):
    """E MLPs and a router: (b, s, h) to the sum of each token's k experts, weighted.

    Jiang et al. 2024 (Mixtral).

    The load is balanced by force, so that no shape depends on the data: the (token, choice) pairs are sorted
    by the expert that was chosen and cut into E equal pieces of b·s·k/E, rounded. A pair near a cut is
    computed by a neighbour of the expert that it asked for; a real router would send more to some experts and
    fewer to others.

    For backward it keeps, in addition to what each expert keeps of its piece, the probabilities, choices and
    weights, the indices, and each expert's weighted output, although `index_add_` needs only its shape.
    """

    def __init__(self, model: TransformerConfig) -> None:
        super().__init__()
        self.chosen = model.experts_per_token
        self.dropout = model.dropout
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.experts = nn.ModuleList(MLP(model, dropout=0.0) for _ in range(model.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.route(tokens)
        # A stable sort keeps tokens in order, so that recomputation cuts exactly where forward did.
        pieces = experts.flatten().argsort(stable=True).tensor_split(len(self.experts))
        y = torch.zeros_like(tokens)
        for expert, pairs in zip(self.experts, pieces, strict=True):
            token = pairs // self.chosen
            y.index_add_(0, token, expert(tokens[token]) * weights[pairs])
        return F.dropout(y.view_as(x), self.dropout)

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (b·s·k, 1) in the tokens' type and experts (b·s, k) of each token's k choices.

        Softmax over all experts in fp32, the k largest, made to sum to one (Jiang et al. 2024, section 2.1).
        """
        chances = self.router(tokens).float().softmax(dim=-1)
        weights, experts = chances.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(tokens.dtype).view(-1, 1), experts
