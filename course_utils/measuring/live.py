"""Measuring on a real CUDA GPU, safe when memory runs out.

Its own counters are read without the tracker, and the kinds of memory with it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import GpuOutOfMemory
from ..estimating.workspaces import workspaces_of
from ..gpus import Gpu, recognized
from ..measurement import Measurement, Provenance
from ..planning.twin import largest_micro_batch, needed, not_built
from ..run import TrainingRun
from ..units import format_bytes
from .devices import Cuda, Device, Phases, count_peaks
from .release import is_out_of_memory, let_go, release
from .step import SEED, Training, follow
from .tracker import Tracker

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

# Words of torch's and the driver's errors
# The one kernel that is allowed cannot do what is asked
NO_KERNEL = ("No available kernel", "No viable backend")
# torch was not built for this GPU
NO_CODE = "no kernel image is available"
# There is simply no GPU; any other words mean that something is broken
NO_GPU = ("No CUDA GPUs are available", "Found no NVIDIA driver")


class KernelRefused(ValueError):
    """torch has no kernel for this run or step on this GPU: the attention kernel, or any at all."""


def free_bytes() -> int:
    return Cuda().free()


def this_gpu() -> Gpu:
    """The current CUDA GPU with its free memory. Raises RuntimeError, torch's own, where there is none."""
    return Gpu(torch.cuda.get_device_name(), free_bytes(), Cuda().capability())


def usable_gpu() -> tuple[Gpu | None, str]:
    """The current CUDA GPU, or None and why this torch cannot use it; "" where there is no GPU."""
    try:
        if not torch.cuda.is_available():
            if torch.version.cuda:
                torch.cuda.init()  # raises other errors for a driver that fails than for no GPU
            return None, ""
        card = this_gpu()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        said = str(error).splitlines()[0]
        if said.startswith(NO_GPU):
            return None, ""
        return None, f"this GPU cannot be used: {said}"
    reason = not_built(torch.cuda.get_device_capability(), architectures())
    if reason:
        return None, reason
    return card, ""


def card_there() -> Gpu | None:
    """The current CUDA GPU as the catalog has it, or as it calls itself; None where torch can use none.

    Its memory is all that a program sees, free or not.
    """
    if usable_gpu()[0] is None:
        return None
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return recognized(seen.name, seen.total_memory, (seen.major, seen.minor), seen.multi_processor_count)


def architectures() -> list[str]:
    """Architectures this torch was built for, as in ["sm_80", "sm_90"]; none in a build without CUDA."""
    return torch.cuda.get_arch_list() if torch.version.cuda else []


def demand_gpu() -> None:
    """Raise ValueError, saying why, where this torch can use no CUDA GPU."""
    card, reason = usable_gpu()
    if card is None:
        reason = reason or "there is no CUDA GPU that this torch can use here"
        raise ValueError(f"{reason}; choose source='simulated', or 'auto'")


def memory_released(run: TrainingRun, free: Callable[[], int]) -> AbstractContextManager[None]:
    """`released`, with advice for a run that did not fit `free()` bytes."""
    return released(lambda asked: _advice(run, asked, free()))


@contextmanager
def released(advice: Callable[[str], str], otherwise: str = "") -> Iterator[None]:
    """However what is inside ends, keep nothing that it had allocated.

    Raises GpuOutOfMemory where memory ran out, with `advice` on what was asked for, and KernelRefused, ending
    in `otherwise`, where torch has no code for this GPU. Every other exception passes, and keeps no tensor
    alive.
    """
    try:
        yield
    except BaseException as error:
        if not is_out_of_memory(error):
            let_go(error)
            with suppress(RuntimeError):  # a GPU that has failed fails again here: the first error says how
                release(None)
            if isinstance(error, RuntimeError) and NO_CODE in str(error):
                raise KernelRefused(f"{_no_code()}{otherwise}") from error
            raise
        asked = _asked_for(str(error))
        release(error)
    else:
        release(None)
        return
    # outside of the handler: raised inside, it would keep the error that it comes from as its context
    raise GpuOutOfMemory(advice(asked))


