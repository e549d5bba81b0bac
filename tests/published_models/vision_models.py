"""Steps of vision transformers as published scripts take them."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_utils.estimating.workspaces import Workspaces
from course_utils.measurement import Measurement

from .running import measured


class EarlierFlash(torch.autograd.Function):
    """What flash attention keeps and takes before torch 2.2, for up to 256 positions in 16 bits; it computes
    nothing.

    In its copies of q, k, v and in its output each sequence's positions lie together (fmha_api.cpp and
    attention.cu in torch's aten/src/ATen/native/transformers/cuda); later outputs lie as q does, and are not
    copied again.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = [each.transpose(1, 2).contiguous() for each in (q, k, v)]
        result = torch.empty_like(copies[0]).transpose(1, 2)
        rounded = -(-q.size(2) // 16) * 16
        ctx.save_for_backward(q, k, v, result, q.new_empty((*q.shape[:2], rounded), dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        copies = [each.transpose(1, 2).contiguous() for each in (gradients[0], *ctx.saved_tensors[:3])]
        return tuple(torch.empty_like(each).transpose(1, 2) for each in copies[1:])


def earlier_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """The kernel of 16 bits before torch 2.2."""
    result: Any = EarlierFlash.apply(q, k, v)
    return result


class EncoderBlock(nn.Module):
    """Pre-norm block with torch's own attention module."""

    def __init__(self, h: int, a: int, f: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(h, eps=1e-6)
        self.norm_2 = nn.LayerNorm(h, eps=1e-6)
        self.attention = nn.MultiheadAttention(h, a, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(h, f), nn.GELU(), nn.Linear(f, h))

    def forward(self, given: Tensor) -> Tensor:
        x = self.norm_1(given)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = x + given
        y = self.norm_2(x)
        y = self.mlp(y)
        return x + y


class VisionTransformer(nn.Module):
    """torchvision's: patches of 16 x 16, a class token in front, no dropout."""

    def __init__(self, L: int, h: int, a: int, f: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, h, 16, 16)
        self.token = nn.Parameter(torch.empty(1, 1, h))
        self.positions = nn.Parameter(torch.empty(1, 14 * 14 + 1, h))
        self.blocks = nn.Sequential(*(EncoderBlock(h, a, f) for _ in range(L)))
        self.norm = nn.LayerNorm(h, eps=1e-6)
        self.head = nn.Linear(h, classes)

    def forward(self, images: Tensor) -> Tensor:
        n = images.size(0)
        x = self.patches(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token.expand(n, -1, -1), x], 1)
        x = x + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


VIT_L = {"L": 24, "h": 1024, "a": 16, "f": 4096}


class EarlierAdam(torch.optim.Optimizer):
    """Adam for all tensors at once as before torch 2.1, which made its denominators anew from the roots."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore [bad-override]
        weights = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        for one in weights:
            if not self.state[one]:
                self.state[one] = {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
        gradients = [one.grad for one in weights]
        means, squares = ([self.state[one][name] for one in weights] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, gradients, alpha=0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, 1.0)
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(weights, means, denominators, -1.0)


def fine_tuned_vit(
    workspaces: Workspaces,
    batch: int,
    precision: str = "fp32",
    fabric: bool = True,
    accumulate: int = 1,
    optimizer: str = "Adam",
) -> Measurement:
    """Batches of an epoch, with an update after the first and then after each `accumulate`; at last an
    evaluation.

    Without accumulation the gradients of the last step live until after the next forward. Fabric loads a
    batch before the last one is gone, and returns fp32. `precision` is "fp32", "fp16-mixed" (autocast and a
    scaler) or "bf16" (all).
    """
    with torch.device("meta"):
        model = VisionTransformer(classes=10, **VIT_L).to(
            torch.bfloat16 if precision == "bf16" else torch.float32
        )
    updates = {"Adam": EarlierAdam, "SGD": torch.optim.SGD}[optimizer](model.parameters(), lr=5e-5)
    mixed = precision == "fp16-mixed"

    def outputs(model: Any, images: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16) if mixed else nullcontext():
            return model(images.to(model.token.dtype)).float()

    def step(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cuda", enabled=mixed)
        images = None
        for number in range(7 * accumulate + 1):
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

    def earlier_step(model: Any, optimizer: Any) -> None:
        with patch.object(F, "scaled_dot_product_attention", earlier_attention):
            step(model, optimizer)

    return measured(
        step if precision == "fp32" else earlier_step, model, updates, workspaces=workspaces, steps=1
    )


def summed_vit(workspaces: Workspaces) -> Measurement:
    """One image, the sum of the output as loss, Adam."""
    with torch.device("meta"):
        model = VisionTransformer(classes=1000, **VIT_L)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.empty(1, 3, 224, 224, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return measured(step, model, torch.optim.Adam(model.parameters()), workspaces=workspaces)
