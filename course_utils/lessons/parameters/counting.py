"""Lesson 04: every parameter of a transformer counted from its symbols alone, next to the modules' own tensors.

V vocabulary, P positions, h hidden, L layers; in Llama's family k for the width of keys and of values (kv_heads · h/a),
f for that of the MLP, E for experts. No formula looks at shapes, so that a comparison with real modules can fail.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_utils.model_files import model_config
from course_utils.models import TransformerConfig
from course_utils.units import Table

if TYPE_CHECKING:
    from torch import nn


class Term(NamedTuple):
    """A line of a count: what it is, its formula as one would write it, and the number of parameters."""

    name: str
    formula: str
    count: int


def block_terms(model: str | TransformerConfig) -> list[Term]:
    """Return the parameters of one block, matrix by matrix and each with its bias, in the order of the forward pass."""
    model = model_config(model)
    gated, wide = model.mlp == "swiglu", "4h" if model.ffn == 4 * model.hidden else "f"
    first = {"4h": "8h", "f": "2f"}[wide] if gated else wide
    mlp = {
        "MLP, gate and up" if gated else "MLP, up": _matrix(first, model.bias),
        "MLP, down": _matrix(wide, model.bias, biases="h"),
    }
    if model.experts:
        each = {name.replace("MLP", "experts"): f"E·({formula})" for name, formula in mlp.items()}
        mlp = {"router": "E·h", **each}
    formulas = {
        "norm before attention": _norm(model),
        "queries, keys, values": _matrix("3h" if model.kv == model.hidden else "h + 2k", model.qkv_bias),
        "attention's output": _matrix("h", model.bias),
        "norm before the MLP": _norm(model),
    }
    return _terms(formulas | mlp, model)


def _norm(model: TransformerConfig) -> str:
    return "2h" if model.norm == "layernorm" and model.bias else "h"


def _matrix(rows: str, bias: bool | None, biases: str = "") -> str:
    square = f"{rows}²" if rows.endswith("h") else f"{rows}·h"
    product = f"h·({rows})" if " + " in rows else square
    return f"{product} + {biases or rows}" if bias else product


def _terms(formulas: Mapping[str, str], model: TransformerConfig) -> list[Term]:
    symbols = {"V": model.vocab, "P": model.max_positions, "h": model.hidden, "k": model.kv, "f": model.ffn}
    symbols["E"] = model.experts
    terms = []
    for name, formula in formulas.items():
        code = re.sub(r"(?<=\d)(?=[a-z])", "*", formula.replace("²", "**2").replace("·", "*"))
        terms.append(Term(name, formula, eval(code, {}, symbols)))
    return terms


def model_terms(model: str | TransformerConfig) -> list[Term]:
    """Return all parameters: embedding, positions if they are learned, blocks, final norm, head unless it is tied."""
    model = model_config(model)
    before = {"embedding": "V·h", **({"positions": "P·h"} if model.positions == "learned" else {})}
    after = {"final norm": _norm(model), **({} if model.tied else {"head": "V·h"})}
    blocks = Term(f"{model.layers} blocks", "L · a block", model.layers * total(block_terms(model)))
    return [*_terms(before, model), blocks, *_terms(after, model)]


def total(terms: Iterable[Term]) -> int:
    """Return the number of parameters of all terms."""
    return sum(term.count for term in terms)


def parts(model: str | TransformerConfig) -> dict[str, int]:
    """Return parameters by what they belong to: embedding, positions, attention, MLP (all experts), norms, head.

    Biases are counted with their matrices, a router with the experts.
    """
    model = model_config(model)
    found: Counter[str] = Counter()
    for term in model_terms(model):
        found["norms" if "norm" in term.name else term.name] += term.count
    for term in block_terms(model):
        name = "norms" if "norm" in term.name else "attention" if term.name in ATTENTION else "MLP"
        found[name] += model.layers * term.count
    order = ("embedding", "positions", "attention", "MLP", "norms", "head")
    return {name: found[name] for name in order if name in found}


ATTENTION = ("queries, keys, values", "attention's output")

BLOCK_NAMES: tuple[tuple[str, str], ...] = (
    (r"norm1\.", "norm before attention"),
    (r"attention\.(qkv|q|k|v)\.", "queries, keys, values"),
    (r"attention\.out\.", "attention's output"),
    (r"norm2\.", "norm before the MLP"),
    (r"mlp\.router\.", "router"),
    (r"mlp\.experts\.\d+\.(gate|up)\.", "experts, gate and up"),
    (r"mlp\.experts\.\d+\.down\.", "experts, down"),
    (r"mlp\.(gate|up)\.", "MLP, up"),
    (r"mlp\.down\.", "MLP, down"),
)
"""The names of the network's tensors, and the line of the count that each belongs to."""


