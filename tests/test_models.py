"""Parameters to the unit, against published totals."""

import pytest

from course_utils.model_files import model_config
from course_utils.models import PRESETS, TransformerConfig

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


def test_parameters_are_those_of_the_released_checkpoints():
    assert {name: PRESETS[name].parameters for name in PUBLISHED} == PUBLISHED


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit():
    mixtral, mistral = PRESETS["mixtral-8x7b"], PRESETS["mistral-7b"]
    assert round(mixtral.active_parameters / 1e9, 1) == 12.9  # Jiang et al. 2024 say 13 B
    one_expert = 3 * 4096 * 14336
    routers = 32 * 8 * 4096
    assert mixtral.active_parameters == mistral.parameters + routers + 32 * one_expert
    assert mixtral.parameters == mixtral.active_parameters + 32 * 6 * one_expert
    assert mistral.active_parameters == mistral.parameters


def test_a_model_is_a_name_or_a_config_which_leaves_out_what_is_usual():
    assert all(name == model.name and model_config(name) is model for name, model in PRESETS.items())
    model = TransformerConfig(**GPT)
    assert model_config(model) is model
    assert (model.kv_heads, model.ffn, model.head_size) == (4, 256, 16)
    with pytest.raises(
        ValueError, match=r"unknown model 'gpt2xl': did you mean 'gpt2-xl'.*Known: .*gpt3-175b"
    ):
        model_config("gpt2xl")
    with pytest.raises(TypeError, match=r"preset's name, the path of a config\.json or a TransformerConfig"):
        model_config(["gpt2"])  # pyrefly: ignore [bad-argument-type]


GPT = {
    "name": "x",
    "family": "gpt2",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "vocab": 100,
    "max_positions": 32,
}
