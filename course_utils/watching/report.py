"""The report on a script that was watched: its peak, the cards that it fits, and what would lower it."""

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from types import MappingProxyType

from ..allocator.replay import replay
from ..estimating.workspaces import workspaces_of
from ..gpus import GPUS
from ..measurement import Allocation, Measurement
from ..measuring.cuda_answers import CARD
from ..planning.twin import SAFETY
from ..units import aligned, format_bytes, percent

WORTH_IT = 0.03  # Part of the peak that a change has to save to be named
CHUNKS = 8  # Pieces that the loss is computed in
# Of fp32: one byte each, and an fp32 scale for 256 (bitsandbytes' block-wise states)
EIGHT_BIT = (1 + 4 / 256) / 4
EIGHT_BIT_FROM = 4096  # Elements below which bitsandbytes keeps fp32
PASSING = ("activations", "temporaries")  # Kinds of what a pass makes

Part = Callable[[Allocation], float]
"""The part of an allocation, from 0 to 1, that is left after a change."""

Blocks = dict[tuple[str, int], list[Allocation]]
"""What each block keeps, by its name and the number of backward passes before."""


def report(measured: Measurement, count: int = 10) -> str:
    """All that `watch` prints."""
    replayed = replay(measured)
    word = "simulated" if measured.source == "simulated" else "measured"
    allocated = replayed.peak_allocated
    reserved = replayed.peak_reserved
    peaks = [
        ("peak", _in_gb(measured.peak), f"peak of the tensors, {word}, in {measured.peak_phase}"),
        ("allocated", _in_gb(allocated), "by the allocator's rules (max_memory_allocated)"),
        ("reserved", _in_gb(reserved), "by the same (max_memory_reserved)"),
    ]
    lines = [aligned(peaks, 3), "", str(measured.breakdown), "", repr(measured.explain(count)), ""]
    lines += [*cards(measured, allocated, reserved), ""]
    rows = [
        (what, _in_gb(peak), f"−{percent(1 - peak / measured.peak)}")
        for what, peak in changed_peaks(measured)
    ]
    if rows:
        lines.append("Estimated peak after one change, all other tensors as in this step:")
        lines.append(aligned(rows))
    lines.append("")
    lines += [f"- {note}" for note in measured.provenance.note.split("; ")]
    return "\n".join(lines)


def _in_gb(size: int) -> str:
    return format_bytes(size, "GB", 3)


def cards(measured: Measurement, allocated: int, reserved: int) -> Iterator[str]:
    """Cards of the catalog by whether the script fits them with 5 % in reserve, a line for each answer."""
    found: dict[str, list[str]] = {}
    here = workspaces_of(CARD.capability).cublas
    for card in GPUS.values():
        # one for forward's thread, one for backward's
        more = 2 * (workspaces_of(card.capability).cublas - here)
        short = int((allocated + more) * SAFETY) - card.room
        name = card.name
        if short > 0:
            answer = "Too small"
            name += f" (by {format_bytes(short)})"
        elif (reserved + more) * SAFETY <= card.room:
            answer = "Fits"
        else:
            answer = "Fits if the allocator returns what it caches"
        found.setdefault(answer, []).append(name)
    yield from (f"{answer}: {', '.join(names)}" for answer, names in sorted(found.items()))
    older = [card.name for card in GPUS.values() if not card.has_bf16]
    if any(item.dtype == "bfloat16" for item in measured.allocations):
        yield f"No bf16 arithmetic and no flash kernel: {', '.join(older)}"


def changed_peaks(measured: Measurement) -> list[tuple[str, int]]:
    """Changes that would lower the peak by 3 % or more, and its bytes then, the smallest first."""
    tried = [(what, peak_with(measured, part)) for what, part in _changes(measured)]
    blocks = _blocks(measured)
    if blocks:
        count = len({name for name, _ in blocks})
        recomputed = f"each of the {count} blocks recomputed in backward (torch.utils.checkpoint)"
        tried.append((recomputed, peak_with(measured, away=_recomputed(blocks))))
    worth = (1 - WORTH_IT) * measured.peak
    return sorted(((what, peak) for what, peak in tried if peak < worth), key=lambda change: change[1])


