"""The numbers in the quiz of lesson 19, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ... import TrainingRun, estimate, gpu
from ...interactive.quiz import Numbers, gb
from ...planning.twin import SAFETY
from ...units import GB, GiB, each, format_bytes

XL = TrainingRun("gpt2-xl", 32, 1024)
_gb = partial(format_bytes, unit="GB", digits=0)
_mib = partial(format_bytes, unit="MiB", digits=0)


def numbers() -> Iterator[Numbers]:
    card = gpu("A100-80GB")
    room = round(card.room / SAFETY)
    memory = round(80 * GiB / SAFETY)
    yield "room", each(gb, room=room, card=card.room, label=80 * GB, memory=memory)
    runs = XL, XL.replace(micro_batch=4, accumulation_steps=8), XL.replace(micro_batch=4)
    whole, parts, one = (estimate(run).total for run in runs)
    yield "smaller", each(_gb, whole=whole, parts=parts, eighth=whole // 8, one=one)
    N = TrainingRun("llama3-8b").model.parameters
    yield "untouched", each(_gb, floor=16 * N, weights=2 * N, no_gradients=12 * N, copies=18 * N)
    b, s, a, h, V = 4, 1024, 12, 768, 50257
    sizes = each(
        _mib, scores=4 * b * a * s * s, logits=2 * b * s * V, wide=8 * b * s * h, input=4 * b * s * h
    )
    yield "request", {"b": b, "s": s, "a": a, "h": h, "V": V} | sizes
    capacity = 6 * GiB
    asked = 20 * 2**20
    sizes = each(_mib, asked=asked, crumbs=capacity // 50)
    yield "crumbs", {"capacity": format_bytes(capacity, "GiB", 0)} | sizes
