"""A script that is watched in a process of its own, which is behind a fence from its beginning to its end.

`shield` sends what Python writes to a temporary folder. The fence (Linux) refuses what gets around that, as a
library in C may. Both last until the process has ended, also for its threads. Only then is the report made.
Standard library only, as the fence comes before torch.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .. import fence
from ..errors import GpuOutOfMemory, ScriptError, SimulationUnavailable
from ..gpus import GPUS, Gpu
from ..measurement import Measurement
from ..measuring.files import everything_from_json, everything_to_json
from ..pace import wait_for

TASK, ANSWER = "task.json", "answer.json"

START = f"""import sys
folder, *sys.path[:] = sys.argv[1:]
from {__name__} import main
main(folder)
"""

REFUSALS = (ScriptError, SimulationUnavailable, GpuOutOfMemory, ValueError)
"""Errors that the process tells as an answer. Any other is a mistake of ours."""

NO_FENCE = "this system has no Landlock, so files that libraries in C write or delete are not protected"

SHARED_MEMORY = Path("/dev/shm")  # Where Python's locks and torch's shared tensors are
CARDS = ("nvidia*", "dxg")  # Files in /dev, by which programs reach a GPU; the second is Windows' for Linux
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def watch_apart(
    path: str, arguments: Sequence[str] = (), source: str = "simulated", **choices: Any
) -> tuple[Measurement, Gpu]:
    """Run `watch_script`, with its choices, in a new process; returns what it measured and the card.

    What the script prints goes to stderr. Raises as that does, and ScriptError, too, for a process that ends
    before it has answered. Then the files of the script are deleted, and on Linux all that it started has
    ended.
    """
    fenced = fence.version() > 0
    with TemporaryDirectory(prefix="watched-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        task = {"fenced": fenced, "watch": [path, list(arguments), source], "choices": choices}
        (folder / TASK).write_text(json.dumps(task), encoding="utf-8")
        code = _run(folder, Path(path).name)
        if code or not (folder / ANSWER).exists():
            raise ScriptError(_ended(Path(path).name, code))
        answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    for error in REFUSALS:
        if answer.get("error") == error.__name__:
            raise error(answer["said"])
    measured = everything_from_json(answer["measurement"])
    if not fenced:
        origin = measured.provenance
        measured = replace(measured, provenance=replace(origin, note=f"{origin.note}; {NO_FENCE}"))
    chosen = Gpu(**answer["card"] | {"capability": tuple(answer["card"]["capability"])})
    return measured, GPUS.get(chosen.name, chosen)


def _run(folder: Path, name: str) -> int:
    """Run the process with its task in a folder, and say that the script of this name is running.

    Returns its exit code when nothing of it is left.
    """
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP", *CACHES), str(folder))
    command = [sys.executable, "-c", START, str(folder), *sys.path]
    stderr = 2
    process = subprocess.Popen(command, env={**os.environ, **places}, stdout=stderr)
    try:
        return wait_for(process, f"running {name} for some steps")
    finally:  # also after Ctrl-C
        process.kill()
        process.wait()
        _end_others(folder)


def _end_others(folder: Path) -> None:
    """End what the process has left behind (Linux): all that has its temporary folder."""
    mark = f"TMPDIR={folder}".encode()
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if mark in variables.read_bytes().split(b"\0"):
                os.kill(int(variables.parent.name), signal.SIGKILL)


def _ended(name: str, code: int) -> str:
    """One sentence on a process that ended without an answer."""
    how = f"with exit code {code}"
    if code < 0:
        how = f"by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as when a machine runs out of memory"
    return f"{name}: the process that executes it ended {how} before its last step was measured"


def main(folder: str) -> None:
    """Do the task in a folder, and end this process: handlers that the script left do not run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it, then
    task = json.loads(Path(folder, TASK).read_text(encoding="utf-8"))
    if task["fenced"]:
        fence.end_with_parent()
        cards = [path for pattern in CARDS for path in Path("/dev").glob(pattern)]
        fence.enter(None, [Path(folder), SHARED_MEMORY, *cards])
    from .shield import nothing_changed

    code = 1
    with nothing_changed(folder):
        try:
            answer = _answer(task)
            Path(folder, ANSWER).write_text(json.dumps(answer), encoding="utf-8")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # within the block, which other threads must not outlive


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    from .script import place_for, watch_script

    choices = task["choices"]
    try:
        measured = watch_script(*task["watch"], **choices)
    except REFUSALS as error:
        name = next(each.__name__ for each in REFUSALS if isinstance(error, each))
        return {"error": name, "said": str(error)}
    card = place_for(choices.get("card"), task["watch"][2]).card
    names = ("name", "memory", "capability", "usable")
    return {
        "measurement": everything_to_json(measured),
        "card": {name: getattr(card, name) for name in names},
    }
