"""The numbers in the quiz of lesson 10, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ... import TrainingRun, estimate, format_bytes
from ...estimating.formula_of_ranks import rank_0_states
from ...estimating.sharding import all_reduce_bytes, bucket_sizes
from ...interactive.quiz import Numbers, gb
from ...units import each

RUN = TrainingRun("gpt2-medium", 4, 1024, "amp-bf16", world_size=8)
_mb = partial(format_bytes, unit="MB", digits=0)
_gb = partial(format_bytes, unit="GB", digits=2)


def numbers() -> Iterator[Numbers]:
    whole = sum(rank_0_states(RUN).values())
    D = RUN.world_size
    parts = each(gb, replica=whole, shared=whole // D, no_gradients=whole * 3 // 4, no_moments=whole // 2)
    yield "states_of_a_rank", {"D": D} | parts
    ranks, size = 5, 200_000_000
    sent = all_reduce_bytes(size, ranks)
    sizes = each(_mb, ring=sent, half=sent // 2, everybody=(ranks - 1) * size, limit=2 * size)
    yield "bytes_of_a_ring", {"D": ranks} | sizes
    held = estimate(RUN)["communication"]
    yield "buckets", each(_gb, buckets=held, largest=max(bucket_sizes(RUN)), half=held // 2, share=held // D)
    k, size = 8, 300_000_000
    sizes = each(_mb, saved=(k - 1) * size, all=k * size, last=size, part=size // k)
    yield "what_no_sync_saves", {"k": k} | sizes
    few, many = 8, 64
    factors = {"ranks": many // few, "messages": many * (many - 1) / (few * (few - 1))}
    yield "steps_of_a_ring", {"few": few, "many": many, "ring": (many - 1) / (few - 1)} | factors
