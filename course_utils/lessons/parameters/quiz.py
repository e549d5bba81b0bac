"""The numbers in the quiz of lesson 04, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial
from math import prod

from ...interactive.quiz import Numbers
from ...models import PRESETS, block_shapes, mlp_shapes
from ...units import each, format_bytes, percent

_gb = partial(format_bytes, unit="GB", digits=0)


def numbers() -> Iterator[Numbers]:
    model = PRESETS["gpt2-xl"]
    block, mlp = (sum(map(prod, shapes_of(model).values())) for shapes_of in (block_shapes, mlp_shapes))
    yield "one_block", each(percent, mlp=mlp / block, attention=1 - mlp / block, one=4 / 8, three=8 / 11)
    model = PRESETS["gpt2"]
    words = model.vocab * model.hidden
    N = model.parameters
    yield "tied_head", {"doubled": (N + words) / 1e6, "once": N / 1e6, "missing": (N - words) / 1e6}
    blocks = 12 * model.layers * model.hidden**2
    grown = (2 * words + 4 * blocks) / (words + blocks)
    yield "twice_as_wide", each("{:.1f} times".format, grown=grown, four=4, two=2, eight=8)
    model = PRESETS["llama3-8b"]
    shrunk = 1 - model.kv / model.hidden
    parts = each(percent, two=shrunk * 2 / 4, both=shrunk, one=shrunk / 4, three=shrunk * 3 / 4)
    yield "grouped_queries", {"heads": model.heads, "kv_heads": model.kv_heads} | parts
    model = PRESETS["mixtral-8x7b"]
    dense = PRESETS["mistral-7b"]
    every = model.parameters
    active = model.active_parameters
    eight = 8 * dense.parameters
    sizes = each(_gb, all=16 * every, active=16 * active, models=16 * eight, weights=2 * every)
    yield "states_of_experts", sizes
