"""Models read from config.json files: the right ones, and every way in which a file can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from course_utils.model_files import config_from_file, model_config
from course_utils.models import PRESETS, TransformerConfig
from course_utils.run import TrainingRun

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}


def llama_like(kind: str, preset: str, **more: Any) -> dict[str, Any]:
    """What the released config.json of such a model says of its sizes."""
    model = PRESETS[preset]
    return {
        "model_type": kind,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "hidden_act": "silu",
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_positions,
        "rope_theta": model.rope_theta,
    } | more


LLAMA = llama_like("llama", "llama3-8b")
RELEASED = {
    "gpt2": GPT2 | {"activation_function": "gelu_new", "n_ctx": 1024, "n_inner": None, "attn_pdrop": 0.1},
    "llama3-8b": LLAMA | {"attention_bias": False, "mlp_bias": False, "rope_scaling": None},
    "mistral-7b": llama_like("mistral", "mistral-7b", sliding_window=None),
    "mixtral-8x7b": llama_like(
        "mixtral", "mixtral-8x7b", num_local_experts=8, num_experts_per_tok=2, head_dim=None
    ),
    "qwen2.5-0.5b": llama_like("qwen2", "qwen2.5-0.5b", tie_word_embeddings=True, use_sliding_window=False),
}


def without(settings: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != key}


TRANSFORMERS_5 = without(RELEASED["mixtral-8x7b"], "rope_theta") | {
    "rope_parameters": {"rope_theta": 100_000, "rope_type": "default"}
}


def write(folder: Path, settings: Any, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_the_preset_of_that_model(tmp_path, name):
    assert config_from_file(write(tmp_path / name, RELEASED[name])) == PRESETS[name]


def test_a_path_is_a_model_wherever_a_model_is_asked_for(tmp_path, monkeypatch):
    path = write(tmp_path / "llama3-8b", LLAMA)
    expected = PRESETS["llama3-8b"]
    assert model_config(path) == model_config(str(path)) == model_config(path.parent) == expected
    run = TrainingRun(write(tmp_path / "short", LLAMA | {"num_hidden_layers": 3}), 1, 512)
    assert eval(run.code(), {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig}) == run
    assert TrainingRun(str(path), 1, 512) == TrainingRun("llama3-8b", 1, 512)
    monkeypatch.chdir(tmp_path)
    assert model_config("llama3-8b/") == model_config("./llama3-8b") == expected
    monkeypatch.chdir(path.parent)
    assert model_config("config.json") == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (without(GPT2, "n_positions") | {"n_ctx": 512}, {"max_positions": 512}),  # older files
        (TRANSFORMERS_5, {"rope_theta": 100_000}),
        (GPT2, {"tied": True, "dropout": 0.1, "ffn": 4 * 768, "bias": True}),
        (GPT2 | {"n_inner": 1000, "tie_word_embeddings": False}, {"tied": False, "ffn": 1000}),
        (LLAMA, {"tied": False, "dropout": 0.0, "bias": False, "qkv_bias": False, "rope_theta": 500_000.0}),
        (without(LLAMA, "rope_theta"), {"rope_theta": 10_000.0}),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, {"bias": True, "qkv_bias": True}),
        (llama_like("qwen2", "qwen2.5-7b"), {"tied": False, "bias": False, "qkv_bias": True}),
    ],
)
def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path, settings, expected):
    model = config_from_file(write(tmp_path, settings))
    assert {name: getattr(model, name) for name in expected} == expected


def test_a_sliding_window_is_said_to_be_left_aside(tmp_path):
    windowed = RELEASED["mistral-7b"] | {"sliding_window": 4096}
    for settings in (windowed, without(windowed, "sliding_window")):  # without, transformers takes 4,096
        path = write(tmp_path, settings)
        with pytest.warns(
            UserWarning, match=r"sliding_window is 4,096, but the course's attention is full"
        ) as said:
            assert TrainingRun(path).model.max_positions == 32_768
        assert said[0].filename == __file__


def refused(path: Any, *said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        config_from_file(path)
    assert str(path) in str(refusal.value) and refusal.value.__cause__ is None
    for words in said:
        assert words in str(refusal.value)


def test_what_is_not_there_is_said(tmp_path):
    write(tmp_path / "llama", LLAMA)
    missing = tmp_path / "llama" / "settings.json"
    refused(missing, "no such file or folder", "there is config.json", "Nothing is downloaded")
    refused(tmp_path / "elsewhere" / "config.json", "nor is there a folder")
    write(tmp_path, LLAMA, "other.json")
    refused(tmp_path, "the folder has no config.json; there is other.json")
    with pytest.raises(ValueError, match="no such file or folder"):
        TrainingRun("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (LLAMA | {"model_type": "llama2"}, "unknown model_type 'llama2': did you mean 'llama'? Known: gpt2,"),
        (LLAMA | {"head_dim": 96}, "head_dim is 96, but hidden_size / num_attention_heads is 4096/32 = 128"),
        (LLAMA | {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        (LLAMA | {"attention_bias": True}, "attention_bias is True and mlp_bias is False"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is true"),
        (RELEASED["mixtral-8x7b"] | {"num_experts_per_tok": 9}, "experts_per_token=9"),
    ],
)
def test_what_describes_no_model_is_refused_by_its_key(tmp_path, settings, said):
    refused(write(tmp_path, settings), said)
