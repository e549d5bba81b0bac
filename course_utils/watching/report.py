"""The report on a script that was watched: its peak, the cards that it fits, and what would lower it."""

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any

from ..allocator.replay import replay
from ..estimating.workspaces import installed_torch
from ..gpus import IMITATED, Gpu
from ..measurement import Allocation, HostMemory, Measurement, Messages
from ..palette import words
from ..terminal import WIDE, stack, within
from ..units import aligned, cut, format_bytes, percent
from .which_cards import Answer, answer_on, answers

ORDERED_BY_AGE = (2, 13)  # From this torch on it does not matter where the driver places a segment
VERSION = 1  # Of `Report.to_dict`
WORTH_IT = 0.03  # Part of the peak that a change has to save to be named
CHUNKS = 8  # Pieces that the loss is computed in
# Of fp32: one byte each, and an fp32 scale for 256 (bitsandbytes' block-wise states)
EIGHT_BIT = (1 + 4 / 256) / 4
EIGHT_BIT_FROM = 4096  # Elements below which bitsandbytes keeps fp32
NOT_COUNTED = (
    "of the host's memory tensors alone are counted: not Python's objects, NumPy's arrays, mapped files,"
    " a DataLoader's workers and its pinned batches, or the CUDA context's part"
)
PASSING = ("activations", "temporaries")  # Kinds of what a pass makes

Part = Callable[[Allocation], float]
"""The part of an allocation, from 0 to 1, that is left after a change."""

Blocks = dict[tuple[str, int], list[Allocation]]
"""What each block keeps, by its name and the number of backward passes before."""


