"""One task of a recording, done in a process of its own: whatever happens to it, the others go on.

Results are written as they come, one JSON object a line: `{"part": "counters", …}`. `record.py` reads them.
"""

import argparse
import faulthandler
import json
import platform
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from hashlib import sha256
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..allocator.replay import replay
from ..allocator.snapshots import compare_with_gpu
from ..errors import GpuOutOfMemory
from ..estimating import estimate
from ..estimating.workspaces import installed_torch
from ..gpus import GPUS
from ..interactive.course_files import ROOT
from ..measuring.devices import Cuda, Device, Unwatched, count_peaks, time_calls
from ..measuring.files import thinned, to_json
from ..measuring.live import KernelRefused, memory_released, only_kernel, ready, released, traced
from ..measuring.recorded import spread
from ..measuring.sources import simulated_run
from ..measuring.step import provenance_of, torch_release
from ..run import TrainingRun
from . import published
from .hardware import context_bytes, first_line, kernel_times, scratch_bytes, workspace_bytes
from .history import packed, unpacked
from .published import Row, published_rows
from .sequence import hash_of, release_line, sequence_hash
from .tasks import STEPS, Task, recording_list, sized

FACTS = "facts"  # The task before all others: it names the device, and fails unless torch can use it
OLDEST_TORCH = "2.11"

Send = Callable[..., None]


def main(arguments: Sequence[str]) -> int:
    """Do the task that the arguments name and write its parts; 1 if it failed, which a part then says."""
    parser = argparse.ArgumentParser(prog="one_task")
    parser.add_argument("--task", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--shared", action="store_true", help="other programs use the GPU at the same time")
    options = parser.parse_args(arguments)
    # Even a hang inside a library ends, and so does this process if the one that started it was killed
    faulthandler.dump_traceback_later(options.seconds, exit=True)

    def send(part: str, **content: Any) -> None:
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **content}, separators=(",", ":")) + "\n")

    try:
        if options.task == FACTS:
            send(FACTS, **facts(Cuda()))
        else:
            perform(find(options.task), Cuda(), send, options.shared)
    except Exception as error:  # sent to the recorder; a traceback would name this machine's folders
        send("error", error=first_line(error))
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def find(name: str) -> Task:
    for task in recording_list():
        if task.name == name:
            return task
    raise ValueError(f"there is no task {name!r}")


