"""Tensor parallelism: the formula's rows against torch's own `parallelize_module` on simulated ranks."""

from math import prod
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from course_utils import TrainingRun, TransformerConfig, on_gpu
from course_utils.estimating.formula import block_table
from course_utils.estimating.megatron import rank_shapes

MODEL = TransformerConfig("wide", "llama", 1, 256, 4, 512, 128, ffn=1024, positions="none", tied=False)
CUTS = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")} | {
    name: RowwiseParallel() for name in ("out", "down")
}


class Block(nn.Module):
    """What tensor parallelism cuts of a block: no norms, and no sums."""

    def __init__(self) -> None:
        super().__init__()
        h, f = MODEL.hidden, MODEL.ffn
        self.q, self.k, self.v, self.out = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(h, f, bias=False) for _ in range(2))
        self.down = nn.Linear(f, h, bias=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            one(x).unflatten(-1, (-1, MODEL.head_size)).transpose(1, 2) for one in (self.q, self.k, self.v)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def kept_by(ranks: int, part: str) -> tuple[int, int]:
    """Bytes that a part of the block keeps besides its input, and elements of the rank's weights."""
    with on_gpu(ranks=ranks):
        mesh = init_device_mesh("cuda", (ranks,))
        block = parallelize_module(Block().to("cuda", torch.bfloat16), mesh, dict(CUTS))
        x = torch.randn(2, 64, MODEL.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = getattr(block, part)(x)
        kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        weights = cast("list[DTensor]", list(block.parameters()))
        local = sum(weight.to_local().numel() for weight in weights)
    return kept, local


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_what_the_rows_say(ranks: int) -> None:
    run = TrainingRun(MODEL, 2, 64, "bf16", attention="flash", tensor_parallel=ranks)
    table = block_table(run)
    inside = {"attend": ("attention:",), "widen": ("SiLU:", "gate · up:", "down:")}
    matrices = [
        shape for name, shape in rank_shapes(MODEL, ranks).items() if "blocks" in name and len(shape) == 2
    ]
    for part, rows in inside.items():
        expected = sum(size for name, size in table.items() if name.startswith(rows))
        kept, local = kept_by(ranks, part)
        assert kept == pytest.approx(expected, abs=4 * 512), part  # the kernel's random state
        assert local == sum(map(prod, matrices))
