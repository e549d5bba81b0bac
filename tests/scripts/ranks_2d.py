"""Two dimensions for torchrun: each layer is cut by tensor parallelism, and its pieces by FSDP2."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYERS, WIDTH, TENSOR = 3, 256, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
shape = (int(os.environ["WORLD_SIZE"]) // TENSOR, TENSOR)
mesh = init_device_mesh("cuda", shape, mesh_dim_names=("shards", "tensor"))
model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to("cuda")
for layer in model:
    parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(layer, mesh=mesh["shards"])
fully_shard(model, mesh=mesh["shards"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(4, 32, WIDTH, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
