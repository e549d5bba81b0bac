"""The command `record`: the course's runs on the GPU that is here, within a given time whatever happens.

Each task runs in a process of its own with its own time limit, so that a hang, a crash or an error that CUDA
cannot recover from ends that task alone. Every process of a task ends with the task, and with this process
however that ends. This process uses no torch and holds no GPU memory. Several tasks can be at work at once:
each asks for its turn on the GPU when it has done what needs none, and gets it when what it needs of the
memory is not promised to another.
"""

import hashlib
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
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from ..gpus import Gpu, card_named
from ..interactive.course_files import PACKAGE
from ..measuring import recording_file
from ..ranks.launch import signal_name
from ..units import MiB, aligned, format_bytes
from . import gpu_turns
from .tasks import FACTS, STEPS, Task, recording_list, rehearsal_list
from .verifying import names_here, verify

GUARD = PACKAGE / "ranks" / "guard.py"

NOTEBOOK_PACKAGES = ("matplotlib", "IPython", "nbclient", "ipykernel", "ipywidgets", "jupytext", "nbformat")

Command = Callable[[Task, Path, float], list[str]]
"""The command line that does a task, writes its results to a file and ends itself after so many seconds."""

FACTS_SECONDS = 120.0
SHORTEST = 10.0  # Seconds: with less than this left, no further task is begun
BETWEEN = 0.05  # Seconds between two looks at what is at work
# Seconds in which a process that was killed has to be gone; a driver that hangs can hold it longer
GRACE = 5.0

say_now = partial(print, flush=True)
"""Print, and let it be seen also if this process is killed next: a pipe would keep it back."""


class RecordingError(Exception):
    """The reason why no recording can be made, in a sentence for the person who asked for it."""


class TaskResult(NamedTuple):
    """The result of a task's process: its parts by name, how it ended, and a line that says more."""

    parts: dict[str, Any]
    status: str
    detail: str
    seconds: float


@dataclass
class Running:
    """A task at work in its own process, its files in `folder`; `limit` counts `since` it had its turn."""

    task: Task
    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    limit: float
    begun: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    has_turn: bool = False

    def file(self, name: str) -> Path:
        return Path(self.folder.name) / name

    @property
    def waits(self) -> bool:
        return not self.has_turn and self.file(gpu_turns.ASKED).exists()

    def give_turn(self, shared: bool) -> None:
        """Let it use the GPU; its time counts from now on."""
        self.has_turn = True
        self.since = time.monotonic()
        gpu_turns.give(self.file(gpu_turns.GIVEN), shared)

    def finish(self, killed: bool = False) -> TaskResult:
        """End the process if it has not ended, and read what it has written."""
        code = None if killed else self.process.poll()
        _kill(self.process)
        parts = read_parts(self.file("parts.jsonl"))
        status, detail = judged(parts, code, self.file("stderr").read_text(errors="replace"))
        if status == recording_file.TIMED_OUT:
            detail = f"after {self.limit:.0f} s"
        self.folder.cleanup()
        return TaskResult(parts, status, detail, round(time.monotonic() - self.begun, 1))

    def is_over(self) -> bool:
        if self.process.poll() is not None:
            return True
        return not self.waits and time.monotonic() > self.since + self.limit


