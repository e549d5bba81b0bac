"""Steps of vision transformers as published scripts take them."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...estimating.workspaces import Workspaces
from ...measurement import Measurement
from .running import measured


class EncoderBlock(nn.Module):
    """Pre-norm block with torch's own attention module."""

    def __init__(self, h: int, a: int, f: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(h, eps=1e-6), nn.LayerNorm(h, eps=1e-6)
        self.attention = nn.MultiheadAttention(h, a, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(h, f), nn.GELU(), nn.Linear(f, h))

    def forward(self, given: Tensor) -> Tensor:
        x = self.norm_1(given)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = x + given
        y = self.norm_2(x)
        y = self.mlp(y)
        return x + y


class Encoder(nn.Module):
    """The blocks with their positions and last norm."""

    def __init__(self, L: int, h: int, a: int, f: int, s: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(1, s, h))
        self.blocks = nn.Sequential(*(EncoderBlock(h, a, f) for _ in range(L)))
        self.norm = nn.LayerNorm(h, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        return self.norm(self.blocks(x))


class VisionTransformer(nn.Module):
    """torchvision's: patches of 16 x 16, a class token in front, no dropout."""

    def __init__(self, L: int, h: int, a: int, f: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, h, 16, 16)
        self.token = nn.Parameter(torch.empty(1, 1, h))
        self.encoder = Encoder(L, h, a, f, 14 * 14 + 1)
        self.head = nn.Linear(h, classes)

    def forward(self, images: Tensor) -> Tensor:
        n = images.size(0)
        x = self.patches(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token.expand(n, -1, -1), x], 1)
        x = self.encoder(x)
        return self.head(x[:, 0])


VIT_L = {"L": 24, "h": 1024, "a": 16, "f": 4096}


def fine_tuned_vit(
    workspaces: Workspaces, batch: int, precision: str = "fp32", fabric: bool = True, accumulate: int = 1,
    optimizer: str = "Adam",
) -> Measurement:  # fmt: skip
    """Batches of an epoch, with an update after the first and then after each `accumulate`; at last an evaluation.

    Without accumulation the gradients of the last step live until after the next forward. Fabric loads a batch before
    the last one is gone, and returns fp32. `precision` is "fp32", "fp16-mixed" (autocast and a scaler) or "bf16" (all).
    """
    with torch.device("meta"):
        model = VisionTransformer(classes=10, **VIT_L).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    updates = getattr(torch.optim, optimizer)(model.parameters(), lr=5e-5)
    mixed = precision == "fp16-mixed"

    def outputs(model: Any, images: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16) if mixed else nullcontext():
            return model(images.to(model.token.dtype)).float()

    def step(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cuda", enabled=mixed)
        images = None
        for number in range(2 * accumulate + 1):
            images = images if fabric else None
            images = torch.empty(batch, 3, 224, 224, device="cuda")
            logits = outputs(model, images)
            loss = F.cross_entropy(logits, torch.zeros(batch, dtype=torch.int64, device="cuda")) / accumulate
            if accumulate == 1:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            if number % accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                if accumulate > 1:
                    optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs(model, torch.empty(batch, 3, 224, 224, device="cuda"))
        model.train()

    return measured(step, model, updates, workspaces=workspaces, steps=1)


def summed_vit(workspaces: Workspaces) -> Measurement:
    """One image, the sum of the output as loss, Adam."""
    with torch.device("meta"):
        model = VisionTransformer(classes=1000, **VIT_L)
    optimizer = torch.optim.Adam(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        images = torch.empty(1, 3, 224, 224, device="cuda")
        model(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return measured(step, model, optimizer, workspaces=workspaces)
