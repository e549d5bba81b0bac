"""From a run to a Measurement: the step is run for real under the tracker, on any device."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import lru_cache

import torch

from ..breakdown import MemoryBreakdown
from ..estimating.workspaces import Workspaces, workspaces_of, workspaces_on
from ..measurement import Measurement, Provenance
from ..pace import working
from ..run import TrainingRun
from .patches import ONE_AT_A_TIME
from .simulated import simulated_gpu
from .step import Training
from .tracker import Tracker, last_index

atexit.register(gc.freeze)  # or Python, as it ends, searches all of torch for cycles: most of a second

SEED = 0

DEVICES = {"simulated": "simulated GPU", "cpu": "CPU"}
"""The name of the device in a provenance; a live one's is the GPU's own."""

SKIPPED = "gradients overflowed in fp16 and an update was skipped: optimizer states may not be there yet"


@lru_cache(maxsize=16)
def trace_simulated(run: TrainingRun, steps: int, note: str) -> Measurement:
    """The run on a simulated GPU; one that this process has done already is given again."""
    shown, fewer = shortened(run)
    with simulated_gpu(run.attention), cycles_left_alone():
        return trace(shown, "cuda", steps, provenance_of("simulated", note, fewer))


def shortened(run: TrainingRun) -> tuple[TrainingRun, str]:
    """The run with at most two micro-batches, as later ones repeat the second, and a note that says so."""
    if run.accumulation_steps <= 2:
        return run, ""
    note = f"2 of {run.accumulation_steps} micro-batches run, the others repeat the second"
    return run.replace(accumulation_steps=2), note


@contextmanager
def cycles_left_alone() -> Iterator[None]:
    """Inside, Python searches for no cycles of references: no tensor of the course's own steps is in one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def trace_on_cpu(run: TrainingRun, steps: int, note: str) -> Measurement:
    """The run on the CPU, with real numbers and real losses."""
    with own_random_numbers():
        return trace(run, "cpu", steps, provenance_of("cpu", note))


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Inside, torch's random numbers begin at the course's seed; then they go on as before."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=gpus, device_type="cuda"):
        torch.default_generator.manual_seed(SEED)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(SEED)
        yield


def trace(run: TrainingRun, device: str, steps: int, provenance: Provenance) -> Measurement:
    """Run `steps` steps on `device` under the tracker; the peak is that of the last one."""
    training = Training(run, device, simulated=provenance.source == "simulated")
    return follow(training, Tracker(device, _workspaces(run, provenance.source)), steps, provenance)


def _workspaces(run: TrainingRun, source: str) -> Workspaces | None:
    """cuBLAS's workspaces per thread, on the run's card or the GPU that is there; None without a card."""
    if run.card and source == "live":
        return workspaces_of(torch.cuda.get_device_capability())
    if source == "simulated":
        return workspaces_on(run.card)
    return None


def follow(training: Training, tracker: Tracker, steps: int, provenance: Provenance) -> Measurement:
    """Run `steps` steps of `training` under `tracker`; the peak is that of the last one."""
    said = "simulating" if provenance.source == "simulated" else "tracing"
    with working(said) as work, tracker:
        tracker.watch(training.network, training.named_states)
        tracker.bind("inputs", [training.tokens, training.targets])
        ends = []
        for step in range(1, steps + 1):
            tracker.step = step
            work.at(f"{said} step {step} of {steps}")
            training.step(tracker)
            ends.append(len(tracker.events))
    if training.skipped_an_update:
        provenance = replace(provenance, note="; ".join(filter(None, (provenance.note, SKIPPED))))
    return measurement_of(tracker, ends, training.losses, provenance)


def measurement_of(
    tracker: Tracker, ends: list[int], losses: list[float], provenance: Provenance
) -> Measurement:
    """The measurement of the steps that ended at these event counts."""
    last_step = ends[-2] if len(ends) > 1 else 0
    peak = tracker.peak_event(since=last_step)
    return Measurement(
        breakdown=tracker.at(peak, "peak"),
        moments=_moments(tracker, ends),
        timeline=tracker.timeline(),
        provenance=provenance,
        peak_event=peak,
        allocations=tracker.allocations(),
        losses=losses,
        phase_peaks=tracker.phase_peaks(last_step),
    )


def _moments(tracker: Tracker, ends: list[int]) -> dict[str, MemoryBreakdown]:
    """The named moments of the last pass that had a backward, as far as it had them, and each step's end."""
    phases = [mark.phase for mark in tracker.marks]
    starts = [*(mark.event for mark in tracker.marks), ends[-1]]
    events: dict[str, int] = {}
    if "backward" in phases:
        backward = last_index(phases, "backward")
        forward = last_index(phases[:backward], "forward")
        after_forward = phases.index("loss", forward) if "loss" in phases[forward:backward] else backward
        events |= {"end of forward": starts[after_forward], "after loss": starts[backward]}
        events["end of backward"] = starts[backward + 1]
    events |= {f"end of step {step}": end for step, end in enumerate(ends, start=1)}
    return {name: tracker.at(event, name) for name, event in events.items()}


def provenance_of(source: str, *notes: str) -> Provenance:
    """The provenance of what is measured now; of the notes those that are not empty."""
    note = "; ".join(filter(None, notes))
    today = date.today().isoformat()
    if source == "live":
        return Provenance(source, torch.cuda.get_device_name(), torch.__version__, today, note)
    return Provenance(source, DEVICES[source], torch_release(), today, note)


def torch_release() -> str:
    """torch's version without its build (+cpu, +cu130), which makes no difference where no GPU is used."""
    return torch.__version__.split("+")[0]
