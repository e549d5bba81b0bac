"""Lesson 04: every parameter of a transformer counted from its symbols alone, next to the modules' own tensors.

The symbols are those of the course: V vocabulary, P positions, h hidden, L layers, and for Llama's family k for the
width of keys and of values (kv_heads · h/a), f for the width of the MLP, E for experts. Nothing here looks at a list of
shapes: the formulas are independent of it, so that a comparison with real modules can fail.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from course_utils.model_files import model_config
from course_utils.models import TransformerConfig
from course_utils.units import aligned, html_table

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Term:
    """A line of a count: what it is, its formula as one would write it, and the number of parameters."""

    name: str
    formula: str
    count: int


# ------------------------------------------------------------------------------------------- one block, by symbols


def block_terms(model: str | TransformerConfig) -> list[Term]:
    """Return the parameters of one block, matrix by matrix and each with its bias, in the order of the forward pass."""
    model = model_config(model)
    norm = _norm_term(model)
    mlp = _expert_terms(model) if model.experts else _mlp_terms(model)
    first, second = (replace(norm, name=f"norm before {what}") for what in ("attention", "the MLP"))
    return [first, *_attention_terms(model), second, *mlp]


def _norm_term(model: TransformerConfig) -> Term:
    """A scale for each of the h numbers, and with LayerNorm's bias a shift."""
    shifted = model.norm == "layernorm" and model.bias
    return Term("norm", "2h" if shifted else "h", (2 if shifted else 1) * model.hidden)


def _attention_terms(model: TransformerConfig) -> list[Term]:
    h, k = model.hidden, model.kv
    rows = _sum([(1, "h", h), (2, "k", k)]) if k != h else _sum([(3, "h", h)])
    return [
        _matrix("queries, keys, values", rows, ("h", h), model.qkv_bias),
        _matrix("attention's output", ("h", h), ("h", h), model.bias),
    ]