def facts(device: Cuda) -> dict[str, Any]:
    """The origin that every line of a recording names, and the bytes free. RuntimeError if there is none."""
    if installed_torch() < tuple(map(int, OLDEST_TORCH.split("."))):
        raise RuntimeError(
            f"torch {OLDEST_TORCH} or newer is needed in {sys.executable}, not {torch.__version__}"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} can use no CUDA GPU here")
    return {
        **device.facts(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "free": device.free(),
    }


def perform(task: Task, device: Device, send: Send, shared: bool = False) -> None:
    """Do one task and send each of its parts as soon as it is there."""
    if task.kind == "run" and task.run is not None:
        send_said(task.run, device, send)
        record_run(task.run, device, send, shared)
    elif task.kind == "history" and task.run is not None:
        record_history(task.run, device, send)
    elif task.kind == "published":
        record_published(task.topic.split(","), device, send)
    elif task.kind == "notebook":
        record_lesson(task.topic, send)
    elif task.kind == "script":
        send("script", **counted_script(ROOT / "notebooks" / "train" / task.topic))
    elif task.kind == "times":
        send("times", variants=variant_times(task.topic, device))
    elif task.kind == "kernels":
        send("kernels", kernels=kernel_times(device, int(task.topic)))
    elif task.kind == "scratch":
        send("scratch", operations=scratch_bytes(device))
    elif task.kind == "workspaces":
        send("workspaces", **workspace_bytes(device))
    elif task.kind == "context":
        send("context", **context_bytes(device))
    else:
        raise ValueError(f"nothing is known of tasks of the kind {task.kind!r}")


# Training runs


def send_said(run: TrainingRun, device: Device, send: Send) -> None:
    """Predict a run before the GPU runs it: parts "estimate" and "simulated".

    On a GPU of the catalog's compute capabilities cuBLAS's workspaces are counted in. The simulation is under
    the same torch; "allocated" and "reserved" are what the allocator's policy makes of it, and "sequence" is
    the hash by which a later version of the course knows whether it still takes the same step.
    """
    card = next((name for name, gpu in GPUS.items() if gpu.capability == device.capability()), None)
    said = estimate(run.replace(card=card))
    by_kind = {kind: size for kind, size in said.items() if size}
    send("estimate", total=said.total, by_kind=by_kind, card=card)
    try:
        simulated = simulated_run(run.replace(card=card), STEPS, "")
        sequence = {release_line(): sequence_hash(run, STEPS)}
    except RuntimeError as error:  # the GPU's figures are recorded, with or without it
        send("simulated", unavailable=first_line(error))
        return
    replayed = replay(simulated)
    full = to_json(simulated)
    send(
        "simulated",
        torch=torch_release(),
        card=card,
        breakdown=full["breakdown"],
        phase_peaks=full["phase_peaks"],
        allocated=replayed.step_peaks()[STEPS],
        reserved=replayed.peak_reserved,
        sequence=sequence,
    )


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
                    del counters["driver"]
                send("counters", **counters)
                del training
            with memory_released(run, device.free):
                found = traced(run, STEPS, device.kind, provenance_of("live"))
            send("measured", **to_json(thinned(found)), losses=list(found.losses))
    except KernelRefused as error:
        send("refused", message=str(error))


@contextmanager
def out_of_memory_sent(device: Device, send: Send) -> Iterator[None]:
    """Send part "out_of_memory" where memory runs out inside."""
    try:
        yield
    except GpuOutOfMemory as error:
        send("out_of_memory", message=str(error), free=device.free())


# Histories


def record_history(run: TrainingRun, device: Device, send: Send) -> None:
    """Part "history": the allocator's history of a run from its first tensor on.

    "exact" tells whether its replay is the same. "steps" says for each step after how many allocations and
    frees it ended, and the bytes then reserved.
    """
    with out_of_memory_sent(device, send):
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
        history = packed(snapshot)
        exact = compare_with_gpu(unpacked(history)).exact
        # last: a simulation leaves a segment on a GPU that is here, and the history has to begin before any
        sequence = {release_line(): sequence_hash(run, STEPS)}
        send("history", history=history, steps=steps, exact=exact, sequence=sequence)


def _moments(snapshot: Mapping[str, Any]) -> int:
    return sum(entry["action"] in ("alloc", "free_completed") for entry in snapshot["device_traces"][0])


# Published steps


def record_published(ids: Sequence[str], device: Device, send: Send) -> None:
    """Published steps on this GPU: parts "said ID", by the simulation of such a card, and "counted ID".

    Both have bytes allocated and reserved by moment: before the first step ("start"), the last step's peak,
    and after it ("end"). A step that fails has "error" instead of counts.
    """
    rows = [row for row in published_rows() if row.id in ids]
    for row in rows:
        send(f"said {row.id}", **said_of(row, device.capability()))
    for row in rows:
        try:
            with released(lambda asked: asked):
                count = published.family_of(row.family, live=True)
                send(f"counted {row.id}", **count(None, **row.how))
        except (GpuOutOfMemory, RuntimeError, TypeError) as error:
            send(f"counted {row.id}", error=first_line(error))


def said_of(row: Row, capability: tuple[int, int]) -> dict[str, Any]:
    """Return a row's bytes by moment, simulated for such a card under this torch, and its step's hash."""
    here = replace(row, capability=capability, torch=installed_torch())
    found: dict[str, Any] = {}
    for moment in ("start", "peak", "end"):
        said = published.say(replace(here, moment=moment))
        found[moment] = [said.allocated, said.reserved]
    step, _ = published.simulated(here)
    return {**found, "sequence": {release_line(): hash_of(step.allocations)}}


# Times and lessons


def variant_times(topic: str, device: Device) -> list[dict[str, Any]]:
    """Time each variant of a comparison: milliseconds per step with their spread, or why there are none."""
    runs = sized(topic, device.free(), device.capability())
    return [{"label": label, **step_time(run, device)} for label, run in runs.items()]


def step_time(run: TrainingRun | str, device: Device) -> dict[str, Any]:
    if isinstance(run, str):
        return {"refused": run}
    with memory_released(run, device.free), only_kernel(run):
        training, _ = ready(run, device)
        for _ in range(STEPS):
            training.step(Unwatched())
        times = time_calls(lambda: training.step(Unwatched()), device, most=20, seconds=6.0)
        return {"step_ms": spread(times)}


def counted_script(path: Path) -> dict[str, Any]:
    """A training script's counters after its last step, and its speed: the median after five steps.

    The script prints its speed as "12,345 tokens/s". "sha256" is that of its text.
    """
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    speeds = [float(found.replace(",", "")) for found in re.findall(r"([\d,]+) tokens/s", printed.getvalue())]
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "tokens_per_second": median(speeds[5:]),
        "sha256": sha256(path.read_bytes()).hexdigest(),
    }


def record_lesson(topic: str, send: Send) -> None:
    """Part "notebook": how a lesson went. RuntimeError, after it was sent, if a cell failed."""
    from .live_notebook import execute_live  # it needs Jupyter's packages

    found = execute_live(ROOT / topic)
    send("notebook", **found)
    if found["failed"]:
        raise RuntimeError(f"{len(found['failed'])} cells fail, the first: {found['failed'][0]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
