"""Measuring on a real CUDA GPU: the device's own counters without the tracker, the kinds with it, and safe when
memory runs out.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..estimating import estimate
from ..measurement import Measurement, Provenance
from ..run import TrainingRun
from ..units import format_bytes
from .step import Training
from .tracing import SEED, today, trace

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}

SAFETY = 1.05
"""A run is taken live if 1.05 times its estimate is free: fragmentation and kernels' scratch are not in the estimate.
"""


class GpuOutOfMemory(RuntimeError):
    """The GPU was too small for a run. Its memory has been released; the message says what would fit."""


def measure_live(run: TrainingRun, steps: int, note: str) -> Measurement:
    """The run on the current CUDA GPU: `counters` from a pass without the tracker, kinds and timeline from one with it.

    Raises ValueError if the GPU lacks the run's number format or attention kernel, GpuOutOfMemory if it is too small.
    """
    reason = unsupported(run, torch.cuda.get_device_capability())
    if reason:
        raise ValueError(reason)
    name = torch.cuda.get_device_name()
    with memory_released(run, free_bytes):
        counters = _count(run, steps)
        measured = _traced(run, steps, Provenance("live", name, torch.__version__, today(), note))
    return replace(measured, counters=counters)


def unsupported(run: TrainingRun, capability: tuple[int, int]) -> str:
    """Why a GPU of this compute capability cannot run `run`, or "" if it can (NVIDIA Ampere, 8.0, brought bf16)."""
    if capability >= (8, 0):
        return ""
    older = f"this GPU (compute capability {capability[0]}.{capability[1]}) is older than Ampere (8.0)"
    if "bf16" in run.precision.name:
        return f"{older} and does not compute in bf16: choose precision='amp-fp16' or 'fp32'"
    if run.attention == "flash":
        return f"{older}, for which torch has no flash kernel: choose attention='efficient' or 'eager'"
    return ""


def free_bytes() -> int:
    """Bytes that a new tensor could get: what the driver has free, and what the allocator has cached."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


@contextmanager
def memory_released(run: TrainingRun, free: Callable[[], int]) -> Iterator[None]:
    """Turn running out of memory into GpuOutOfMemory, in words, with everything that the run had allocated released."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = str(error).split(". ")[0]
        release(error)
    else:
        release(None)
        return
    raise GpuOutOfMemory(_advice(run, asked, free()))


def release(error: BaseException | None) -> None:
    """Give memory back: an exception's traceback keeps every frame's tensors alive until it is cleared."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _advice(run: TrainingRun, asked: str, free: int) -> str:
    needs = estimate(run).total
    fits = largest_micro_batch(run, free)
    would = (
        f"micro_batch={fits} would fit"
        if fits
        else "no micro-batch fits: try recompute='full', a smaller model or fewer tokens"
    )
    return (
        f"{run} does not fit this GPU. {asked}. The run needs about {format_bytes(needs, 'GB', 1)}; "
        f"{format_bytes(free, 'GB', 1)} is free now that its memory is released; {would}."
    )


def largest_micro_batch(run: TrainingRun, free: int) -> int:
    """The largest micro-batch, up to the run's own, whose estimate leaves a margin in `free` bytes; 0 if none does."""
    low, high = 0, run.micro_batch
    while low < high:
        middle = (low + high + 1) // 2
        if estimate(run.replace(micro_batch=middle)).total * SAFETY <= free:
            low = middle
        else:
            high = middle - 1
    return low


class _Untracked:
    """Stands in for the tracker where nothing is tracked."""

    micro_batch = 0

    def in_phase(self, phase: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def bind_states(self) -> None:
        """Nothing is tracked, so nothing is bound."""


def _count(run: TrainingRun, steps: int) -> dict[str, int]:
    """What the device counts in the last of `steps` steps, in bytes: allocated, reserved, and used as the driver sees
    it.
    """
    torch.manual_seed(SEED)
    before = torch.cuda.memory_allocated()
    with _kernel(run):
        training = Training(run, "cuda", simulated=False)
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            training.step(_Untracked())
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved(),
        "driver": total - free,
    }


def _traced(run: TrainingRun, steps: int, provenance: Provenance) -> Measurement:
    torch.manual_seed(SEED)
    with _kernel(run):
        return trace(run, "cuda", steps, provenance)


def _kernel(run: TrainingRun) -> Any:
    """Only the chosen kernel is allowed, so that none stands in for it silently."""
    return sdpa_kernel(KERNELS[run.attention]) if run.attention in KERNELS else nullcontext()
