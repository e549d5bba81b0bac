"""The numbers in the quiz of lesson 14, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ...interactive.quiz import Numbers
from ...run import TrainingRun
from ...units import each, format_bytes, percent
from .schedules import bubble, most_kept, simulate

RUN = TrainingRun("gpt2-xl", 4, 1024, "bf16-master")
P, M, STAGE = 8, 24, 2


def numbers() -> Iterator[Numbers]:
    known = {"P": P, "M": M}
    waits = bubble(P, M)
    parts = each(percent, bubble=waits, ratio=(P - 1) / M, naive=1 - 1 / P, one_more=P / (M + P))
    yield "the_bubble", known | parts
    deeper = bubble(2 * P, M)
    more = bubble(P, 2 * M)
    parts = each(percent, bubble=deeper, before=waits, doubled=2 * waits, micro_batches=more)
    yield "twice_the_stages", known | {"longer": 2 * P} | parts
    kept, gpipe = (most_kept(schedule, P, M, STAGE) for schedule in ("1F1B", "GPipe"))
    counts = {"kept": kept, "gpipe": gpipe, "first": most_kept("1F1B", P, M, 0), "behind": STAGE + 1}
    yield "what_1f1b_keeps", known | {"stage": STAGE} | counts
    pipeline = simulate("PipeDream", 5, 40)
    flush = simulate("1F1B", 5, 40).late(STAGE)
    updates = {"late": pipeline.late(STAGE), "versions": pipeline.versions(STAGE), "first": pipeline.late(0)}
    yield "how_late", updates | {"stage": STAGE, "flush": flush}
    s, b, h, L = RUN.seq_len, RUN.micro_batch, RUN.model.hidden, RUN.model.layers
    stream = 2 * s * b * h
    weights = 2 * RUN.model.parameters // 4
    mb = partial(format_bytes, unit="MB", digits=1)
    sizes = each(mb, stream=stream, streams=stream * L, weights=weights)
    yield "what_crosses_a_cut", {"b": b, "s": s} | sizes