def _mlp_terms(model: TransformerConfig) -> list[Term]:
    """GELU's two matrices, or SwiGLU's three."""
    h, f, gated = model.hidden, model.ffn, model.mlp == "swiglu"
    symbol, per_row = ("h", 4) if f == 4 * h else ("f", 1)
    first = _sum([((2 if gated else 1) * per_row, symbol, f // per_row)])
    second = _sum([(per_row, symbol, f // per_row)])
    return [
        _matrix("MLP, gate and up" if gated else "MLP, up", first, ("h", h), model.bias),
        _matrix("MLP, down", second, ("h", h), model.bias, ("h", h)),
    ]


def _expert_terms(model: TransformerConfig) -> list[Term]:
    """A router's row for each expert, and as many MLPs as there are experts."""
    E, h = model.experts, model.hidden
    mlps = [Term(t.name.replace("MLP", "experts"), f"E·({t.formula})", E * t.count) for t in _mlp_terms(model)]
    return [Term("router", "E·h", E * h), *mlps]


Width = tuple[str, int]
"""A width in symbols, and in numbers."""


def _sum(parts: Sequence[tuple[int, str, int]]) -> Width:
    """(2, "k", 1024) and the like, added up: ("h + 2k", 6144)."""
    symbols = " + ".join(f"{factor if factor > 1 else ''}{symbol}" for factor, symbol, _ in parts)
    return symbols, sum(factor * size for factor, _, size in parts)


def _matrix(name: str, one: Width, other: Width, bias: bool | None, biases: Width | None = None) -> Term:
    """A matrix, written as one would: 3h² rather than 3h·h; with one bias for each of `one`, unless `biases` differ."""
    (symbols, rows), (symbol, columns) = one, other
    square = f"{symbols}²" if symbols.endswith(symbol) else f"{symbols}·{symbol}"
    formula = f"{symbol}·({symbols})" if " + " in symbols else square
    added, count = biases or one
    return Term(name, f"{formula} + {added}" if bias else formula, rows * columns + (count if bias else 0))


# ------------------------------------------------------------------------------------------- the whole, by symbols


def model_terms(model: str | TransformerConfig) -> list[Term]:
    """Return all parameters: embedding, positions if they are learned, blocks, final norm, head unless it is tied."""
    model = model_config(model)
    V, P, h, L = model.vocab, model.max_positions, model.hidden, model.layers
    positions = [Term("positions", "P·h", P * h)] if model.positions == "learned" else []
    head = [] if model.tied else [Term("head", "V·h", V * h)]
    blocks = Term(f"{L} blocks", "L · a block", L * total(block_terms(model)))
    return [Term("embedding", "V·h", V * h), *positions, blocks, replace(_norm_term(model), name="final norm"), *head]


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


# ------------------------------------------------------------------------------------------- the modules' own count

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


# ------------------------------------------------------------------------------------------------------- as a table


@dataclass(frozen=True, repr=False)
class Counts:
    """Terms, each with its formula, next to what the modules hold where that is given; draws itself as a table."""

    terms: Sequence[Term]
    measured: Mapping[str, int] | None = None

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield the table as text: a header, a row for each term, a row of totals."""
        yield ("", "formula", "parameters", *(("in the modules", "difference") if self.measured is not None else ()))
        for term in self.terms:
            yield (term.name, term.formula, *self._numbers(term.count, (self.measured or {}).get(term.name, 0)))
        yield ("total", "", *self._numbers(total(self.terms), sum((self.measured or {}).values())))

    def _numbers(self, count: int, measured: int) -> tuple[str, ...]:
        difference = f"{count - measured:+,}".replace("-", "−") if count != measured else "0"
        return (f"{count:,}", f"{measured:,}", difference) if self.measured is not None else (f"{count:,}",)

    def __repr__(self) -> str:
        return aligned(self.cells(), words=2)

    def _repr_html_(self) -> str:
        return html_table(self.cells(), words=2, totals=True)


# ------------------------------------------------------------------------------------------------ what others counted

GPT2_PAPER = {"gpt2": 117, "gpt2-medium": 345, "gpt2-large": 762, "gpt2-xl": 1542}
"""Millions of parameters: Radford et al. 2019, table 2. OpenAI's repository says that these are wrong.

The first checkpoints carried these numbers: 117M (February 2019) and 345M (May 2019).
"""

GPT2_CORRECTED = {"gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
"""Millions of parameters: the checkpoints' names in OpenAI's repository openai/gpt-2 since August 2019 (f35fa1d)."""

CHECKPOINT_BYTES = {
    "llama3-8b": 16_060_522_496,
    "llama3-70b": 141_107_412_992,
    "mistral-7b": 14_483_464_192,
    "qwen2.5-7b": 15_231_233_024,
    "mixtral-8x7b": 93_405_585_408,
}
"""`total_size` in the model.safetensors.index.json of each released checkpoint: all its tensors, in bf16, in bytes."""


# ---------------------------------------------------------------------------------------------- 12Lh² against size

Rule = Callable[[TransformerConfig], int]


def blocks_alone(model: TransformerConfig) -> int:
    """Return 12Lh²: the matrices of GPT's blocks and nothing else (Kaplan et al. 2020, section 2.1, counts so)."""
    return 12 * model.layers * model.hidden**2


def with_embedding(model: TransformerConfig) -> int:
    """Return 12Lh² + Vh: the blocks and the embedding."""
    return blocks_alone(model) + model.vocab * model.hidden


def rule_errors(rule: Rule, models: Iterable[TransformerConfig]) -> tuple[list[float], list[float]]:
    """Return, for `lines`, the models' sizes in millions of parameters, and the rule's error in percent."""
    sizes = [(model.parameters / 1e6, 100 * (rule(model) / model.parameters - 1)) for model in models]
    millions, errors = map(list, zip(*sizes, strict=True))
    return millions, errors


def gpt_ladder(
    vocab: int = 50257, widths: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192)
) -> list[TransformerConfig]:
    """Return GPTs of growing width, a layer for each 64 of it as in the smallest GPT-2; heads of 64."""
    return [TransformerConfig(f"gpt-{h}", "gpt2", h // 64, h, h // 64, vocab, 1024) for h in widths]
