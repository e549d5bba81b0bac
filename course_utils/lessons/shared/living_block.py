"""The picture of a block with controls: each choice runs the block again. Only notebooks import this."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import PRESETS, TrainingRun
from ...errors import check_known
from ...estimating.formula import block_bytes
from ...interactive.html_bars import Picture
from ...interactive.widgets import SliderBox, dropdown, slider
from ...measuring.compiling import unavailable
from ...measuring.cuda_answers import CARD
from ...units import format_bytes, format_signed
from ...watching.on_gpu import on_new_gpu
from .block_picture import block_picture
from .block_trace import Trace, trace
from .compiled_trace import compiled_trace


class NormInPieces(nn.Module):
    """LayerNorm in single operations of torch's, as a formula is written down."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(h)), nn.Parameter(torch.zeros(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        off = x - x.mean(-1, keepdim=True)
        return off / (off.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias


class GeluInPieces(nn.Module):
    """GELU's approximation by tanh in single operations, as in the transformers library's GPT-2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.797885 * (x + 0.044715 * x**3)))


class SwiGLU(nn.Module):
    """Llama's MLP: two branches are multiplied, and there are three matrices."""

    def __init__(self, h: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(h, ffn, bias=False), nn.Linear(h, ffn, bias=False)
        self.down = nn.Linear(ffn, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


NORMS: dict[str, Any] = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm, in single operations": NormInPieces,
    "RMSNorm": nn.RMSNorm,
}
MLPS = ("GELU", "GELU, in single operations", "SwiGLU of 8/3·h")


def _mlp(name: str, h: int) -> nn.Module:
    if name.startswith("SwiGLU"):
        return SwiGLU(h, 8 * h // 3)
    middle = nn.GELU() if name == "GELU" else GeluInPieces()
    return nn.Sequential(nn.Linear(h, 4 * h), middle, nn.Linear(4 * h, h))


class ExampleBlock(nn.Module):
    """Lesson 05's block of GPT-2 small, with a choice of attention, dropout, norms and MLP."""

    def __init__(self, h: int, a: int, attention: str, rate: float, norm: str, mlp: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = NORMS[norm](h), NORMS[norm](h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = _mlp(mlp, h)
        self.a, self.eager, self.rate = a, attention == "eager", rate

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.eager:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)
        s = q.shape[-2]
        mask = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        scores = (q / q.shape[-1] ** 0.5) @ k.mT + mask
        return F.dropout(scores.softmax(-1), self.rate) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(b, s, h)
        x = x + F.dropout(self.out(mixed), self.rate)
        return x + F.dropout(self.mlp(self.norm2(x)), self.rate)


@dataclass(frozen=True)
class Choices:
    """A block of GPT-2 small: sequences, tokens, and how its parts are made."""

    micro_batch: int = 2
    seq_len: int = 512
    attention: str = "flash"
    autocast: bool = False
    dropout: float = 0.1
    norm: str = "LayerNorm"
    mlp: str = "GELU"
    compile: bool = False

    def __post_init__(self) -> None:
        check_known("attention", self.attention, ("eager", "flash"))
        check_known("norm", self.norm, NORMS)
        check_known("mlp", self.mlp, MLPS)

    def traced(self) -> Trace:
        """The block's forward on a simulated GPU, operation by operation."""
        model = PRESETS["gpt2"]
        dtype = torch.float32 if self.autocast else torch.bfloat16
        shape = (self.micro_batch, self.seq_len, model.hidden)
        with on_new_gpu():
            parts = (self.attention, self.dropout, self.norm, self.mlp)
            block = ExampleBlock(model.hidden, model.heads, *parts).to("cuda", dtype)
            x = torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
                return compiled_trace(block, x) if self.compile else trace(block, x)

    def run(self) -> TrainingRun | None:
        """The same block as a run, or None where it has operations that the closed form does not know."""
        if "single" in self.norm + self.mlp or (self.compile and self.attention == "eager"):
            return None
        model = replace(PRESETS["gpt2"], dropout=self.dropout, norm=self.norm.lower())
        if self.mlp != "GELU":
            model = replace(model, mlp="swiglu", ffn=8 * model.hidden // 3)
        precision = "amp-bf16" if self.autocast else "bf16-master"
        compiled = "blocks" if self.compile else "none"
        return TrainingRun(
            model, self.micro_batch, self.seq_len, precision, attention=self.attention, compile=compiled
        )


def _cannot_compile() -> str:
    """The reason why this torch cannot compile for a simulated GPU; "" where it can."""
    with on_new_gpu():
        torch.compile(lambda: None)  # the first call tries a small step
        return unavailable(CARD)


class LivingBlock(SliderBox):
    """Controls for a block, and its picture: what its operations make, and what is kept for backward.

    `choices` are the first ones, as `Choices` has them. Raises ValueError for those that it does not know.
    """

    invitation = "A block and what it keeps for backward: run this cell to change its parts."

    def __init__(self, **choices: Any) -> None:
        first = Choices(**choices)
        weights = [("16-bit weights", False), ("autocast", True)]
        controls = {
            "attention": dropdown("attention", ("flash", "eager"), first.attention),
            "autocast": dropdown("formats", weights, first.autocast),
            "dropout": dropdown("dropout", (0.1, 0.0), first.dropout),
            "norm": dropdown("norms", list(NORMS), first.norm),
            "mlp": dropdown("MLP", MLPS, first.mlp),
            "compile": dropdown("code", [("eager", False), ("torch.compile", True)], first.compile),
            "seq_len": slider("tokens s", (128, 256, 512, 1024), first.seq_len, continuous=False),
            "micro_batch": slider("sequences b", (1, 2, 4, 8), first.micro_batch, continuous=False),
        }
        super().__init__(controls)

    @property
    def choices(self) -> Choices:
        return Choices(**{name: control.value for name, control in self.controls.items()})

    def redraw(self) -> tuple[Picture, str]:
        choices = self.choices
        missing = _cannot_compile() if choices.compile else ""
        if missing:
            choices = replace(choices, compile=False)
        traced = choices.traced()
        kept = format_bytes(traced.kept, "MB", 2)
        message = f"It cannot be compiled here ({missing}), so it is eager. " if missing else ""
        source = "the compiler's graph" if choices.compile else "torch's hooks"
        message += f"By {source}, the block keeps <b>{kept}</b>: {traced.numbers:,} numbers s·b·h, "
        message += f"{traced.kept / traced.numbers:.2f} bytes for each."
        run = choices.run()
        if run is None:
            lacks = (
                "single operations" if "single" in choices.norm + choices.mlp else "compiled eager attention"
            )
            message += f" The closed form has no rows for {lacks}."
        else:
            estimated = block_bytes(run)
            gap = format_signed(estimated - traced.kept)
            message += f" The closed form: {format_bytes(estimated, 'MB', 2)}, the gap: {gap}."
        formats = "autocast to bf16" if choices.autocast else "weights in bf16"
        code = "compiled" if choices.compile else "traced"
        where = f"{code} on the simulated GPU · {choices.attention} attention, {formats}"
        return block_picture(traced, provenance=where), message


living_block = LivingBlock
