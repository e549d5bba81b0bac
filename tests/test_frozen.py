"""Frozen weights in few bits: what they cost, how wrong they are, and that gradients pass through them."""

import pytest
import torch
from engine import tiny
from torch import nn
from torch.nn import functional as F

from course_utils.measuring.simulated import simulated_gpu
from course_utils.networks import build_network
from course_utils.networks.frozen import FrozenLinear, freeze, nf4_code, nf4_pairs, quantize_nf4, quantize_rows, unpack

# Dettmers et al. 2023 (QLoRA), appendix E
PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def frozen(bits: int, n_out: int = 48, n_in: int = 128, dtype: torch.dtype = torch.float32) -> FrozenLinear:
    torch.manual_seed(0)
    pairs = nf4_pairs(dtype, torch.device("cpu")) if bits == 4 else None
    return FrozenLinear(nn.Linear(n_in, n_out), bits, dtype, pairs)


def original(n_out: int = 48, n_in: int = 128) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(n_in, n_out)


def test_nf4s_values_are_the_published_ones():
    assert nf4_code() == pytest.approx(PUBLISHED, abs=2e-6)
    assert nf4_code()[7] == 0 and list(nf4_code()) == sorted(set(nf4_code()))


@pytest.mark.parametrize("bits", [8, 4])
def test_storage_is_what_the_bits_say(bits):
    layer = frozen(bits)
    assert layer.weight.nbytes == 48 * 128 * bits // 8
    assert layer.scale.nbytes == 4 * (48 if bits == 8 else 48 * 128 // 64)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_fewer_bits_are_less_exact():
    weight = original().weight.detach()
    spread = weight.std()
    error = {bits: float((frozen(bits).dense_weight() - weight).abs().mean() / spread) for bits in (8, 4)}
    in_16 = float((weight.bfloat16().float() - weight).abs().mean() / spread)
    assert 0 < in_16 < error[8] < error[4] / 5
    assert error[8] < 0.01 and error[4] < 0.1


def test_8_bits_are_off_by_half_a_step_at_most():
    weight = torch.randn(16, 64)
    numbers, scale = quantize_rows(weight)
    assert numbers.abs().amax(dim=1).eq(127).all()  # each row's largest number is exact
    assert ((numbers * scale.unsqueeze(1) - weight).abs() <= scale.unsqueeze(1) * 0.5001).all()


def test_nf4_takes_the_nearest_of_its_values():
    weight = torch.randn(4, 64)
    packed, scale = quantize_nf4(weight)
    code = torch.tensor(nf4_code())
    nearest = (weight / scale.unsqueeze(1)).unsqueeze(-1).sub(code).abs().argmin(dim=-1)
    assert torch.equal(unpack(packed).view(4, 64), nearest.to(torch.uint8))


def test_values_of_the_code_itself_and_zeros_come_back_exactly():
    code, pairs = torch.tensor(nf4_code()), nf4_pairs(torch.float32, torch.device("cpu"))
    linear = nn.Linear(64, 2, bias=False)
    linear.weight.data = torch.stack((code.repeat(4) * 0.5, code.flip(0).repeat(4) * 4))
    assert torch.equal(FrozenLinear(linear, 4, torch.float32, pairs).dense_weight(), linear.weight)
    nn.init.zeros_(linear.weight)
    for bits in (8, 4):
        dense = FrozenLinear(linear, bits, torch.float32, pairs if bits == 4 else None).dense_weight()
        assert not dense.any()


def test_a_size_that_is_no_multiple_of_64_is_filled_up():
    layer = frozen(4, n_out=5, n_in=13)
    assert layer.dense_weight().shape == (5, 13) and layer.scale.numel() == 2
    assert (layer.dense_weight() - original(5, 13).weight).abs().mean() < 0.1 * original(5, 13).weight.std()


@pytest.mark.parametrize("bits", [8, 4])
def test_output_and_gradient_are_those_of_the_dense_weight_and_autograd_keeps_neither_input_nor_weight(bits):
    layer, kept = frozen(bits), list[torch.Tensor]()
    x = torch.randn(2, 5, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
    assert not kept
    assert torch.equal(y, F.linear(x, layer.dense_weight(), layer.bias))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(F.linear(x, layer.dense_weight(), layer.bias).square().sum(), x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_frozen_network_is_16_bit_but_for_its_blocks_matrices(family, bits):
    network = build_network(tiny(family, tied=True), "eager")
    freeze(network, bits, torch.bfloat16)
    assert {weight.dtype for weight in network.parameters()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in network.parameters())
    assert network.head.weight is network.embedding.weight
    few = {buffer.dtype for name, buffer in network.named_buffers() if name.endswith("weight")}
    assert few == {16: set(), 8: {torch.int8}, 4: {torch.uint8}}[bits]
    assert len({id(buffer) for name, buffer in network.named_buffers() if name.endswith("pairs")}) == (bits == 4)
    tokens = torch.randint(512, (1, 8))
    assert network(tokens).shape == (1, 8, 512)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantizing_needs_no_values(bits):
    with simulated_gpu("flash"), torch.device("cuda"):
        network = build_network(tiny("llama"), "flash")
        freeze(network, bits, torch.bfloat16)
        layer = network.get_submodule("blocks.0.mlp.up")
    assert isinstance(layer, FrozenLinear) and layer.weight.device.type == "cuda"
