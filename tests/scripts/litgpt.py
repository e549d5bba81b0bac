"""litgpt's way: a Llama that is built on the meta device, weights in bf16, blocks recomputed in backward."""

from sys import argv

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

layers, heads, width, length, batch = map(int, argv[1:6] or (22, 32, 2048, 2048, 4))
vocab, size = 32_000, width // heads


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fc_1, self.fc_2 = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.out = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (one.unflatten(-1, (heads, size)).transpose(1, 2) for one in self.qkv(self.norm_1(x)).chunk(3, -1))
        q, k = (one * cos + torch.cat(one.chunk(2, -1)[::-1], -1) * sin for one in (q, k))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        n = self.norm_2(x)
        return x + self.out(F.silu(self.fc_1(n)) * self.fc_2(n))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(layers)), nn.RMSNorm(width)
        angles = torch.outer(torch.arange(length), 1 / 10_000 ** (torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = checkpoint(block, x, self.cos.to(x), self.sin.to(x), use_reentrant=False)
        return self.lm_head(self.ln_f(x))


torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    model = GPT()
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
text = torch.randint(0, vocab, (64, length + 1))
loader = torch.utils.data.DataLoader(text, batch_size=batch, shuffle=True, num_workers=4, pin_memory=True)
for tokens in loader:
    tokens = tokens.to("cuda", non_blocking=True)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
