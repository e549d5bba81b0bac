"""Measuring on a real CUDA GPU: the device's own counters without the tracker, the kinds with it, and safe when
memory runs out.
"""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from traceback import clear_frames, walk_tb

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..estimating import estimate
from ..fitting import largest_micro_batch, unsupported
from ..gpus import Gpu
from ..measurement import Measurement, Provenance
from ..measuring_errors import GpuOutOfMemory
from ..run import TrainingRun
from ..units import format_bytes
from .counting import count_peaks
from .devices import Cuda, Device, name_here
from .step import Training
from .tracing import SEED, own_random_numbers, today, trace

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch begins when the one kernel that it may use cannot do what is asked."""

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""How such errors read: torch's own, the driver's, those of libraries that could not get their workspace."""


class KernelRefused(ValueError):
    """torch has the attention kernel that was asked for, but not for this run on this GPU."""


def measure_live(run: TrainingRun, steps: int, note: str) -> Measurement:
    """The run on the current CUDA GPU: `counters` from a pass without the tracker, kinds and timeline from one with it.

    Raises ValueError if the GPU lacks the run's number format or attention kernel, GpuOutOfMemory if it is too small.
    """
    reason = unsupported(run, Cuda().capability())
    if reason:
        raise ValueError(reason)
    name = name_here(torch.cuda.get_device_name())
    with own_random_numbers(), memory_released(run, free_bytes):
        counters = _count(run, steps)
        measured = traced(run, steps, Cuda.kind, Provenance("live", name, torch.__version__, today(), note))
    return replace(measured, counters=counters)


def free_bytes() -> int:
    """Bytes that a new tensor could get on the current CUDA GPU."""
    return Cuda().free()


def this_gpu() -> Gpu:
    """The current CUDA GPU, its memory being what is free on it now. Raises RuntimeError, torch's own, where there is
    none.
    """
    return Gpu(name_here(torch.cuda.get_device_name()), free_bytes(), Cuda().capability())


@contextmanager
def memory_released(run: TrainingRun, free: Callable[[], int]) -> Iterator[None]:
    """Turn running out of memory into GpuOutOfMemory, in words, with everything that the run had allocated released.

    Whatever else ends the run, an interrupt for one, passes as it is, and keeps no tensor of it alive.
    """
    try:
        yield
    except BaseException as error:
        if not is_out_of_memory(error):
            let_go(error)
            raise
        asked = asked_for(str(error))
        release(error)
    else:
        release(None)
        return
    raise GpuOutOfMemory(_advice(run, asked, free()))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is torch's, the driver's or a library's way of saying that memory has run out."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)
    )


def let_go(error: BaseException) -> None:
    """Let an exception keep no tensor alive: its traceback holds every frame, and each frame what it works on.

    Letting go of the traceback is not enough: whoever handles the exception above still holds it.
    """
    following: BaseException | None = error
    while following is not None:
        clear_frames(following.__traceback__)
        for frame, _ in walk_tb(following.__traceback__):
            # Up to Python 3.12 whoever looked at it (IPython does) left a copy: renewed, it is empty.
            _ = frame.f_locals
        following = following.__context__


def release(error: BaseException | None) -> None:
    """Give memory back: what an exception keeps, what only cycles keep, and what torch has cached of a GPU."""
    if error is not None:
        let_go(error)
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
    gc.collect()
    if torch.cuda.is_available():
        Cuda().release()


def asked_for(message: str) -> str:
    """What torch's message says was asked for, and how much was free then; its first sentence if it is worded anew."""
    found = re.search(r"Tried to allocate ([\d.]+ \w+)\..* of which ([\d.]+ \w+) is free", message, re.DOTALL)
    return f"It asked for {found[1]} more when {found[2]} was free" if found else message.split(". ")[0]


def _advice(run: TrainingRun, asked: str, free: int) -> str:
    needs = estimate(run).total
    smaller = run.replace(micro_batch=run.micro_batch - 1) if run.micro_batch > 1 else None
    fits = largest_micro_batch(smaller, free) if smaller else 0
    else_try = "recompute='full', " if run.recompute == "none" else ""
    would = (
        f"micro_batch={fits} would fit"
        if fits
        else f"no micro-batch fits: try {else_try}a smaller model or fewer tokens"
    )
    return (
        f"{run} does not fit this GPU. {asked}. The run needs about {format_bytes(needs, 'GB', 1)}; "
        f"{format_bytes(free, 'GB', 1)} is free now that its memory is released; {would}."
    )


def ready(run: TrainingRun, device: Device) -> tuple[Training, tuple[int, int]]:
    """The run's training on `device`, nothing stepped yet, and the bytes allocated and reserved before it was built."""
    device.release()
    torch.manual_seed(SEED)
    before = device.allocated(), device.reserved()
    return Training(run, device.kind, simulated=False), before


def _count(run: TrainingRun, steps: int) -> dict[str, int]:
    """What is counted in the last of `steps` steps of the run, in bytes."""
    device = Cuda()
    with only_kernel(run):
        training, before = ready(run, device)
        counted = count_peaks(training, device, steps, before)
    return {name: counted[name] for name in ("allocated", "reserved", "driver")}


def peak_counters(set_up: Callable[[], Callable[[], object]], steps: int) -> dict[str, int]:
    """What is counted in the last of `steps` steps, in bytes: torch's allocated and reserved, without what was there
    before, and what the driver says is in use on the whole device, by every program. `set_up` returns the step.
    """
    release(None)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    step = set_up()
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated() - allocated,
        "reserved": torch.cuda.max_memory_reserved() - reserved,
        "driver": total - free,
    }


def traced(run: TrainingRun, steps: int, device: str, provenance: Provenance) -> Measurement:
    """The run on a device that is there ("cuda" or "cpu"), under the tracker and with its kernel alone."""
    torch.manual_seed(SEED)
    # Backward on this thread: the tracker is told of operators on the thread that entered it.
    with only_kernel(run), torch.autograd.set_multithreading_enabled(False):
        return trace(run, device, steps, provenance)


@contextmanager
def only_kernel(run: TrainingRun) -> Iterator[None]:
    """Only the chosen kernel is allowed, so that none stands in for it silently.

    Raises KernelRefused where torch refuses the kernel for this run: cuDNN's, for one, takes in some releases of torch
    only dropout that is a multiple of 1/16.
    """
    with sdpa_kernel(KERNELS[run.attention]) if run.attention in KERNELS else nullcontext():
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith(NO_KERNEL):
                raise
            raise KernelRefused(
                f"torch {torch.__version__} has no {run.attention} kernel on this GPU for heads of "
                f"{run.model.head_size} elements with dropout {run.model.dropout:g}: choose another attention"
            ) from error
