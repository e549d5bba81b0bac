"""Which number formats a measured step really used: per operation, per byte, and per parameter.

A recording keeps no tensors but those of its peak, so that it cannot tell: where one stands in for a simulation, these
functions say `NOT_RECORDED` instead.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from ..measurement import Allocation, Measurement
from ..measuring import forced_source
from ..run import TrainingRun

if TYPE_CHECKING:
    from ..measuring.devices import Device

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "bool", "int64": "int64"}

STATES = ("parameters", "gradients", "optimizer_states")

NOT_RECORDED = "format not recorded"


def short(dtype: str) -> str:
    """torch's name of a format as the course writes it; unknown names stay."""
    return SHORT.get(dtype, dtype)


def kept_after_forward(measured: Measurement) -> list[Allocation]:
    """Everything alive when forward of the last step is over."""
    event = next(mark.event for mark in reversed(measured.timeline.marks) if mark.phase == "loss")
    return list(measured.alive_at(event))


def activation_formats(measured: Measurement) -> dict[str, int]:
    """Bytes of the activations that the last forward keeps, by number format, the largest first."""
    if measured.source == "recorded":
        return {NOT_RECORDED: measured.moments["end of forward"]["activations"]}
    sizes: dict[str, int] = {}
    for item in kept_after_forward(measured):
        if item.kind == "activations":
            sizes[short(item.dtype)] = sizes.get(short(item.dtype), 0) + item.bytes
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def operation_formats(measured: Measurement) -> dict[str, str]:
    """For each operation of the last step's forward and loss, the formats of what it makes: "bf16" or "bf16, fp32".

    Weight copies are left out, and so is what has no format to choose: masks and indices.
    """
    if measured.source == "recorded":
        return {"all": NOT_RECORDED}
    last = max(mark.step for mark in measured.timeline.marks)
    formats: dict[str, set[str]] = {}
    for item in measured.allocations:
        made_then = item.step == last and item.phase in ("forward", "loss") and item.kind != "weight_copies"
        if made_then and item.dtype.startswith(("float", "bfloat")):
            formats.setdefault(f"{item.phase}: {item.operation}", set()).add(short(item.dtype))
    return {name: ", ".join(sorted(found)) for name, found in sorted(formats.items())}


def state_formats(measured: Measurement) -> dict[str, str]:
    """The formats of parameters, gradients and optimizer states at the end of the last step's backward.

    What has less than 1,024 bytes is left out: step counters and the like.
    """
    if measured.source == "recorded":
        return dict.fromkeys(STATES, NOT_RECORDED)
    event = [mark.event for mark in measured.timeline.marks if mark.phase == "optimizer"][-1]
    alive = [item for item in measured.alive_at(event) if item.bytes >= 1024]
    return {kind: ", ".join(sorted({short(item.dtype) for item in alive if item.kind == kind})) for kind in STATES}


def estimated_states(run: TrainingRun) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states from the course's closed forms."""
    return dict(zip(STATES, (parameter_bytes(run), gradient_bytes(run), optimizer_state_bytes(run)), strict=True))


def measured_states(measured: Measurement) -> dict[str, int]:
    """Bytes of the same three at the end of backward, when all of them are there."""
    moment = measured.moments["end of backward"]
    return {kind: moment[kind] for kind in STATES}


def per_parameter(states: Mapping[str, int], parameters: int) -> str:
    """States as bytes a parameter: "2 + 2 + 12 = 16"."""
    shares = [size / parameters for size in states.values()]
    return f"{' + '.join(f'{share:.3g}' for share in shares)} = {sum(shares):.3g}"


WAITING = """No GPU is measured here, so there is no time to show: how long a step takes is a matter of hardware alone.
On a machine with an NVIDIA GPU run this cell again, or `python3 -m course_utils record` for the whole course."""


def step_times(runs: Mapping[str, TrainingRun]) -> dict[str, float]:
    """The median milliseconds of one step of each run on the GPU of this machine; empty where none is to be measured.

    A run that the card cannot compute is left out. COURSE_SOURCE=simulated leaves all out, GPU or not.
    """
    import torch

    if not torch.cuda.is_available() or forced_source() not in ("auto", "live"):
        return {}
    from ..fitting import unsupported
    from ..measuring.devices import Cuda

    device = Cuda()
    return {name: median_step(run, device) for name, run in runs.items() if not unsupported(run, device.capability())}


def median_step(run: TrainingRun, device: "Device") -> float:
    """The median milliseconds of a step of `run` on a device (one of `measuring.devices`), two steps run before."""
    from ..measuring.counting import Unwatched, time_steps
    from ..measuring.live import only_kernel, ready

    with only_kernel(run):
        training, _ = ready(run, device)
        for _ in range(2):
            training.step(Unwatched())
        times = sorted(time_steps(training, device)["step_ms"])
    return times[len(times) // 2]


def tell_times(times: Mapping[str, float]) -> str:
    """The times as lines of text, each with its ratio to the first; the reason where there are none."""
    if not times:
        return WAITING
    first = next(iter(times.values()))
    return "\n".join(
        f"{name:12s} {time:8.1f} ms a step, {first / time:.2f} times as fast" for name, time in times.items()
    )
