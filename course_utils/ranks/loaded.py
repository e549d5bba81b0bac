"""The process that ranks start from. It has loaded torch, which takes seconds, and waits for the next ranks.

A process that has used torch cannot be forked. So this one never uses it: on Linux it forks a launcher for
each set of ranks. Elsewhere it is that launcher itself, once. It holds about 300 MB, and ends with its caller
or after some minutes in which nobody needs it.
"""

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SERVE = "from course_utils.ranks.loaded import serve; serve()"
PID, CODE = "launcher.pid", "launcher.code"
FORKS = sys.platform == "linux"
IDLE_SECONDS = 300.0
END_SECONDS = 10.0  # for a killed process to end; one that waits for a disk may take longer
MARGIN_SECONDS = 30.0
"""A caller stops counting on a process this long before it ends by itself."""

_idle: list["Loaded"] = []  # at most one


class Loaded:
    """The caller's side of such a process: it performs one task at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.folder = Path()
        self.last_used = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def is_ready(self, environment: Mapping[str, str]) -> bool:
        """True if it waits for a task, in the same environment."""
        soon_over = time.monotonic() - self.last_used > IDLE_SECONDS - MARGIN_SECONDS
        return self.process.poll() is None and not soon_over and self.environment == environment

    def begin(self, task: dict[str, Any], folder: Path, environment: Mapping[str, str]) -> None:
        """Start the ranks of a task, which get `environment` too. They print to files in `folder`."""
        self.folder = folder
        order = {"task": task, "folder": str(folder), "cwd": str(Path.cwd()), "environment": environment}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        ended = self.folder / CODE
        code = self.process.poll()  # before the file, which is there if a launcher has ended
        return int(ended.read_text()) if ended.is_file() else code

    def end(self) -> None:
        """Kill it, the launcher and the ranks."""
        _kill_group(self.process.pid)  # first: it starts nothing after this
        with suppress(FileNotFoundError, ValueError):  # a launcher that has not written this is in that group
            _kill_group(int((self.folder / PID).read_text()))
        self.process.communicate()


@contextmanager
def loaded(environment: Mapping[str, str]) -> Iterator[Loaded]:
    """A process to start ranks from, with that environment. It is killed unless its task came to an end."""
    one = _idle.pop() if _idle else None  # another thread, meanwhile, begins its own
    if one and not one.is_ready(environment):
        one.end()
        one = None
    one = one or Loaded(environment)
    try:
        yield one
    finally:
        if one.process.poll() is None and one.code() is not None and not _idle:
            one.last_used = time.monotonic()
            _idle.append(one)
        else:
            one.end()


@atexit.register
def end() -> None:
    """Kill the process that waits, if one does."""
    while _idle:
        _idle.pop().end()


def _kill_group(group: int) -> None:
    """Kill a group of processes, and wait until none of it is left: a large one takes a while to end."""
    until = time.monotonic() + END_SECONDS
    with suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError where all have ended
        os.killpg(group, signal.SIGKILL)
        while _is_alive(group) and time.monotonic() < until:
            time.sleep(0.002)


def _is_alive(group: int) -> bool:
    """True if a process of this group has not ended. One that nobody has waited for (a zombie) has."""
    if not FORKS:
        os.killpg(group, 0)
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended since it was listed
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


# The process itself


def serve() -> None:
    """Perform the tasks that the caller sends, one line each, until it ends or has none for a while."""
    from . import worker

    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        order = json.loads(line)
        folder = Path(order["folder"])
        _print_to(folder / "launcher.log")
        worker.load(order["task"])
        gc.freeze()  # or each rank would search all this for cycles as it ends
        launcher = os.fork() if FORKS else 0
        if not launcher:
            (folder / PID).write_text(str(os.getpid()))
            if FORKS:
                os.setsid()
            os.chdir(order["cwd"])
            os.environ.update(order["environment"])
            worker.launch(order["task"])
            return
        status = os.waitpid(launcher, 0)[1]
        _kill_group(launcher)  # what ranks have started and left
        code = folder / f"{CODE}.part"
        code.write_text(str(os.waitstatus_to_exitcode(status)))
        code.rename(folder / CODE)


def _print_to(path: Path) -> None:
    """Let this process, and all that it starts, print to a file."""
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