def peak_with(
    measured: Measurement,
    part: Part = lambda _: 1,
    away: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> int:
    """The peak of the last step, in bytes, if only this part of each allocation were there.

    Those in `away`, by the event that made them, are not there from one event until another.
    """
    changes = [0] * len(measured.timeline)
    for item in measured.allocations:
        left = int(item.bytes * part(item))
        gone, back = away.get(item.born, (item.died, None))
        events = [(item.born, left), (gone, -left), (back, left)]
        if back:
            events.append((item.died, -left))
        for event, size in events:
            if event is not None:
                changes[event] += size
    marks = measured.timeline.marks
    start = 0
    if marks and marks[-1].step > 1:
        start = next(mark.event for mark in marks if mark.step == marks[-1].step)
    return max(list(accumulate(changes))[start:], default=0)


def _changes(measured: Measurement) -> Iterator[tuple[str, Part]]:
    """Changes of a script, each with the part that it leaves of an allocation."""
    items = measured.allocations
    yield "half the batch at a time", _of_half_the_batch(items)
    yield f"the loss in {CHUNKS} chunks, with the layer before it", _of_a_chunked_loss(items)
    if any(item.kind == "optimizer_states" and item.dtype == "float32" for item in items):
        yield "optimizer states in 8 bits (bitsandbytes, as AdamW8bit)", _of_8_bit_states
    yield "a fused optimizer (fused=True), which needs no temporaries", _of_a_fused_optimizer
    yield "scaled_dot_product_attention, which keeps no score matrix", _without_scores(items)


def _of_half_the_batch(items: Sequence[Allocation]) -> Part:
    weights = {item.shape for item in items if item.kind == "parameters"}

    def part(item: Allocation) -> float:
        halved = item.kind in ("activations", "inputs")
        if item.kind == "temporaries":  # those of the optimizer, or of a weight's shape, are of no batch
            halved = item.phase != "optimizer" and item.shape not in weights
        return 0.5 if halved else 1

    return part


def _of_a_chunked_loss(items: Sequence[Allocation]) -> Part:
    logits = {prod(item.shape) for item in items if item.operation == "_log_softmax"}

    def part(item: Allocation) -> float:
        of_loss = item.module == "(loss)" or prod(item.shape) in logits
        return 1 / CHUNKS if item.kind in PASSING and of_loss else 1

    return part


def _of_8_bit_states(item: Allocation) -> float:
    large = prod(item.shape) >= EIGHT_BIT_FROM
    return EIGHT_BIT if item.kind == "optimizer_states" and large else 1


def _of_a_fused_optimizer(item: Allocation) -> float:
    return 0 if item.kind == "temporaries" and item.phase == "optimizer" else 1


def _without_scores(items: Sequence[Allocation]) -> Part:
    scores = {item.shape for item in items if item.operation == "_softmax" and len(item.shape) > 2}

    def part(item: Allocation) -> float:
        return 0 if item.kind in PASSING and item.shape in scores else 1

    return part


def _recomputed(blocks: Blocks) -> dict[int, tuple[int, int]]:
    """Tensors that blocks keep, outputs aside, by birth: when they are freed, and when they are back.

    They are freed once the block has its output, and back before backward frees any.
    """
    found: dict[int, tuple[int, int]] = {}
    for items in blocks.values():
        *inner, output = sorted(items, key=lambda item: item.born)
        back = min((item.died or 0 for item in inner if item.kind == "activations"), default=0) - 1
        found |= {item.born: (output.born, back) for item in inner if (item.died or 0) > back}
    return found


def _blocks(measured: Measurement) -> Blocks:
    """Tensors kept by each block of the model.

    Blocks are modules whose names differ in one number, if there are at least 3 of them.
    """
    found: Blocks = {}
    marks = measured.timeline.marks
    backwards = [mark.event for mark in marks if mark.phase == "backward"]
    last_forward = (marks[-1].step, "forward")
    for item in measured.allocations:
        name = re.match(r"[^ ]*?\.\d+(?=\.|$)", item.module)
        kept = item.kind in ("activations", "weight_copies")
        if name and kept and (item.step, item.phase) == last_forward:
            found.setdefault((name[0], bisect(backwards, item.born)), []).append(item)
    return found if len({name for name, _ in found}) > 2 else {}
