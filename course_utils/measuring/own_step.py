"""Measuring a step of your own: any model, any training step, on a GPU, a simulated GPU or the CPU.

The step works on copies, in which each tensor has a stand-in on the device: what was handed over stays as it
was.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from ..errors import GpuOutOfMemory, SimulationUnavailable, StepError
from ..estimating.workspaces import Workspaces
from ..gpus import Gpu
from ..measurement import Measurement, Provenance, explained
from ..pace import working
from ..planning.twin import SAFETY
from ..units import format_bytes
from . import live
from .compiling import compiling
from .copy_to_device import OwnStep, carried_over, checked
from .cuda_answers import CARD, Memory, answered
from .phases import PLACEHOLDER, PhaseWatch
from .release import empty_queue, let_go
from .simulated import availability, simulated_gpu
from .step import SEED, own_random_numbers, provenance_of
from .tracker import FailedOperator, Tracker

# The type of device that each source puts stand-ins on
DEVICE_TYPE = {"cpu": "cpu", "live": "cuda", "simulated": "cuda"}
CELL_BY_CELL = (
    "recurrent layers run cell by cell here;"
    " on a GPU cuDNN does them in one kernel, with a reserve of its own"
)
ANY_KERNEL = "attention kernel on this GPU for what your step asks: allow more of them in its sdpa_kernel(…)"
NOT_IN_STEP = "Leave this out of the step, or measure it with source='cpu' or, on a GPU, 'live'"
NO_UPDATE = "the step never called optimizer.step(): nothing was updated, and no optimizer states were made"
SCALER_IS_OFF = (
    "the GradScaler is off, as torch switches one off that is made where there is no GPU:"
    ' nothing was scaled here; GradScaler("cuda", …) made inside the step is on'
)


def measure_own(
    step: Any,
    model: Any,
    optimizer: Any,
    batch: Any,
    *,
    source: str,
    steps: int,
    attention: str,
    workspaces: Workspaces | None = None,
    card: Gpu | None = None,
) -> Measurement:
    """Run `step(model, optimizer, batch)` `steps` times and return where each byte went; see `measure`.

    `workspaces` are cuBLAS's, for each thread; `card` is the one that a simulated GPU imitates.
    """
    own = replace(checked(step, model, optimizer, batch), workspaces=workspaces, card=card)
    if source == "recorded":
        raise ValueError(
            "a step of your own is never recorded: choose source='simulated', 'cpu', 'live' or 'auto'"
        )
    if source == "auto":
        return _auto(own, steps, attention)
    return _measured(own, source, steps, attention)


def _auto(own: OwnStep, steps: int, attention: str) -> Measurement:
    """Live where the simulation fits the GPU; else the simulation, or where there is none, the CPU."""
    works, how = availability()
    card, broken = live.usable_gpu()
    if card is None:
        notes: list[str] = []
        if broken:
            notes.append(f"not live: {broken}")
        if not works:
            notes.append(f"not simulated: {how}")
        return _measured(own, "simulated" if works else "cpu", steps, attention, *notes)
    simulated = None
    try:
        simulated = _measured(own, "simulated", steps, attention)
    except RuntimeError as error:
        # no simulation here, a StepError, or an operator that torch cannot simulate
        how = str(error)
    if simulated is None:
        return _live(own, steps, f"not simulated first: {how}", f". Nor can it be simulated: {how}")
    if simulated.peak * SAFETY > card.memory:
        needs = format_bytes(simulated.peak, "GB", 1)
        free = format_bytes(card.memory, "GB", 1)
        return noted(simulated, f"not live: needs {needs}, {card.name} has {free} free")
    try:
        return _live(own, steps)
    except (GpuOutOfMemory, live.KernelRefused) as error:
        return noted(simulated, f"not live: {error}")


def _measured(own: OwnStep, source: str, steps: int, attention: str, *notes: str) -> Measurement:
    """Measure with one source. An exception of the step passes, and keeps no tensor of the copies alive."""
    if source == "live":
        return _live(own, steps, otherwise="; source='simulated' tells what it would need, on any machine")
    try:
        if source == "simulated":
            works, how = availability()
            if not works:
                raise SimulationUnavailable(how)
        gpu = nullcontext()
        if source == "simulated":
            gpu = simulated_gpu(attention, card=own.card or CARD)
        with own_random_numbers(), gpu:
            return _trace(own, provenance_of(source, *notes, card=own.card), steps)
    except BaseException as error:
        let_go(error)
        empty_queue()
        raise


def _live(own: OwnStep, steps: int, note: str = "", otherwise: str = "") -> Measurement:
    """Kinds from a pass with the tracker, the device's counters from one without it, each on its own copy."""
    live.demand_gpu()

    def set_up() -> Callable[[Any], object]:
        torch.manual_seed(SEED)
        work = carried_over(own, DEVICE_TYPE["live"], simulated=False)
        return lambda _: work.advance()

    def advice(asked: str) -> str:
        free = format_bytes(live.free_bytes(), "GB", 1)
        return (
            f"your step does not fit this GPU. {asked}."
            f" {free} is free now that its memory is released{otherwise}"
        )

    with live.released(advice, otherwise), live.refusals_told(ANY_KERNEL + otherwise), own_random_numbers():
        with torch.autograd.set_multithreading_enabled(False):  # the tracker sees operators on its own thread
            measured = _trace(own, provenance_of("live", note), steps)
        return replace(measured, counters=live.counters(set_up, steps))


