"""Lesson 04: what the parameters of a transformer belong to, and what a paper and a rule of thumb say."""

from collections import Counter
from math import prod

from ...model_files import model_config
from ...models import TransformerConfig, block_shapes, outer_shapes

PARTS = {
    "embedding": "embedding", "positions": "positions", "attention": "attention",
    "mlp": "MLP", "norm": "norms", "head": "head",
}  # fmt: skip
"""How names of the network's tensors begin, and what those parameters belong to, in the figure's order."""


def parts_of(model: str | TransformerConfig) -> dict[str, int]:
    """Return parameters by what they belong to, one of the values of `PARTS`; the MLP's are all experts'.

    Biases are counted with their matrices, a router with the experts.
    """
    model = model_config(model)
    found: Counter[str] = Counter()
    for shapes, times in ((outer_shapes(model), 1), (block_shapes(model), model.layers)):
        for name, shape in shapes.items():
            part = next(part for start, part in PARTS.items() if name.startswith(start))
            found[part] += times * prod(shape)
    return {part: found[part] for part in PARTS.values() if part in found}


GPT2_PAPER = {"gpt2": 117, "gpt2-medium": 345, "gpt2-large": 762, "gpt2-xl": 1542}
"""Millions of parameters: Radford et al. 2019, table 2. OpenAI's repository says that these are wrong."""