def record(
    tasks: Sequence[Task],
    file: Path,
    origin: dict[str, Any],
    deadline: float,
    command: Command,
    say: Callable[[str], None],
    jobs: int = 1,
    memory: int = 0,
) -> int:
    """Append each task's result to `file` until all are done or time is up; returns how many are left.

    `jobs` tasks are at work at a time, those that have their turn within `memory` bytes of the GPU.
    """
    waiting = list(tasks)
    running: list[Running] = []
    cut = 0
    try:
        while running or (waiting and deadline - time.monotonic() >= SHORTEST):
            while waiting and len(running) < jobs:
                left = deadline - time.monotonic()
                if left < SHORTEST:
                    break
                task = waiting.pop(0)
                say(f"[{len(tasks) - len(waiting)}/{len(tasks)}, {left / 60:.1f} min left] {task.name}")
                running.append(begin(command, task, task.seconds, takes_turns=True))
            give_turns(running, memory, jobs > 1)
            is_late = time.monotonic() > deadline - GRACE
            for each in [each for each in running if is_late or each.is_over()]:
                running.remove(each)
                outcome = _ended(each, is_late)
                if outcome.status == recording_file.CUT_SHORT:
                    cut += 1
                recording_file.append(file, {**origin, **about(each.task), **outcome._asdict()})
                say(_outcome_line(outcome, each.task.name if jobs > 1 else ""))
            time.sleep(BETWEEN)
    finally:
        for each in running:
            each.finish(killed=True)
    return cut + len(waiting)


def _ended(running: Running, is_late: bool) -> TaskResult:
    """End a task; where the given time is over, that is why it did not end by itself."""
    outcome = running.finish(killed=running.process.poll() is None)
    if outcome.status == recording_file.TIMED_OUT and is_late:
        return outcome._replace(status=recording_file.CUT_SHORT, detail="the given time was over")
    return outcome


def _outcome_line(outcome: TaskResult, name: str) -> str:
    named = f"{name}: " if name else ""
    detail = f": {outcome.detail}" if outcome.detail else ""
    return f"    {named}{outcome.status}{detail}"


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


def give_turns(running: Sequence[Running], memory: int, shared: bool) -> None:
    """Let those that wait use the GPU, in their order, while none needs it alone or more than is left."""
    using = [each for each in running if each.has_turn]
    for each in [each for each in running if each.waits]:
        if not _can_join(each.task, [other.task for other in using], memory):
            return  # those behind it wait too, or the largest task would come last
        each.give_turn(shared and not each.task.alone)
        using.append(each)


def _can_join(task: Task, using: Sequence[Task], memory: int) -> bool:
    """Tell whether a task can use the GPU next to those that use it now."""
    if not using:
        return True  # alone on the GPU, whatever it needs
    if task.alone or using[0].alone:
        return False
    taken = sum(other.room for other in using)
    return taken + task.room <= memory


def work_command(rehearse: bool, as_card: str = "") -> Command:
    more: list[str] = []
    if rehearse:
        more.append("--rehearse")
    if as_card:
        more += ["--as-card", as_card]

    def command(task: Task, results: Path, seconds: float) -> list[str]:
        options = ["--task", task.name, "--results", str(results), "--seconds", f"{seconds:.1f}"]
        return [sys.executable, "-m", "course_utils.recording.one_task", *options, *more]

    return command


