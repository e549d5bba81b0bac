"""Train GPT-2 on a GPU, or watch it without one: `python3 -m course_utils watch FILE`."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

V, POSITIONS = 50257, 1024


class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.norm1, self.norm2, self.a = nn.LayerNorm(h), nn.LayerNorm(h), a
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, h, L, a):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(POSITIONS, h)
        self.blocks, self.norm = nn.ModuleList(Block(h, a) for _ in range(L)), nn.LayerNorm(h)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # keeps its input alone
        return self.norm(x)

    def loss(self, x, targets):  # the head shares the embedding's weights
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Lora(nn.Module):
    def __init__(self, base, r=8):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(base.weight.new_empty(r, base.in_features).normal_(std=0.02))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


def train(h=768, L=12, a=12, b=32, k=4, s=1024, steps=20):
    dist.init_process_group("nccl")  # torchrun starts one process per GPU
    torch.cuda.set_device(dist.get_node_local_rank())
    model = GPT(h, L, a).to("cuda").requires_grad_(False)  # load a trained model here
    model.loss = torch.compile(model.loss)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        block.qkv, block.out = Lora(block.qkv), Lora(block.out)
        block.mlp[0], block.mlp[2] = Lora(block.mlp[0]), Lora(block.mlp[2])
        block.compile()  # one graph per block: FSDP gathers between them
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)  # the rest
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    text = torch.randint(V, (b, s + 1), device="cuda")  # your data goes here
    for step in range(1, steps + 1):
        began = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        for micro in text.chunk(k):
            with torch.autocast("cuda", torch.bfloat16):
                x = model(micro[:, :-1])
                parts = zip(x.chunk(8, 1), micro[:, 1:].chunk(8, 1))  # an eighth at a time
                loss = sum(checkpoint(model.loss, *part, use_reentrant=False) for part in parts) / 8
            (loss / k).backward()  # adds to .grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        value = loss.item()  # waits for the GPU
        tokens = dist.get_world_size() * b * s / (time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(f"step {step}: loss {value:.3f}, {tokens:,.0f} tokens/s, peak {peak:.2f} GB")


if __name__ == "__main__":
    train()
