"""The numbers in the quiz of lesson 15, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ...estimating.sharding import zero_bytes
from ...interactive.quiz import Numbers
from ...model_files import model_config
from ...units import each, format_bytes

T, RANKS, TOKENS, CHOICES, FACTOR = 8, 8, 4096, 2, 1.25
PARAMETERS, REPLICAS = 70 * 10**9, 64


def numbers() -> Iterator[Numbers]:
    ring = 2 * (T - 1) / T
    sends = {"ring": 4 * ring, "messages": 4, "forward": 2 * ring, "cut": 4 * ring / T}
    yield "what_tensor_parallelism_sends", {"t": T} | sends
    gpt3 = model_config("gpt3-175b")
    scores = 5 * gpt3.heads * 2048 / gpt3.hidden
    linear = 34 / (10 + 24 / T)
    factor = (34 + scores) / (10 + (24 + scores) / T)
    yield "what_tensor_parallelism_keeps", {"t": T, "factor": factor, "linear": linear}
    equal = TOKENS * CHOICES
    pairs = {"capacity": int(FACTOR * equal), "equal": equal, "all": RANKS * equal, "single": TOKENS}
    yield "what_experts_keep", {"ranks": RANKS, "tokens": TOKENS, "k": CHOICES, "factor": FACTOR} | pairs
    gb = partial(format_bytes, unit="GB", digits=0)
    stages = {f"zero_{stage}": zero_bytes(PARAMETERS, REPLICAS, stage) for stage in (1, 3)}
    states = 12 * PARAMETERS // REPLICAS
    yield "what_zero_1_keeps", each(gb, **stages, replica=16 * PARAMETERS, states=states)
