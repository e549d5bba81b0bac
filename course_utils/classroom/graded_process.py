"""Keep one notebook that is graded: start its worker, in a sandbox if there is one, and end all it started.

Run as `python -m course_utils.classroom.graded_process`, with the task on stdin. Prints why the notebook
did not end by itself and well, or nothing. The worker's results go to stderr, which is a file of the
grader's.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..ranks.guard import SET_CHILD_SUBREAPER, SET_PARENT_DEATH_SIGNAL, end_children, prctl, stop
from ..units import GB, MB

REFUSED = "not graded: the system refused to keep it apart: "
POLL_SECONDS = 0.25
DISK_MARGIN = 1.25
"""Size of the file system behind walls per byte that a notebook may write: the remark comes before the error.
"""

BLOCK = 512
NOT_FENCED = 77
"""The worker's exit code if it could not put up its fence; it has run nothing then."""

MOST_PROCESSES = 1000
"""Processes and threads behind walls, for the kernels that count them there (Linux 5.14, and not for root).
"""


class Limits(NamedTuple):
    """Limits of one notebook: seconds of the processor, bytes of addresses per process, bytes of files."""

    seconds: float = 300.0
    memory: int = 12 * GB  # torch alone maps several GB and uses few
    disk: int = 200 * MB

    @property
    def clock(self) -> float:
        """Seconds by the clock: others work, too, and sleeping ends."""
        return 4 * self.seconds


def main() -> int:
    task = json.load(sys.stdin)
    os.lseek(0, 0, os.SEEK_SET)  # the worker reads the same file
    home = Path(task["home"])
    limits = Limits(**task["limits"])
    hidden = [Path(path) for path in task["hidden"]]
    is_walled = task["kind"] == "walls"
    if sys.platform == "linux":
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)  # however the grader ends
        if os.getppid() != task["grader"]:
            return 1
        try:
            _prepare(home, limits, task["shown"] if is_walled else [], hidden)
        except OSError as error:
            print(f"{REFUSED}{error.strerror}", flush=True)
            return 0
    # within walls the kernel ends everything with the first process there, which no signal reaches
    if not is_walled:
        signal.signal(signal.SIGTERM, stop)
    (home / "work").mkdir()
    print(_keep(home, limits, is_walled), flush=True)
    return 0


def _prepare(home: Path, limits: Limits, shown: list[str], hidden: list[Path]) -> None:
    """Raise walls, if something is to be shown behind them; always become the parent of orphans (Linux)."""
    import resource

    from .sandbox import SET_DUMPABLE, enter

    # who is short of memory ends a notebook, not the grader
    Path("/proc/self/oom_score_adj").write_text("1000")
    if shown:
        enter([Path(path) for path in shown], hidden, home, int(limits.disk * DISK_MARGIN))
        resource.setrlimit(resource.RLIMIT_NPROC, (MOST_PROCESSES, MOST_PROCESSES))
    prctl(SET_CHILD_SUBREAPER, 1)
    prctl(SET_DUMPABLE, 0)  # the notebook cannot look into this process, nor write what it prints


def _keep(home: Path, limits: Limits, is_walled: bool) -> str:
    """Run the worker to its end; returns why it was ended, or ended badly, or ""."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "course_utils.classroom.grading_worker"],
        cwd=home / "work",
        stdin=0,
        stdout=2,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + limits.clock
    try:
        while time.monotonic() <= end:
            with suppress(subprocess.TimeoutExpired):
                code = worker.wait(timeout=POLL_SECONDS)
                return _wrote_too_much(home, limits, is_walled) or ended(code, limits)
            if why := _wrote_too_much(home, limits, is_walled):
                return why
        return f"ended after {limits.clock:g} s by the clock"
    finally:
        _end(worker)


def ended(code: int, limits: Limits) -> str:
    """The remark on an exit code; "" for 0."""
    if code == 0:
        return ""
    if code == NOT_FENCED:
        return f"{REFUSED}there is no Landlock"
    # Windows has neither
    by_limit = [getattr(signal, name) for name in ("SIGXCPU", "SIGKILL") if hasattr(signal, name)]
    if -code in by_limit:
        return (
            f"ended by a signal: more than {limits.seconds:g} s of the processor,"
            " too much memory, or its own doing"
        )
    if code > 0:
        return f"ended itself with code {code}"
    name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"crashed ({name})"


def _wrote_too_much(home: Path, limits: Limits, is_walled: bool) -> str:
    try:
        if is_walled:  # a file system of its own, which is full, too, if it can hold no more files
            held = os.statvfs("/")
            free = held.f_bfree if held.f_ffree else 0
            used = (held.f_blocks - free) * held.f_frsize
        else:
            used = folder_bytes(home)
    except OSError as error:  # a folder without permissions, or deeper than a path can be long
        return f"ended: what it wrote cannot be counted ({error.strerror})"
    if used <= limits.disk:
        return ""
    return f"ended: it wrote more than {limits.disk // MB} MB of files, or too many"


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder, holes left out, and a block for each of them. Raises OSError."""
    total = 0
    folders = [str(folder)]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    blocks = getattr(found, "st_blocks", found.st_size // BLOCK + 1)  # Windows counts none
                    total += BLOCK * (1 + blocks)
    return total


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """End the worker and all that it started: its session; on Linux every descendant; on Windows it alone."""
    if sys.platform == "win32":
        worker.kill()
        worker.wait()
        return
    with suppress(ProcessLookupError, PermissionError):  # none of them is left
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if sys.platform == "linux":
        end_children()


if __name__ == "__main__":
    sys.exit(main())
