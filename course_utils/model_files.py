"""A transformer described by a Hugging Face config.json.

Read with the standard library alone and without a network.
"""

import json
import sys
import warnings
from os import PathLike, altsep, sep
from pathlib import Path
from typing import Any

from .errors import check_known, unknown
from .models import PRESETS, TransformerConfig

Settings = dict[str, Any]

LARGEST_FILE = 10_000_000
"""Bytes. A config.json has some thousands: what is larger is the weights, or something else altogether."""

LARGEST_SIZE = 10**9
"""No size of a transformer is beyond this; `TransformerConfig` knows of each what it can be."""

GELU = ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh")
SILU = ("silu", "swish")
"""Activation functions by transformers' names, whose memory is that of the course's own."""

ROPE_THETA = {"mixtral": 1_000_000.0}
"""Where transformers takes another base of rotary angles than 10,000 when the file names none."""

SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096}
"""The window, in tokens, that transformers takes where the file does not speak of one.

Of MistralConfig and Qwen2Config.
"""


def config_from_file(path: str | PathLike[str]) -> TransformerConfig:
    """The model that a config.json describes, named after its folder; `path` is the file's or the folder's.

    Known are the model types of READERS, with the defaults that transformers has where a file is silent. Left
    aside is what changes no byte of a training step: the scaling of rotary positions, quantization for
    inference, the cache of keys and values. A warning says that attention is full here where a file has a
    sliding window shorter than its longest sequence, and what is taken where dropout differs from place to
    place. Raises ValueError that names the file and says what is wrong: missing, truncated, not JSON, of an
    unknown family, without a size or with an impossible one, or of a kind that the course's network is not.
    """
    file = Path(path)
    try:
        file = _file(file.expanduser())
        settings = _settings(file)
        kind = settings.get("model_type")
        if not isinstance(kind, str) or kind not in READERS:
            raise unknown("model_type", kind, READERS)
        name = file.absolute().parent.name if file.name == "config.json" else file.stem
        return READERS[kind](name, settings)
    except (ValueError, OSError, RuntimeError) as error:  # the last for the home of nobody that is known
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read a model from {file}: {reason}") from None


def _file(path: Path) -> Path:
    """The file itself, or the config.json of a folder."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder has no config.json{_there(path)}")
        return path / "config.json"
    if path.exists():
        return path
    near = _there(path.parent) if path.parent.is_dir() else f"; nor is there a folder {path.parent}"
    raise ValueError(
        f"there is no such file or folder{near}. "
        "Nothing is downloaded: give the path of a config.json that is here"
    )


def _there(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.json"))[:5]
    return f"; there is {', '.join(found)}" if found else ""


def _settings(file: Path) -> Settings:
    """The file's JSON object. Raises ValueError if it holds none."""
    size = file.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(
            f"it has {size:,} bytes, where a config.json has some thousands: are these the weights?"
        )
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not text: give the config.json, not the weights next to it") from None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(_not_json(text, error)) from None
    if not isinstance(settings, dict):
        raise ValueError(
            f'it holds a JSON {type(settings).__name__}, not an object such as {{"model_type": "llama", …}}'
        )
    return settings


def _not_json(text: str, error: Exception) -> str:
    """The fault of text that is no JSON: empty, cut off at its end, or wrong at a line that is named."""
    if not text.strip():
        return "it is empty"
    if not isinstance(error, json.JSONDecodeError):
        return f"it is not JSON that can be read: {error}"
    rest = text[error.pos :].strip()
    in_a_word = any(word.startswith(rest) for word in ("true", "false", "null"))
    if not rest or in_a_word or error.msg.startswith("Unterminated"):
        return f"it ends in the middle, at line {error.lineno}: it was not written or copied completely"
    return f"it is not JSON: {error.msg}, at line {error.lineno}, column {error.colno}"


# One reader for each kind of model


