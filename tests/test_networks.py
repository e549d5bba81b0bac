"""The networks: parameters, arithmetic against a plain reading, experts, frozen weights, the loss."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from engine import RECIPES, simulate, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_utils.estimating.step_time import chunked_loss_flops
from course_utils.measuring import measure
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.tracker import Tracker
from course_utils.models import TransformerConfig, parameter_count, parameter_shapes
from course_utils.networks import Transformer, build_network, chunked_loss, loss_of
from course_utils.networks.attention import rotation
from course_utils.networks.experts import Experts
from course_utils.networks.frozen import (
    FrozenLinear,
    freeze,
    nf4_code,
    nf4_pairs,
    quantize_nf4,
    quantize_rows,
    unpack,
)
from course_utils.run import TrainingRun
from course_utils.units import round_up

OPTIONS: dict[str, tuple[Any, ...]] = {
    "family": ("gpt2", "llama"),
    "positions": ("learned", "rotary", "none"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "swiglu"),
    "bias": (True, False),
    "qkv_bias": (True, False),
    "tied": (True, False),
    "kv_heads": (4, 2),
    "experts": (0, 3),
}


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
    "gpt2, grouped and rotary": small(family="gpt2", kv_heads=2, positions="rotary", layers=2),
    "gpt2 without biases": small(family="gpt2", bias=False, layers=2),
    "llama": small(kv_heads=2, layers=2, tied=False),
    "llama with learned positions": small(
        positions="learned", norm="layernorm", mlp="gelu", bias=True, kv_heads=1
    ),
    "qwen": small(kv_heads=2, qkv_bias=True),
    "no positions": small(positions="none", qkv_bias=True, mlp="gelu"),
}


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


def attention_of(network: Transformer) -> Any:
    return network.blocks[0].attention


@pytest.mark.parametrize("family", OPTIONS["family"])
@pytest.mark.parametrize("experts", OPTIONS["experts"])
@pytest.mark.sweep(6)
def test_parameters_of_every_combination_are_those_that_are_counted(family, experts):
    free = {name: values for name, values in OPTIONS.items() if name not in ("family", "experts")}
    for chosen in itertools.product(*free.values()):
        model = small(family=family, experts=experts, **dict(zip(free, chosen, strict=True)))
        with torch.device("meta"):
            network = build_network(model, "flash")
        built = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        assert list(built.items()) == list(parameter_shapes(model).items()), model
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


@pytest.mark.parametrize("attention", ["eager", "efficient"])
@pytest.mark.parametrize("name", MIXED)
def test_logits_are_what_the_formulas_say(name, attention):
    model = MIXED[name]
    tokens = some_tokens(model)
    network = seeded(model, attention)
    torch.testing.assert_close(network(tokens).double(), plain(network, tokens), rtol=2e-4, atol=2e-4)
    features = network.features(tokens)
    assert features.shape == (*tokens.shape, model.hidden) and torch.equal(
        network.head(features), network(tokens)
    )


@pytest.mark.parametrize("name", MIXED)
def test_recomputation_changes_no_gradient(name):
    gradients: list[dict[str, Any]] = []
    for recompute in ("none", "full"):
        network = seeded(dataclasses.replace(MIXED[name], dropout=0.2), recompute=recompute)
        torch.manual_seed(1)
        network(some_tokens(network.model)).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    for parameter, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().sum() > 0
        assert torch.equal(gradient, gradients[1][parameter])


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
    attention = attention_of(network)
    attention.out = torch.nn.Identity()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda x, p: x)
        torch.manual_seed(1)
        first = attention(x, by, None)
        second = attention(x, by, None)
    assert not torch.equal(first, second)


MOE = small(experts=4, kv_heads=2, layers=2, tied=False)


def test_where_the_router_itself_is_balanced_the_experts_are_a_mixture_as_published():
    experts = Experts(small(experts=4, mlp="gelu", bias=True))
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[:, :4] = torch.eye(4)
        # each expert is five tokens' first choice and five others' second
        first = torch.arange(20).view(2, 10) % 4
        x[..., :4] = 3 * F.one_hot(first, 4) + 2 * F.one_hot((first + 1) % 4, 4)
    chances = (x @ experts.router.weight.T).softmax(-1)
    mixed = torch.zeros_like(x)
    for b, s in itertools.product(range(2), range(10)):
        best, chosen = chances[b, s].topk(2)
        parts = [
            weight * experts.experts[int(e)](x[b, s])
            for weight, e in zip(best / best.sum(), chosen, strict=True)
        ]
        mixed[b, s] = sum(parts)
    torch.testing.assert_close(experts(x), mixed)


@pytest.mark.parametrize(("tokens", "pieces"), [(8, [4, 4, 4, 4]), (5, [3, 3, 2, 2]), (1, [1, 1, 0, 0])])
def test_every_expert_gets_the_same_number_of_tokens(tokens, pieces):
    experts = Experts(MOE)
    seen = []
    for expert in experts.experts:
        expert.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    # a real router would send every one of these to the same
    x = torch.randn(1, 1, MOE.hidden).expand(1, tokens, -1)
    experts(x)
    assert seen == pieces


def test_the_router_and_every_expert_learn():
    network = seeded(MOE)
    network(some_tokens(MOE)).square().mean().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("precision", "attention"), RECIPES)
@pytest.mark.sweep(5)
def test_experts_are_simulated_in_every_recipe(precision, attention, recompute):
    model = tiny("llama", experts=4, experts_per_token=2)
    run = TrainingRun(model, 2, 64, precision, attention=attention, recompute=recompute)
    rounding = simulate(run).moments["end of forward"]["parameters"] - run.precision.weight * model.parameters
    assert 0 <= rounding < 512 * len(parameter_shapes(model))


def test_a_step_on_the_cpu_is_the_simulated_one():
    model = tiny("gpt2", experts=4, experts_per_token=2, kv_heads=2, mlp="swiglu")
    run = TrainingRun(model, 2, 48, "fp32", attention="eager")
    on_cpu = measure(run, "cpu")
    simulated = simulate(run)
    assert len(on_cpu.losses) == 2 and all(math.isfinite(loss) for loss in on_cpu.losses)
    for kind in ("parameters", "activations", "temporaries"):
        assert on_cpu.moments["end of forward"][kind] == simulated.moments["end of forward"][kind] > 0


# Frozen weights in few bits

# Dettmers et al. 2023 (QLoRA), appendix E
PUBLISHED = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


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
    code = torch.tensor(nf4_code())
    pairs = nf4_pairs(torch.float32, torch.device("cpu"))
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
    assert len({id(buffer) for name, buffer in network.named_buffers() if name.endswith("pairs")}) == (
        bits == 4
    )
    tokens = torch.randint(512, (1, 8))
    assert network(tokens).shape == (1, 8, 512)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantizing_needs_no_values(bits):
    with simulated_gpu("flash"), torch.device("cuda"):
        network = build_network(tiny("llama"), "flash")
        freeze(network, bits, torch.bfloat16)
        layer = network.get_submodule("blocks.0.mlp.up")
    assert isinstance(layer, FrozenLinear) and layer.weight.device.type == "cuda"


# The loss piece by piece

CHUNKS = [1, 2, 3, 7, 48]


def features_head_targets(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    features = torch.randn(2, 24, 16, dtype=dtype, requires_grad=True)
    return features, nn.Linear(16, 50, bias=False, dtype=dtype), torch.randint(50, (2, 24))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_loss_and_gradients_equal_the_plain_ones_to_rounding(chunks):
    features, head, targets = features_head_targets()
    plain = loss_of(head(features), targets)
    expected = torch.autograd.grad(plain, [features, head.weight])
    loss = chunked_loss(features, head, targets, chunks)
    torch.testing.assert_close(loss, plain, rtol=1e-14, atol=0)
    for found, gradient in zip(torch.autograd.grad(loss, [features, head.weight]), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_pieces_cost_one_more_product_with_the_head(chunks):
    features, head, targets = features_head_targets()
    counted = []
    for pieces in (1, chunks):
        with FlopCounterMode(display=False) as counter:
            if pieces > 1:
                loss = chunked_loss(features, head, targets, pieces)
            else:
                loss = loss_of(head(features), targets)
            loss.backward()
        counted.append(counter.get_total_flops())
    run = TrainingRun(tiny("gpt2", hidden=16, vocab=50), 2, 24, loss_chunks=chunks, attention="eager")
    assert counted[1] - counted[0] == chunked_loss_flops(run)


@pytest.mark.parametrize("chunks", [1, 4])
def test_upcast_logits_lose_nothing_after_the_head(chunks):
    """From bf16 logits an fp32 loss is that of the same logits in fp32; gradients come back in bf16."""
    features, head, targets = features_head_targets(torch.bfloat16)
    exact = loss_of(head(features).double(), targets)
    errors = []
    for upcast in (True, False):
        if chunks > 1:
            loss = chunked_loss(features, head, targets, chunks, upcast)
        else:
            loss = loss_of(head(features), targets, upcast)
        errors.append(abs(loss.item() - exact.item()))
        assert loss.dtype == (torch.float32 if upcast else torch.bfloat16)
        assert all(
            gradient.dtype == torch.bfloat16
            for gradient in torch.autograd.grad(loss, [features, head.weight])
        )
    assert errors[0] < 1e-6 < 1e-4 < errors[1]


def test_a_last_piece_that_is_smaller_counts_for_less():
    features, head, targets = features_head_targets()
    with torch.no_grad():
        head.weight[targets[-1, -1]] = -100 * features[-1, -1]  # very wrong, alone with 7 others at the end
    plain = loss_of(head(features), targets)
    assert targets.numel() % 10 == 8
    torch.testing.assert_close(chunked_loss(features, head, targets, 5), plain, rtol=1e-14, atol=0)


def test_half_precision_does_not_overflow():
    features, _, _ = features_head_targets()
    # 24,576 tokens: their losses add up to more than fp16 can hold
    wide = features.detach().half().repeat(64, 8, 1)
    targets = torch.zeros(wide.shape[:2], dtype=torch.long)
    loss = chunked_loss(wide, lambda x: 4 * x, targets, 64)
    assert torch.isfinite(loss)
    assert float(loss) * targets.numel() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_logits_of_one_piece_live_at_a_time(chunks):
    """bf16 on a simulated GPU: the logits, their log-softmax and its gradient are all of one piece."""
    b, s, h, V = 4, 256, 64, 1024
    with simulated_gpu("flash"):
        features = torch.empty(b, s, h, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        head = nn.Linear(h, V, bias=False, dtype=torch.bfloat16, device="cuda")
        targets = torch.randint(V, (b, s), device="cuda")
        with Tracker("cuda") as tracker:
            tracker.bind("parameters", head.parameters())
            tracker.bind("inputs", [features, targets])
            with tracker.in_phase("loss"):
                loss = chunked_loss(features, head, targets, chunks)
            kept = tracker.at(len(tracker.events))["activations"]
            with tracker.in_phase("backward"):
                loss.backward()
        piece = round_up(2 * b * s * V // chunks)
        largest = max(item.bytes for item in tracker.allocations())
    assert largest == max(piece, round_up(2 * V * h))
    assert kept < piece
