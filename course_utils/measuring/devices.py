"""What a recording asks of a device: its counters, its clock, its name. The CPU stands in for a GPU in a rehearsal."""

import gc
import platform
import subprocess
import time
from typing import Any, Protocol

import torch


class Device(Protocol):
    """A device that steps run on. Sizes are in bytes; those of `peaks` and `in_use` are what the device itself says."""

    kind: str

    def facts(self) -> dict[str, Any]: ...
    def free(self) -> int: ...
    def release(self) -> None: ...
    def synchronize(self) -> None: ...
    def allocated(self) -> int: ...
    def reserved(self) -> int: ...
    def reset_peaks(self) -> None: ...
    def peaks(self) -> tuple[int, int]: ...
    def in_use(self) -> int: ...
    def stamp(self) -> Any: ...
    def milliseconds(self, start: Any, end: Any) -> float: ...


class Cuda:
    """The current CUDA GPU: torch's counters, the driver's, and CUDA events for a clock."""

    kind = "cuda"

    def facts(self) -> dict[str, Any]:
        """Name, capability, memory and driver of the GPU, and the versions of CUDA and cuDNN that torch brings."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "device": {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory": properties.total_memory,
                "driver": driver_version(),
            },
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def free(self) -> int:
        """Bytes that a new tensor could get: what the driver has free, and what the allocator has cached."""
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def release(self) -> None:
        """Give back what nothing uses, the libraries' workspaces too."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # they stay in torch's allocator from the first matrix product on
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the GPU has done all that it was told."""
        torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes in tensors and workspaces now."""
        return torch.cuda.memory_allocated()

    def reserved(self) -> int:
        """Bytes that the allocator holds now."""
        return torch.cuda.memory_reserved()

    def reset_peaks(self) -> None:
        """Let both peaks begin anew."""
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
    """The CPU in a GPU's place, to rehearse a recording: its clock is real, its counters all say 0."""

    kind = "cpu"

    def facts(self) -> dict[str, Any]:
        """The same facts as a GPU's, named as a rehearsal."""
        device = {"name": f"{platform.machine()} CPU", "capability": [0, 0], "memory": 0, "driver": ""}
        return {"device": device, "cuda": None, "cudnn": None, "rehearsal": True}

    def free(self) -> int:
        """0: nobody asks a CPU whether a run fits."""
        return 0

    def release(self) -> None:
        """Collect what is in cycles."""
        gc.collect()

    def synchronize(self) -> None:
        """Nothing to wait for: a CPU is done when the call returns."""

    def allocated(self) -> int:
        """0: torch does not count on a CPU."""
        return 0

    reserved = in_use = allocated

    def reset_peaks(self) -> None:
        """Nothing to reset."""

    def peaks(self) -> tuple[int, int]:
        """0 and 0: torch does not count on a CPU."""
        return 0, 0

    def stamp(self) -> float:
        """Now, in seconds."""
        return time.perf_counter()

    def milliseconds(self, start: float, end: float) -> float:
        """The time between two stamps, in milliseconds."""
        return 1000 * (end - start)


def driver_version() -> str:
    """The NVIDIA driver's version, as nvidia-smi tells it; "" where that program is missing or says nothing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else ""
