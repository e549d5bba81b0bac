"""The command `record`: the course's runs on the GPU that is here, each appended as a line to one file.

Each task runs in a process of its own with a time limit, so that a hang, a crash or an error that CUDA cannot
recover from costs that task alone. This process uses no torch and holds no GPU memory.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..interactive.course_files import PACKAGE, python_path
from ..measuring.files import (
    CRASHED,
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    REFUSED,
    SETTLED,
    TIMED_OUT,
    Line,
    append,
    read_lines,
    repair,
)
from ..units import aligned, format_bytes
from .tasks import STEPS, Task, recording_list

NOTEBOOK_PACKAGES = ("IPython", "nbclient", "ipykernel", "ipywidgets")

FACTS = Task("facts", "facts", "", seconds=120.0)
BETWEEN = 0.05  # Seconds between two looks at what is running
GRACE = 5.0  # Seconds in which a process that was killed has to be gone; a driver can hold it longer

Command = Callable[[Task, Path], list[str]]
"""The command line that does a task and writes its parts to a file."""

say = partial(print, flush=True)


class RecordingError(Exception):
    """The reason why no recording can be made, in a sentence for the person who asked for it."""


def run(options: Namespace) -> int:
    """Do what the command line asks: list, or record. RecordingError for what cannot be done."""
    tasks = chosen(options.only)
    if options.list:
        say(listing(tasks))
        return 0
    if options.out is None:
        raise RecordingError("record needs --out and a folder for its results, or --list.")
    if options.out.exists() and not options.out.is_dir():
        raise RecordingError(f"--out is {options.out}, which is not a folder.")
    if not 0 < options.minutes < 10_000:
        raise RecordingError(f"--minutes is {options.minutes:g}: give a time limit, such as --minutes 30.")
    if options.jobs < 1:
        raise RecordingError(f"--jobs is {options.jobs}: it must be at least 1.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # being asked to end is like Ctrl-C
    deadline = time.monotonic() + 60 * options.minutes
    found = device_facts(command_of(shared=False))
    file = options.out / f"{_file_stem(found['device']['name'])}.jsonl"
    try:
        return record(tasks, file, found, deadline, options.jobs)
    except KeyboardInterrupt:
        say(f"\nStopped. {file} has each task that has ended; the same command does the others.")
        return 130
    except OSError as problem:
        words = f"{problem.filename or file} cannot be written: {problem.strerror or problem}."
        words += f" {file.name} holds whole results: the same command goes on."
        raise RecordingError(words) from problem


def chosen(words: str) -> list[Task]:
    """The tasks whose kind, name or reason contains `words`. RecordingError if none does."""
    found = [
        task for task in recording_list() if words.lower() in f"{task.kind}: {task.name}: {task.why}".lower()
    ]
    if not found:
        raise RecordingError(f"No task matches {words!r}: --list shows them all.")
    return found


def listing(tasks: Sequence[Task]) -> str:
    """The tasks as a table, with their estimated peaks."""
    rows = [["", "peak", "task"]]
    for number, task in enumerate(tasks, start=1):
        peak = format_bytes(task.predicted, "GB", 1) if task.predicted else ""
        rows.append([str(number), peak, f"{task.name}  ({task.why})"])
    return aligned(rows, len(rows[0]))


def device_facts(command: Command) -> dict[str, Any]:
    """Facts about the GPU and torch, from a process of its own. RecordingError if there is no GPU."""
    running = Running(FACTS, command)
    try:
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(FACTS.seconds)
        parts, status, detail = running.finish()
    finally:
        running.end()
    if status != MEASURED:
        raise RecordingError(f"There is no GPU to record on: {detail or status}. --list shows the tasks.")
    return parts["facts"]


def record(
    tasks: Sequence[Task],
    file: Path,
    found: dict[str, Any],
    deadline: float,
    jobs: int = 1,
    command: Command | None = None,
) -> int:
    """Append each task's result to `file` until all are done or time is up; returns 0.

    `jobs` tasks run at a time, as far as the GPU's free memory goes.
    """
    command = command or command_of(shared=jobs > 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    repair(file)
    waiting = to_do(tasks, found, read_lines(file) if file.exists() else [])
    memory = found["free"]
    origin = {name: value for name, value in found.items() if name != "free"} | {"commit": commit()}
    free = format_bytes(memory, "GB", 1)
    say(f"{found['device']['name']}, {free} free, torch {found['torch']}: {len(waiting)} tasks to do.")
    running: list[Running] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < jobs and has_room(waiting[0], running, memory):
                running.append(Running(waiting.pop(0), command))
            for each in [each for each in running if each.is_over()]:
                running.remove(each)
                parts, status, detail = each.finish()
                used = 1 if each.task.alone else jobs
                content = {**origin, "jobs": used, **about(each.task), "status": status, "detail": detail}
                append(file, {**content, "seconds": each.seconds, "parts": parts})
                words = f"{status}: {detail}" if detail else status
                say(f"{len(waiting) + len(running):4} left  {each.task.name}: {words}")
            time.sleep(BETWEEN)
    finally:
        for each in running:
            each.end()
    left = len(waiting) + len(running)
    then = f"{left} tasks are left: run the same command again." if left else "Nothing is left to do."
    say(f"Recorded in {file}. {then}")
    return 0


def to_do(tasks: Sequence[Task], found: dict[str, Any], lines: Sequence[Line]) -> list[Task]:
    """The tasks that this GPU can do and `lines` do not settle: untried ones, then failed ones."""
    absent = [name for name in NOTEBOOK_PACKAGES if find_spec(name) is None]
    if absent and any(task.kind == "notebook" for task in tasks):
        say(f"Lessons are left out: they need {', '.join(absent)} (docs/gpu.md).")
        tasks = [task for task in tasks if task.kind != "notebook"]
    here = [line.content for line in lines if line.origin == (found["device"]["name"], found["torch"])]
    tried = {content["task"] for content in here}
    settled = {content["task"] for content in here if content["status"] in SETTLED}
    major, minor = found["device"]["capability"]
    left = [task for task in tasks if task.name not in settled]
    left = [task for task in left if not task.obstacle(found["free"], (major, minor))]
    return sorted(left, key=lambda task: task.name in tried)


def has_room(task: Task, running: Sequence["Running"], memory: int) -> bool:
    """Tell whether a task can use the GPU next to those that run now."""
    if not running:
        return True  # alone on the GPU, whatever it needs
    if task.alone or running[0].task.alone:
        return False
    return task.room + sum(each.task.room for each in running) <= memory


@dataclass
class Running:
    """A task in a process of its own, started now."""

    task: Task
    command: Command
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.results = Path(self.folder.name, "parts.jsonl")
        self.errors = Path(self.folder.name, "stderr")
        with self.errors.open("wb") as stream:
            self.process = subprocess.Popen(
                self.command(self.task, self.results),
                env={**os.environ, "PYTHONPATH": python_path(), **self.task.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.begun, 1)

    def is_over(self) -> bool:
        return self.process.poll() is not None or self.seconds > self.task.seconds

    def finish(self) -> tuple[dict[str, Any], str, str]:
        """End the process if it has not ended; returns its parts, its status, and a line that says more."""
        code = self.process.poll()
        parts = read_parts(self.results)
        status, detail = judged(parts, code, self.errors.read_text(errors="replace"))
        if status == TIMED_OUT:
            detail = f"after {self.task.seconds:.0f} s"
        self.end()
        return parts, status, detail

    def end(self) -> None:
        """Kill the process and its group. One that the driver does not let go is left alone."""
        if sys.platform == "win32":
            self.process.kill()
        else:
            with suppress(ProcessLookupError):  # it and all that it started have ended
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self.folder.cleanup()


def command_of(shared: bool) -> Command:
    """The command line of a task, with other tasks on the GPU or without."""

    def command(task: Task, results: Path) -> list[str]:
        # the process ends itself some time after it should have been ended: its starter may be gone
        limit = str(task.seconds + 60)
        line = [sys.executable, "-m", "course_utils.evidence.one_task", "--task", task.name]
        line += ["--results", str(results), "--seconds", limit]
        return [*line, "--shared"] if shared and not task.alone else line

    return command


def read_parts(path: Path) -> dict[str, Any]:
    """The parts that a task's process wrote, by name; a last one that it did not finish is left out."""
    if not path.exists():
        return {}
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    parts = {}
    for line in whole.splitlines():
        content = json.loads(line)
        parts[content.pop("part")] = content
    return parts


def judged(parts: dict[str, Any], code: int | None, errors: str) -> tuple[str, str]:
    """The status of a task, from what it wrote and its exit code, and a line that says more."""
    error = parts.pop("error", {}).get("error", "")
    if code is None:
        return TIMED_OUT, ""
    if error:
        return FAILED, error
    if code < 0:
        return CRASHED, f"ended by signal {-code}"
    if code:
        last = [line for line in errors.splitlines() if line.strip()][-1:]
        return CRASHED, f"exit code {code}; {''.join(last)[:300]}"
    if not parts:
        return FAILED, "it ended without a result"
    if "refused" in parts:
        return REFUSED, parts["refused"]["message"]
    if "out_of_memory" in parts:
        return OUT_OF_MEMORY, ""
    return MEASURED, ""


def about(task: Task) -> dict[str, Any]:
    return {
        "task": task.name,
        "kind": task.kind,
        "why": task.why,
        "environment": dict(task.environment),
        "steps": STEPS,
        "predicted": task.predicted,
        "date": date.today().isoformat(),
    }


def commit() -> str:
    """The commit of the course's code, with "-dirty" where files were changed; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=PACKAGE, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _file_stem(device: str) -> str:
    """A device's name as a file's: "nvidia-h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "gpu"