def _no_code() -> str:
    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    return (
        f"torch {torch.__version__} has no code for this {name} (compute capability {major}.{minor});"
        f" it was built for {', '.join(architectures())}: install a build of torch that names it"
    )


def _asked_for(message: str) -> str:
    """The bytes asked for and free then, out of torch's message, or its first sentence."""
    found = re.search(r"Tried to allocate ([\d.]+ \w+)\..* of which ([\d.]+ \w+) is free", message, re.DOTALL)
    if found is None:
        return message.split(". ")[0]
    return f"It asked for {found[1]} more when {found[2]} was free"


def _advice(run: TrainingRun, asked: str, free: int) -> str:
    needs = needed(run)
    fits = 0
    if run.micro_batch > 1:
        fits = largest_micro_batch(run.replace(micro_batch=run.micro_batch - 1), free)
    if fits:
        would = f"micro_batch={fits} would fit"
    else:
        else_try = "recompute='full', " if run.recompute == "none" else ""
        would = f"no micro-batch fits: try {else_try}a smaller model or fewer tokens"
    return (
        f"{run} does not fit this GPU. {asked}. The run needs about {format_bytes(needs, 'GB', 1)};"
        f" {format_bytes(free, 'GB', 1)} is free now that its memory is released; {would}."
    )


def ready(run: TrainingRun, device: Device) -> tuple[Training, tuple[int, int]]:
    """The run's training on `device`, not stepped yet, and (allocated, reserved) before it was built."""
    device.release()
    torch.manual_seed(SEED)
    before = device.allocated(), device.reserved()
    training = Training(run, device.kind, simulated=False)
    device.release()  # weights in 4 bits are packed from larger ones, which no step uses again
    return training, before


def counters(set_up: Callable[[], Callable[[Phases], object]], steps: int) -> dict[str, int]:
    """The GPU's counters in bytes in the last of `steps` steps.

    `set_up` returns the step, so that the frames in which it was built have ended.
    """
    release(None)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    counted = count_peaks(set_up(), Cuda(), steps, before)
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()  # torch takes new ones when they are needed
    workspaces = held - torch.cuda.memory_allocated()
    return {name: counted[name] for name in ("allocated", "reserved", "driver")} | {"workspaces": workspaces}


def traced(run: TrainingRun, steps: int, device: str, provenance: Provenance) -> Measurement:
    """The run on a device that is there ("cuda" or "cpu"), under the tracker and with its kernel alone."""
    torch.manual_seed(SEED)
    on_card = run.card and provenance.source == "live"
    workspaces = workspaces_of(torch.cuda.get_device_capability()) if on_card else None
    # Backward on this thread: the tracker sees operators on the thread that entered it.
    with only_kernel(run), torch.autograd.set_multithreading_enabled(False):
        return follow(Training(run, device, simulated=False), Tracker(device, workspaces), steps, provenance)


@contextmanager
def only_kernel(run: TrainingRun) -> Iterator[None]:
    """Allow only the chosen kernel, so that none replaces it silently. KernelRefused if torch refuses it."""
    asked = (
        f"{run.attention} kernel on this GPU for heads of {run.model.head_size} elements"
        f" with dropout {run.model.dropout:g}: choose another attention"
    )
    choice = sdpa_kernel(KERNELS[run.attention]) if run.attention in KERNELS else nullcontext()
    with choice, refusals_told(asked):
        yield


@contextmanager
def refusals_told(asked: str) -> Iterator[None]:
    """Raise KernelRefused, "torch … has no" and `asked`, where torch refuses every kernel allowed."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(NO_KERNEL):
            raise
        raise KernelRefused(f"torch {torch.__version__} has no {asked}") from error
