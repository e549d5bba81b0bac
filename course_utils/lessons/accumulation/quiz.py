"""The numbers in the quiz of lesson 07, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ... import TrainingRun, estimate, format_bytes
from ...interactive.quiz import Numbers
from ...units import each

RUN = TrainingRun("gpt2", 4, 1024, accumulation_steps=25)
_mb, _gb = (partial(format_bytes, unit=unit, digits=digits) for unit, digits in (("MB", 0), ("GB", 2)))


def numbers() -> Iterator[Numbers]:
    count, k = 103, 8
    yield (
        "last_group",
        {"count": count, "k": k, "groups": -(-count // k), "whole": count // k, "rest": count % k},
    )
    short, long = 100, 700
    shares = {"share": short / (short + long), "half": 1 / 2, "other": long / (short + long)}
    yield "a_long_sequence", {"short": short, "long": long, "ratio": short / long} | shares
    alone, at_once = (estimate(RUN.replace(micro_batch=b, accumulation_steps=1)).total for b in (4, 100))
    extra = estimate(RUN).total - alone
    yield "what_stays", each(_mb, extra=extra, each_time=25 * extra, at_once=at_once - alone)
    k, N = 8, RUN.model.parameters
    sizes = each(_gb, exchanged=4 * k * N, once=4 * N, halved=2 * k * N, parted=4 * N // k)
    yield "without_no_sync", {"k": k} | sizes
