"""The numbers in the quiz of lesson 06, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial
from math import isqrt

from ... import TrainingRun, estimate
from ...estimating.formula import block_bytes, input_bytes
from ...estimating.published import checkpoints_bytes, zero_activation_bytes, zero_checkpointed_bytes
from ...interactive.quiz import Numbers, gb
from ...units import each, format_bytes, percent

RUN = TrainingRun("gpt2-xl", 32, 1024, recompute="full")


def numbers() -> Iterator[Numbers]:
    n = 64
    k = isqrt(n)
    yield "square_root", {"n": n, "k": k, "alive": n // k + k, "second": n // 2 + 2}
    forward, backward = 1, 2
    third = forward / (forward + backward)
    new_total = forward / (2 * forward + backward)
    yield "a_third_more", each(percent, third=third, half=forward / backward, whole=1.0, new_total=new_total)
    run = TrainingRun("gpt2-xl", 32, 1000, attention="eager")
    kept = checkpoints_bytes(run)
    zero = zero_checkpointed_bytes(run)
    everything = zero_activation_bytes(run)
    sizes = each(gb, checkpoints=kept, zero=zero, everything=everything, block=kept // run.model.layers)
    yield "where_8_gb_come_from", sizes
    keep = RUN.replace(recompute="none")
    live = block_bytes(keep)
    stream = input_bytes(keep)
    sizes = {"live": live, "stream": stream, "inside": live - 2 * stream, "blocks": live * keep.model.layers}
    yield "what_stays_alive", each(partial(format_bytes, unit="GB", digits=2), **sizes)
    states = sum(estimate(RUN)[kind] for kind in ("parameters", "gradients", "optimizer_states"))
    N = RUN.model.parameters
    yield "what_stays_anyway", each(gb, states=states, all=16 * N, weights=2 * N, peak=estimate(keep).total)
