"""Parameters to the unit, against published totals and against the network that is really built."""

import dataclasses
from math import prod

import pytest
import torch

from course_utils.model_files import model_config
from course_utils.models import (
    PRESETS,
    TransformerConfig,
    block_shapes,
    outer_shapes,
    parameter_count,
    parameter_shapes,
)
from course_utils.networks import build_network

PUBLISHED = {
    # released checkpoints of Radford et al. 2019, counted without the tied head
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    # released checkpoints of Llama 3, Llama 3.2 and TinyLlama
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    # released checkpoints of Mistral 7B, Mixtral 8x7B and Qwen2.5
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_totals(name, parameters):
    assert PRESETS[name].parameters == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_names_shapes_and_order_are_those_of_the_network(name):
    with torch.device("meta"):
        network = build_network(PRESETS[name], "eager")
    built = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert list(parameter_shapes(PRESETS[name]).items()) == list(built.items())
    assert parameter_count(PRESETS[name]) == sum(prod(shape) for shape in built.values())


def test_the_loss_reads_logits_as_in_each_familys_reference_code():
    """nanoGPT's are 16-bit; Meta's Llama 3, and transformers' Mistral, Mixtral and
    Qwen, are copied to fp32.
    """
    for name, model in PRESETS.items():
        assert model.logits == ("compute" if "gpt" in name else "fp32"), name
    assert dataclasses.replace(PRESETS["gpt2"], logits="fp32").parameters == PRESETS["gpt2"].parameters


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_counts_once(name, tied):
    model = dataclasses.replace(PRESETS[name], tied=tied)
    with torch.device("meta"):
        network = build_network(model, "eager")
    assert model.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert (network.head.weight is network.embedding.weight) == tied


@pytest.mark.parametrize("name", [name for name, model in PRESETS.items() if model.family == "gpt2"])
def test_formula_of_the_gpt2_family(name):
    model = PRESETS[name]
    V, h, L, positions = model.vocab, model.hidden, model.layers, model.max_positions
    assert model.parameters == h * V + L * (12 * h**2 + 13 * h) + 2 * h + positions * h


def test_blocks_and_the_rest_make_the_whole():
    model = PRESETS["llama3-8b"]
    shapes = parameter_shapes(model)
    inside = [name for name in shapes if name.startswith("blocks.")]
    assert len(inside) == model.layers * len(block_shapes(model))
    assert set(shapes) - set(inside) == set(outer_shapes(model))


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit():
    mixtral, mistral = PRESETS["mixtral-8x7b"], PRESETS["mistral-7b"]
    assert round(mixtral.active_parameters / 1e9, 1) == 12.9  # Jiang et al. 2024 say 13 B
    one_expert = 3 * 4096 * 14336
    routers = 32 * 8 * 4096
    assert mixtral.active_parameters == mistral.parameters + routers + 32 * one_expert
    assert mixtral.parameters == mixtral.active_parameters + 32 * 6 * one_expert
    every = dataclasses.replace(mixtral, experts_per_token=8)
    assert every.active_parameters == every.parameters
    assert mistral.active_parameters == mistral.parameters


def test_config_of_a_name_and_of_a_config():
    assert all(name == model.name and model_config(name) is model for name, model in PRESETS.items())
    assert model_config(PRESETS["gpt2"]) is PRESETS["gpt2"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gpt2xl", "gpt2-xl"),
        ("GPT2-XL", "gpt2-xl"),
        ("llama-3-8b", "llama3-8b"),
        ("tinyllama", "tinyllama-1.1b"),
    ],
)
def test_unknown_model_names_the_nearest(name, nearest):
    with pytest.raises(
        ValueError, match=f"unknown model '{name}': did you mean '{nearest}'.*Known: .*gpt3-175b"
    ):
        model_config(name)
    with pytest.raises(ValueError, match=r"unknown model 'qqqq'\. Known: gpt2, "):
        model_config("qqqq")


@pytest.mark.parametrize("model", [None, 7, ["gpt2"]])
def test_a_model_is_a_name_or_a_config(model):
    with pytest.raises(TypeError, match=r"preset's name, the path of a config\.json or a TransformerConfig"):
        model_config(model)


GPT = {
    "name": "x", "family": "gpt2", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "max_positions": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": -64}, "hidden is -64"),
        ({"hidden": None}, "hidden is None"),
        ({"vocab": 100.0}, "vocab is 100.0"),
        ({"max_positions": True}, "max_positions is True"),
        ({"layers": "12"}, "layers is '12'"),
        ({"layers": 10**9}, "layers is 1,000,000,000"),
        ({"vocab": 10**12}, "vocab is 1,000,000,000,000"),
        ({"heads": 5}, "5 heads do not divide a hidden size of 64"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"family": "gpt"}, "did you mean 'gpt2'"),
        ({"family": ["gpt2"]}, r"unknown model family \['gpt2'\]"),
        ({"name": 7}, "name is 7"),
        ({"family": "llama", "kv_heads": 3}, "3 key and value heads do not divide 4 query heads"),
        ({"family": "llama", "hidden": 60}, "rotary positions turn pairs"),
        ({"bias": "no"}, "bias is 'no'"),
        ({"tied": "no"}, "tied is 'no'"),
        ({"positions": "rotating"}, "unknown positions .*rotary"),
        ({"experts": 4}, "give both"),
        ({"dropout": "a"}, "dropout is 'a'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ],
)
def test_what_makes_no_transformer_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        TransformerConfig(**(GPT | changes))


def test_what_is_left_out_is_as_usual():
    model = TransformerConfig(**GPT)
    assert (model.kv_heads, model.ffn, model.head_size) == (4, 256, 16)
