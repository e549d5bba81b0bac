"""LoRA: it starts as the identity, trains its factors alone, and can be merged into one weight."""

from typing import Any

import pytest
import torch
from engine import GPT, LLAMA, Unwatched, shallow, simulate, tiny
from torch import nn

from course_utils.measuring.step import Training
from course_utils.networks import build_network, network_for
from course_utils.networks.frozen import FrozenLinear
from course_utils.networks.lora import LoraLinear
from course_utils.run import TrainingRun
from course_utils.units import round_up

MATRICES = {"gpt2": ("qkv", "out", "up", "down"), "llama": ("q", "k", "v", "out", "gate", "up", "down")}


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


@pytest.mark.parametrize("family", MATRICES)
def test_at_first_nothing_is_added(family):
    run = run_with(family)
    torch.manual_seed(0)
    plain = build_network(run.model, "eager")
    torch.manual_seed(0)
    with_lora = network_for(run)
    tokens = torch.randint(run.model.vocab, (2, 32))
    assert torch.equal(plain(tokens), with_lora(tokens))


@pytest.mark.parametrize("family", MATRICES)
def test_the_factors_have_their_shapes_and_names_and_learn_alone(family):
    run = run_with(family, precision="amp-bf16")
    trained = {name: weight for name, weight in network_for(run).named_parameters() if weight.requires_grad}
    expected = {}
    for name, weight in build_network(run.model, "eager").named_parameters():
        matrix, _, last = name.rpartition(".")
        if name.startswith("blocks.") and matrix.split(".")[-1] in MATRICES[family] and last == "weight":
            expected |= {f"{matrix}.A": (4, weight.shape[1]), f"{matrix}.B": (weight.shape[0], 4)}
    assert {name: tuple(weight.shape) for name, weight in trained.items()} == expected
    assert len(expected) == 2 * len(MATRICES[family]) * run.model.layers
    assert {weight.dtype for weight in trained.values()} == {torch.float32}


def test_only_the_named_targets_are_adapted_and_others_refused():
    layers = lora_layers(network_for(run_with("llama", ("q", "v"))))
    assert {name.rsplit(".", 1)[1] for name in layers} == {"q", "v"} and len(layers) == 2 * 2
    with pytest.raises(ValueError, match=r"'qkv'.*q, k, v, out, gate, up, down"):
        run_with("llama", ["qkv"])


def merge(layer: LoraLinear) -> torch.Tensor:
    """The one weight (n_out, n_in) that does what the layer does: W + B·A, in the type of its factors."""
    base = layer.base.dense_weight() if isinstance(layer.base, FrozenLinear) else layer.base.weight
    return base.detach().to(layer.A.dtype) + layer.B.detach() @ layer.A.detach()


@pytest.mark.parametrize("bias", [True, False])
def test_merged_equals_unmerged(bias):
    torch.manual_seed(0)
    base = nn.Linear(24, 40, bias=bias, dtype=torch.float64)
    layer = LoraLinear(base, 4, torch.float64)
    nn.init.normal_(layer.B)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    expected = nn.functional.linear(x, merge(layer), base.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x), base(x))


@pytest.mark.parametrize("bits", [8, 4])
def test_merged_equals_unmerged_beside_a_quantized_weight(bits):
    torch.manual_seed(0)
    network = network_for(run_with("llama", precision="bf16", frozen_bits=bits))
    layer = next(iter(lora_layers(network).values()))
    nn.init.normal_(layer.B, std=0.02)
    assert isinstance(layer.base, FrozenLinear)
    x = torch.randn(7, layer.base.in_features, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(x), x @ merge(layer).t(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("precision", "bits"), [("fp32", None), ("bf16", 16), ("bf16", 8), ("bf16", 4)])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_it_learns_and_nothing_else_moves(precision, bits, recompute):
    torch.manual_seed(0)
    run = run_with(
        "llama", precision=precision, frozen_bits=bits, optimizer="adamw-loop", recompute=recompute
    )
    training = Training(run, "cpu", simulated=False)
    before = training.network.state_dict().items()
    frozen = {name: tensor.clone() for name, tensor in before if name.rsplit(".", 1)[1] not in ("A", "B")}
    for _ in range(8):
        training.step(Unwatched())
    assert training.losses[-1] < training.losses[0]
    after = training.network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in frozen.items()) and frozen
    assert all(bool(layer.B.any()) for layer in lora_layers(training.network).values())


@pytest.mark.parametrize("bits", [None, 16, 8, 4])
@pytest.mark.parametrize(("precision", "attention"), [("amp-bf16", "flash"), ("bf16-master", "eager")])
@pytest.mark.parametrize("model", [shallow(GPT, 2), shallow(LLAMA, 2)], ids=["gpt2", "llama"])
def test_it_simulates_and_keeps_gradients_and_states_of_the_factors_alone(model, precision, attention, bits):
    dense = TrainingRun(model, 2, 128, precision, attention=attention)
    run = dense.replace(lora_rank=8, lora_targets=("attention", "mlp"), frozen_bits=bits)
    end = simulate(run).moments["end of backward"]
    with torch.device("meta"):
        weights = [
            weight for layer in lora_layers(network_for(run)).values() for weight in (layer.A, layer.B)
        ]
    assert end["gradients"] == sum(round_up(run.precision.gradient * weight.numel()) for weight in weights)
    assert end["activations"] == 0 and end["temporaries"] == 0
    whole = simulate(dense).moments["end of backward"]["parameters"]
    assert end["parameters"] < whole * {None: 1.1, 16: 1.1, 8: 0.95, 4: 0.9}[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_activations_under_lora_leave_out_the_inputs_of_frozen_products(bits):
    """What a weight's gradient needs is kept for the factor A instead, where there is one: here q and v."""
    run = TrainingRun(
        shallow(LLAMA, 2), 2, 128, "bf16", lora_rank=8, lora_targets=("q", "v"), frozen_bits=bits
    )
    with_lora = simulate(run).moments["end of forward"]["activations"]
    dense = simulate(TrainingRun(run.model, 2, 128, "bf16")).moments["end of forward"]["activations"]
    # no longer kept by those products of a block
    of_down_and_up = 2 * 2 * 128 * (run.model.ffn + run.model.hidden)
    assert dense - with_lora > of_down_and_up
