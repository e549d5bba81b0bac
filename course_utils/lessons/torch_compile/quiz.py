"""The numbers in the quiz of lesson 07, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ...interactive.quiz import Numbers
from ...units import each, format_bytes
from .recorded import FRONT, WAYS

TOKENS, V, FFN = 16 * 1024, 50_257, 14_336
_gb = partial(format_bytes, unit="GB", digits=2)
_mb = partial(format_bytes, unit="MB", digits=0)


def numbers() -> Iterator[Numbers]:
    wide = 2 * 4096 * FFN
    yield "swiglu", {"MB": _mb(wide)} | each(_mb, one=wide, two=2 * wide, three=3 * wide, four=4 * wide)
    logits = TOKENS * V
    sizes = each(_gb, two=2 * logits, four=4 * logits, six=6 * logits, ten=10 * logits)
    yield "the_loss", {"tokens": TOKENS, "V": V} | sizes
    peaks = {name: int(FRONT[key]["peak"]) for name, key in PEAKS.items()}
    yield "budget", each(_gb, states=int(FRONT["budget=0.0"]["kept"]), **peaks)
    graphs, plain = WAYS["the model, CUDA graphs"], WAYS["the model"]
    yield ("cuda_graphs", each(_gb, before=plain["peak"], after=graphs["peak"], reserved=graphs["reserved"]))


PEAKS = {"all": "compiled", "none": "budget=0.0", "tenth": "budget=0.1"}
