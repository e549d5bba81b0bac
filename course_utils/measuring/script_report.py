"""The report on a script that was watched: its peak, the cards that it fits, and what
would make it smaller.
"""

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import prod
from types import MappingProxyType

from ..allocator.replay import replay
from ..estimating.workspaces import workspaces_of
from ..gpus import GPUS
from ..measurement import Allocation, Measurement
from ..planning.twin import SAFETY
from ..units import aligned, format_bytes, percent
from .memory import CARD

WORTH_IT = 0.03  # Part of the peak that a change has to save to be named
CHUNKS = 8  # Pieces that the loss is computed in
EIGHT_BIT = (
    1 + 4 / 256
) / 4  # Of fp32: one byte each, and an fp32 scale for 256 (bitsandbytes' block-wise states)
EIGHT_BIT_FROM = 4096  # Elements below which bitsandbytes keeps fp32

Part = Callable[[Allocation], float]
"""The part of an allocation, from 0 to 1, that is left after a change."""

Blocks = dict[tuple[str, int], list[Allocation]]
"""What each block keeps, by its name and the number of backward passes before."""


def report(measured: Measurement, count: int = 10) -> str:
    """All that `watch` prints."""
    replayed = replay(measured)
    word = "simulated" if measured.source == "simulated" else "measured"
    peaks = (measured.peak, replayed.peak_allocated, replayed.peak_reserved)
    meant = (
        ("peak", f"peak of the tensors, {word}, in {measured.peak_phase}"),
        ("allocated", "by the allocator's rules (max_memory_allocated)"),
        ("reserved", "by the same (max_memory_reserved)"),
    )
    shown = [
        (name, format_bytes(size, "GB", 3), text) for size, (name, text) in zip(peaks, meant, strict=True)
    ]
    notes = [f"- {note}" for note in measured.provenance.note.split("; ")]
    changes = changed_peaks(measured)
    rows = [
        (what, format_bytes(peak, "GB", 3), f"−{percent(1 - peak / measured.peak)}") for what, peak in changes
    ]
    return "\n".join(
        [
            aligned(shown, 3),
            "",
            str(measured.breakdown),
            "",
            repr(measured.explain(count)),
            "",
            *cards(measured, replayed.peak_allocated, replayed.peak_reserved),
            "",
            *(
                ["Estimated peak after one change, all other tensors as in this step:", aligned(rows)]
                if rows
                else []
            ),
            "",
            *notes,
        ]
    )


def cards(measured: Measurement, allocated: int, reserved: int) -> Iterator[str]:
    """Cards of the catalog by whether the script fits them, with a reserve of 5 %, one
    line for each answer.
    """
    found: dict[str, list[str]] = {}
    here = workspaces_of(CARD.capability).cublas
    for card in GPUS.values():
        # one for forward's thread, one for backward's
        more = 2 * (workspaces_of(card.capability).cublas - here)
        short = int((allocated + more) * SAFETY) - card.room
        if short > 0:
            found.setdefault("Too small", []).append(f"{card.name} (by {format_bytes(short)})")
        else:
            fits = (reserved + more) * SAFETY <= card.room
            found.setdefault("Fits" if fits else "Fits if the allocator returns what it caches", []).append(
                card.name
            )
    yield from (f"{answer}: {', '.join(names)}" for answer, names in sorted(found.items()))
    older = [card.name for card in GPUS.values() if not card.has_bf16]
    if any(item.dtype == "bfloat16" for item in measured.allocations):
        yield f"No bf16 arithmetic and no flash kernel: {', '.join(older)}"


def changed_peaks(measured: Measurement) -> list[tuple[str, int]]:
    """Changes that would lower the peak by 3 % or more, and the bytes of the peak then,
    the smallest first.
    """
    tried = [(what, peak_with(measured, part)) for what, part in _changes(measured)]
    blocks = _blocks(measured)
    recomputed = (
        f"each of the {len({name for name, _ in blocks})} blocks recomputed in backward"
        " (torch.utils.checkpoint)"
    )
    tried += [(recomputed, peak_with(measured, away=_recomputed(blocks)))] if blocks else []
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
        for event, size in (
            (item.born, left),
            (gone, -left),
            (back, left),
            (item.died if back else None, -left),
        ):
            if event is not None:
                changes[event] += size
    marks = measured.timeline.marks
    start = next((mark.event for mark in marks if marks[-1].step > 1 and mark.step == marks[-1].step), 0)
    return max(list(accumulate(changes))[start:], default=0)


def _changes(measured: Measurement) -> Iterator[tuple[str, Part]]:
    weights = {item.shape for item in measured.allocations if item.kind == "parameters"}
    of_batch = lambda item: (
        item.kind == "temporaries" and item.phase != "optimizer" and item.shape not in weights
    )  # noqa: E731
    halved = lambda item: 0.5 if item.kind in ("activations", "inputs") or of_batch(item) else 1  # noqa: E731
    yield "half the batch at a time", halved
    kept = ("activations", "temporaries")
    loss = f"the loss in {CHUNKS} chunks, with the layer before it"
    logits = {prod(item.shape) for item in measured.allocations if item.operation == "_log_softmax"}
    of_loss = lambda item: item.kind in kept and (item.module == "(loss)" or prod(item.shape) in logits)  # noqa: E731
    yield loss, lambda item: 1 / CHUNKS if of_loss(item) else 1
    eight = lambda item: (
        EIGHT_BIT if item.kind == "optimizer_states" and prod(item.shape) >= EIGHT_BIT_FROM else 1
    )  # noqa: E731
    if any(item.kind == "optimizer_states" and item.dtype == "float32" for item in measured.allocations):
        yield "optimizer states in 8 bits (bitsandbytes, as AdamW8bit)", eight
    of_update = lambda item: 0 if item.kind == "temporaries" and item.phase == "optimizer" else 1  # noqa: E731
    yield "a fused optimizer (fused=True), which needs no temporaries", of_update
    scores = {
        item.shape for item in measured.allocations if item.operation == "_softmax" and len(item.shape) > 2
    }
    by_hand = lambda item: 0 if item.kind in kept and item.shape in scores else 1  # noqa: E731
    yield "scaled_dot_product_attention, which keeps no score matrix", by_hand


def _recomputed(blocks: Blocks) -> dict[int, tuple[int, int]]:
    """Tensors that blocks keep, outputs aside: freed once the block has its output, back before backward
    frees any.
    """
    found: dict[int, tuple[int, int]] = {}
    for items in blocks.values():
        *inner, output = sorted(items, key=lambda item: item.born)
        back = min((item.died or 0 for item in inner if item.kind == "activations"), default=0) - 1
        found |= {item.born: (output.born, back) for item in inner if (item.died or 0) > back}
    return found


def _blocks(measured: Measurement) -> Blocks:
    """Tensors kept by each block of the model: modules whose names differ in one number, if there are at
    least 3.
    """
    found: Blocks = {}
    marks = measured.timeline.marks
    backwards = [mark.event for mark in marks if mark.phase == "backward"]
    for item in measured.allocations:
        name = re.match(r"[^ ]*?\.\d+(?=\.|$)", item.module)
        kept = item.kind in ("activations", "weight_copies") and (item.step, item.phase) == (
            marks[-1].step,
            "forward",
        )
        if name and kept:
            found.setdefault((name[0], bisect(backwards, item.born)), []).append(item)
    return found if len({name for name, _ in found}) > 2 else {}
