"""What watching costs: a step's time and peak alone, beside the meter, and under the tracker, on the device itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..interactive.meter import CudaGauge, Gauge, Meter, Reading
from ..measuring.counting import Unwatched, time_calls
from ..measuring.devices import Device
from ..measuring.live import only_kernel, ready
from ..measuring.step import Phases, Training
from ..measuring.tracker import Tracker
from ..run import TrainingRun
from .comparisons import spread

MODES = ("alone", "with the meter", "under the tracker", "alone, again")
"""In this order; what the last differs from the first by is the machine's own unrest."""

WARM_UP = 2


class DeviceGauge:
    """Reads any device through its counters: stands in for `CudaGauge` in a rehearsal."""

    capacity, axis = None, "seconds"

    def __init__(self, device: Device) -> None:
        self.device, self.source = device, f"a rehearsal on {device.kind}"

    def read(self, seconds: float) -> Reading:
        """The counters now."""
        return Reading(self.device.allocated(), self.device.peaks()[0], self.device.reserved(), self.device.in_use())


def watching_costs(run: TrainingRun, device: Device) -> dict[str, Any]:
    """Milliseconds of a step and its peak in bytes, allocated and reserved, for each of `MODES`.

    Every mode builds the run anew from the same random numbers. "readings" is how often the meter has looked.
    """
    return {"run": run.code(), "modes": [_mode(name, run, device) for name in MODES]}


def _mode(name: str, run: TrainingRun, device: Device) -> dict[str, Any]:
    # Backward on this thread in every mode: the tracker needs it, and nothing else may differ.
    with only_kernel(run), torch.autograd.set_multithreading_enabled(False):
        training, before = ready(run, device)
        with _watched(name, training, device) as (watch, readings):
            for _ in range(WARM_UP):
                training.step(watch)
            device.synchronize()
            device.reset_peaks()
            times = time_calls(lambda: training.step(watch), device)
            allocated, reserved = device.peaks()
            found = {"mode": name, "step_ms": spread(times), "readings": readings()}
    return found | {"allocated": allocated - before[0], "reserved": reserved - before[1]}


@contextmanager
def _watched(name: str, training: Training, device: Device) -> Iterator[tuple[Phases, Callable[[], int]]]:
    """Who is told of the phases, and how often the meter has read by now."""
    if name == "with the meter":
        gauge: Gauge = CudaGauge() if device.kind == "cuda" else DeviceGauge(device)
        with Meter(gauge).follow(training.holdings()) as meter:
            yield Unwatched(), lambda: len(meter.samples)
    elif name == "under the tracker":
        with Tracker(device.kind) as tracker:
            tracker.watch(training.network, training.named_states)
            tracker.bind("inputs", [training.tokens, training.targets])
            yield tracker, lambda: 0
    else:
        yield Unwatched(), lambda: 0
