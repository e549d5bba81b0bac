"""Single operations and small modules, repeated as Liger-Kernel's benchmark scripts repeat them.

A script calls an iteration ten times and reports the median of its highest points: gradients of the one
before are there, and new ones are added. Each function here makes what lives in the process and returns an
iteration. Modules of the kernel that was compared live too: hence more weights than are used.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .running import data, leaf, script

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64


def full(
    forward: Callable[[], Any], gradient: Any = None, retain: bool = False, loss: Any = None
) -> Callable[[], Any]:
    """Forward, and backward of the output or a `loss` of it; a `gradient` is made of the output."""

    def iteration() -> None:
        y = forward()
        (loss(y) if loss else y).backward(gradient(y) if gradient else None, retain_graph=retain)

    return iteration


@script
def cross_entropy(V: int, tokens: int, h: int = 0) -> Any:
    """Cross-entropy of fp32 logits; with `h` of an output layer's in 16 bits."""
    weights = [leaf(V, h, dtype=BF16) for _ in range(2)] if h else []
    x = leaf(tokens, h, dtype=BF16) if h else leaf(tokens, V)
    targets = data(tokens, dtype=INT64)
    return full(lambda: F.cross_entropy(F.linear(x, weights[0]) if h else x, targets))


@script
def kl_divergence(V: int, tokens: int) -> Any:
    """Kullback-Leibler divergence in fp32, from probabilities that were made once from logits."""
    given = torch.log_softmax(leaf(tokens, V), -1)
    target = data(tokens, V)
    return full(lambda: F.kl_div(given, target, reduction="batchmean"), retain=True)


@script
def norm(shape: list[int], groups: int = 0) -> Any:
    """LayerNorm, or GroupNorm with `groups`, in fp32, and backward from a gradient that lives already."""
    channels = shape[1 if groups else -1]
    weights = [leaf(channels) for _ in range(4)]
    x = leaf(*shape)
    dy = data(*shape)

    def forward() -> torch.Tensor:
        if groups:
            return F.group_norm(x, groups, weights[0], weights[1])
        return F.layer_norm(x, [channels], weights[0], weights[1])

    return full(forward, lambda _: dy, retain=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Llama's RMSNorm as transformers has it: single operations on an fp32 copy."""
    hidden = x.to(FP32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + 1e-6)
    return weight * hidden.to(x.dtype)


@script
def llama_rms_norm(rows: int, h: int, added: bool = False) -> Any:
    """Llama's RMSNorm by an fp32 weight: of 16 bits, or in fp32 of a sum that is a result too (`added`)."""
    weights = [leaf(h) for _ in range(4 if added else 2)]
    dtype = FP32 if added else BF16
    x, *residual = (leaf(rows, h, dtype=dtype) for _ in range(1 + added))
    gradients = [data(rows, h, dtype=dtype) for _ in range(1 + added)]

    def iteration() -> None:
        total = x + residual[0] if added else x
        y = rms_norm(total, weights[0])
        torch.autograd.backward((y, total)[: 1 + added], gradients, retain_graph=not added)

    return iteration


@script
def fused_rms_norm(rows: int, h: int) -> Any:
    """torch's RMSNorm in 16 bits, and backward of the sum of what it gives."""
    layer = torch.nn.RMSNorm(h, eps=1e-6, device="cuda", dtype=BF16)
    x = leaf(rows, 1, h, dtype=BF16)
    return full(lambda: layer(x), loss=torch.sum)


@script
def softmax(n: int, dtype: str) -> Any:
    """A softmax of one row."""
    x = leaf(n, dtype=getattr(torch, dtype))
    return full(lambda: F.softmax(x, dim=-1), torch.ones_like, retain=True)


@script
def swiglu_of_halves(rows: int, batch: int, ffn: int) -> Any:
    """SiLU of one half times the other, in 16 bits; the input's gradient is dropped first."""
    x = leaf(rows, batch, 2 * ffn, dtype=BF16)

    def forward() -> torch.Tensor:
        x.grad = None
        gate, up = torch.chunk(x, 2, -1)
        return F.silu(gate) * up

    return full(forward, loss=torch.sum)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The second half with its sign changed, then the first."""
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


@script
def rope(h: int, T: int) -> Any:
    """Rotary positions of 32 query and 8 key heads in 16 bits, by tables that were made by a product of
    matrices.
    """
    q, k = (leaf(1, T, heads, h // 32, dtype=BF16).transpose(1, 2) for heads in (32, 8))
    gradients = [torch.randn_like(one) for one in (q, k)]
    rest = (data(1, T, dtype=INT64), data(h // 64))
    cos = data(1, 1, T, h // 32, dtype=BF16)
    sin = data(1, 1, T, h // 32, dtype=BF16)
    _ = data(1, 1) @ data(1, 1)  # the tables of cosines and sines come from a product

    def iteration() -> None:
        q_out = (q * cos) + (rotate_half(q) * sin)
        k_out = (k * cos) + (rotate_half(k) * sin)
        torch.autograd.grad((q_out, k_out), (q, k), gradients, allow_unused=True, retain_graph=True)

    return lambda: (iteration(), rest)


@script
def gated_mlp(batch: int, T: int, h: int, ffn: int, activation: str, mode: str = "full") -> Any:
    """Llama's feed-forward layer in 16 bits; "backward" is of an output that was made once."""
    act = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}[activation]
    x, gate, up, down = (leaf(*shape, dtype=BF16) for shape in ((batch, T, h), (ffn, h), (ffn, h), (h, ffn)))

    def forward() -> torch.Tensor:
        return F.linear(act(F.linear(x, gate)) * F.linear(x, up), down)

    if mode == "backward":
        y = forward()
        dy = torch.randn_like(x)
        return lambda: y.backward(dy, retain_graph=True)
    return forward if mode == "forward" else full(forward, torch.randn_like, retain=True)
