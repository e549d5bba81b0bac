"""Estimates of a training step's memory, without torch: the closed form of `formula.py`.

Lessons compare it with measurements, and explain what is left between them.
"""

from ..breakdown import MemoryBreakdown
from ..run import TrainingRun
from . import formula

__all__ = ["estimate", "moments"]


def estimate(run: TrainingRun) -> MemoryBreakdown:
    """Bytes by kind at the peak of a step (the second or a later one); of several ranks, on rank 0.

    `phase` is the phase that owns the peak, `label` the moment within it. How near it comes, by kind of run,
    is what `python3 -m course_utils evidence --table accuracy` measures. On one rank and with FSDP2 the judge
    is a simulated step, with tensor parallelism the published formula (Korthikanti et al. 2022); for fp8 and
    for pairs of choices that torch does not run, such as LoRA with FSDP2, there is none.

    Raises TypeError for anything but a TrainingRun.
    """
    return formula.estimate(checked(run))


def moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """Bytes by kind at the moments of a step at which memory may peak, in order, by name.

    Raises like `estimate`.
    """
    return formula.moments(checked(run))


def checked(run: object) -> TrainingRun:
    """The run. Raises TypeError for anything else."""
    if not isinstance(run, TrainingRun):
        raise TypeError(f"estimate takes a TrainingRun, not {run!r}: write estimate(TrainingRun(...))")
    return run