def run_process(command: Command, task: Task, seconds: float) -> TaskResult:
    """Do a task in a process of its own that is killed after `seconds`, and read what it has written."""
    started = begin(command, task, seconds)
    try:
        started.process.wait(timeout=max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        return started.finish(killed=True)
    except BaseException:
        started.finish(killed=True)
        raise
    return started.finish()


def begin(command: Command, task: Task, seconds: float, takes_turns: bool = False) -> Running:
    """Start a task's process."""
    folder = tempfile.TemporaryDirectory()
    place = Path(folder.name)
    paths = [str(PACKAGE.parent)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **task.environment}
    if takes_turns:
        environment[gpu_turns.VARIABLE] = str(place / gpu_turns.GIVEN)
    line = command(task, place / "parts.jsonl", seconds)
    if sys.platform == "linux":  # then nothing that the command starts outlives it, or this process
        line = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *line]
    with (place / "stderr").open("wb") as stream:
        process = subprocess.Popen(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,
        )
    return Running(task, process, folder, seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started. One that the driver does not let go is left alone."""
    process.terminate()  # its guard ends every process below it, in whatever session
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE if sys.platform == "linux" else 0)
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):  # it and all that it started have ended
            os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        print(f"Process {process.pid} was killed but does not end. Continuing without it.", file=sys.stderr)


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
        return recording_file.TIMED_OUT, ""
    if error:
        return recording_file.FAILED, error
    if code < 0:
        return recording_file.CRASHED, f"ended by {signal_name(-code)}"
    if code > 0:
        if "Timeout (" in errors:  # the words of faulthandler, which ends a process that hangs
            return recording_file.TIMED_OUT, ""
        lines = [line for line in errors.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        return recording_file.CRASHED, f"exit code {code}; {last[:300]}"
    if not parts:
        return recording_file.FAILED, "it ended without a result"
    if "refused" in parts:
        return recording_file.REFUSED, parts["refused"]["message"]
    if "out_of_memory" in parts:
        return recording_file.OUT_OF_MEMORY, ""
    return recording_file.MEASURED, ""


def device_facts(command: Command, seconds: float) -> dict[str, Any]:
    """Facts about the GPU and torch, from a process of its own. RecordingError if there is no GPU."""
    outcome = run_process(command, Task(FACTS, FACTS, ""), seconds)
    if outcome.status != recording_file.MEASURED:
        raise RecordingError(
            f"There is no GPU to record on: {outcome.detail or outcome.status}."
            " --list shows what would be recorded, and --rehearse tries it on the CPU."
        )
    return outcome.parts[FACTS]


def commit() -> str:
    """The commit of the course's code; with a hash of the code where that was changed, or git is missing."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "*.py", "*.toml")
    except (OSError, subprocess.SubprocessError):
        return f"code {code_hash()}"
    return f"{head} changed, code {code_hash()}" if changed else head


def _git(*arguments: str) -> str:
    options = {"cwd": PACKAGE, "capture_output": True, "text": True, "check": True, "timeout": 20}
    return subprocess.run(["git", *arguments], **options).stdout.strip()


def code_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml"))):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def chosen(tasks: Sequence[Task], words: str) -> list[Task]:
    """The tasks whose kind, name or reason contains `words`. RecordingError if none does."""
    found = [task for task in tasks if words.lower() in f"{task.kind}: {task.name}: {task.why}".lower()]
    if not found:
        raise RecordingError(f"No task matches {words!r}: --list shows them all.")
    return found


def plan(
    tasks: Sequence[Task], found: dict[str, Any], lines: Sequence[recording_file.Line], commit: str
) -> list[Task]:
    """The tasks still to be done on this GPU: untried ones, then failed ones."""
    free, (major, minor) = found["free"], found["device"]["capability"]
    origin = (found["device"]["name"], found["torch"], commit)
    before: dict[str, list[str]] = {}
    for line in lines:
        status = line.content["status"]
        if status == recording_file.CUT_SHORT:
            continue  # the time's fault, not the task's
        if line.origin == origin:
            before.setdefault(line.content["task"], []).append(status)

    def is_possible(task: Task) -> bool:
        return bool(found.get("rehearsal")) or not task.obstacle(free, (major, minor))

    def is_open(task: Task) -> bool:
        tries = before.get(task.name, [])
        is_settled = any(status in recording_file.SETTLED for status in tries)
        return not is_settled and len(tries) < recording_file.MOST_TRIES

    to_do = [task for task in tasks if is_possible(task) and is_open(task)]
    return sorted(to_do, key=lambda task: len(before.get(task.name, [])))


# The command


def run(options: Namespace, say: Callable[[str], None] = say_now) -> int:
    """Do what the command line asks: verify, list, or record. RecordingError for what cannot be done."""
    if options.verify is not None:
        page, problems = verify(options.verify, names_here())
        say(page)
        return 1 if problems else 0
    if not options.list and options.out is None:
        raise RecordingError(
            "record needs --out and a folder for its results, or --list, or --verify and a file."
        )
    if not 0 < options.minutes < 10_000:
        raise RecordingError(f"--minutes is {options.minutes:g}: give a time limit, such as --minutes 30.")
    if options.jobs < 1:
        raise RecordingError(f"--jobs is {options.jobs}: it must be at least 1.")
    if options.as_card:
        card_option(options.as_card)
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise RecordingError(f"--out is {options.out}, which is not a folder.")
    tasks = chosen(rehearsal_list() if options.rehearse else recording_list(), options.only)
    if options.list:
        say(listing(tasks, card_here()))
        return 0
    # Being asked to end is like Ctrl-C: the task's process is ended too, and the file stays whole.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _record(options, tasks, say)
    finally:
        signal.signal(signal.SIGTERM, before)


def _record(options: Namespace, tasks: Sequence[Task], say: Callable[[str], None]) -> int:
    deadline = time.monotonic() + 60 * options.minutes
    command = work_command(options.rehearse, options.as_card)
    found = device_facts(command, min(FACTS_SECONDS, 60 * options.minutes))
    device = found["device"]["name"]
    code = commit()
    stem = "rehearsal" if options.rehearse else _file_stem(device)
    file = options.out / f"{stem}.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    repaired = recording_file.repair(file)
    if repaired:
        say(repaired)
    absent = [name for name in NOTEBOOK_PACKAGES if util.find_spec(name) is None]
    possible = [task for task in tasks if not (absent and task.needs_notebooks)]
    if len(possible) < len(tasks):
        waiting = len(tasks) - len(possible)
        say(f"{waiting} tasks execute cells and wait for {', '.join(absent)}: see docs/gpu.md.")
    lines = recording_file.read_lines(file) if file.exists() else []
    to_do = plan(possible, found, lines, code)
    free = format_bytes(found["free"], "GB", 1)
    say(f"{device}, {free} free, torch {found['torch']}: {len(to_do)} of {len(tasks)} tasks to do.")
    origin = {name: value for name, value in found.items() if name != "free"}
    origin |= {"commit": code, "jobs": options.jobs}
    left = record(to_do, file, origin, deadline, command, say, options.jobs, found["free"])
    if left:
        then = f"{left} tasks are left: run the same command again."
    else:
        then = "Nothing is left to do on this GPU."
    say(f"Recorded in {file}. {then}")
    return 0


def _file_stem(device: str) -> str:
    """A device's name as a file's: "nvidia-h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "gpu"


def listing(tasks: Sequence[Task], card: Gpu | None) -> str:
    """The list as a table: peak, and whether the GPU here can do it."""
    lines: list[str] = []
    header = ["", "peak", "task"]
    if card:
        lines.append(f"{card.name}, {format_bytes(card.memory, 'GB', 1)} free:")
        header.insert(2, "fits")
    rows = [header]
    for number, task in enumerate(tasks, start=1):
        peak = format_bytes(task.predicted, "GB", 1) if task.predicted else ""
        row = [str(number), peak, f"{task.name}  ({task.why})"]
        if card:
            row.insert(2, "no" if task.obstacle(card.memory, card.capability) else "yes")
        rows.append(row)
    return "\n".join([*lines, aligned(rows, len(header))])


def card_here(ask: Callable[..., Any] = subprocess.run) -> Gpu | None:
    """The first GPU that nvidia-smi names, with the memory that is free on it now; None if there is none."""
    options = ["--query-gpu=name,memory.free,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = ask(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"(.+), (\d+), (\d+)\.(\d+)$", done.stdout.partition("\n")[0].strip())
    if done.returncode or not found:
        return None
    return Gpu(found[1], int(found[2]) * MiB, (int(found[3]), int(found[4])))


def card_option(name: str) -> Gpu:
    """The card that the GPU is to imitate. RecordingError, saying what it may be, for another name."""
    try:
        return card_named(name, (0, 0))
    except ValueError as problem:
        raise RecordingError(f"--as-card: {problem}.") from None
