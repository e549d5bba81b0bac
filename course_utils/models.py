"""Transformers described by their sizes, and their parameters counted tensor by tensor."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from .nearest import unknown

FAMILIES = ("gpt2", "llama")

LARGEST = {"layers": 10_000, "vocab": 100_000_000, "max_positions": 1_000_000_000}
"""Sizes beyond these, and widths beyond a million, are typing errors, not transformers."""


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a decoder-only transformer: V vocabulary, h hidden, L layers, a heads.

    `family` "gpt2" has learned positions, LayerNorm, biases and a GELU MLP of 4h; "llama" has rotary positions,
    RMSNorm, no biases, grouped queries (`kv_heads`) and a SwiGLU MLP of width `ffn`. `tied` says that the output head
    is the embedding. Raises ValueError for sizes that make no transformer.
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

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise unknown("model family", self.family, FAMILIES)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        for size in ("layers", "hidden", "heads", "vocab", "max_positions", "kv_heads", "ffn"):
            value = getattr(self, size)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{size} is {value!r}: it must be a whole number of at least 1")
            if value > LARGEST.get(size, 1_000_000):
                raise ValueError(f"{size} is {value:,}: more than {LARGEST.get(size, 1_000_000):,} cannot be meant")
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}: the rest would be lost")
        if self.family == "llama" and self.head_size % 2:
            raise ValueError(f"heads of {self.head_size} elements: rotary positions turn pairs, so it must be even")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key and value heads do not divide {self.heads} query heads")
        if self.family == "gpt2" and (self.kv_heads != self.heads or self.ffn != 4 * self.hidden):
            raise ValueError("the gpt2 family has as many key heads as query heads and an MLP of 4h")
        if not isinstance(self.dropout, (int, float)) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout!r}: a probability of at least 0 and below 1")
        if self.family == "llama" and self.dropout:
            raise ValueError("the llama family has no dropout: set dropout=0")
        if not isinstance(self.rope_theta, (int, float)) or not 1.0 < self.rope_theta < float("inf"):
            raise ValueError(f"rope_theta is {self.rope_theta!r}: the base of rotary angles, a number above 1")
        if not isinstance(self.tied, bool):
            raise ValueError(f"tied is {self.tied!r}: True if the head is the embedding, else False")

    @property
    def head_size(self) -> int:
        """Elements of one attention head, h/a."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """N, the number of parameters; a tied head counts once."""
        return parameter_count(self)


Shapes = dict[str, tuple[int, ...]]


def block_shapes(model: TransformerConfig) -> Shapes:
    """Shapes of one block's parameters, in the order in which the network registers them."""
    h, kv, ffn = model.hidden, model.kv_heads * model.head_size, model.ffn
    if model.family == "gpt2":
        return {
            "norm1.weight": (h,), "norm1.bias": (h,),
            "attention.qkv.weight": (3 * h, h), "attention.qkv.bias": (3 * h,),
            "attention.out.weight": (h, h), "attention.out.bias": (h,),
            "norm2.weight": (h,), "norm2.bias": (h,),
            "mlp.up.weight": (ffn, h), "mlp.up.bias": (ffn,),
            "mlp.down.weight": (h, ffn), "mlp.down.bias": (h,),
        }  # fmt: skip
    return {
        "norm1.weight": (h,),
        "attention.q.weight": (h, h), "attention.k.weight": (kv, h), "attention.v.weight": (kv, h),
        "attention.out.weight": (h, h),
        "norm2.weight": (h,),
        "mlp.gate.weight": (ffn, h), "mlp.up.weight": (ffn, h), "mlp.down.weight": (h, ffn),
    }  # fmt: skip


def outer_shapes(model: TransformerConfig) -> Shapes:
    """Shapes of the parameters outside the blocks: embeddings, the final norm, the head where it is not tied."""
    V, h = model.vocab, model.hidden
    shapes: Shapes = {"embedding.weight": (V, h)}
    if model.family == "gpt2":
        shapes |= {"positions.weight": (model.max_positions, h), "norm.weight": (h,), "norm.bias": (h,)}
    else:
        shapes |= {"norm.weight": (h,)}
    return shapes if model.tied else shapes | {"head.weight": (V, h)}


@lru_cache(maxsize=256)
def parameter_shapes(model: TransformerConfig) -> Shapes:
    """Every parameter's name and shape, in the order of `named_parameters()` of the course's own network."""
    outer = outer_shapes(model)
    before = {name: shape for name, shape in outer.items() if name in ("embedding.weight", "positions.weight")}
    blocks = {
        f"blocks.{layer}.{name}": shape for layer in range(model.layers) for name, shape in block_shapes(model).items()
    }
    return before | blocks | {name: shape for name, shape in outer.items() if name not in before}


@lru_cache(maxsize=256)
def parameter_count(model: TransformerConfig) -> int:
    """N, to the unit: hV + L(12h² + 13h) + 2h + positions for the GPT-2 family."""
    in_blocks = model.layers * sum(prod(shape) for shape in block_shapes(model).values())
    return in_blocks + sum(prod(shape) for shape in outer_shapes(model).values())


def _gpt2(
    name: str, layers: int, hidden: int, heads: int, positions: int = 1024, dropout: float = 0.1
) -> TransformerConfig:
    return TransformerConfig(name, "gpt2", layers, hidden, heads, vocab=50257, max_positions=positions, dropout=dropout)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    positions: int,
    tied: bool,
    theta: float,
) -> TransformerConfig:
    return TransformerConfig(
        name, "llama", layers, hidden, heads, vocab, positions, kv_heads, ffn, tied=tied, rope_theta=theta
    )


PRESETS: dict[str, TransformerConfig] = {
    config.name: config
    for config in (
        # Radford et al. 2019, table 2, and the released checkpoints' hyperparameters (dropout 0.1, 1,024 positions)
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        # Brown et al. 2020, table 2.1
        _gpt2("gpt3-175b", 96, 12288, 96, positions=2048),
        # Grattafiori et al. 2024, table 3, and the model cards of Llama 3 and 3.2
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, tied=False, theta=500_000.0),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, tied=False, theta=500_000.0),
        _llama("llama3.2-1b", 16, 2048, 32, 8, 8192, 128256, 131072, tied=True, theta=500_000.0),
        _llama("llama3.2-3b", 28, 3072, 24, 8, 8192, 128256, 131072, tied=True, theta=500_000.0),
        # Zhang et al. 2024, table 1
        _llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32000, 2048, tied=False, theta=10_000.0),
        # Small enough for a laptop's CPU: the course's own, of no published model
        _gpt2("tiny-gpt", 2, 64, 4, positions=256),
        _llama("tiny-llama", 4, 256, 8, 4, 688, 4096, 1024, tied=False, theta=10_000.0),
    )
}
"""Models by name, with the source of their sizes."""


def model_config(model: str | TransformerConfig) -> TransformerConfig:
    """The config of a preset's name; a config is returned as it is.

    Raises ValueError naming the known presets and the nearest, TypeError for anything else.
    """
    if isinstance(model, TransformerConfig):
        return model
    if not isinstance(model, str):
        raise TypeError(f"a model is a preset's name or a TransformerConfig, not {type(model).__name__}")
    if model not in PRESETS:
        raise unknown("model", model, PRESETS)
    return PRESETS[model]
