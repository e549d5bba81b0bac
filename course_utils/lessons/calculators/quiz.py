"""The numbers in the quiz of lesson 18, question by question; its words are in quiz.toml."""

from collections.abc import Iterator

from ...estimating import formula
from ...interactive.quiz import Numbers, gb
from ...run import TrainingRun
from ...units import GB, GiB, each, format_bytes, plus_minus

LLAMA = TrainingRun("llama3.1-8b", 1, 8192)
XL = TrainingRun("gpt2-xl", 32, 1024)


def numbers() -> Iterator[Numbers]:
    a, s, L = LLAMA.model.heads, LLAMA.seq_len, LLAMA.model.layers
    block = 5 * a * s * s
    sizes = each(gb, term=block * L, block=block, no_dropout=3 * a * s * s * L, none=0)
    yield "not_there", {"a": a, "L": L, "s": s} | sizes
    N = LLAMA.model.parameters
    yield "at_once", each(gb, there=12 * N, all=16 * N, master=18 * N, moments=8 * N)
    ways = {"other_way": 80 * GB / GiB, "thousands": 80 * 1.024}
    yield "unit", each(gb, right=80 * GiB, same=80 * GB) | ways
    states, blocks, loss = 6, 5, -10
    total = states + blocks + loss
    grown = states + 2 * (blocks + loss)
    loss_alone = states + blocks + 2 * loss
    known = {"states": states, "blocks": blocks, "missing": -loss, "total": total}
    totals = each(plus_minus, grown=grown, same=total, doubled=2 * total, loss_alone=loss_alone)
    yield "by_chance", known | totals
    kept = formula.moments(XL)["after loss"]["weight_copies"]
    share = format_bytes(kept // XL.model.layers, "GB", 2)
    yield "copies", each(gb, copies=kept, none=0, fp32=2 * kept) | {"block": share}
