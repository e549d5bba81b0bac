"""Counters and clocks of a step that nothing tracks: the device's own peak, and the time, of each phase."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .devices import Device
from .step import Phases


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