def network_without_memory(model: str | TransformerConfig) -> "nn.Module":
    """Return the course's network of these sizes on torch's meta device: tensors have shapes and no memory."""
    import torch

    from course_utils.networks import build_network

    with torch.device("meta"):
        return build_network(model_config(model), "eager")


def counted_block(network: "nn.Module") -> dict[str, int]:
    """Return what the tensors of the network's first block hold, under the names of `block_terms`."""
    found: Counter[str] = Counter()
    for name, parameter in network.get_submodule("blocks.0").named_parameters():
        found[next(line for pattern, line in BLOCK_NAMES if re.match(pattern, name))] += parameter.numel()
    gated = any(".gate." in name for name, _ in network.named_parameters())
    return {("MLP, gate and up" if gated and line == "MLP, up" else line): count for line, count in found.items()}


def counted_model(network: "nn.Module") -> dict[str, int]:
    """Return what the network's tensors hold, under the names of `model_terms`; a tied head is no tensor of its own."""
    names = {"blocks": f"{len(list(network.get_submodule('blocks').children()))} blocks", "norm": "final norm"}
    found: Counter[str] = Counter()
    for name, parameter in network.named_parameters():
        module = name.split(".")[0]
        found[names.get(module, module)] += parameter.numel()
    return dict(found)


def counts(terms: Sequence[Term], measured: Mapping[str, int]) -> Table:
    """Return a table of terms with their formulas, what the modules hold of each, the differences, and totals."""
    rows: list[tuple[str, ...]] = [("", "formula", "parameters", "in the modules", "difference")]
    found = [(term.name, term.formula, term.count, measured.get(term.name, 0)) for term in terms]
    for name, formula, count, held in [*found, ("total", "", total(terms), sum(measured.values()))]:
        difference = f"{count - held:+,}".replace("-", "−") if count != held else "0"
        rows.append((name, formula, f"{count:,}", f"{held:,}", difference))
    return Table(rows, words=2, totals=True)


GPT2_PAPER = {"gpt2": 117, "gpt2-medium": 345, "gpt2-large": 762, "gpt2-xl": 1542}
"""Millions of parameters: Radford et al. 2019, table 2. OpenAI's repository says that these are wrong."""

GPT2_CORRECTED = {"gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
"""Millions of parameters: the checkpoints' names in OpenAI's repository openai/gpt-2 since August 2019 (f35fa1d)."""

CHECKPOINT_BYTES = {
    "llama3-8b": 16_060_522_496, "llama3-70b": 141_107_412_992, "mistral-7b": 14_483_464_192,
    "qwen2.5-7b": 15_231_233_024, "mixtral-8x7b": 93_405_585_408,
}  # fmt: skip
"""`total_size` in the model.safetensors.index.json of each released checkpoint: all its tensors, in bf16, in bytes."""


def blocks_alone(model: TransformerConfig) -> int:
    """Return 12Lh²: the matrices of GPT's blocks and nothing else (Kaplan et al. 2020, section 2.1, counts so)."""
    return 12 * model.layers * model.hidden**2


def with_embedding(model: TransformerConfig) -> int:
    """Return 12Lh² + Vh: the blocks and the embedding."""
    return blocks_alone(model) + model.vocab * model.hidden


def rule_errors(
    rule: Callable[[TransformerConfig], int], models: Sequence[TransformerConfig]
) -> tuple[list[float], list[float]]:
    """Return, for `lines`, the models' sizes in millions of parameters, and the rule's error in percent."""
    errors = [100 * (rule(model) / model.parameters - 1) for model in models]
    return [model.parameters / 1e6 for model in models], errors


def gpt_ladder(vocab: int = 50257) -> list[TransformerConfig]:
    """Return GPTs of growing width, a layer for each 64 of it as in the smallest GPT-2; heads of 64."""
    return [
        TransformerConfig(f"gpt-{h}", "gpt2", h // 64, h, h // 64, vocab, 1024)
        for h in (256, 512, 1024, 2048, 4096, 8192)
    ]
