"""Falcon's attention: one head of keys and values for all query heads, handed to torch as it is."""

import torch
from torch import nn
from torch.nn import functional as F

layers, heads, width, length, batch, vocab = 8, 16, 1024, 1024, 4, 32_000
size = width // heads


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, width + 2 * size, bias=False)
        self.dense = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        query, key, value = self.query_key_value(normed).split((width, size, size), dim=-1)
        query = query.unflatten(-1, (heads, size)).transpose(1, 2)
        key, value = key.unsqueeze(1), value.unsqueeze(1)  # one head, which torch broadcasts
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.dense(attended.transpose(1, 2).flatten(2))
        return x + attended + self.down(F.gelu(self.up(normed)))  # attention and MLP in parallel


class Falcon(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Falcon().to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(10):
    tokens = torch.randint(vocab, (batch, length + 1), device="cuda")
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {loss.item():.3f}")
