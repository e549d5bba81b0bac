"""Devices that steps run on: their counters and clocks, also of a step that nothing tracks, by phase."""

import gc
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Cuda:
    """The current CUDA GPU: torch's counters, the driver's, and CUDA events for a clock."""

    kind = "cuda"

    def facts(self) -> dict[str, Any]:
        """The GPU's name, capability, memory and driver, and the versions of torch's CUDA and cuDNN."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory": properties.total_memory,
            "driver": driver_version(),
        }
        return {"device": device, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}

    def capability(self) -> tuple[int, int]:
        """CUDA's compute capability."""
        return torch.cuda.get_device_capability()

    def free(self) -> int:
        """Bytes that a new tensor could get: free or cached, and within this process's limit."""
        allocated = torch.cuda.memory_allocated()
        there = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
        if not torch.cuda.is_initialized():  # a limit can only be set once CUDA is in use
            return there
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        limit = round(torch.cuda.get_per_process_memory_fraction() * total)
        return min(there, limit - allocated)

    def release(self) -> None:
        """Give back what nothing uses, the libraries' workspaces too."""
        gc.collect()
        # they stay in torch's allocator from the first matrix product on
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> tuple[int, int]:
        """The most bytes allocated and reserved since the peaks began."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def in_use(self) -> int:
        """Bytes that the driver says are taken on the whole GPU, by every program."""
        free, total = torch.cuda.mem_get_info()
        return total - free

    def stamp(self) -> Any:
        """A mark in the stream of work, passed when all work before it is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """The time between two marks, in milliseconds; both must have been passed."""
        return start.elapsed_time(end)


class Host:
    """The CPU in a GPU's place: its clock is real, its counters all say 0."""

    kind = "cpu"

    def capability(self) -> tuple[int, int]:
        return 0, 0

    def release(self) -> None:
        gc.collect()

    def allocated(self) -> int:
        return 0

    free = reserved = in_use = allocated

    peaks = capability

    def synchronize(self) -> None: ...

    reset_peaks = synchronize

    def stamp(self) -> float:
        return time.perf_counter()

    def milliseconds(self, start: float, end: float) -> float:
        return 1000 * (end - start)


Device = Cuda | Host
"""A device that steps run on. Sizes are in bytes; `peaks` and `in_use` are what the device itself says."""


def driver_version() -> str:
    """The NVIDIA driver's version from nvidia-smi; "" where that program is missing or says nothing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return next(iter(done.stdout.split()), "")


class Phases(Protocol):
    """Follows a step's phases: the tracker, or `Unwatched` where nothing is tracked."""

    micro_batch: int

    def in_phase(self, phase: str) -> AbstractContextManager[Any]: ...
    def bind_states(self) -> None: ...
    def bind(self, kind: str, tensors: Iterable[Any]) -> None: ...


class Unwatched:
    """Takes the tracker's place where nothing is tracked: it ignores everything."""

    micro_batch = 0

    def in_phase(self, phase: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def bind_states(self) -> None: ...

    def bind(self, kind: str, tensors: Iterable[Any]) -> None: ...


class PeaksByPhase(Unwatched):
    """Asks the device for its peaks at each phase's end; what lies between two counts to the earlier."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reserved = 0
        self.allocated: dict[str, int] = {}
        self._phase = ""

    def in_phase(self, phase: str) -> AbstractContextManager[Any]:
        self.end_phase()
        self._phase = phase
        return nullcontext()

    def end_phase(self) -> None:
        """Read the peaks of the phase that has just ended, and let the next one's begin."""
        allocated, reserved = self.device.peaks()
        self.allocated[self._phase] = max(allocated, self.allocated.get(self._phase, 0))
        self.reserved = max(self.reserved, reserved)
        self.device.reset_peaks()


def count_peaks(
    step: Callable[[Phases], object], device: Device, steps: int, before: tuple[int, int]
) -> dict[str, Any]:
    """The device's counters in the last of `steps` steps, in bytes.

    "allocated" and "reserved" are peaks without what was there `before` (allocated, reserved), "phases" the
    peak allocated in each phase, "driver" what is in use on the whole device after the step, by every
    program.
    """
    watch = PeaksByPhase(device)
    for _ in range(steps):
        device.synchronize()
        device.reset_peaks()
        watch = PeaksByPhase(device)
        step(watch)
        watch.end_phase()
    device.synchronize()
    return {
        "allocated": max(watch.allocated.values()) - before[0],
        "reserved": watch.reserved - before[1],
        "driver": device.in_use(),
        "phases": {phase: peak - before[0] for phase, peak in watch.allocated.items() if phase},
    }


def time_calls(
    call: Callable[[], object], device: Device, most: int = 10, seconds: float = 8.0
) -> list[float]:
    """Milliseconds of each call on the device: at least 3 calls, then up to `most` within `seconds`."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 3 or (len(times) < most and time.monotonic() < end):
        device.synchronize()
        start = device.stamp()
        call()
        stop = device.stamp()
        device.synchronize()
        times.append(round(device.milliseconds(start, stop), 4))
    return times