def _gpt2(name: str, settings: Settings) -> TransformerConfig:
    sizes = _sizes(settings, layers="n_layer", hidden="n_embd", heads="n_head", vocab="vocab_size")
    older = "n_ctx" in settings and "n_positions" not in settings
    sizes |= _sizes(settings, max_positions="n_ctx" if older else "n_positions")
    if settings.get("n_inner") is not None:  # null means 4h
        sizes |= _sizes(settings, ffn="n_inner")
    _check_activation(settings, "activation_function", GELU)
    if settings.get("add_cross_attention"):
        raise ValueError("add_cross_attention is true: the course's network is only a decoder")
    dropouts = {key: _probability(settings, key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    dropout = dropouts["resid_pdrop"]
    if any(value != dropout for value in dropouts.values()):
        said = ", ".join(f"{key} {value}" for key, value in dropouts.items())
        _warn(
            name,
            f"dropout differs from place to place ({said}): {dropout}, the residual's, is taken everywhere",
        )
    tied = _flag(settings, "tie_word_embeddings", True)
    return TransformerConfig(name, "gpt2", **sizes, dropout=dropout, tied=tied)


def _llama(name: str, settings: Settings, **options: Any) -> TransformerConfig:
    """Llama's family; `options` are a relative's differences from Llama."""
    sizes = _sizes(settings, layers="num_hidden_layers", hidden="hidden_size", heads="num_attention_heads")
    sizes |= _sizes(
        settings, vocab="vocab_size", max_positions="max_position_embeddings", ffn="intermediate_size"
    )
    grouped = settings.get("num_key_value_heads") is not None
    sizes |= _sizes(settings, kv_heads="num_key_value_heads" if grouped else "num_attention_heads")
    _check_activation(settings, "hidden_act", SILU)
    _check_head_size(settings, sizes["hidden"], sizes["heads"])
    _warn_of_window(name, settings, sizes["max_positions"])
    if settings.get("attention_dropout"):
        _warn(
            name,
            f"attention_dropout is {settings['attention_dropout']}: ignored, as Llama has no other dropout",
        )
    tied = _flag(settings, "tie_word_embeddings", False)
    theta = _rope_theta(settings)
    return TransformerConfig(name, "llama", **sizes, tied=tied, rope_theta=theta, **options)


def _biased_llama(name: str, settings: Settings) -> TransformerConfig:
    """Llama itself, which transformers can also give biases.

    They are on all matrices, where it can be one of the course's.
    """
    bias = {key: _flag(settings, key, False) for key in ("attention_bias", "mlp_bias")}
    if bias["attention_bias"] != bias["mlp_bias"]:
        raise ValueError(
            f"attention_bias is {bias['attention_bias']} and mlp_bias is {bias['mlp_bias']}: "
            "the course's blocks have biases on all their matrices, on none, "
            "or (model_type qwen2) on those of q, k and v alone"
        )
    return _llama(name, settings, bias=bias["attention_bias"])


def _mistral(name: str, settings: Settings, **options: Any) -> TransformerConfig:
    """Mistral's grouped queries have to be named.

    Where the key is missing transformers takes 8, and for Qwen 32, whatever the size.
    """
    _require(settings, ["num_key_value_heads"])
    return _llama(name, settings, **options)


def _mixtral(name: str, settings: Settings) -> TransformerConfig:
    experts = _sizes(settings, experts="num_local_experts", experts_per_token="num_experts_per_tok")
    return _mistral(name, settings, **experts)


def _qwen2(name: str, settings: Settings) -> TransformerConfig:
    """Qwen 2 and 2.5: Llama with biases on q, k and v, and on nothing else."""
    return _mistral(name, settings, qkv_bias=True)


READERS = {"gpt2": _gpt2, "llama": _biased_llama, "mistral": _mistral, "mixtral": _mixtral, "qwen2": _qwen2}
"""The model types that can be read."""


def _sizes(settings: Settings, **keys: str) -> Settings:
    """Sizes under the course's names, from the file's. Raises ValueError for missing and impossible ones."""
    _require(settings, keys.values())
    for key in keys.values():
        size = settings[key]
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{key} is {size!r}: it must be a whole number of at least 1")
        if size > LARGEST_SIZE:
            raise ValueError(f"{key} is {size:,}: more than {LARGEST_SIZE:,} cannot be meant")
    return {name: settings[key] for name, key in keys.items()}


def _require(settings: Settings, keys: Any) -> None:
    missing = [key for key in keys if key not in settings]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(f"{', '.join(missing)} {verb} missing")


def _flag(settings: Settings, key: str, standard: bool) -> bool:
    value = settings.get(key, standard)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}: it is true or false")
    return value


def _probability(settings: Settings, key: str, standard: float) -> float:
    value = settings.get(key, standard)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{key} is {value!r}: a probability of at least 0 and below 1")
    return value


def _check_activation(settings: Settings, key: str, known: tuple[str, ...]) -> None:
    function = settings.get(key, known[0])
    if function not in known:
        raise ValueError(
            f"{key} is {function!r}: the course's network of this family has {' or '.join(known)}"
        )


def _check_head_size(settings: Settings, hidden: int, heads: int) -> None:
    size = settings.get("head_dim")
    if size is not None and (not isinstance(size, int) or size * heads != hidden):
        raise ValueError(
            f"head_dim is {size!r}, but hidden_size / num_attention_heads is "
            f"{hidden}/{heads} = {hidden / heads:g}: the course's heads share the hidden size evenly"
        )


def _warn_of_window(name: str, settings: Settings, longest: int) -> None:
    """Warn where the model's own attention has a window: the course's is full.

    Qwen's is off unless it is used.
    """
    kind = settings["model_type"]
    window = settings.get("sliding_window", SLIDING_WINDOW.get(kind))
    if isinstance(window, int) and window < longest and settings.get("use_sliding_window", kind != "qwen2"):
        _warn(
            name,
            f"sliding_window is {window:,}, but the course's attention is full: "
            f"every token attends to all those before it, so that beyond {window:,} tokens "
            "a run takes more than the model's own attention would",
        )


def _rope_theta(settings: Settings) -> Any:
    """The base of rotary angles; null means the usual one.

    transformers 5 writes it into rope_parameters.
    """
    nested = settings.get("rope_parameters")
    places = [settings, nested] if isinstance(nested, dict) else [settings]
    said = [place["rope_theta"] for place in places if place.get("rope_theta") is not None]
    return said[0] if said else ROPE_THETA.get(settings["model_type"], 10_000.0)


def _warn(name: str, text: str) -> None:
    """Warn, naming the line outside the course that asked for the model."""
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == __package__:
        frame = frame.f_back
        level += 1
    warnings.warn(f"{name}: {text}", stacklevel=level)


def model_config(model: str | PathLike[str] | TransformerConfig) -> TransformerConfig:
    """The config of a preset's name or of a Hugging Face config.json's path; a config is returned as it is.

    A string is a path if it ends in .json or has a separator in it ("./llama", "models/config.json").
    Raises ValueError naming the known presets and the nearest, or what is wrong with the file; TypeError for
    anything else.
    """
    if isinstance(model, TransformerConfig):
        return model
    if isinstance(model, PathLike) or (isinstance(model, str) and _is_path(model)):
        return config_from_file(model)
    if not isinstance(model, str):
        raise TypeError(
            "a model is a preset's name, the path of a config.json or a TransformerConfig, "
            f"not {type(model).__name__}"
        )
    check_known("model", model, PRESETS)
    return PRESETS[model]


def _is_path(model: str) -> bool:
    return model.lower().endswith(".json") or any(mark in model for mark in ("/", sep, altsep or sep))
