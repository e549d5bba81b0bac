"""Estimates of a training step's memory, without torch, by two methods.

`formula.py` is the closed form: arithmetic to follow with a pencil, its error stated. `exact/` executes a
model of autograd and is right to the byte wherever a simulation can check it. Lessons compare both with
measurements.
"""

from types import ModuleType

from ..breakdown import MemoryBreakdown
from ..errors import unknown
from ..run import TrainingRun
from . import formula
from .exact import peak

__all__ = ["estimate", "moments"]

METHODS = {"exact": peak, "formula": formula}


def estimate(run: TrainingRun, method: str = "exact") -> MemoryBreakdown:
    """Bytes by kind at the peak of a step (the second or a later one); of several ranks, on rank 0.

    `phase` is the phase that owns the peak, `label` the moment within it. `method` is "exact", the engine of
    `estimating.exact`, or "formula", the closed form of `estimating.formula`, whose docstring states its
    error.

    Raises ValueError for what a method does not cover. For both that is tensor parallelism (see
    `rank_states`); for the exact engine, on several ranks, LoRA, and with FSDP2 (zero_stage 2 and 3) fp8,
    optimizers that need whole tensors, checkpoints of several blocks and models of one block; for the closed
    form LoRA, experts, offloading and fp8. Raises TypeError for anything but a TrainingRun.
    """
    return _chosen(run, method).estimate(run)


def moments(run: TrainingRun, method: str = "exact") -> dict[str, MemoryBreakdown]:
    """Bytes by kind at the moments of a step at which memory may peak, in order, by name.

    Raises like `estimate`.
    """
    return _chosen(run, method).moments(run)


def _chosen(run: object, method: str) -> ModuleType:
    if not isinstance(run, TrainingRun):
        raise TypeError(f"estimate takes a TrainingRun, not {run!r}: write estimate(TrainingRun(...))")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    return METHODS[method]
