"""Devices that steps run on: counters, clock and name. In a rehearsal the CPU takes the GPU's place."""

import gc
import platform
import subprocess
import time
from typing import Any

import torch

from ..gpus import Gpu, card_named
from .recording_file import AS


class Cuda:
    """The current CUDA GPU: torch's counters, the driver's, and CUDA events for a clock."""

    kind = "cuda"
    has_history = True

    def facts(self) -> dict[str, Any]:
        """The GPU's name, capability, memory and driver, and the versions of torch's CUDA and cuDNN."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {
            "name": name_here(properties.name),
            "capability": [*capability_here((properties.major, properties.minor))],
            "memory": properties.total_memory,
            "driver": driver_version(),
        }
        if IMITATED:
            device["as_card"] = IMITATED[0].name
        return {"device": device, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}

    def capability(self) -> tuple[int, int]:
        """CUDA's compute capability; that of the card which this GPU imitates where that is lower."""
        return capability_here(torch.cuda.get_device_capability())

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


IMITATED: list[Gpu] = []  # The card that this process imitates, if any


def as_card(name: str) -> Gpu:
    """From now on this process has no more of its GPU than the card `name` would have.

    That is its memory, and what it can compute. `name` is of the catalog ("T4-16GB") or an amount ("16 GB").
    torch's allocator gets no more than that card's `room`, and what needs a newer card is refused. ValueError
    for an unknown name, or if the GPU is smaller.
    """
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    card = card_named(name, (here.major, here.minor))
    if card.room > here.total_memory:
        raise ValueError(
            f"{here.name} has {here.total_memory:,} bytes: it cannot imitate {card.name}, which has more"
        )
    torch.cuda.set_per_process_memory_fraction(card.room / here.total_memory)
    IMITATED[:] = [card]
    return card


def capability_here(real: tuple[int, int]) -> tuple[int, int]:
    """The compute capability to go by: the GPU's own, or a lower one of the card that it imitates."""
    return min([real, *(card.capability for card in IMITATED)])


def name_here(real: str) -> str:
    """The GPU's name, and that of the card that it imitates: "NVIDIA H200 as T4-16GB"."""
    return AS.join([real, *(card.name for card in IMITATED)])


class Host:
    """The CPU in a GPU's place, to rehearse a recording: its clock is real, its counters all say 0."""

    kind = "cpu"
    has_history = False  # torch keeps one of CUDA's allocator alone

    def facts(self) -> dict[str, Any]:
        device = {"name": f"{platform.machine()} CPU", "capability": [0, 0], "memory": 0, "driver": ""}
        return {"device": device, "cuda": None, "cudnn": None, "rehearsal": True}

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
