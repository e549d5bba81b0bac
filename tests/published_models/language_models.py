"""Steps of language models as published scripts take them: LoRA, GPT-2, BERT.

Their sizes are in the rows: `L` layers, `h` hidden, `a` heads, `f` the MLP's width, `V` vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils.estimating.workspaces import Workspaces
from course_utils.measurement import Measurement

from .running import measured


def tokens(batch: int, length: int) -> Tensor:
    """Token ids."""
    return torch.zeros(batch, length, dtype=torch.int64)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves; fp32 tables make fp32 temporaries."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return ((x * cos) + (turned * sin)).type_as(x)


# -------------------------------------------------------------------------------------------------------
# litgpt, LoRA


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
        self.kind = kind
        self.heads = a
        self.turned = int(rotary * h // a)
        norm = UpcastRMSNorm if llama else nn.LayerNorm
        self.norm_1 = norm(h)
        self.qkv = QueryValueLora(h, not llama)
        self.proj = nn.Linear(h, h, not llama)
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
        q_turned = rotated(q[..., :n], cos, sin)
        k_turned = rotated(k[..., :n], cos, sin)
        q = torch.cat((q_turned, q[..., n:]), -1)
        k = torch.cat((k_turned, k[..., n:]), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, h))

    def mlp(self, x: Tensor) -> Tensor:
        if self.kind != "llama":
            return self.out(F.gelu(self.fc_1(x), approximate="tanh" if self.kind == "phi" else "none"))
        gate = self.fc_1(x)
        up = self.fc_2(x)
        return self.out(F.silu(gate) * up)


class LitGPT(nn.Module):
    """litgpt's model, where only LoRA's matrices are trained; the head gives logits in chunks of 128
    positions.
    """

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
    """The first iteration of LoRA on weights in bf16."""
    with torch.device("meta"):
        model = LitGPT(s=s, **size)
    return lora_iteration(workspaces, model, batch, s)


def lora_iteration(workspaces: Workspaces, model: LitGPT, batch: int, s: int) -> Measurement:
    """The first iteration, whose batch is the longest: no optimizer states yet. Lightning returns fp32
    logits.
    """

    def step(model: Any, ids: Tensor) -> None:
        logits = model(ids)
        logits = [part.to(torch.float32) for part in logits]
        logits[-1] = logits[-1][..., :-1, :]
        parts = [part.reshape(-1, part.size(-1)) for part in logits]
        targets = [part.reshape(-1) for part in ids[..., 1:].split(128, 1)]
        losses = [
            F.cross_entropy(part, of, reduction="none") for part, of in zip(parts, targets, strict=True)
        ]
        del parts, targets
        loss = torch.cat(losses).mean()
        del losses
        loss.backward()

    return measured(step, model, batch=tokens(batch, s), workspaces=workspaces, steps=1)


# ---------------------------------------------------------------------------------------- GPT-2 from scratch,
# in stages


class OwnLayerNorm(nn.Module):
    """Layer norm of single operations."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(h))
        self.shift = nn.Parameter(torch.empty(h))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class OwnGELU(nn.Module):
    """The tanh approximation of single operations."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class ScratchAttention(nn.Module):
    """Attention by hand with a mask in fp32, kept or made in each call; from stage 7 on by one kernel."""

    def __init__(self, h: int, a: int, s: int, stage: int) -> None:
        super().__init__()
        self.heads, self.stage = a, stage
        if stage < 7:
            self.query, self.key, self.value = (nn.Linear(h, h, bias=False) for _ in range(3))
        else:
            self.qkv = nn.Linear(h, 3 * h, bias=False)
        self.proj = nn.Linear(h, h)
        if stage == 0:
            self.register_buffer("mask", torch.empty(s, s))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        if self.stage >= 7:
            q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True
            )
            return self.proj(y.transpose(1, 2).contiguous().view(b, s, h))
        k = self.key(x)
        q = self.query(x)
        v = self.value(x)
        k, q, v = (each.view(b, s, self.heads, -1).transpose(1, 2) for each in (k, q, v))
        scores = q @ k.transpose(2, 3)
        mask = self.mask if self.stage == 0 else torch.triu(torch.ones(s, s, device=x.device), diagonal=1)
        mask = mask.bool()[:s, :s]
        scores.masked_fill_(mask, -math.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, -1)
        weights = F.dropout(weights, 0.1, self.training)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, s, h))


class ScratchBlock(nn.Module):
    """Pre-norm block with dropout on both branches."""

    def __init__(self, h: int, a: int, s: int, stage: int) -> None:
        super().__init__()
        norm = OwnLayerNorm if stage < 6 else nn.LayerNorm
        self.attention = ScratchAttention(h, a, s, stage)
        gelu = OwnGELU() if stage < 6 else nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), gelu, nn.Linear(4 * h, h))
        self.norm_1 = norm(h)
        self.norm_2 = norm(h)

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch in ((self.norm_1, self.attention), (self.norm_2, self.mlp)):
            shortcut = x
            x = norm(x)
            x = branch(x)
            x = F.dropout(x, 0.1, self.training)
            x = x + shortcut
        return x


class ScratchGPT(nn.Module):
    """GPT-2 with a head of its own."""

    def __init__(self, L: int, h: int, a: int, V: int, s: int, stage: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, h)
        self.positions = nn.Embedding(s, h)
        self.blocks = nn.Sequential(*(ScratchBlock(h, a, s, stage) for _ in range(L)))
        self.norm = OwnLayerNorm(h) if stage < 6 else nn.LayerNorm(h)
        self.head = nn.Linear(h, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.tokens(ids)
        positions = self.positions(torch.arange(ids.size(1), device=ids.device))
        x = tokens + positions
        x = F.dropout(x, 0.1, self.training)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)


def scratch_gpt(workspaces: Workspaces, stage: int, batch: int, s: int, **size: Any) -> Measurement:
    """A step, an evaluation of two batches, and a second step; the stages: 1 mask made in each call, 3 fused
    AdamW, 5 weights in bf16, 6 torch's norm and GELU, 7 torch's attention.
    """
    with torch.device("meta"):
        model = ScratchGPT(stage=stage, s=s, **size).to(torch.float32 if stage < 5 else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=stage >= 3 or None)

    def loss_of(model: Any, ids: Tensor) -> Tensor:
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def step(model: Any, optimizer: Any, ids: Tensor) -> None:
        for evaluates in (True, False):
            optimizer.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            if evaluates:
                model.eval()
                with torch.no_grad():
                    for _ in range(2):
                        loss_of(model, ids)
                model.train()

    return measured(step, model, optimizer, tokens(batch, s), workspaces)


# ------------------------------------------------------------------------------------------------- PEFT's
# comparison


class Llama3B(nn.Module):
    """Llama 3.2 3B's weights in bf16, and LoRA's of `rank` for q and v in fp32; no step of it is run."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        half = {"dtype": torch.bfloat16}
        h = 3072
        shapes = [(h, h), (1024, h), (1024, h), (h, h), (8192, h), (8192, h), (h, 8192), (h,), (h,)] * 28
        shapes += [(128256, h), (h,)]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(shape, **half), rank == 0) for shape in shapes
        )
        lora = [(rank, h), (h, rank), (rank, h), (1024, rank)] * 28 if rank else []
        self.lora = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in lora)

    def forward(self, batch: int, s: int) -> tuple[Tensor, ...]:
        """The outputs that a step keeps: logits, and the keys and values of all blocks."""
        shapes = [(batch, s, 128256), *[(batch, 8, s, 128)] * 56]
        return tuple(self.weights[0].new_empty(shape) for shape in shapes)


