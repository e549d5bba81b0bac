"""LoRA: it starts as the identity, trains its factors alone, and can be merged into one weight."""

from typing import Any

import pytest
import torch
from engine import Unwatched, tiny
from torch import nn

from course_utils.measuring.step import Training
from course_utils.networks.frozen import FrozenLinear
from course_utils.networks.lora import LoraLinear
from course_utils.run import TrainingRun


def run_with(family: str, targets: Any = ("attention", "mlp"), **changes: Any) -> TrainingRun:
    choices: dict[str, Any] = {
        "precision": "fp32",
        "attention": "eager",
        "lora_rank": 4,
        "lora_targets": targets,
    }
    return TrainingRun(tiny(family, dropout=0.0), 2, 32, **(choices | changes))


def lora_layers(network: nn.Module) -> dict[str, LoraLinear]:
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, LoraLinear)}


def merge(layer: LoraLinear) -> torch.Tensor:
    """The one weight (n_out, n_in) that does what the layer does: W + B·A, in the type of its factors."""
    base = layer.base.dense_weight() if isinstance(layer.base, FrozenLinear) else layer.base.weight
    return base.detach().to(layer.A.dtype) + layer.B.detach() @ layer.A.detach()


def test_it_starts_as_the_identity_and_merged_equals_unmerged():
    torch.manual_seed(0)
    base = nn.Linear(24, 40, dtype=torch.float64)
    layer = LoraLinear(base, 4, torch.float64)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    assert torch.equal(layer(x), base(x))
    nn.init.normal_(layer.B)
    expected = nn.functional.linear(x, merge(layer), base.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x), base(x))


@pytest.mark.parametrize(
    ("precision", "bits", "recompute"), [("fp32", None, "none"), ("bf16", 4, "selective")]
)
def test_it_learns_and_nothing_else_moves(precision, bits, recompute):
    torch.manual_seed(0)
    run = run_with(
        "llama", precision=precision, frozen_bits=bits, optimizer="adamw-loop", recompute=recompute
    )
    training = Training(run, "cpu", simulated=False)
    before = training.network.state_dict().items()
    frozen = {name: tensor.clone() for name, tensor in before if name.rsplit(".", 1)[1] not in ("A", "B")}
    for _ in range(4):
        training.step(Unwatched())
    assert training.losses[-1] < training.losses[0]
    after = training.network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in frozen.items()) and frozen
    assert all(bool(layer.B.any()) for layer in lora_layers(training.network).values())
