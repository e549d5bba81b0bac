"""The rule by which a script fits a card, in one place: the report, the JSON and the exit code follow it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..estimating.workspaces import workspaces_of
from ..gpus import GPUS, Gpu
from ..planning.twin import SAFETY
from ..units import format_bytes

FITS = "Fits"
FROM_CACHE = "Fits if the allocator returns what it caches"
TOO_SMALL = "Too small"


@dataclass(frozen=True)
class Answer:
    """An answer to "does it fit?", from a script's allocated and reserved bytes, each with 5 % in reserve.

    What is allocated has to fit. Where what is reserved does not, the allocator has to return memory that it
    caches. It does so by itself before it raises an error, but holes between tensors may remain.
    """

    card: Gpu
    allocated: int
    reserved: int

    @property
    def fits(self) -> bool:
        """True if the allocated bytes fit, with what the allocator caches or without."""
        return self.short <= 0

    @property
    def short(self) -> int:
        """Bytes that the card lacks; 0 or less if the allocated bytes fit."""
        return int(self.allocated * SAFETY) - self.card.room

    @property
    def words(self) -> str:
        """FITS, FROM_CACHE or TOO_SMALL."""
        if not self.fits:
            return TOO_SMALL
        return FITS if self.reserved * SAFETY <= self.card.room else FROM_CACHE

    @property
    def name(self) -> str:
        """The card's name, with the bytes that it lacks."""
        return self.card.name if self.fits else f"{self.card.name} (by {format_bytes(self.short)})"

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data, sizes in bytes; "short" is 0 where it fits."""
        sizes = {"room": self.card.room, "allocated": self.allocated, "reserved": self.reserved}
        sizes["short"] = max(0, self.short)
        return {"name": self.card.name, "fits": self.fits, "answer": self.words} | sizes


def answer_on(card: Gpu, allocated: int, reserved: int, was: Gpu) -> Answer:
    """The answer for a card, from what was allocated and reserved on the card that it `was` watched on."""
    # one workspace of cuBLAS for forward's thread, one for backward's
    more = 2 * (workspaces_of(card.capability).cublas - workspaces_of(was.capability).cublas)
    return Answer(card, allocated + more, reserved + more)


def answers(allocated: int, reserved: int, was: Gpu) -> Iterator[Answer]:
    """The answer for each card of the catalog, in its order."""
    yield from (answer_on(card, allocated, reserved, was) for card in GPUS.values())


def with_room(card: Gpu, budget: int | None) -> Gpu:
    """The card with a budget of bytes in place of its own room; itself without one."""
    if budget is None:
        return card
    return replace(card, name=f"Budget of {format_bytes(budget)}", memory=budget, usable=budget)
