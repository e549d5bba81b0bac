"""Peaks of the moments of a training run: one counter, set to zero before each moment and read after it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..units import aligned, formatter


@dataclass(frozen=True)
class MomentPeak:
    """Bytes allocated before and after one moment, and at its peak, as torch.cuda counts them."""

    name: str
    before: int
    after: int
    peak: int


@dataclass(frozen=True, repr=False)
class MomentPeaks:
    """The result of `measure_moments`, in order; `device` is the GPU, which may be simulated."""

    moments: tuple[MomentPeak, ...]
    device: str

    def __repr__(self) -> str:
        largest = max(self.moments, key=lambda moment: moment.peak)
        shown = formatter(largest.peak)
        rows = [("moment", "before", "after", "peak", "")]
        rows += [
            (one.name, shown(one.before), shown(one.after), shown(one.peak), "largest" * (one is largest))
            for one in self.moments
        ]
        return f"{aligned(rows)}\n{self.device}"


def measure_moments(moments: Iterable[tuple[str, Callable[[], Any]]]) -> MomentPeaks:
    """Call each function in turn, and return what was allocated before and after it, and its peak.

    `moments` are pairs of a name and a function without arguments, as in [("step 1", step), ("evaluation",
    evaluate)]. All share one GPU: what a function leaves alive counts in those after it. What it returns is
    still alive in its own `after`, and is dropped before the next. Call it inside `with on_gpu():`, or where
    there is a GPU. Raises ValueError where there is neither, and for no moments; errors of a function pass.
    """
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here: call measure_moments inside `with on_gpu():`")
    found = tuple(_measured(name, function) for name, function in moments)
    if not found:
        raise ValueError("moments is empty: give pairs of a name and a function")
    return MomentPeaks(found, torch.cuda.get_device_name())


def _measured(name: str, function: Callable[[], Any]) -> MomentPeak:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = function()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    del returned
    return MomentPeak(name, before, after, torch.cuda.max_memory_allocated())
