"""Numbers for the quiz of lesson 13, question by question. Its texts are in quiz.toml."""

from collections.abc import Iterator

from ... import PRESETS
from ...interactive.quiz import Numbers, gb
from ...units import each


def numbers() -> Iterator[Numbers]:
    N = PRESETS["gpt2-medium"].parameters
    yield "resume", {"N": N} | each(gb, weights=4 * N, states=12 * N, moments=8 * N)
    yield "total", {}
    yield "counter", {}
    yield "one", {"N": N} | each(gb, foreach=20 * N, fused=16 * N, states=12 * N, forty=40 * N)