def peft_state(workspaces: Workspaces, rank: int, batch: int, s: int) -> Measurement:
    """What is left after AdamW's step, gradients and outputs included; two threads'
    workspaces are among it.
    """
    with torch.device("meta"):
        model = Llama3B(rank)
    trained = [one for one in model.parameters() if one.requires_grad]
    kept: list[Tensor] = []

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        kept[:] = model(batch, s)
        one = torch.empty(1, 1, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        loss = (one @ one).sum()  # a product in forward and in backward
        for part in model.parameters():
            loss = loss + part.sum() if part.requires_grad else loss
        loss.backward()
        optimizer.step()

    return measured(step, model, torch.optim.AdamW(trained), workspaces=workspaces)


# ------------------------------------------------------------------------------- BERT by transformers'
# Trainer of 2022


class EarlierSoftmax(torch.autograd.Function):
    """Softmax of the last dimension, as before torch 1.11: it keeps its input too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = F.softmax(x, -1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], result, -1, x.dtype)


class BertLayer(nn.Module):
    """Post-norm layer with attention by hand."""

    def __init__(self, h: int, a: int, f: int) -> None:
        super().__init__()
        self.heads = a
        self.query, self.key, self.value, self.proj = (nn.Linear(h, h) for _ in range(4))
        self.norm_1 = nn.LayerNorm(h)
        self.up = nn.Linear(h, f)
        self.down = nn.Linear(f, h)
        self.norm_2 = nn.LayerNorm(h)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed = self.attention(x, mask)
        x = self.added(self.proj, mixed, x, self.norm_1)
        wide = F.gelu(self.up(x))
        return self.added(self.down, wide, x, self.norm_2)

    def added(self, dense: nn.Linear, given: Tensor, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        y = dense(given)
        y = F.dropout(y, 0.1)
        return norm(y + x)

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.query(x)
        k, v, q = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.key(x), self.value(x), q))
        scores = q @ k.transpose(-1, -2)
        scores = scores / math.sqrt(k.shape[-1])
        scores = scores + mask
        weights: Any = EarlierSoftmax.apply(scores)
        weights = F.dropout(weights, 0.1)
        y = weights @ v
        return y.transpose(1, 2).contiguous().flatten(2)


class Bert(nn.Module):
    """BERT for 512 tokens, with a pooler and a classifier of two classes."""

    places: Tensor
    kinds: Tensor

    def __init__(self, L: int, h: int, a: int, f: int, V: int, recompute: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(V, h, 0)
        self.positions = nn.Embedding(512, h)
        self.types = nn.Embedding(2, h)
        self.norm = nn.LayerNorm(h)
        self.recompute = recompute
        self.layers = nn.ModuleList(BertLayer(h, a, f) for _ in range(L))
        self.pooler = nn.Linear(h, h)
        self.classifier = nn.Linear(h, 2)
        for name in ("places", "kinds"):
            self.register_buffer(name, tokens(1, 512))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = torch.ones(ids.shape, device=ids.device)[:, None, None, :]
        mask = (1.0 - mask) * -10000.0
        x = self.embedded(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=True) if self.recompute else layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return F.cross_entropy(self.classifier(F.dropout(pooled, 0.1)), labels)

    def embedded(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        types = self.types(self.kinds.expand(ids.shape))
        x = words + types
        positions = self.positions(self.places)
        x += positions
        x = self.norm(x)
        return F.dropout(x, 0.1)


class EarlierAdamW(torch.optim.Optimizer):
    """transformers' AdamW, one parameter at a time, with one temporary."""

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore [bad-override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            denominator = state["exp_avg_sq"].sqrt().add_(1e-8)
            p.addcdiv_(state["exp_avg"], denominator, value=-5e-5)


class Adafactor(torch.optim.Optimizer):
    """transformers' Adafactor, one parameter at a time: of a matrix it keeps means of rows and columns."""

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore [bad-override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            matrix = p.dim() > 1
            if not state:
                kept = ("row", "column") if matrix else ("all",)
                state |= {name: p.new_zeros(p.shape[name == "column"]) for name in kept}
            state["rms"] = p.norm(2) / p.numel() ** 0.5
            update = (p.grad**2) + 1e-30
            if matrix:
                state["row"].mul_(0.8).add_(update.mean(-1), alpha=0.2)
                state["column"].mul_(0.8).add_(update.mean(-2), alpha=0.2)
                rows = (state["row"] / state["row"].mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                update = torch.mul(rows, state["column"].unsqueeze(-2).rsqrt())
                update.mul_(p.grad)
            else:
                state["all"].mul_(0.8).add_(update, alpha=0.2)
                update = state["all"].rsqrt().mul_(p.grad)
            update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
            update.mul_(5e-5)
            p.add_(-update)


def fine_tuned_bert(
    _: Workspaces,
    batch: int,
    accumulate: int = 1,
    recompute: bool = False,
    mixed: bool = False,
    adafactor: bool = False,
    updates: int = 4,
    **size: Any,
) -> Measurement:
    """Several updates, whose gradients are clipped, and then set to zero. cuBLAS's workspaces were its own in
    2022.

    Biases and norms come last for the optimizer, as they have no weight decay. With `mixed` it is fp16 and a
    scaler.
    """
    with torch.device("meta"):
        model = Bert(recompute=recompute, **size)
    groups: tuple[list[nn.Parameter], ...] = ([], [])
    for name, parameter in model.named_parameters():
        groups["norm" in name or "bias" in name].append(parameter)

    def backward(model: Any, scaler: Any) -> None:
        ids, labels = (
            torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((batch, 512), (batch,))
        )
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            loss = model(ids, labels)
        scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()

    def step(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cuda", enabled=mixed)
        for _ in range(updates):
            for _ in range(accumulate):
                backward(model, scaler)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=False)

    optimizer = (Adafactor if adafactor else EarlierAdamW)(groups[0] + groups[1], {})
    return measured(step, model, optimizer, steps=1)
