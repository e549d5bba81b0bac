"""One task of a recording, done in a process of its own: whatever happens to it, the others go on.

Results are written as they come, one JSON object a line: `{"part": "counters", …}`. `recorder.py` reads them.
"""

import argparse
import faulthandler
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ..allocator.replay import replay
from ..allocator.settings import settings
from ..allocator.snapshots import compare_with_gpu, snapshot_of
from ..errors import GpuOutOfMemory
from ..estimating import estimate, formula
from ..gpus import GPUS
from ..interactive.course_files import ROOT
from ..measuring.counting import Unwatched, count_peaks, time_calls
from ..measuring.devices import Cuda, Device, Host, as_card
from ..measuring.live import KernelRefused, memory_released, only_kernel, ready, traced
from ..measuring.recorded import thinned, to_json
from ..measuring.recording_file import AS
from ..measuring.tracing import provenance_of, torch_release, trace_simulated
from ..run import TrainingRun
from .allocation_history import packed, unpacked
from .gpu_turns import await_turn
from .hardware import context_bytes, first_line, kernel_times, scratch_bytes, workspace_bytes
from .published_steps import counting
from .tasks import (
    FACTS,
    STEPS,
    TIMES_OUT_OF_MEMORY,
    Task,
    recording_list,
    rehearsal_list,
    sized,
    spread,
    variants,
)

OLDEST_TORCH = "2.11"

Send = Callable[..., None]


