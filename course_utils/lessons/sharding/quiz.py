"""The numbers in the quiz of lesson 11, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ... import TrainingRun, format_bytes
from ...estimating.formula_of_ranks import buffers
from ...estimating.sharding import shard_shape, zero_bytes, zero_communication_elements
from ...interactive.quiz import Numbers, gb
from ...units import each

N, D = 7_500_000_000, 64
LLAMA = TrainingRun("llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=D, zero_stage=3)


def numbers() -> Iterator[Numbers]:
    floors = each(partial(format_bytes, unit="GB", digits=0), stage_2=2 * N, stage_1=4 * N, divided=14 * N)
    yield "the_floor", {"billions": N / 1e9, "D": D, "stage_3": gb(zero_bytes(N, D, 3))} | floors
    plain, three = (zero_communication_elements(N, stage) for stage in (0, 3))
    more = {"more": 100 * (three / plain - 1), "all_reduce": 100 * (three / N - 1)}
    yield "half_as_much_again", more | {"D": D}
    rows, columns, ranks = 50, 3, 8
    padding = ranks * shard_shape((rows, columns), ranks)[0] * columns - rows * columns
    counts = {"padding": padding, "single": -rows * columns % ranks, "padded_rows": padding // columns}
    yield "padded_rows", {"rows": rows, "columns": columns, "ranks": ranks} | counts
    held = buffers(LLAMA)
    whole = 2 * LLAMA.model.parameters
    sizes = {"outer": held.outer.whole, "block": held.block.whole, "model": whole, "shard": whole // D}
    yield "the_largest_unit", {"D": D} | each(partial(format_bytes, unit="GB", digits=2), **sizes)
    paper = plain // N
    yield "stage_1_of_torch", {"sent": paper + 1, "paper": paper, "like": paper + 2}
