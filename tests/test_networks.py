"""One network for every option: its parameters, its arithmetic against a plain reading of the formulas, its experts."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from engine import RECIPES, simulate, tiny
from torch import Tensor
from torch.nn import functional as F

from course_utils.measuring import measure
from course_utils.models import TransformerConfig, parameter_count, parameter_shapes
from course_utils.networks import Transformer, build_network
from course_utils.networks.attention import rotation
from course_utils.networks.experts import Experts
from course_utils.run import TrainingRun

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
    sizes: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 61, "max_positions": 24}
    sizes["family"] = "llama"
    if options.get("experts"):
        sizes["experts_per_token"] = 2
    return TransformerConfig("small", **(sizes | options))


MIXED = {
    "gpt2": small(family="gpt2", layers=2),
    "gpt2, grouped and rotary": small(family="gpt2", kv_heads=2, positions="rotary", layers=2),
    "gpt2 without biases": small(family="gpt2", bias=False, layers=2),
    "llama": small(kv_heads=2, layers=2, tied=False),
    "llama with learned positions": small(positions="learned", norm="layernorm", mlp="gelu", bias=True, kv_heads=1),
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
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


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
    d, widths = model.head_size, [model.hidden, model.kv, model.kv]
    if model.fused_qkv:
        q, k, v = plain_linear(w, "attention.qkv", x).split(widths, -1)
    else:
        q, k, v = (plain_linear(w, f"attention.{name}", x) for name in "qkv")
    seen = torch.ones(x.size(1), x.size(1)).tril().bool()
    outputs = []
    for head in range(model.heads):
        group = head // (model.heads // model.kv_heads)
        one_q, one_k, one_v = q[..., head * d :][..., :d], k[..., group * d :][..., :d], v[..., group * d :][..., :d]
        if model.positions == "rotary":
            one_q, one_k = plain_rotary(model, one_q), plain_rotary(model, one_k)
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
    assert features.shape == (*tokens.shape, model.hidden) and torch.equal(network.head(features), network(tokens))


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
    network, dropped = seeded(model), list[Any]()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda x, p: (dropped.append((tuple(x.shape), p)), x)[1])
        network(some_tokens(model, 2, 5))
    stream, scores = (2, 5, model.hidden), (2, model.heads, 5, 5)
    assert dropped == [(stream, 0.5), (scores, 0.5), (stream, 0.5), (stream, 0.5)]


def test_dropout_is_of_the_fused_kernels_too():
    model = dataclasses.replace(MIXED["llama"], dropout=0.9)
    network = seeded(model, "efficient")
    x, by = torch.randn(1, 8, 32), rotation(torch.zeros(1, 8), model.head_size, 1e4, torch.float32)
    attention = attention_of(network)
    attention.out = torch.nn.Identity()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda x, p: x)
        torch.manual_seed(1)
        first, second = attention(x, by, None), attention(x, by, None)
    assert not torch.equal(first, second)


MOE = small(experts=4, kv_heads=2, layers=2, tied=False)


def test_where_the_router_itself_is_balanced_the_experts_are_a_mixture_as_published():
    experts = Experts(small(experts=4, mlp="gelu", bias=True))
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[:, :4] = torch.eye(4)
        first = torch.arange(20).view(2, 10) % 4  # each expert is five tokens' first choice and five others' second
        x[..., :4] = 3 * F.one_hot(first, 4) + 2 * F.one_hot((first + 1) % 4, 4)
    chances, mixed = (x @ experts.router.weight.T).softmax(-1), torch.zeros_like(x)
    for b, s in itertools.product(range(2), range(10)):
        best, chosen = chances[b, s].topk(2)
        parts = [weight * experts.experts[int(e)](x[b, s]) for weight, e in zip(best / best.sum(), chosen, strict=True)]
        mixed[b, s] = sum(parts)
    torch.testing.assert_close(experts(x), mixed)


@pytest.mark.parametrize(("tokens", "pieces"), [(8, [4, 4, 4, 4]), (5, [3, 3, 2, 2]), (1, [1, 1, 0, 0])])
def test_every_expert_gets_the_same_number_of_tokens(tokens, pieces):
    experts, seen = Experts(MOE), []
    for expert in experts.experts:
        expert.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    x = torch.randn(1, 1, MOE.hidden).expand(1, tokens, -1)  # a real router would send every one of these to the same
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
    on_cpu, simulated = measure(run, "cpu"), simulate(run)
    assert len(on_cpu.losses) == 2 and all(math.isfinite(loss) for loss in on_cpu.losses)
    for kind in ("parameters", "activations", "temporaries"):
        assert on_cpu.moments["end of forward"][kind] == simulated.moments["end of forward"][kind] > 0
