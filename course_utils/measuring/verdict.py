"""Does a run fit a card? The closed form, then a simulated step, then the allocator with the card's room."""

from dataclasses import dataclass

from ..allocator.replay import replay
from ..errors import SimulationUnavailable
from ..estimating import estimate
from ..gpus import GPUS, Gpu, gpu
from ..planning.twin import named, unsupported
from ..run import TrainingRun
from ..units import format_bytes
from .sources import measure

CONTEXT = 549_060_608
"""Bytes of CUDA's context, as recorded on an H200 (docs/gpu_results.md), taken for that of any card."""


@dataclass(frozen=True, repr=False)
class Verdict:
    """The answer whether `run` fits `card`, and the bytes that say so.

    `estimated` is the closed form's peak, `tensors` the simulated step's, `reserved` what the allocator takes
    for it. All have to be in `room`, what the card leaves after the driver's share and CUDA's context.
    `failure` is the reason why it does not fit, "" if it does.
    """

    run: TrainingRun
    card: Gpu
    estimated: int
    tensors: int
    reserved: int
    room: int
    failure: str

    @property
    def fits(self) -> bool:
        """True if the allocator found room for every tensor of the step."""
        return not self.failure

    def __repr__(self) -> str:
        rows = [
            ("closed form", self.estimated),
            ("simulated step, tensors", self.tensors),
            ("reserved, when it failed" if self.failure else "reserved by the allocator", self.reserved),
            (f"room on {named(self.card)}", self.room),
        ]
        lines = [f"{name:<28}{format_bytes(size, 'GB', 3):>12}" for name, size in rows]
        return "\n".join([*lines, f"✗ {self.failure}" if self.failure else "✓ It fits."])


def verdict(run: TrainingRun, card: str | Gpu) -> Verdict:
    """The answer whether `run` fits `card`: its simulated step goes through the allocator in the room there.

    A card of the catalog adds cuBLAS's workspaces; `card_here()` may be another one. NCCL's buffers and other
    programs on the card are not in it. Raises ValueError like `measure`, and for a card that cannot run
    `run`; SimulationUnavailable where torch cannot simulate a step: `estimate` and `fit` work there, without
    a verdict.
    """
    card = card if isinstance(card, Gpu) else gpu(card)
    if reason := unsupported(run, card.capability):
        raise ValueError(reason)
    room = card.room  # of a card here, what is free: its context is there already
    if card.name in GPUS:
        run = run.replace(card=card.name)
        room -= CONTEXT
    measured = measure(run, "simulated")
    if measured.source != "simulated":
        raise SimulationUnavailable(f"a verdict needs a simulated step, this is {measured.provenance}")
    replayed = replay(measured, room)
    found = {"estimated": estimate(run).total, "tensors": measured.peak, "reserved": replayed.peak_reserved}
    return Verdict(run, card, **found, room=room, failure=replayed.message)
