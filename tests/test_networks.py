"""The networks: parameters, arithmetic against a plain reading, experts, frozen weights, the loss."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_utils.models import TransformerConfig, parameter_count, parameter_shapes
from course_utils.networks import Transformer, build_network, chunked_loss, loss_of
from course_utils.networks.attention import rotation
from course_utils.networks.experts import Experts
from course_utils.networks.frozen import FrozenLinear, nf4_code, nf4_pairs


def small(**options: Any) -> TransformerConfig:
    """A model of one block whose sizes all differ, so that no two can be exchanged unnoticed."""
    sizes: dict[str, Any] = {
        "layers": 1,
        "hidden": 32,
        "heads": 4,
        "ffn": 48,
        "vocab": 61,
        "max_positions": 24,
    }
    sizes["family"] = "llama"
    if options.get("experts"):
        sizes["experts_per_token"] = 2
    return TransformerConfig("small", **(sizes | options))


MIXED = {
    "gpt2": small(family="gpt2", layers=2),
    "gpt2, grouped, rotary, without biases": small(
        family="gpt2", kv_heads=2, positions="rotary", bias=False, layers=2
    ),
    "llama": small(kv_heads=2, layers=2, tied=False),
    "llama with learned positions": small(
        positions="learned", norm="layernorm", mlp="gelu", bias=True, kv_heads=1
    ),
    "qwen": small(kv_heads=2, qkv_bias=True),
    "no positions": small(positions="none", qkv_bias=True, mlp="gelu"),
}
MOE = small(experts=4, kv_heads=2, layers=2, tied=False)


def seeded(model: TransformerConfig, attention: str = "eager", recompute: str = "none") -> Transformer:
    """A network in fp32 on the CPU whose weights are all far from zero, biases included."""
    torch.manual_seed(5)
    network = build_network(model, attention, recompute)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network


def some_tokens(model: TransformerConfig, b: int = 3, s: int = 20) -> Tensor:
    return torch.randint(model.vocab, (b, s), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    "model", [*MIXED.values(), MOE, small(family="gpt2", experts=3, mlp="swiglu")], ids=str
)
def test_parameters_are_those_that_are_counted(model):
    with torch.device("meta"):
        network = build_network(model, "flash")
    built = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert list(built.items()) == list(parameter_shapes(model).items())
    assert sum(parameter.numel() for parameter in network.parameters()) == parameter_count(model)
    assert list(network.buffers()) == []


def plain(network: Transformer, tokens: Tensor) -> Tensor:
    """The logits, read off the formulas: head by head, position by position, in fp64 and without dropout."""
    model = network.model
    w = {name: parameter.detach().double() for name, parameter in network.named_parameters()}
    x = w["embedding.weight"][tokens]
    if model.positions == "learned":
        x = x + w["positions.weight"][: tokens.size(1)]
    for layer in range(model.layers):
        here = f"blocks.{layer}."
        block = {name.removeprefix(here): value for name, value in w.items() if name.startswith(here)}
        x = x + plain_attention(model, block, plain_norm(model, block, "norm1", x))
        x = x + plain_mlp(model, block, plain_norm(model, block, "norm2", x))
    return plain_norm(model, w, "norm", x) @ w.get("head.weight", w["embedding.weight"]).T


def plain_norm(model: TransformerConfig, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if model.norm == "rmsnorm":
        epsilon = torch.finfo(torch.float32).eps  # torch's own, where RMSNorm is given none
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * w[f"{name}.weight"]
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w.get(
        f"{name}.bias", 0.0
    )


def plain_linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def plain_mlp(model: TransformerConfig, w: dict[str, Tensor], x: Tensor) -> Tensor:
    up = plain_linear(w, "mlp.up", x)
    if model.mlp == "swiglu":
        gate = plain_linear(w, "mlp.gate", x)
        return plain_linear(w, "mlp.down", gate / (1 + (-gate).exp()) * up)
    bell = (math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)).tanh()  # Hendrycks and Gimpel 2016
    return plain_linear(w, "mlp.down", up * (1 + bell) / 2)


def plain_attention(model: TransformerConfig, w: dict[str, Tensor], x: Tensor) -> Tensor:
    d = model.head_size
    widths = [model.hidden, model.kv, model.kv]
    if model.fused_qkv:
        q, k, v = plain_linear(w, "attention.qkv", x).split(widths, -1)
    else:
        q, k, v = (plain_linear(w, f"attention.{name}", x) for name in "qkv")
    seen = torch.ones(x.size(1), x.size(1)).tril().bool()
    outputs = []
    for head in range(model.heads):
        group = head // (model.heads // model.kv_heads)
        one_q = q[..., head * d :][..., :d]
        one_k = k[..., group * d :][..., :d]
        one_v = v[..., group * d :][..., :d]
        if model.positions == "rotary":
            one_q = plain_rotary(model, one_q)
            one_k = plain_rotary(model, one_k)
        scores = (one_q @ one_k.transpose(1, 2) / math.sqrt(d)).masked_fill(~seen, -math.inf)
        outputs.append(scores.softmax(-1) @ one_v)
    return plain_linear(w, "attention.out", torch.cat(outputs, -1))


def plain_rotary(model: TransformerConfig, x: Tensor) -> Tensor:
    """Elements i and i + d/2 of a head are a complex number, turned by position · θ^(−2i/d)."""
    half = model.head_size // 2
    rates = model.rope_theta ** (-2 * torch.arange(half, dtype=torch.float64) / model.head_size)
    turns = torch.exp(1j * torch.arange(x.size(1))[:, None] * rates)
    turned = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "eager") for name in MIXED), ("gpt2", "efficient"), ("llama", "efficient")],
)
def test_logits_are_what_the_formulas_say(name, attention):
    model = MIXED[name]
    tokens = some_tokens(model)
    network = seeded(model, attention)
    torch.testing.assert_close(network(tokens).double(), plain(network, tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_both_families_drop_at_four_places(name):
    model = dataclasses.replace(MIXED[name], dropout=0.5, layers=1)
    network = seeded(model)
    dropped = list[Any]()

    def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
        dropped.append((tuple(x.shape), p))
        return x

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        network(some_tokens(model, 2, 5))
    stream = (2, 5, model.hidden)
    scores = (2, model.heads, 5, 5)
    assert dropped == [(stream, 0.5), (scores, 0.5), (stream, 0.5), (stream, 0.5)]


def test_dropout_is_of_the_fused_kernels_too():
    model = dataclasses.replace(MIXED["llama"], dropout=0.9)
    network = seeded(model, "efficient")
    x = torch.randn(1, 8, 32)
    by = rotation(torch.zeros(1, 8), model.head_size, 1e4, torch.float32)
    attention: Any = network.blocks[0].attention
    attention.out = torch.nn.Identity()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda x, p: x)
        torch.manual_seed(1)
        first = attention(x, by, None)
        second = attention(x, by, None)
    assert not torch.equal(first, second)


def test_where_the_router_itself_is_balanced_the_experts_are_a_mixture_as_published():
    experts = Experts(small(experts=4, mlp="gelu", bias=True))
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[:, :4] = torch.eye(4)
        # each expert is five tokens' first choice and five others' second
        first = torch.arange(20).view(2, 10) % 4
        x[..., :4] = 3 * F.one_hot(first, 4) + 2 * F.one_hot((first + 1) % 4, 4)
    best, chosen = (x @ experts.router.weight.T).softmax(-1).topk(2)
    mixed = torch.zeros_like(x)
    for b, s in itertools.product(range(2), range(10)):
        one, other = (experts.experts[int(expert)](x[b, s]) for expert in chosen[b, s])
        mixed[b, s] = (best[b, s, 0] * one + best[b, s, 1] * other) / best[b, s].sum()
    torch.testing.assert_close(experts(x), mixed)


def test_the_router_and_every_expert_learn():
    network = seeded(MOE)
    network(some_tokens(MOE)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


# Frozen weights in few bits

# Dettmers et al. 2023 (QLoRA), appendix E
PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


NF4 = nf4_pairs(torch.float32, torch.device("cpu"))


def frozen(bits: int, n_out: int = 48, n_in: int = 128) -> FrozenLinear:
    torch.manual_seed(0)
    return FrozenLinear(nn.Linear(n_in, n_out), bits, torch.float32, NF4 if bits == 4 else None)


def test_nf4s_values_are_the_published_ones():
    assert nf4_code() == pytest.approx(PUBLISHED, abs=2e-6)
    assert nf4_code()[7] == 0 and list(nf4_code()) == sorted(set(nf4_code()))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_dense_weight_is_near_the_original_and_zeros_stay_zeros(bits):
    """Of 65 numbers, NF4 fills up the second block of 64."""
    layer = frozen(bits, n_out=5, n_in=13)
    torch.manual_seed(0)
    original = nn.Linear(13, 5)
    error = (layer.dense_weight() - original.weight).abs().mean() / original.weight.std()
    assert 0 < error < {8: 0.01, 4: 0.1}[bits]
    assert layer.scale.numel() == {8: 5, 4: 2}[bits]
    nn.init.zeros_(original.weight)
    assert not FrozenLinear(original, bits, torch.float32, NF4 if bits == 4 else None).dense_weight().any()


@pytest.mark.parametrize("bits", [8, 4])
def test_output_and_gradient_are_those_of_the_dense_weight_and_autograd_keeps_neither_input_nor_weight(bits):
    layer = frozen(bits)
    kept = list[torch.Tensor]()
    x = torch.randn(2, 5, 128, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    assert not kept
    assert torch.equal(y, F.linear(x, layer.dense_weight(), layer.bias))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(F.linear(x, layer.dense_weight(), layer.bias).square().sum(), x)
    torch.testing.assert_close(gradient, expected)


# The loss piece by piece


def features_head_targets(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    features = torch.randn(2, 24, 16, dtype=dtype, requires_grad=True)
    return features, nn.Linear(16, 50, bias=False, dtype=dtype), torch.randint(50, (2, 24))


@pytest.mark.parametrize("chunks", [1, 7, 48])
def test_loss_and_gradients_equal_the_plain_ones_to_rounding(chunks):
    features, head, targets = features_head_targets()
    plain = loss_of(head(features), targets)
    expected = torch.autograd.grad(plain, [features, head.weight])
    loss = chunked_loss(features, head, targets, chunks)
    torch.testing.assert_close(loss, plain, rtol=1e-14, atol=0)
    for found, gradient in zip(torch.autograd.grad(loss, [features, head.weight]), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)


def test_upcast_logits_lose_nothing_after_the_head():
    """From bf16 logits an fp32 loss is that of the same logits in fp32; gradients come back in bf16."""
    features, head, targets = features_head_targets(torch.bfloat16)
    exact = loss_of(head(features).double(), targets).item()
    for upcast in (loss_of(head(features), targets, True), chunked_loss(features, head, targets, 4, True)):
        assert upcast.dtype == torch.float32 and abs(upcast.item() - exact) < 1e-6
        gradients = torch.autograd.grad(upcast, [features, head.weight])
        assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    for as_it_is in (loss_of(head(features), targets), chunked_loss(features, head, targets, 4)):
        assert as_it_is.dtype == torch.bfloat16 and abs(as_it_is.item() - exact) > 1e-4


def test_half_precision_does_not_overflow():
    features, _, _ = features_head_targets()
    # 24,576 tokens: their losses add up to more than fp16 can hold
    wide = features.detach().half().repeat(64, 8, 1)
    targets = torch.zeros(wide.shape[:2], dtype=torch.long)
    loss = chunked_loss(wide, lambda x: 4 * x, targets, 64)
    assert torch.isfinite(loss)
    assert float(loss) * targets.numel() > torch.finfo(torch.float16).max