def _trace(own: OwnStep, provenance: Provenance, steps: int) -> Measurement:
    device = DEVICE_TYPE[provenance.source]
    simulated = provenance.source == "simulated"
    said = "simulating" if simulated else "tracing"
    where = "the simulated GPU" if simulated else f"device {device!r}"
    losses = list[float]()
    ends = list[int]()
    with ExitStack() as stack:
        # The copies come first, so that the tracker does not see them made. The watch comes last: the mode
        # that is entered last sees an operator first, and it names the phase before the tracker looks.
        pace = stack.enter_context(working("copying your model"))
        work = carried_over(own, device, simulated)
        tracker = stack.enter_context(Tracker(device, own.workspaces, own.card))
        if simulated:
            stack.enter_context(answered(Memory(lambda: tracker.events, own.card or CARD)))
        watch = stack.enter_context(PhaseWatch(tracker, work, simulated))
        changes = dict[str, None]()
        if simulated:
            stack.enter_context(compiling(own.card or CARD, changes))
        for number in range(1, steps + 1):
            watch.begin_step(number)
            pace.at(f"{said} step {number} of {steps}")
            with errors_told(tracker, where):
                result = work.advance()
            if not simulated:
                losses += _values(result)
            del result  # a loss holds its graph
            watch.end_step()
            gc.collect()  # what only a cycle of references keeps is not a leak
            ends.append(len(tracker.events))
    measured = tracker.measurement(ends, losses, provenance)
    return noted(measured, *_notes(measured, own, watch.placeholders), *changes)


def _values(result: Any) -> list[float]:
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return [float(result.detach())]
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        return [float(result)]
    return []


def _notes(measured: Measurement, own: OwnStep, placeholders: bool) -> Iterator[str]:
    recurrent = any(isinstance(part, torch.nn.RNNBase) for part in own.model.modules())
    if measured.source == "simulated" and recurrent:
        yield CELL_BY_CELL
    phases = {mark.phase for mark in measured.timeline.marks}
    if "backward" not in phases:
        yield (
            "the step had no backward:"
            " what forward keeps is kept for nothing, unless it ran under torch.no_grad()"
        )
    elif own.optimizers and "optimizer" not in phases:
        yield NO_UPDATE
    scalers = (leaf for leaf in tree_leaves(own.batch) if isinstance(leaf, torch.amp.GradScaler))
    if measured.source == "simulated" and not all(one.is_enabled() for one in scalers):
        yield SCALER_IS_OFF
    ends = [moment.total for name, moment in measured.moments.items() if name.startswith("end of step")]
    if len(ends) > 1 and ends[-1] > ends[-2]:
        yield _leak(measured, len(ends), ends[-1] - ends[-2])
    if placeholders:
        yield f"values that the step reads, as with loss.item(), are placeholders of {PLACEHOLDER}"


def _leak(measured: Measurement, step: int, growth: int) -> str:
    kinds = ("activations", "temporaries", "inputs")
    alive = (item for item in measured.allocations if item.step == step and item.died is None)
    text = f"memory grows: {format_bytes(growth)} more after step {step} than after step {step - 1}"
    largest = explained([item for item in alive if item.kind in kinds], 3, "").rows
    if not largest:
        return text
    named = (f"{row.count} × {row.shape} {row.dtype} from {row.operation} at {row.line}" for row in largest)
    return f"{text}; what stays: {', '.join(named)}"


def noted(measured: Measurement, *notes: str) -> Measurement:
    """The measurement with more notes in its provenance."""
    note = "; ".join(filter(None, (measured.provenance.note, *notes)))
    return replace(measured, provenance=replace(measured.provenance, note=note))


@contextmanager
def errors_told(tracker: Tracker, where: str, instead: str = NOT_IN_STEP) -> Iterator[None]:
    """Raise StepError where a message can say more than torch's; every other exception passes as it is.

    `where` the code runs, and what to do `instead` of what cannot be simulated.
    """
    tracker.failure = None  # an earlier one may have had the same identity
    try:
        yield
    except Exception as error:
        message = _message(error, tracker.failure, where, instead)
        if message is None:
            raise
        raise StepError(message) from error


def _message(error: Exception, failure: FailedOperator | None, where: str, instead: str) -> str | None:
    if failure is None or failure.error != id(error):
        return None
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        reads = failure.operation == "_local_scalar_dense"
        what = "this reads" if reads else f"{failure.operation} depends on"
        none = "the values of a tensor, and a simulated tensor has a shape but no values"
        return f"{failure.line}: {what} {none}. {instead}"
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{failure.line}: {failure.operation} cannot be simulated,"
            f" as torch can tell what it makes only by running it. {instead}"
        )
    devices = {device for shape, device in failure.tensors if shape}
    if len(devices) < 2:
        return None
    given = " and ".join(f"{shape} on {device}" for shape, device in failure.tensors)
    return (
        f"{failure.line}: {failure.operation} got tensors on different devices: {given}."
        f" The model is on {where}: make the other tensor with device=x.device,"
        " register it as a buffer of the model, or hand it over in batch=…"
    )