@dataclass(frozen=True)
class Report:
    """All that `watch` prints of a script that was watched on `card`; `to_dict` has the same as plain data.

    `wanted` is the answer for the card or budget that somebody named, None where nobody did.
    """

    measured: Measurement
    card: Gpu
    allocated: int
    reserved: int
    wanted: Answer | None
    count: int

    @property
    def changes(self) -> list[tuple[str, int]]:
        """Changes that would lower the peak, and its bytes then."""
        return changed_peaks(self.measured)

    @property
    def cards(self) -> list[Answer]:
        """The answer for each card of the catalog."""
        return list(answers(self.allocated, self.reserved, self.card))

    @property
    def notes(self) -> list[str]:
        """Sentences on how it was watched."""
        found = self.measured.provenance.note.split("; ")
        return [*found, NOT_COUNTED] if self.measured.host else found

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, sizes in bytes; a change of its form changes "version"."""
        peak = self.measured.peak
        largest = self.measured.explain(self.count)
        return {
            "format": "course_utils watch",
            "version": VERSION,
            **self.measured.to_dict(),
            "allocated": self.allocated,
            "reserved": self.reserved,
            "card": self.card.name,
            "wanted": self.wanted.to_dict() if self.wanted else None,
            "cards": [answer.to_dict() for answer in self.cards],
            "largest": [row.to_dict() for row in largest.rows],
            "rest": {"count": largest.rest, "bytes": largest.rest_bytes},
            "changes": [{"what": what, "peak": then, "saved": peak - then} for what, then in self.changes],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int = WIDE, colors: bool = False) -> str:
        """The report for a terminal of so many characters, which shows the colors of memory if asked to."""
        measured = self.measured
        word = "simulated" if measured.source == "simulated" else "measured"
        run = ", in the whole run" if measured.parts else ""
        peaks = [
            ("peak", _in_gb(measured.peak), f"peak of the tensors, {word}, in {measured.peak_phase}"),
            ("allocated", _in_gb(self.allocated), f"by the allocator's rules{run} (max_memory_allocated)"),
            ("reserved", _in_gb(self.reserved), f"by the same{run} (max_memory_reserved)"),
        ]
        peaks += [
            ("not predicted", _seen(most), f"cuDNN's workspace for convolutions ({kind}), as an H200 took it")
            for kind, most in measured.not_predicted.items()
        ]
        if measured.host:
            peaks.append(("host memory", _in_gb(measured.host.peak), _of_host(measured.host)))
        origin = replace(measured.provenance, note="")
        title = f"The largest tensors at the peak ({origin}):"
        largest = replace(measured.explain(self.count), title=title)
        lines = [*_parts(measured, width), aligned(peaks, 3), ""]
        lines += [stack(measured.breakdown, min(width, 100), colors), "", largest.to_text(width), ""]
        if measured.messages:
            lines += ["Messages to other ranks in this step:", _messages(measured.messages), ""]
        if self.wanted:
            lines += [f"{self.wanted.name}: {self.wanted.words.lower()}", ""]
        lines += [*lines_of_cards(measured, self.cards), ""]
        rows = [(what, _in_gb(peak), f"−{percent(1 - peak / measured.peak)}") for what, peak in self.changes]
        if rows:
            lines.append("Estimated peak after one change, all other tensors as in this step:")
            lines.append(aligned(rows))
        lines.append("")
        lines += [f"- {note}" for note in self.notes]
        return within("\n".join(lines), width)


def report(measured: Measurement, card: Gpu = IMITATED, wanted: Gpu | None = None, count: int = 10) -> Report:
    """The report on a script that was watched on `card`: with the answer for `wanted`, if that is given."""
    if measured.parts:
        allocated = max(part.allocated for part in measured.parts)
        reserved = max(part.reserved for part in measured.parts)
    else:
        replayed = replay(measured, descending=installed_torch() < ORDERED_BY_AGE)
        allocated, reserved = replayed.peak_allocated, replayed.peak_reserved
    answer = answer_on(wanted, allocated, reserved, card) if wanted else None
    return Report(measured, card, allocated, reserved, answer, count)


def _parts(measured: Measurement, width: int) -> Iterator[str]:
    """Lines on the parts of a whole run; none for a script that was watched for its steps alone."""
    if not measured.parts:
        return
    largest = max(measured.parts, key=lambda part: part.allocated)
    rows = [("peak", "before", "after", "part", "", "most of it", "begins in")]
    for part in measured.parts:
        kind, size = max(part.breakdown.items(), key=lambda item: item[1])
        share = f"{percent(size / part.breakdown.total)} {words(kind)}" if size else ""
        sizes = (_in_gb(part.allocated), _in_gb(part.before), _in_gb(part.after))
        rows.append((*sizes, part.name, "largest" if part is largest else "", share, part.line))
    steps = sum(name.startswith("end of step") for name in measured.moments)
    yield f"The whole run, with training up to step {steps}. The largest peak says which card to choose:"
    lines = aligned(rows, range(3, 7)).split("\n")  # numbers come first
    if max(map(len, lines)) > width:  # two lines for each part
        begins = aligned([row[:5] for row in rows], range(3, 5)).split("\n")
        more = [", ".join(filter(None, row[5:])) for row in rows]
        lines = [f"{begin}\n{cut(f'    {rest}', width)}" for begin, rest in zip(begins, more, strict=True)]
    yield from lines
    yield ""
    yield "The last step that was watched:"


def _of_host(host: HostMemory) -> str:
    pinned = f", {_in_gb(host.pinned)} of them pinned" if host.pinned else ""
    ranks = ""
    if host.ranks > 1:
        ranks = f"; if each of {host.ranks} ranks on a node takes as much: {_in_gb(host.ranks * host.peak)}"
    return f"of tensors on the host at most{pinned}, in {host.line}{ranks}"


def _in_gb(size: int) -> str:
    return format_bytes(size, "GB", 3)


def _seen(most: int | None) -> str:
    return "never recorded" if most is None else f"up to {_in_gb(most)}"


def _messages(messages: Sequence[Messages]) -> str:
    rows = [("", "", "together", "sent in a ring")]
    rows += [
        (one.kind, f"{one.count} ×", format_bytes(one.bytes), format_bytes(one.sent)) for one in messages
    ]
    return aligned(rows)


def lines_of_cards(measured: Measurement, found: Sequence[Answer]) -> Iterator[str]:
    """Cards by whether the script fits them, a line for each answer."""
    by_words: dict[str, list[str]] = {}
    for answer in found:
        by_words.setdefault(answer.words, []).append(answer.name)
    yield from (f"{words}: {', '.join(names)}" for words, names in sorted(by_words.items()))
    older = [answer.card.name for answer in found if not answer.card.has_bf16]
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
