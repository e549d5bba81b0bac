"""Transformers described by their sizes, and their parameters counted tensor by tensor."""

import sys
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from .errors import check_known, unknown

FAMILIES = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "logits": "compute"},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "logits": "fp32"},
}
"""Defaults of each family. GPT-2's models make q, k and v by one matrix, Llama's by three.

The loss reads logits as in nanoGPT (model.py), and as in Meta's Llama 3 (llama/model.py), transformers and
torchtitan: docs/reference_code.md.
"""

LOGITS = ("fp32", "compute")
"""Number formats of the logits that the loss reads: copied to fp32, or left in the head's type."""

CHOICES = {
    "positions": ("learned", "rotary", "none"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "swiglu"),
    "logits": LOGITS,
}

LARGEST = {"layers": 10_000, "vocab": 100_000_000, "max_positions": 1_000_000_000}
"""Sizes beyond these, and widths beyond a million, are typing errors, not transformers."""


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a decoder-only transformer: V vocabulary, h hidden, L layers, a heads.

    `family` "gpt2" has learned positions, LayerNorm, biases and a GELU MLP of 4h; "llama" has rotary
    positions, RMSNorm, no biases, grouped queries (`kv_heads`) and a SwiGLU MLP of width `ffn`; each of these
    can be chosen anew. `tied` says that the output head is the embedding; `logits`, one of LOGITS, what the
    loss reads; `unfused`, that GELU and RMSNorm are single operations, not one kernel each, and that eager
    attention next to RMSNorm has an fp32 softmax: transformers' and Meta's code (docs/reference_code.md).
    `repeat_kv`: a fused kernel gets keys and values repeated for every query head, as in Meta's. `fused_qkv`:
    one matrix makes q, k and v. With `experts`, each block has that many MLPs and a token visits
    `experts_per_token` of them. Raises ValueError for sizes that make no transformer.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    max_positions: int
    kv_heads: int = 0
    ffn: int = 0
    dropout: float = 0.0
    tied: bool = True
    rope_theta: float = 10_000.0
    positions: str = ""
    norm: str = ""
    mlp: str = ""
    bias: bool | None = None
    qkv_bias: bool | None = None
    experts: int = 0
    experts_per_token: int = 0
    logits: str = ""
    unfused: bool = False
    repeat_kv: bool = False
    fused_qkv: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name is {self.name!r}: what the model is called, a text")
        if not isinstance(self.family, str) or self.family not in FAMILIES:
            raise unknown("model family", self.family, FAMILIES)
        self._fill_in()
        self._check_sizes()
        self._check_choices()

    def _fill_in(self) -> None:
        # What is no size is refused in `_check_sizes`, by its name.
        usual = 4 * self.hidden if isinstance(self.hidden, int) else 0
        standard: dict[str, Any] = {"kv_heads": self.heads, "ffn": usual} | FAMILIES[self.family]
        for name, value in standard.items():
            given = getattr(self, name)
            if given in (0, "", None) and given is not False:  # False equals 0, but it has been chosen
                object.__setattr__(self, name, value)
        if self.qkv_bias is None:
            object.__setattr__(self, "qkv_bias", self.bias)
        if self.fused_qkv is None:
            object.__setattr__(self, "fused_qkv", self.family == "gpt2")

    def _check_sizes(self) -> None:
        for size in ("layers", "hidden", "heads", "vocab", "max_positions", "kv_heads", "ffn"):
            value = getattr(self, size)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{size} is {value!r}: it must be a whole number of at least 1")
            if value > LARGEST.get(size, 1_000_000):
                raise ValueError(
                    f"{size} is {value:,}: more than {LARGEST.get(size, 1_000_000):,} cannot be meant"
                )
        if self.hidden % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide a hidden size of {self.hidden}: choose other heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key and value heads do not divide {self.heads} query heads")
        chosen, experts = self.experts_per_token, self.experts
        if not isinstance(experts, int) or not isinstance(chosen, int) or not 0 <= chosen <= experts <= 1024:
            raise ValueError(
                f"experts={experts!r}, experts_per_token={chosen!r}: a token visits some of at most 1,024"
            )
        if bool(experts) != bool(chosen) or experts == 1:
            raise ValueError(
                f"experts={experts}, experts_per_token={chosen}: give both, from 2 experts on, or neither"
            )

    def _check_choices(self) -> None:
        for name, known in CHOICES.items():
            check_known(name, getattr(self, name), known)
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"heads of {self.head_size} elements: rotary positions turn pairs, so it must be even"
            )
        if not isinstance(self.dropout, (int, float)) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout!r}: a probability of at least 0 and below 1")
        if not isinstance(self.rope_theta, (int, float)) or not 1.0 < self.rope_theta <= sys.float_info.max:
            raise ValueError(
                f"rope_theta is {self.rope_theta!r}: the base of rotary angles, a number above 1"
            )
        for name in ("tied", "bias", "qkv_bias", "unfused", "repeat_kv", "fused_qkv"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it is True or False")

    @property
    def head_size(self) -> int:
        """Elements of one attention head, h/a."""
        return self.hidden // self.heads

    @property
    def kv(self) -> int:
        """Elements of a token's keys, and of its values: kv_heads · h/a."""
        return self.kv_heads * self.head_size

    @property
    def parameters(self) -> int:
        """N, the number of parameters; a tied head counts once."""
        return parameter_count(self)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all, or with experts only those that it visits, and the router."""
        idle = self.experts - self.experts_per_token
        expert = sum(prod(shape) for shape in mlp_shapes(self).values())
        return self.parameters - self.layers * idle * expert


Shapes = dict[str, tuple[int, ...]]


@lru_cache(maxsize=256)
def block_shapes(model: TransformerConfig) -> Shapes:
    """Shapes of one block's parameters, in the order in which the network registers them."""
    h = model.hidden
    mlp = mlp_shapes(model)
    if model.experts:
        experts = {f"experts.{e}.{name}": shape for e in range(model.experts) for name, shape in mlp.items()}
        mlp = {"router.weight": (model.experts, h)} | experts
    return {
        **norm_shapes(model, "norm1"),
        **{f"attention.{name}": shape for name, shape in attention_shapes(model).items()},
        **norm_shapes(model, "norm2"),
        **{f"mlp.{name}": shape for name, shape in mlp.items()},
    }


def norm_shapes(model: TransformerConfig, name: str) -> Shapes:
    """A norm's weight, and the bias that a LayerNorm has where the model has biases."""
    shapes: Shapes = {f"{name}.weight": (model.hidden,)}
    if model.norm == "layernorm" and model.bias:
        shapes[f"{name}.bias"] = (model.hidden,)
    return shapes


def linear_shapes(name: str, n_out: int, n_in: int, bias: bool | None) -> Shapes:
    """The matrix of a linear layer, and its bias."""
    shapes: Shapes = {f"{name}.weight": (n_out, n_in)}
    if bias:
        shapes[f"{name}.bias"] = (n_out,)
    return shapes


def attention_shapes(model: TransformerConfig) -> Shapes:
    """One attention layer's parameters: q, k and v by one matrix or by three, then the output's."""
    h, kv, bias = model.hidden, model.kv, model.qkv_bias
    widths = {"qkv": h + 2 * kv} if model.fused_qkv else {"q": h, "k": kv, "v": kv}
    shapes: Shapes = {}
    for name, width in widths.items():
        shapes |= linear_shapes(name, width, h, bias)
    return shapes | linear_shapes("out", h, h, model.bias)


def mlp_shapes(model: TransformerConfig) -> Shapes:
    """One MLP's parameters (one expert's, where there are experts): two matrices, with SwiGLU three."""
    h, ffn, bias = model.hidden, model.ffn, model.bias
    gate = linear_shapes("gate", ffn, h, bias) if model.mlp == "swiglu" else {}
    return gate | linear_shapes("up", ffn, h, bias) | linear_shapes("down", h, ffn, bias)


@lru_cache(maxsize=256)
def outer_shapes(model: TransformerConfig) -> Shapes:
    """Shapes of the parameters outside the blocks: embeddings, the final norm, a head that is not tied."""
    V, h = model.vocab, model.hidden
    shapes: Shapes = {"embedding.weight": (V, h)}
    if model.positions == "learned":
        shapes |= {"positions.weight": (model.max_positions, h)}
    shapes |= norm_shapes(model, "norm")
    return shapes if model.tied else shapes | {"head.weight": (V, h)}


@lru_cache(maxsize=256)
def parameter_shapes(model: TransformerConfig) -> Shapes:
    """Every parameter's name and shape, in the order of `named_parameters()` of the course's own network."""
    outer = outer_shapes(model)
    before = {
        name: shape for name, shape in outer.items() if name in ("embedding.weight", "positions.weight")
    }
    blocks = {
        f"blocks.{layer}.{name}": shape
        for layer in range(model.layers)
        for name, shape in block_shapes(model).items()
    }
    after = {name: shape for name, shape in outer.items() if name not in before}
    return before | blocks | after


@lru_cache(maxsize=256)
def parameter_count(model: TransformerConfig) -> int:
    """N, to the unit: hV + L(12h² + 13h) + 2h + positions for the GPT-2 family."""
    in_blocks = model.layers * sum(prod(shape) for shape in block_shapes(model).values())
    return in_blocks + sum(prod(shape) for shape in outer_shapes(model).values())


_SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

PRESETS: dict[str, TransformerConfig] = {
    name: TransformerConfig(name, **sizes) for name, sizes in _SIZES.items()
}
"""Models by name; models.toml has the source of their sizes."""
