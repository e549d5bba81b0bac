"""The number formats that a measured step really used; a recording keeps no tensors, so its are `NOT_RECORDED`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from course_utils.errors import GpuOutOfMemory
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from course_utils.measurement import Measurement
from course_utils.measuring import forced_source
from course_utils.planning.twin import largest_micro_batch, unsupported
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

if TYPE_CHECKING:
    from course_utils.measuring.devices import Device

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""torch's names of formats as the course writes them."""

STATES = ("parameters", "gradients", "optimizer_states")
NOT_RECORDED = "format not recorded"


def activation_formats(measured: Measurement) -> dict[str, int]:
    """Return the bytes of the activations that the last forward keeps, by number format, the largest first."""
    if measured.source == "recorded":
        return {NOT_RECORDED: measured.moments["end of forward"]["activations"]}
    sizes: Counter[str] = Counter()
    for item in measured.alive_at(_last_event(measured, "loss")):
        if item.kind == "activations":
            sizes[SHORT.get(item.dtype, item.dtype)] += item.bytes
    return dict(sizes.most_common())


def operation_formats(measured: Measurement) -> dict[str, str]:
    """Return, for each operation of the last step's forward and loss, the formats of what it makes: "bf16, fp32"."""
    if measured.source == "recorded":
        return {"all": NOT_RECORDED}
    last = max(mark.step for mark in measured.timeline.marks)
    formats: dict[str, set[str]] = {}
    for item in measured.allocations:
        made_then = item.step == last and item.phase in ("forward", "loss") and item.kind != "weight_copies"
        if made_then and item.dtype in SHORT:
            formats.setdefault(f"{item.phase}: {item.operation}", set()).add(SHORT[item.dtype])
    return {name: ", ".join(sorted(found)) for name, found in sorted(formats.items())}


def state_formats(measured: Measurement) -> dict[str, str]:
    """Return the formats of parameters, gradients and optimizer states at the end of the last step's backward."""
    if measured.source == "recorded":
        return dict.fromkeys(STATES, NOT_RECORDED)
    # step counters and the like are smaller than 1,024 bytes
    alive = [item for item in measured.alive_at(_last_event(measured, "optimizer")) if item.bytes >= 1024]
    return {kind: ", ".join(sorted({SHORT[item.dtype] for item in alive if item.kind == kind})) for kind in STATES}


def _last_event(measured: Measurement, phase: str) -> int:
    """The event with which the phase of the last step begins."""
    return [mark.event for mark in measured.timeline.marks if mark.phase == phase][-1]


def estimated_states(run: TrainingRun) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states from the course's closed forms."""
    return dict(zip(STATES, (parameter_bytes(run), gradient_bytes(run), optimizer_state_bytes(run)), strict=True))


def measured_states(measured: Measurement) -> dict[str, int]:
    """Return the bytes of the same three at the end of backward, when all of them are there."""
    return {kind: measured.moments["end of backward"][kind] for kind in STATES}


def per_parameter(states: Mapping[str, int], parameters: int) -> str:
    """Return states as bytes per parameter: "2 + 2 + 12 = 16"."""
    shares = [size / parameters for size in states.values()]
    return f"{' + '.join(f'{share:.3g}' for share in shares)} = {sum(shares):.3g}"


WAITING = """No GPU is measured here, so there is no time to show: how long a step takes is a matter of hardware alone.
On a machine with an NVIDIA GPU run this cell again, or `python3 -m course_utils record` for the whole course."""


class StepTimes(NamedTuple):
    """The median milliseconds of one step by name, and what has to be said of them, each in one line."""

    milliseconds: Mapping[str, float]
    notes: Sequence[str] = ()


def step_times(runs: Mapping[str, TrainingRun], device: "Device | None" = None) -> StepTimes:
    """Time one step of each run on a device, this machine's GPU unless given; nothing with COURSE_SOURCE=simulated.

    All take the largest micro-batch, up to their own, with which each is predicted to fit what is free. A run that the
    card cannot compute, or that runs out of memory all the same, is left out with a note.
    """
    import torch

    from course_utils.measuring.devices import Cuda
    from course_utils.measuring.live import KernelRefused, memory_released

    if device is None:
        if not torch.cuda.is_available() or forced_source() not in ("auto", "live"):
            return StepTimes({}, (WAITING,))
        device = Cuda()
        device.release()
    free, times = device.free(), dict[str, float]()
    reasons = {name: unsupported(run, device.capability()) for name, run in runs.items()}
    notes = [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]
    able = {name: run for name, run in runs.items() if not reasons[name]}
    micro_batch = max(1, min((largest_micro_batch(run, free) for run in able.values()), default=1))
    if any(run.micro_batch > micro_batch for run in able.values()):
        notes.append(f"{format_bytes(free, 'GB', 1)} are free on this GPU: these are steps of {micro_batch=}.")
    for name, run in able.items():
        try:
            with memory_released(run, device.free):
                times[name] = median_step(run.replace(micro_batch=micro_batch), device)
        except (GpuOutOfMemory, KernelRefused) as error:
            notes.append(f"{name} is left out: {error}")
    return StepTimes(times, notes)


def median_step(run: TrainingRun, device: "Device") -> float:
    """Return the median milliseconds of a step of `run` on a device, after two steps to warm up."""
    from course_utils.measuring.counting import Unwatched, time_calls
    from course_utils.measuring.live import only_kernel, ready

    with only_kernel(run):
        training, _ = ready(run, device)
        for _ in range(2):
            training.step(Unwatched())
        return median(time_calls(lambda: training.step(Unwatched()), device))


def tell_times(times: StepTimes) -> str:
    """Return the times as lines of text, each with its ratio to the first, and the notes."""
    first = next(iter(times.milliseconds.values()), 0.0)
    lines = (f"{name:12s} {ms:8.1f} ms a step, {first / ms:.2f} times as fast" for name, ms in times[0].items())
    return "\n".join([*lines, *times.notes])
