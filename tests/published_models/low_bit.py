"""Steps with weights of 4 bits, or with optimizer states of 8 or 4, as bitsandbytes and torchao take them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils.estimating.workspaces import Workspaces
from course_utils.measurement import Measurement

from .language_models import LitGPT, lora_iteration, rotated, tokens
from .running import measured

# -------------------------------------------------------------------------------------- weights of 4 bits:
# bitsandbytes


class QuantizedProduct(torch.autograd.Function):
    """x W^T + bias, where W is unpacked anew in forward and in backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, layer: Any) -> Any:
        context.layer = layer
        # as long as the graph lives
        context.kept = x if layer.keeps_input and context.needs_input_grad[0] else None
        return F.linear(x, layer.unpacked().to(x.dtype), layer.bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # pyrefly: ignore [bad-override]
        return torch.matmul(gradient, context.layer.unpacked().to(gradient.dtype)), None


class QuantizedLinear(nn.Module):
    """A frozen linear layer of 4 bits per weight and a maximum per 64 weights in fp32, or in 8 bits if
    `double`.

    Weights are unpacked to `dtype`, from which they were packed; the product is in bf16. bitsandbytes 0.41
    also kept each input until the graph was gone, 0.43 does not: autograd/_functions.py (MatMul4Bit) and
    functional.py (quantize_4bit, dequantize_4bit) in
    https://github.com/bitsandbytes-foundation/bitsandbytes/tree/0.41.1/bitsandbytes.
    """

    def __init__(self, linear: nn.Linear, double: bool, dtype: torch.dtype, keeps_input: bool) -> None:
        super().__init__()
        self.shape = linear.weight.shape
        self.packs_twice = double
        self.dtype = dtype
        self.keeps_input = keeps_input
        weights = linear.weight.numel()
        blocks = math.ceil(weights / 64)
        self.register_buffer("packed", torch.empty(weights // 2, 1, dtype=torch.uint8))
        self.register_buffer("values", torch.empty(16))
        self.register_buffer("maxima", torch.empty(blocks, dtype=torch.uint8 if double else torch.float32))
        if double:
            self.register_buffer("maxima_of_maxima", torch.empty(math.ceil(blocks / 256)))
            self.register_buffer("offset", torch.empty(()))
        self.bias = linear.bias

    def unpacked(self) -> Tensor:
        """All weights; packed maxima are unpacked first."""
        maxima = self.maxima
        if self.packs_twice:
            maxima = torch.empty(maxima.shape, device=maxima.device)
            maxima += self.offset
        return torch.empty(self.shape, dtype=self.dtype, device=maxima.device)

    def forward(self, x: Tensor) -> Tensor:
        product: Any = QuantizedProduct.apply(x.to(torch.bfloat16), self)
        return product.to(x.dtype)


def replaced(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put what `make` returns in place of each linear layer."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            replaced(child, make)


def litgpt_qlora(workspaces: Workspaces, double: bool, batch: int, s: int, **size: Any) -> Measurement:
    """litgpt's first LoRA iteration; the head and every other linear layer is quantized, by Lightning from
    fp16.
    """
    with torch.device("meta"):
        model = LitGPT(s=s, **size)
        replaced(model, partial(QuantizedLinear, double=double, dtype=torch.float16, keeps_input=True))
    return lora_iteration(workspaces, model, batch, s)


# ------------------------------------------------------------------------------------------ QLoRA: Hugging
# Face, PEFT


class LoraLinear(nn.Module):
    """A frozen layer and an update of low rank in fp32, whose input is cast to fp32 where autocast is off."""

    def __init__(self, linear: nn.Linear, rank: int, double: bool) -> None:
        super().__init__()
        across, out = linear.in_features, linear.out_features
        self.base = QuantizedLinear(linear, True, linear.weight.dtype, False) if double else linear
        self.down = nn.Linear(across, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        if not torch.is_autocast_enabled("cuda"):
            x = x.to(self.down.weight.dtype)
        return (result + self.up(self.down(F.dropout(x, 0.1))) * 1.0).to(result.dtype)


class HfNorm(nn.Module):
    """RMSNorm of single operations in fp32; the weight is multiplied in the input's format."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + 1e-5)
        return self.weight * wide.to(x.dtype)


class HfBlock(nn.Module):
    """Attention with keys and values that several heads share, and SwiGLU."""

    def __init__(self, h: int, a: int, kv: int, f: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.width = h // a
        self.attention = nn.ModuleList(
            [linear(h, h), *(linear(h, kv * h // a) for _ in range(2)), linear(h, h)]
        )
        self.gate = linear(h, f)
        self.up = linear(h, f)
        self.down = linear(f, h)
        self.norm_1 = HfNorm(h)
        self.norm_2 = HfNorm(h)

    def attended(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        to_q, to_k, to_v, proj = self.attention
        q, k, v = (one(x).view(b, s, -1, self.width).transpose(1, 2) for one in (to_q, to_k, to_v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return proj(y.transpose(1, 2).reshape(b, s, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attended(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class HfLlama(nn.Module):
    """Hugging Face's Llama or Mistral in bf16, each block recomputed in backward; without `rank` all is
    trained.

    With it, q, k, v and the output projection have LoRA; if `double`, all layers but the head are quantized.
    If TRL casts the norms' weights to fp32 (`wide`), norms give fp32, and so does every quantized layer after
    them.
    """

    def __init__(
        self,
        L: int,
        h: int,
        a: int,
        kv: int,
        f: int,
        V: int,
        rank: int = 0,
        double: bool = False,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, h)
        self.head = nn.Linear(h, V, bias=False)
        self.blocks = nn.ModuleList(HfBlock(h, a, kv, f) for _ in range(L))
        self.norm = HfNorm(h)
        self.width = h // a
        self.to(torch.bfloat16).requires_grad_(not rank)
        for part in self.modules():
            if wide and isinstance(part, HfNorm):
                part.float()
        if rank:
            self._adapted(rank, double)

    def _adapted(self, rank: int, double: bool) -> None:
        blocks: Any = self.blocks
        for block in blocks:
            replaced(block.attention, partial(LoraLinear, rank=rank, double=double))
            for name in ("gate", "up", "down") if double else ():
                setattr(block, name, QuantizedLinear(getattr(block, name), True, torch.bfloat16, False))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if not x.requires_grad:
            x.requires_grad_()
        cos, sin = (
            torch.empty(1, ids.size(1), self.width, dtype=x.dtype, device=ids.device) for _ in range(2)
        )
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=True, preserve_rng_state=False)
        x = self.norm(x)
        logits = self.head(x)
        return hf_loss(logits, ids)


def hf_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss on fp32 logits; those of all positions but the last are copied."""
    wide = logits.float()
    shifted = wide[..., :-1, :].contiguous()
    labels = ids[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def hf_step(workspaces: Workspaces, batch: int, s: int, mixed: bool = False, **size: Any) -> Measurement:
    """Hugging Face's Trainer with AdamW, its batch of token ids, mask and labels kept to the end."""
    with torch.device("meta"):
        model = HfLlama(**size)
    trained = [one for one in model.parameters() if one.requires_grad]

    def step(model: Any, optimizer: Any, inputs: list[Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            loss = model(inputs[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return measured(step, model, torch.optim.AdamW(trained), [tokens(batch, s) for _ in range(3)], workspaces)


# ------------------------------------------------------------------------------------------- optimizer states
# of 8 bits


class BlockwiseAdam(torch.optim.Optimizer):
    """Adam whose two states have `bits` per element, and an fp32 scale for each `block` of elements.

    Below 4,096 elements states are in fp32; torchao (`whole`) keeps tensors of broken blocks in fp32 too.
    bitsandbytes has two tables in all, torchao two per parameter and its step. bitsandbytes' kernel updates
    in place; what torchao's compiled step allocates for a moment, a few tensors of one parameter at most, is
    left out.
    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.43.1/bitsandbytes/optim/optimizer.py,
    https://github.com/pytorch/ao/blob/56d46a28/torchao/prototype/low_bit_optim/subclass_8bit.py
    """

    def __init__(self, parameters: Any, block: int, whole: bool = False, bits: int = 8) -> None:
        super().__init__(parameters, {})
        self.block, self.whole, self.bits = block, whole, bits
        self.tables: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore [bad-override]
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                if not self.state[weight]:
                    self.state[weight] = self.new_state(weight)
                weight.add_(weight.grad, alpha=-1e-4)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The states of one parameter."""
        elements = weight.numel()
        device = weight.device
        broken = self.whole and elements % self.block
        state = {"step": torch.zeros((), device=device)} if self.whole else {}
        if elements < 4096 or broken:
            return state | {name: torch.zeros_like(weight) for name in ("mean", "square")}
        for name in ("mean", "square"):
            state[name] = torch.zeros(elements * self.bits // 8, dtype=torch.uint8, device=device)
            state[f"scales of {name}"] = torch.zeros(math.ceil(elements / self.block), device=device)
            if self.whole:
                state[f"table of {name}"] = torch.zeros(2**self.bits, device=device)
        if not self.whole and not self.tables:
            self.tables = [torch.zeros(256, device=device) for _ in range(2)]
        return state


class TimmBlock(nn.Module):
    """Pre-norm block with one product for q, k and v."""

    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.heads = a
        self.norm_1 = nn.LayerNorm(h)
        self.norm_2 = nn.LayerNorm(h)
        self.qkv = nn.Linear(h, 3 * h)
        self.proj = nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def attention(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(b, s, h)
        return self.proj(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class TimmVit(nn.Module):
    """timm's vision transformer of images of 224 x 224: a class token in front, no dropout, 45 classes."""

    def __init__(self, L: int, h: int, a: int, patch: int) -> None:
        super().__init__()
        self.token, self.positions = (
            nn.Parameter(torch.empty(1, n, h)) for n in (1, (224 // patch) ** 2 + 1)
        )
        self.patches = nn.Conv2d(3, h, patch, patch)
        self.blocks = nn.Sequential(*(TimmBlock(h, a) for _ in range(L)))
        self.norm = nn.LayerNorm(h)
        self.head = nn.Linear(h, 45)

    def embedded(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return x + self.positions

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embedded(images)))
        x = x[:, 0]
        return self.head(x)


def torchao_vit(
    workspaces: Workspaces, optimizer: str, batch: int, block: int = 2048, bits: int = 8, **size: Any
) -> Measurement:
    """A step of torchao's benchmark of optimizers in bf16 autocast: "torch", "fused", "bitsandbytes" or
    "torchao".
    """
    with torch.device("meta"):
        model = TimmVit(**size)
    weights = list(model.parameters())
    if optimizer in ("torch", "fused"):
        updates: Any = torch.optim.Adam(weights, lr=1e-4, fused=optimizer == "fused" or None)
    else:
        updates = BlockwiseAdam(weights, block, optimizer == "torchao", bits)

    def step(model: Any, optimizer: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            labels = torch.zeros(batch, dtype=torch.int64, device="cuda")
            loss = F.cross_entropy(model(torch.empty(batch, 3, 224, 224, device="cuda")), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return measured(step, model, updates, workspaces=workspaces)
