"""The tensors that forward keeps for backward: the sum is the formula, the list is the explanation.

The lists are read off the tape of a step that keeps everything (`network.py`). In 16-bit, with GPT-2's eager
attention, a block's is s·b·h·(34 + 5·a·s/h) bytes (Korthikanti et al. 2022, table 2), plus the norms'
statistics.
"""

from math import prod
from typing import NamedTuple

from ...run import TrainingRun
from ...units import round_up
from .program import Reading, compiled
from .structure import structure, symbols
from .tape import HEAD, LOSS, STEM, Place


class Saved(NamedTuple):
    """One tensor that autograd keeps between forward and backward; `size` is in bytes before rounding."""

    operation: str
    name: str
    size: int
    why: str
    formula: str

    @property
    def bytes(self) -> int:
        """Bytes that the allocator takes for it."""
        return round_up(self.size)


def stem_saved(run: TrainingRun) -> list[Saved]:
    """Kept once: by embeddings and positions, and what all blocks share.

    Blocks share rotary angles and eager attention's mask.
    """
    own = set(_kept(run, Place("block", 1)))
    return [*_kept(run, STEM), *(item for item in _kept(run, Place("block")) if item not in own)]


def block_saved(run: TrainingRun) -> list[Saved]:
    """Kept by one block that recomputes nothing, in the order of its forward pass, its input included."""
    return _kept(run, Place("block", 1))


def block_input(run: TrainingRun) -> Saved:
    """The residual stream before a block: all that full recomputation keeps of it."""
    return block_saved(run)[0]


def head_saved(run: TrainingRun) -> list[Saved]:
    """Kept by the final norm and the head."""
    return _kept(run, HEAD)


def loss_saved(run: TrainingRun) -> list[Saved]:
    """Kept by cross-entropy: log-softmax in the logits' type.

    Autocast copies it to fp32 for the loss itself.
    """
    return _kept(run, LOSS)


def block_bytes(run: TrainingRun) -> int:
    """Bytes that one block keeps for its backward pass, its input included."""
    return sum_bytes(block_saved(run))


def activation_bytes(run: TrainingRun) -> int:
    """Bytes kept when the forward pass ends, the loss not yet computed, whatever is recomputed later."""
    reading = Reading(run)
    loss = next(visit for visit in reading.visits() if reading.pieces[visit].phase == "loss")
    return reading.before(loss).get("activations", 0)


def sum_bytes(saved: list[Saved]) -> int:
    """Bytes of a list of saved tensors."""
    return sum(item.bytes for item in saved)


def _kept(run: TrainingRun, place: Place) -> list[Saved]:
    """The ledger of one place, with the run's numbers."""
    numbers = symbols(run)
    # Without recomputation, of two blocks: one that comes first and one that does not.
    everything = structure(run)._replace(recompute="none", groups=(1, 1), numbers=(), chunks=1)
    saved = []
    for where, kept in compiled(everything).kept:
        if where == place:
            size = prod(numbers[symbol] for symbol in kept.size.split("·"))
            saved.append(Saved(kept.operation, kept.name, size, kept.why, kept.size))
    return saved
