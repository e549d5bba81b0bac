"""Numbers for the quiz of lesson 13, question by question. Its texts are in quiz.toml."""

from collections.abc import Iterator

from ... import PRESETS
from ...interactive.quiz import Numbers, gb
from ...units import each


def numbers() -> Iterator[Numbers]:
    N = PRESETS["gpt2-medium"].parameters
    yield "resume", {"N": N} | each(gb, weights=4 * N, states=12 * N, moments=8 * N)
    logits = 8 * 1024 * PRESETS["gpt2-medium"].vocab
    kept = 20 * 4 * logits
    yield "evaluate", {"batches": 20} | each(gb, kept=kept, one=4 * logits, half=kept // 2)
    yield "total", {}
    yield "counter", {}
    yield "one", {"N": N} | each(gb, foreach=20 * N, fused=16 * N, states=12 * N, forty=40 * N)
