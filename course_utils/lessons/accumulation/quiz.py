"""The numbers in the quiz of lesson 08, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial
from math import ceil

from ... import TrainingRun, estimate, format_bytes
from ...interactive.quiz import Numbers
from ...units import each

RUN = TrainingRun("gpt2", 4, 1024, accumulation_steps=25)
_mb = partial(format_bytes, unit="MB", digits=0)
_gb = partial(format_bytes, unit="GB", digits=2)


def numbers() -> Iterator[Numbers]:
    count, k = 103, 8
    whole, rest = divmod(count, k)
    yield "last_group", {"count": count, "k": k, "groups": ceil(count / k), "whole": whole, "rest": rest}
    short, long = 100, 700
    shares = {"share": short / (short + long), "half": 1 / 2, "other": long / (short + long)}
    yield "a_long_sequence", {"short": short, "long": long, "ratio": short / long} | shares
    alone = estimate(RUN.replace(accumulation_steps=1)).total
    at_once = estimate(RUN.replace(micro_batch=100, accumulation_steps=1)).total
    extra = estimate(RUN).total - alone
    yield "what_stays", each(_mb, extra=extra, each_time=25 * extra, at_once=at_once - alone)
    N = RUN.model.parameters
    sizes = each(_gb, exchanged=4 * k * N, once=4 * N, halved=2 * k * N, parted=4 * N // k)
    yield "without_no_sync", {"k": k} | sizes
