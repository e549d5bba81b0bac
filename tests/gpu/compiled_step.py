"""A GPT's step in twelve ways of torch.compile, counted in its third step, for a card or a simulated GPU.

On a card: `for way in default blocks …; do python tests/gpu/compiled_step.py $way; done`, a process for each,
as settings of the compiler are the process's. `recorded/compiled_step.jsonl` is what an H200 counted.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_settings
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS, VOCABULARY, HEADS, BATCH, TOKENS = 1024, 8, 50304, 16, 8, 1024
POSITIONS = 2048
STEPS = 3


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, h))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Gpt(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.recomputes = way == "checkpoint"
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block(0.1 if way == "dropout" else 0.0) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            z = checkpoint(block, z, use_reentrant=False) if self.recomputes else block(z)
        return F.cross_entropy(self.head(self.norm(z)).flatten(0, 1), y.flatten())


def compiled(model: Gpt, way: str) -> Callable[..., torch.Tensor]:
    if way == "blocks":
        for block in model.blocks:
            block.compile()
    if way in ("eager", "blocks"):
        return model
    if way == "cudagraphs":
        return torch.compile(model, mode="reduce-overhead")
    return torch.compile(model, dynamic=True) if way == "dynamic" else torch.compile(model)


def counts(way: str) -> dict[str, Any]:
    """Bytes allocated after forward, at the peak and after the step, and reserved, of the last step."""
    with torch.device("cuda"):
        model = Gpt(way)
    if way == "pure":
        model = model.bfloat16()
    budget = float(way.removeprefix("budget")) if way.startswith("budget") else 1.0
    with functorch_settings.patch(activation_memory_budget=budget):
        forward = compiled(model, way)
        foreach = way == "foreach"
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=not foreach, foreach=foreach)
        update = torch.compile(optimizer.step) if way == "optimizer" else optimizer.step
        kept = 0
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            x, y = torch.randint(0, VOCABULARY, (2, BATCH, TOKENS), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=way != "pure"):
                loss = forward(x, y)
            kept = torch.cuda.memory_allocated()
            loss.backward()
            update()
            optimizer.zero_grad()
            del loss
    return {
        "way": way,
        "kept": kept,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "left": torch.cuda.memory_allocated(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }


if __name__ == "__main__":
    print(json.dumps(counts(sys.argv[1])), flush=True)