def main(arguments: Sequence[str]) -> int:
    """Do the task that the arguments name and write its parts; 1 if it failed, which a part then says."""
    options = _options(arguments)
    faulthandler.dump_traceback_later(options.seconds, exit=True)  # even a hang inside a library ends
    device = Host() if options.rehearse else Cuda()

    def send(part: str, **content: Any) -> None:
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **content}, separators=(",", ":")) + "\n")

    try:
        if options.as_card and not options.rehearse:
            as_card(options.as_card)
        if options.task == FACTS:
            send(FACTS, **facts(device))
        else:
            perform(find(options.task, options.rehearse), device, send, options.seconds)
    except Exception as error:  # sent to the recorder; a traceback would name this machine's folders
        send("error", error=first_line(error))
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()  # or it would end whatever process goes on after this
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="work")
    parser.add_argument("--task", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--as-card", default="")
    return parser.parse_args(arguments)


def find(name: str, rehearse: bool = False) -> Task:
    tasks = rehearsal_list() if rehearse else recording_list()
    for task in tasks:
        if task.name == name:
            return task
    raise ValueError(f"there is no task {name!r}")


def facts(device: Device) -> dict[str, Any]:
    """The origin that every line of a recording names, and the bytes free. RuntimeError if there is none."""
    if torch.__version__ < OLDEST_TORCH:
        raise RuntimeError(
            f"torch {OLDEST_TORCH} or newer is needed in {sys.executable}, not {torch.__version__}"
        )
    if device.kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} can use no CUDA GPU here")
    return {
        **device.facts(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "free": device.free(),
    }


def perform(task: Task, device: Device, send: Send, seconds: float = 0.0) -> None:
    """Do one task and send each of its parts as soon as it is there; `seconds` count from its turn."""
    if task.kind == "run" and task.run is not None:
        send_said(task.run, device, send)
    elif task.kind == "published":
        counting.send_said(task.topic, send)
    faulthandler.cancel_dump_traceback_later()
    shared = await_turn()
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    of_cells = {"cells": run_cells, "notebook": run_lesson}
    others: dict[str, Callable[[], Any]] = {
        "context": lambda: context_bytes(device),
        "workspaces": lambda: workspace_bytes(device),
        "scratch": lambda: {"operations": scratch_bytes(device)},
        "kernels": lambda: {"kernels": kernel_times(device, task.seq_len)},
        "times": lambda: {"variants": variant_times(task.topic, device)},
    }
    if task.run is not None and task.kind == "history":
        record_history(task.run, device, send)
    elif task.run is not None:
        record_run(task.run, device, send, shared)
    elif task.kind == "published":
        counting.send_counted(task.topic, send)
    elif task.needs_notebooks:
        of_cells[task.kind](task, device, send)
    else:
        send(task.kind, **others[task.kind]())


def run_cells(task: Task, device: Device, send: Send) -> None:
    """Part "cells": how often a kind of cell ran out of memory and left nothing behind."""
    from ..interactive.failed_cells import watch_cells
    from .out_of_memory_cells import little_memory, prepared_shell, run_out

    card = little_memory()
    prepared_shell(card)
    watch_cells()
    send("cells", **run_out(task.topic, card, TIMES_OUT_OF_MEMORY))


def run_lesson(task: Task, device: Device, send: Send) -> None:
    """Part "notebook": how a lesson went. RuntimeError, after it was sent, if a cell failed."""
    from .notebooks import execute_live

    as_card = device.facts()["device"]["name"].partition(AS)[2]
    source = "simulated" if device.kind == "cpu" else "auto"
    found = execute_live(ROOT / task.topic, as_card, source)
    send("notebook", **found)
    if found["failed"]:
        raise RuntimeError(f"{len(found['failed'])} cells fail, the first: {found['failed'][0]}")


def variant_times(topic: str, device: Device) -> list[dict[str, Any]]:
    """Time each variant of a comparison: milliseconds per step with their spread, or why there are none."""
    if device.kind == "cuda":
        runs = sized(topic, device.free(), device.capability())
    else:
        runs = rehearsed_variants(topic)
    return [{"label": label, **_step_time(run, device)} for label, run in runs.items()]


def rehearsed_variants(topic: str) -> dict[str, TrainingRun | str]:
    """The same variants of a model that a CPU trains in milliseconds, in the one recipe that it has."""
    small = {"model": "tiny-gpt", "seq_len": 32, "precision": "fp32", "attention": "eager"}
    return {label: run.replace(**small) for label, run in variants(topic, 2).items()}


def _step_time(run: TrainingRun | str, device: Device) -> dict[str, Any]:
    if isinstance(run, str):
        return {"refused": run}
    with memory_released(run, device.free), only_kernel(run):
        training, _ = ready(run, device)
        for _ in range(STEPS):
            training.step(Unwatched())
        times = time_calls(lambda: training.step(Unwatched()), device, most=20, seconds=6.0)
        return {"step_ms": spread(times)}


@contextmanager
def out_of_memory_sent(device: Device, send: Send) -> Iterator[None]:
    """Send part "out_of_memory" where memory runs out inside."""
    try:
        yield
    except GpuOutOfMemory as error:
        send("out_of_memory", message=str(error), free=device.free())


def record_run(run: TrainingRun, device: Device, send: Send, shared: bool = False) -> None:
    """Parts "counters" without the tracker, and "measured" with it.

    Where memory runs out, "out_of_memory" takes the place of what is then missing, and "refused" where torch
    has not the kernel that the run asks for. Where the GPU is `shared`, the driver's counter has other
    programs' bytes, and is left out.
    """
    try:
        with out_of_memory_sent(device, send):
            device.release()
            with memory_released(run, device.free), only_kernel(run):
                training, before = ready(run, device)
                counters = count_peaks(training.step, device, STEPS, before)
                if shared:
                    counters = {name: value for name, value in counters.items() if name != "driver"}
                send("counters", **counters)
                del training
            provenance = provenance_of("cpu" if device.kind == "cpu" else "live")
            with memory_released(run, device.free):
                found = traced(run, STEPS, device.kind, provenance)
            send("measured", **to_json(thinned(found)), losses=list(found.losses))
    except KernelRefused as error:
        send("refused", message=str(error))


def send_said(run: TrainingRun, device: Device, send: Send) -> None:
    """Predict a run before the GPU runs it: parts "estimate", "formula" where it has one, and "simulated".

    On a GPU of the catalog's compute capabilities cuBLAS's workspaces are counted in. The simulation is under
    the same torch; "allocated" and "reserved" are what the allocator's policy makes of it.
    """
    card = next((name for name, gpu in GPUS.items() if gpu.capability == device.capability()), None)
    run = run.replace(card=card)
    said = estimate(run)
    by_kind = {kind: size for kind, size in said.items() if size}
    send("estimate", total=said.total, by_kind=by_kind, card=card)
    with suppress(ValueError):  # it covers no such run
        send("formula", total=formula.estimate(run.replace(card=None)).total)
    try:
        simulated = trace_simulated(run, STEPS, "")
    except RuntimeError as error:  # the GPU's figures are recorded, with or without it
        send("simulated", unavailable=first_line(error))
        return
    replayed = replay(simulated)
    blocks = {"allocated": replayed.step_peaks()[STEPS], "reserved": replayed.peak_reserved}
    full = to_json(simulated)
    summary = {name: full[name] for name in ("breakdown", "phase_peaks")}
    send("simulated", torch=torch_release(), card=card, **summary, **blocks)


def record_history(run: TrainingRun, device: Device, send: Send) -> None:
    """Part "history": the allocator's history of a run from its first tensor on.

    "exact" tells whether its replay is the same. "steps" says for each step after how many allocations and
    frees it ended, and the bytes then reserved.
    """
    with out_of_memory_sent(device, send):
        if device.has_history:
            snapshot, steps = _real_history(run, device)
        else:
            snapshot, steps = _rehearsed_history(run)
        history = packed(snapshot)
        exact = compare_with_gpu(unpacked(history)).exact
        send("history", history=history, steps=steps, exact=exact)


def _real_history(run: TrainingRun, device: Device) -> tuple[Mapping[str, Any], list[tuple[int, int]]]:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None)
    steps: list[tuple[int, int]] = []
    snapshot: Mapping[str, Any] = {}
    with memory_released(run, device.free), only_kernel(run):
        training, _ = ready(run, device)
        for _ in range(STEPS):
            training.step(Unwatched())
            device.synchronize()
            snapshot = torch.cuda.memory._snapshot()
            steps.append((_moments(snapshot), device.reserved()))
    return snapshot, steps


def _rehearsed_history(run: TrainingRun) -> tuple[Mapping[str, Any], list[tuple[int, int]]]:
    """The same from a replay of the simulated run, under the settings of this process."""
    choices = settings(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    replayed = replay(trace_simulated(run, STEPS, ""), **choices)
    snapshot = snapshot_of(replayed)
    return snapshot, [(_moments(snapshot), replayed.reserved[-1])]


def _moments(snapshot: Mapping[str, Any]) -> int:
    return sum(entry["action"] in ("alloc", "free_completed") for entry in snapshot["device_traces"][0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
