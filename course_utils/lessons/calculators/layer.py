"""The transformer of Stanford's CS336: the published peak of a step, and one layer with operations of one's own."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import nn
from torch.nn import functional as F

from course_utils.allocator.counters import counted
from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import parse_bytes

Operation = Callable[..., torch.Tensor]

PUBLISHED = parse_bytes("62.69 GiB")
"""max_memory_allocated in ShibukiZero/assignment2-systems@00f1480, artifacts/experiments/ch1/1_1_6_memory/summary.md"""

MODEL = TransformerConfig(
    name="CS336's 2.7B", family="llama", layers=32, hidden=2560, heads=32, kv_heads=32, ffn=10240, vocab=10_000,
    max_positions=512, tied=False, logits="compute",
)  # fmt: skip
RUN = TrainingRun(MODEL, 4, 512, "amp-bf16", optimizer="adamw-loop", attention="eager", card="H100-80GB")
"""The same sizes in the course's network, with torch's own operations."""


def gap() -> int:
    """Published bytes minus what the course estimates for RUN, by the same counter."""
    return PUBLISHED - counted(RUN).allocated


TORCHS: dict[str, Operation] = {
    "norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5), "silu": F.silu,
    "softmax": partial(F.softmax, dim=-1),
}  # fmt: skip


class Layer(nn.Module):
    """Attention written out in 32 heads, then SwiGLU; `own` operations take the place of torch's, by name."""

    def __init__(self, **own: Operation) -> None:
        super().__init__()
        h, ffn = MODEL.hidden, MODEL.ffn
        self.operations = TORCHS | own
        self.first, self.second = nn.Parameter(torch.ones(h)), nn.Parameter(torch.ones(h))
        self.q, self.k, self.v, self.out = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in ((h, ffn), (h, ffn), (ffn, h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, silu, softmax = self.operations.values()
        y = norm(x, self.first)
        q, k, v = (each(y).unflatten(-1, (32, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        y = norm(x, self.second)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def step(layer: nn.Module, x: torch.Tensor) -> None:
    """Forward under autocast, and backward."""
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = layer(x).sum()
    loss.backward()


@lru_cache(maxsize=4)
def one_layer(**own: Operation) -> Measurement:
    """A simulated step of one layer, in which `own` operations take the place of torch's."""
    with torch.device("meta"):
        layer, x = Layer(**own), torch.empty(RUN.micro_batch, RUN.seq_len, MODEL.hidden)
    return measure(step=step, model=layer, batch=x, source="simulated", steps=1)
