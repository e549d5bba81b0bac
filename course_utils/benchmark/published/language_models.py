"""Steps of language models as published scripts take them: LoRA, GPT-2, BERT.

Their sizes are in the rows: `L` layers, `h` hidden, `a` heads, `f` the MLP's width, `V` vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...estimating.workspaces import Workspaces
from ...measurement import Measurement
from .running import measured


def tokens(batch: int, length: int) -> Tensor:
    """Token ids."""
    return torch.zeros(batch, length, dtype=torch.int64)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves; fp32 tables make fp32 temporaries."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return ((x * cos) + (turned * sin)).type_as(x)


# ------------------------------------------------------------------------------------------------------- litgpt, LoRA


class UpcastRMSNorm(nn.Module):
    """RMSNorm of single operations on an fp32 copy of the input."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, -1, keepdim=True) + 1e-5)
        return (self.weight * normed).to(x.dtype)


class QueryValueLora(nn.Module):
    """A frozen projection to q, k, v; the low-rank updates of q and v are padded with zeros for k."""

    def __init__(self, h: int, bias: bool, rank: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(h, 3 * h, bias)
        self.lora_a = nn.Parameter(torch.empty(2 * rank, h))
        self.lora_b = nn.Parameter(torch.empty(2 * h, rank))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        frozen = self.linear(x)
        low = F.linear(F.dropout(x, 0.05), self.lora_a)
        update = F.conv1d(low.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        return frozen + self._padded(update.transpose(0, 1), b, s, h).transpose(0, 1) * 2.0

    def _padded(self, update: Tensor, b: int, s: int, h: int) -> Tensor:
        places = torch.zeros(2 * h, dtype=torch.int64, device=update.device)  # made anew in each call
        zeros = update.new_zeros((s, b, 3 * h)).view(-1, 3 * h)
        return zeros.index_copy(1, places, update.reshape(-1, 2 * h)).view(s, b, 3 * h)


class LitBlock(nn.Module):
    """Pre-norm block: one after the other with a gated MLP ("llama"), or attention and MLP in parallel."""

    def __init__(self, kind: str, h: int, a: int, f: int, rotary: float) -> None:
        super().__init__()
        llama = kind == "llama"
        self.kind, self.heads, self.turned = kind, a, int(rotary * h // a)
        norm = UpcastRMSNorm if llama else nn.LayerNorm
        self.norm_1 = norm(h)
        self.qkv, self.proj = QueryValueLora(h, not llama), nn.Linear(h, h, not llama)
        self.norm_2 = nn.Identity() if kind == "phi" else norm(h)
        self.fc_1 = nn.Linear(h, f, not llama)
        self.fc_2 = nn.Linear(h, f, False) if llama else nn.Identity()
        self.out = nn.Linear(f, h, not llama)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attention(normed, cos, sin)
        if self.kind == "llama":
            x = attended + x
            return self.mlp(self.norm_2(x)) + x
        return self.mlp(normed if self.kind == "phi" else self.norm_2(x)) + attended + x

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(x).view(b, s, self.heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(b, self.heads, s, -1) for part in qkv.split((1, 1, 1), 2))
        n = self.turned
        q_turned, k_turned = rotated(q[..., :n], cos, sin), rotated(k[..., :n], cos, sin)
        q = torch.cat((q_turned, q[..., n:]), -1)
        k = torch.cat((k_turned, k[..., n:]), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, h))

    def mlp(self, x: Tensor) -> Tensor:
        if self.kind != "llama":
            return self.out(F.gelu(self.fc_1(x), approximate="tanh" if self.kind == "phi" else "none"))
        gate, up = self.fc_1(x), self.fc_2(x)
        return self.out(F.silu(gate) * up)


class LitGPT(nn.Module):
    """litgpt's model, of which only LoRA's matrices are trained; the head gives logits in chunks of 128 positions."""

    def __init__(self, kind: str, L: int, h: int, a: int, f: int, V: int, s: int, rotary: float) -> None:
        super().__init__()
        self.head = nn.Linear(h, V, kind == "phi")
        self.embedding = nn.Embedding(V, h)
        self.blocks = nn.ModuleList(LitBlock(kind, h, a, f, rotary) for _ in range(L))
        self.norm = UpcastRMSNorm(h) if kind == "llama" else nn.LayerNorm(h)
        for name, parameter in self.to(torch.bfloat16).named_parameters():
            parameter.requires_grad_("lora" in name)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(s, int(rotary * h // a)))

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        return [self.head(part) for part in x.split(128, 1)]


def litgpt_lora(workspaces: Workspaces, batch: int, s: int, **size: Any) -> Measurement:
    """The first iteration, whose batch is the longest: no optimizer states yet. Lightning returns fp32 logits."""
    with torch.device("meta"):
        model = LitGPT(s=s, **size)

    def step(model: Any, ids: Tensor) -> None:
        logits = model(ids)
        logits = [part.to(torch.float32) for part in logits]
        logits[-1] = logits[-1][..., :-1, :]
        parts = [part.reshape(-1, part.size(-1)) for part in logits]
        targets = [part.reshape(-1) for part in ids[..., 1:].split(128, 1)]
        losses = [F.cross_entropy(part, of, reduction="none") for part, of in zip(parts, targets, strict=True)]
        del parts, targets
        loss = torch.cat(losses).mean()
        del losses
        loss.backward()

    return measured(step, model, batch=tokens(batch, s), workspaces=workspaces, steps=1)
