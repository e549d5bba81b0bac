"""The small transformer of Stanford's CS336 in single operations, and its own AdamW, as students' scripts train it."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...estimating.workspaces import Workspaces
from ...measurement import Measurement
from .running import measured

VOCAB, BATCH = 10_000, 4

SIZES = {"xl": (1600, 6400, 48, 25), "2.7b": (2560, 10240, 32, 32)}
"""Hidden size, feed-forward size, layers and heads by the course's names."""


class Linear(nn.Module):
    """A matrix product by einsum."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    """RMSNorm by single operations, in fp32."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    """Rotary positions of neighbouring pairs, from tables that all layers share."""

    def __init__(self, T: int, size: int) -> None:
        super().__init__()
        self.register_buffer("tables", torch.empty(2, T, size // 2), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.tables[:, positions]
        turned = cos * first - sin * second, sin * first + cos * second
        return torch.cat([half.unsqueeze(-1) for half in turned], -1).flatten(-2)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax by single operations."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention by single operations."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    """Causal attention; positions and mask are made in each layer."""

    def __init__(self, h: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(h, h) for _ in range(4))
        self.heads, self.rotary = heads, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x.shape[1]
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        positions = torch.arange(s, device=x.device).view(1, 1, s)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        place = torch.arange(s, device=x.device)
        mask = place.view(1, 1, s, 1) >= place.view(1, 1, 1, s)
        mixed = attend(q, k, v, mask)
        mixed = mixed.transpose(1, 2).flatten(2).contiguous()
        return self.out(mixed)


class FeedForward(nn.Module):
    """SwiGLU, whose SiLU is a product."""

    def __init__(self, h: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(h, ffn), Linear(ffn, h), Linear(h, ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU by single operations."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """One layer, norms first."""

    def __init__(self, h: int, ffn: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(h, heads, rotary), FeedForward(h, ffn)
        self.norm1, self.norm2 = RMSNorm(h), RMSNorm(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.attention(self.norm1(x))
        between = x + mixed
        fed = self.ffn(self.norm2(between))
        return between + fed


class Transformer(nn.Module):
    """The language model: 10,000 tokens, untied, no biases, no dropout."""

    def __init__(self, size: str, T: int) -> None:
        super().__init__()
        h, ffn, layers, heads = SIZES[size]
        self.embedding = nn.Parameter(torch.empty(VOCAB, h))
        rotary = Rotary(T, h // heads)
        self.layers = nn.ModuleList(Block(h, ffn, heads, rotary) for _ in range(layers))
        self.norm, self.head = RMSNorm(h), Linear(h, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding[ids, :]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


class OwnAdamW(torch.optim.Optimizer):
    """AdamW, one parameter at a time, out of place; zeros are made for states even where they exist."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            grad = p.grad.data
            state = self.state[p]
            m_before = state.get("m", torch.zeros_like(grad))
            v_before = state.get("v", torch.zeros_like(grad))
            m = 0.9 * m_before + (0.1 * grad)
            v = 0.999 * v_before + (0.001 * torch.square(grad))
            p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            p.data -= 1e-5 * p.data
            state["m"], state["v"] = m, v


def network(size: str, T: int) -> tuple[Transformer, tuple[torch.Tensor, torch.Tensor]]:
    """The model and a batch, without memory."""
    with torch.device("meta"):
        ids, targets = torch.zeros(2, BATCH, T, dtype=torch.int64)
        return Transformer(size, T), (ids.clone(), targets.clone())


def precision(autocast: bool) -> AbstractContextManager[Any]:
    """Autocast to bf16, or nothing."""
    return torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext()


def loss_of(model: Any, batch: Any, autocast: bool = False) -> torch.Tensor:
    """Cross-entropy, within autocast if any; the logits' name dies here."""
    with precision(autocast):
        logits = model(batch[0])
        return F.cross_entropy(logits.reshape(-1, VOCAB), batch[1].reshape(-1))


def forward(workspaces: Workspaces, size: str, T: int, autocast: bool = False) -> Measurement:
    """Inference on four sequences."""

    def step(model: Any, batch: Any) -> None:
        with torch.no_grad(), precision(autocast):
            _ = model(batch[0])

    model, batch = network(size, T)
    return measured(step, model, batch=batch, workspaces=workspaces)


def train(workspaces: Workspaces, size: str, T: int, autocast: bool = False) -> Measurement:
    """A training step on four sequences; gradients are dropped when it begins."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, batch, autocast)
        loss.backward()
        optimizer.step()

    model, batch = network(size, T)
    return measured(step, model, OwnAdamW(model.parameters()), batch, workspaces)


def data_parallel(
    workspaces: Workspaces, size: str, T: int, update: bool = True, ranks: int = 1, rank: int = 0
) -> Measurement:
    """The first step of one of two ranks, which sum gradients in place; with `update` the optimizer steps too.

    With `ranks` the optimizer updates each `ranks`-th parameter from number `rank` on. NCCL's buffers are outside the
    allocator.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss = loss_of(model, batch)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        if update:
            optimizer.step()
        return loss

    model, batch = network(size, T)
    return measured(step, model, OwnAdamW(list(model.parameters())[rank::ranks]), batch, workspaces, steps=1)


class Scores(nn.Module):
    """Queries, keys and values without heads, and their attention."""

    def __init__(self, T: int, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.empty(8, T, size)) for _ in range(3))

    def forward(self) -> torch.Tensor:
        return attend(self.q, self.k, self.v)


def attention(workspaces: Workspaces, T: int, size: int) -> Measurement:
    """Attention of eight sequences in fp32, forward and backward; gradients are dropped."""

    def step(model: Any) -> None:
        out = model()
        out.sum().backward()
        model.zero_grad(set_to_none=True)

    with torch.device("meta"):
        return measured(step, Scores(T, size), workspaces=workspaces)
