"""GPT-2 and its training step in plain PyTorch, with the choices whose memory and time
`in_turn.py` counts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

VOCABULARY, POSITIONS = 50257, 1024
SHAPES = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16)}  # blocks, width, heads

KEPT = (  # what selective recomputation keeps: matrix products, and the results of every attention kernel
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


@dataclass(frozen=True)
class Choice:
    """One way to train. `recompute`: none, full, every-K, selective, offload (blocks'
    inputs), offload-all.
    """

    model: str = "gpt2"
    micro_batch: int = 16
    seq_len: int = 1024
    micro_batches: int = 1
    precision: str = "bf16"  # bf16 and fp16 by autocast; fp32; tf32
    attention: str = "flash"
    recompute: str = "none"
    compiled: str = ""  # model, blocks, or nothing
    budget: float = 1.0  # activation_memory_budget of the compiler
    optimizer: str = "fused"  # fused, foreach, loop
    loss_chunks: int = 1

    @property
    def label(self) -> str:
        """What differs from the defaults."""
        plain = Choice()
        changed = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        return ", ".join(f"{name}={value}" for name, value in changed.items()) or "as it is"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, choice: Choice) -> None:
        super().__init__()
        count, width, heads = SHAPES[choice.model]
        self.choice = choice
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(POSITIONS, width)
        blocks = [Block(width, heads) for _ in range(count)]
        together = (
            int(choice.recompute.removeprefix("every-")) if choice.recompute.startswith("every-") else 1
        )
        starts = range(0, count, together)
        self.parts = nn.ModuleList(nn.Sequential(*blocks[start : start + together]) for start in starts)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        with self.offloaded():
            for part in self.parts:
                x = self.through(part, x)
        return self.loss(self.norm(x), targets)

    def through(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.choice.recompute in ("none", "offload-all"):
            return part(x)
        if self.choice.recompute == "selective":
            contexts = partial(create_selective_checkpoint_contexts, kept_or_recomputed)
            return checkpoint(part, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(part, x, use_reentrant=False)

    def offloaded(self) -> AbstractContextManager[Any]:
        """To the host: all that blocks keep for backward, or, under checkpoints, the
        inputs of blocks alone.
        """
        if self.choice.recompute not in ("offload", "offload-all"):
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=True)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.choice.loss_chunks == 1:
            return self.part_of_loss(x, targets) / targets.numel()
        parts = zip(
            x.chunk(self.choice.loss_chunks, 1), targets.chunk(self.choice.loss_chunks, 1), strict=True
        )
        total = torch.zeros((), device=x.device)
        for part in parts:
            total = total + checkpoint(self.part_of_loss, *part, use_reentrant=False)
        return total / targets.numel()

    def part_of_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.tokens.weight)  # the head shares the embedding's weights
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def kept_or_recomputed(_: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Training:
    """A model, its optimizer, and `step`, which returns the bytes allocated when the
    first forward has ended.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        torch.manual_seed(1)
        torch.backends.cuda.matmul.allow_tf32 = choice.precision == "tf32"
        with torch.device("cuda"):
            self.model = Gpt(choice)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        fused = choice.optimizer == "fused"
        foreach = None if fused else choice.optimizer == "foreach"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, foreach=foreach)
        self.forward = compiled(self.model, choice)
        shape = choice.micro_batch, choice.seq_len + 1
        self.texts = [torch.randint(VOCABULARY, shape, device="cuda") for _ in range(choice.micro_batches)]

    def step(self) -> int:
        with self.kernel():  # backward as well, which recomputes
            kept = self.backward_of_all()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return kept

    def backward_of_all(self) -> int:
        kept = 0
        for text in self.texts:
            with self.autocast():
                loss = self.forward(text[:, :-1], text[:, 1:]) / len(self.texts)
            kept = kept or torch.cuda.memory_allocated()
            loss.backward()
        return kept

    def autocast(self) -> AbstractContextManager[Any]:
        formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
        if self.choice.precision not in formats:
            return nullcontext()
        return torch.autocast("cuda", dtype=formats[self.choice.precision])

    def kernel(self) -> AbstractContextManager[Any]:
        names = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
        return sdpa_kernel(names.get(self.choice.attention, SDPBackend.MATH))


def compiled(model: Gpt, choice: Choice) -> Callable[..., torch.Tensor]:
    if choice.compiled == "blocks":
        for part in model.parts:
            part.compile()
    if choice.compiled != "model":
        return model
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = choice.budget
    return torch.compile(model)
