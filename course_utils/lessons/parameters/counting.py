"""Lesson 04: every parameter of a transformer counted from its symbols alone, next to the modules' own tensors.

V vocabulary, P positions, h hidden, L layers; in Llama's family k for the width of keys and of values (kv_heads · h/a),
f for that of the MLP, E for experts. No formula looks at shapes, so that a comparison with real modules can fail.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    return [Term(name, formula, _value(formula, model)) for name, formula in (formulas | mlp).items()]


def _norm(model: TransformerConfig) -> str:
    return "2h" if model.norm == "layernorm" and model.bias else "h"


def _matrix(rows: str, bias: bool | None, biases: str = "") -> str:
    square = f"{rows}²" if rows.endswith("h") else f"{rows}·h"
    product = f"h·({rows})" if " + " in rows else square
    return f"{product} + {biases or rows}" if bias else product


def _value(formula: str, model: TransformerConfig) -> int:
    symbols = {"V": model.vocab, "P": model.max_positions, "h": model.hidden, "k": model.kv, "f": model.ffn}
    code = re.sub(r"(?<=\d)(?=[a-z])", "*", formula.replace("²", "**2").replace("·", "*"))
    return eval(code, {}, symbols | {"E": model.experts})


# ------------------------------------------------------------------------------------------- the whole, by symbols


def model_terms(model: str | TransformerConfig) -> list[Term]:
    """Return all parameters: embedding, positions if they are learned, blocks, final norm, head unless it is tied."""
    model = model_config(model)
    before = {"embedding": "V·h", **({"positions": "P·h"} if model.positions == "learned" else {})}
    after = {"final norm": _norm(model), **({} if model.tied else {"head": "V·h"})}
    blocks = Term(f"{model.layers} blocks", "L · a block", model.layers * total(block_terms(model)))
    first, last = ([Term(name, f, _value(f, model)) for name, f in formulas.items()] for formulas in (before, after))
    return [*first, blocks, *last]


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
"""Millions of parameters: Radford et al. 2019, table 2. OpenAI's repository says that these are wrong."""

GPT2_CORRECTED = {"gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
"""Millions of parameters: the checkpoints' names in OpenAI's repository openai/gpt-2 since August 2019 (f35fa1d)."""

CHECKPOINT_BYTES = {
    "llama3-8b": 16_060_522_496, "llama3-70b": 141_107_412_992, "mistral-7b": 14_483_464_192,
    "qwen2.5-7b": 15_231_233_024, "mixtral-8x7b": 93_405_585_408,
}  # fmt: skip
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
