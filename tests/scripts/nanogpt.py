"""nanoGPT's loop: batches cut from a memory map, autocast, gradient accumulation, clipping, a compiled model."""

import os
from contextlib import nullcontext
from sys import argv

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

layers, heads, width, block, batch, accumulation = map(int, argv[1:7] or (12, 12, 768, 1024, 8, 2))
vocab, device, out_dir = 50304, "cuda", "out-nanogpt"
os.makedirs(out_dir, exist_ok=True)
np.random.randint(vocab, size=20 * block, dtype=np.uint16).tofile(os.path.join(out_dir, "train.bin"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (one.view(*one.shape[:2], heads, -1).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.attn_proj(y)
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


def get_batch():
    data = np.memmap(os.path.join(out_dir, "train.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block, (batch,))
    x = torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in starts])
    return (one.pin_memory().to(device, non_blocking=True) for one in (x, y))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=not torch.cuda.is_bf16_supported())
context = torch.amp.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()
model = torch.compile(model)
for step in range(1000):
    for _ in range(accumulation):
        x, y = get_batch()
        with context:
            loss = model(x, y)[1] / accumulation
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step}: loss {loss.item() * accumulation:.4f}")
    torch.save({"model": model.state_dict(), "step": step}, os.path.join(out_dir, "ckpt.pt"))
