"""The transformer of Stanford's CS336 and its attention, by single operations, as
students' scripts run them.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from course_utils.estimating.workspaces import Workspaces
from course_utils.measurement import Measurement

from .running import leaf, measured, script

VOCAB = 10_000
SIZES = {"xl": (1600, 6400, 48, 25), "2.7b": (2560, 10240, 32, 32)}
"""Tokens; hidden size, feed-forward size, layers and heads by the course's names."""


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer, by einsum."""
    return torch.einsum("...i,oi->...o", x, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm by single operations, in fp32."""
    dtype = x.dtype
    x = x.to(torch.float32)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    x = x * scale
    return (weight * x).to(dtype)


def rotated(x: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions of neighbouring pairs, whose cosines and sines are gathered anew."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = tables[:, positions]
    a = cos * first - sin * second
    b = sin * first + cos * second
    return torch.cat([a.unsqueeze(-1), b.unsqueeze(-1)], -1).flatten(-2)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax by single operations."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention by single operations."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def self_attention(x: torch.Tensor, weights: Any, heads: int, tables: torch.Tensor) -> torch.Tensor:
    """Causal attention; positions and mask are made in each layer."""
    q, k, v = (linear(x, weight).unflatten(-1, (heads, -1)).transpose(1, 2) for weight in weights[:3])
    positions, place = (torch.arange(x.shape[1], device=x.device) for _ in range(2))
    q, k = rotated(q, tables, positions), rotated(k, tables, positions)
    mask = place[:, None] >= place
    mixed = attend(q, k, v, mask)
    mixed = mixed.transpose(1, 2).flatten(2).contiguous()
    return linear(mixed, weights[3])


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU by single operations."""
    return x * torch.sigmoid(x)


class Layer(nn.Module):
    """One layer, norms first, with SwiGLU."""

    def __init__(self, h: int, ffn: int, heads: int) -> None:
        super().__init__()
        shapes = [(h, h)] * 4 + [(ffn, h), (h, ffn), (ffn, h), (h,), (h,)]
        self.weights = nn.ParameterList(torch.empty(shape) for shape in shapes)
        self.heads = heads

    def forward(self, x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        *projections, gate, down, up, norm1, norm2 = self.weights
        mixed = self_attention(rms_norm(x, norm1), projections, self.heads, tables)
        between = x + mixed
        normed = rms_norm(between, norm2)
        fed = linear(silu(linear(normed, gate)) * linear(normed, up), down)
        return between + fed


class Transformer(nn.Module):
    """The language model, untied, without biases and dropout."""

    def __init__(self, size: str, T: int) -> None:
        super().__init__()
        h, ffn, layers, heads = SIZES[size]
        self.first = nn.ParameterList([torch.empty(VOCAB, h)])
        self.register_buffer("tables", torch.empty(2, T, h // heads // 2))
        self.layers = nn.ModuleList(Layer(h, ffn, heads) for _ in range(layers))
        # order decides which blocks are split
        self.last = nn.ParameterList([torch.empty(h), torch.empty(VOCAB, h)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # In embedding[ids, :] the colon was a slice of its own until torch 2.8 (pytorch's pull request
        # 157528)
        x = torch.ops.aten.slice(self.first[0], 1)[ids]
        for layer in self.layers:
            x = layer(x, self.tables)
        x = rms_norm(x, self.last[0])
        return linear(x, self.last[1])


class OwnAdamW(torch.optim.Optimizer):
    """AdamW, one parameter at a time, out of place; zeros are made for states even where they exist."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            grad, state = p.grad.data, self.state[p]
            m_before = state.get("m", torch.zeros_like(grad))
            v_before = state.get("v", torch.zeros_like(grad))
            m = 0.9 * m_before + (0.1 * grad)
            v = 0.999 * v_before + (0.001 * torch.square(grad))
            p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            p.data -= 1e-5 * p.data
            state["m"], state["v"] = m, v


def train(
    workspaces: Workspaces,
    size: str,
    T: int,
    batch: int = 4,
    steps: int = 2,
    autocast: bool = False,
    inference: bool = False,
    update: bool = True,
    shard: tuple[int, int] = (0, 1),
    named: int = 0,
) -> Measurement:
    """A training step. Ranks of data parallelism sum gradients in place, and NCCL's buffers are elsewhere: as
    one GPU.

    With `update` the optimizer steps, on each parameter of a `shard` (first, every). Of loss and logits the
    first `named` keep their names.
    """
    names: list[Any] = []

    def infer(model: Any, given: Any) -> None:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, autocast):
            _ = model(given[0])

    def step(model: Any, optimizer: Any, given: Any) -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, autocast):
            logits = model(given[0])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), given[1].reshape(-1))
        names[:] = (loss, logits)[:named]
        del logits
        loss.backward()
        if update:
            optimizer.step()

    with torch.device("meta"):
        model = Transformer(size, T)
        given = tuple(torch.zeros(batch, T, dtype=torch.int64) for _ in range(2))
    optimizer = None if inference else OwnAdamW(list(model.parameters())[shard[0] :: shard[1]], {})
    return measured(infer if inference else step, model, optimizer, given, workspaces, steps)


@script
def attention(T: int, size: int, then: str = "") -> Any:
    """Attention of eight sequences in fp32, and backward; `then` "forward", a "graph" that stays, or "graph,
    both".
    """
    q, k, v = (leaf(8, T, size) for _ in range(3))
    names: list[Any] = []

    def once(into: list[Any], backward: bool = True) -> None:
        out = attend(q, k, v)
        into[:] = out, out.sum()
        if backward:
            into[1].backward()
            q.grad = k.grad = v.grad = None

    def iteration() -> None:
        if not names or not then:
            once(names if then else [])
        elif then == "forward":
            attend(q, k, v).sum()
        else:
            once(names, backward=False)
            if then == "graph, both":
                once([])

    return iteration
