"""One task of a recording, done in a process of its own: whatever happens to it, the others go on.

Results are written as they come, one JSON object a line: `{"part": "counters", …}`. `recorder.py` reads them.
"""

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..allocator_replay import replay
from ..estimating import estimate
from ..measurement import Measurement, Provenance
from ..measuring_errors import GpuOutOfMemory
from ..run import TrainingRun
from ..snapshots import compare_with_gpu
from .counting import Unwatched, count_peaks, time_steps
from .devices import Cuda, Device, Host
from .hardware import context_bytes, first_line, kernel_times, scratch_bytes, workspace_bytes
from .live import KernelRefused, memory_released, only_kernel, ready, traced
from .recorded import thinned, to_json
from .recording_list import STEPS, Task, recording_list, rehearsal_list
from .tracing import today, torch_release, trace_simulated

Send = Callable[..., None]

FACTS = "facts"
"""The task that comes before all others: it tells what device this is, and that torch can use it."""


def main(arguments: Sequence[str]) -> int:
    """Do the task that the arguments name and write its parts; 1 if it failed, which a part then says."""
    options = _options(arguments)
    faulthandler.dump_traceback_later(options.seconds, exit=True)  # even a hang inside a library ends
    device = Host() if options.rehearse else Cuda()

    def send(part: str, **content: Any) -> None:
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **content}, separators=(",", ":")) + "\n")

    try:
        if options.task == FACTS:
            send(FACTS, **facts(device))
        else:
            perform(find(options.task, options.rehearse), device, send)
    except Exception as error:  # told to whoever records; a traceback would name this machine's folders
        send("error", error=first_line(error))
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()  # or it would end whatever process goes on after this
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recording_work")
    parser.add_argument("--task", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args(arguments)


def find(name: str, rehearse: bool = False) -> Task:
    """The task of that name. Raises ValueError if there is none."""
    for task in rehearsal_list() if rehearse else recording_list():
        if task.name == name:
            return task
    raise ValueError(f"there is no task {name!r}")


def facts(device: Device) -> dict[str, Any]:
    """What every line of a recording says of its origin, and how many bytes are free. RuntimeError without a GPU."""
    if device.kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} can use no CUDA GPU here")
    version = sys.version_info
    python = f"{version.major}.{version.minor}.{version.micro}"
    return {**device.facts(), "torch": torch.__version__, "python": python, "free": device.free()}


def perform(task: Task, device: Device, send: Send) -> None:
    """Do one task and send each of its parts as soon as it is there."""
    if task.run is not None:
        {"run": record_run, "history": record_history}[task.kind](task.run, device, send)
        return
    measure: dict[str, Callable[[], Any]] = {
        "context": lambda: context_bytes(device),
        "workspaces": lambda: workspace_bytes(device),
        "scratch": lambda: {"operations": scratch_bytes(device)},
        "kernels": lambda: {"kernels": kernel_times(device, task.seq_len)},
    }
    send(task.kind, **measure[task.kind]())


# A training run


def record_run(run: TrainingRun, device: Device, send: Send) -> None:
    """Parts "counters" and "times" without the tracker, "measured" with it, "simulated" on a GPU that is not there.

    Where memory runs out, "out_of_memory" takes the place of what is then missing, and "refused" where torch has not
    the kernel that the run asks for.
    """
    try:
        with memory_released(run, device.free):
            _untracked(run, device, send)
        with memory_released(run, device.free):
            provenance = Provenance("cpu" if device.kind == "cpu" else "live", "", torch.__version__, today())
            start = time.perf_counter()
            measured = traced(run, STEPS, device.kind, provenance)
            seconds = time.perf_counter() - start
        send("measured", **to_json(thinned(measured)), losses=list(measured.losses), seconds=seconds)
    except GpuOutOfMemory as error:
        send("out_of_memory", message=str(error), free=device.free())
    except KernelRefused as error:
        send("refused", message=str(error))
    _simulated(run, send)


def _untracked(run: TrainingRun, device: Device, send: Send) -> None:
    device.release()
    in_use = device.in_use()
    start = time.perf_counter()
    with only_kernel(run):
        training, before = ready(run, device)
        counted = count_peaks(training, device, STEPS, before)
        seconds = time.perf_counter() - start  # beside "measured": the same steps, and what the tracker costs
        send("counters", **counted, driver_before=in_use, seconds=seconds)
        send("times", **time_steps(training, device), losses=training.losses)


def _simulated(run: TrainingRun, send: Send) -> None:
    """The same run simulated under the same torch, what the allocator's model reserves for it, and the estimate."""
    formula = estimate(run)
    send("estimate", total=formula.total, by_kind={kind: size for kind, size in formula.items() if size})
    try:
        simulated = trace_simulated(run, STEPS, "")
    except RuntimeError as error:  # what the GPU has told stands, with or without it
        send("simulated", unavailable=first_line(error))
        return
    send("simulated", torch=torch_release(), **summary(simulated), reserved=replay(simulated).peak_reserved)


def summary(measured: Measurement) -> dict[str, Any]:
    """A measurement's breakdowns as JSON, without its timeline and allocations."""
    full = to_json(measured)
    return {name: full[name] for name in ("breakdown", "moments", "phase_peaks")}


# The allocator's history


def record_history(run: TrainingRun, device: Device, send: Send) -> None:
    """Record the allocator's history of a run from its first tensor on, and replay it through the allocator's model.

    Where memory runs out, that is what is recorded.
    """
    try:
        send("history", **_history(run, device))
    except GpuOutOfMemory as error:
        send("out_of_memory", message=str(error), free=device.free())


def _history(run: TrainingRun, device: Device) -> dict[str, Any]:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None)
    with memory_released(run, device.free), only_kernel(run):
        training, _ = ready(run, device)
        for _ in range(STEPS):
            training.step(Unwatched())
        device.synchronize()
        snapshot: Any = torch.cuda.memory._snapshot()
        allocated, reserved = device.peaks()
    return agreement(snapshot) | {"counted_allocated": allocated, "counted_reserved": reserved}


def agreement(snapshot: dict[str, Any]) -> dict[str, Any]:
    """How the replay of a snapshot's history compares with what it says was reserved, in bytes."""
    compared = compare_with_gpu(snapshot)
    return {
        "exact": compared.exact,
        "moments": len(compared.real),
        "allocations": compared.allocations,
        "reserved": max(compared.real, default=0),
        "replayed": max(compared.replayed, default=0),
        "largest_difference": compared.largest_difference,
        "first_difference": compared.first_difference,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
