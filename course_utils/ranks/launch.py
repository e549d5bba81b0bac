"""Real processes from a notebook: a program run by torchrun as several ranks, and what each of them reports.

A process that has used torch cannot be forked, nor a notebook's function pickled: so a program is a file, a
module, or the source of a function, and results are JSON. No process outlives the call; see `worker` for the
other side.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..pace import Work, working
from .functions import packed
from .worker import CALLER, RESULTS, program_lines

MOST_RANKS = 64
LAST_LINES = 12
LONGEST_LINE = 500  # Characters of a line that a message repeats; a rank may print a whole tensor in one
TAIL_BYTES = 100_000  # Of a file, as much as its last lines can be in; a rank may have printed gigabytes
POLL_SECONDS = 0.05
# From a rank's failure to the end of all others; torchrun alone would wait 30 seconds for them.
GRACE_SECONDS = 5.0
HOST = "127.0.0.1"
# True where torchrun loads torch once for all ranks, which then start in half the time.
FORKS = sys.platform == "linux"
BY_WHOM = (
    "by a person, by this computer because it ran out of memory (use fewer or smaller ranks), or by a crash"
)


class RankFailed(RuntimeError):
    """A rank failed, left no result, or they all took too long.

    Every process has ended; the message has its words.
    """


class RanksUnavailable(RuntimeError):
    """Raised where this computer cannot start ranks; says what to do instead."""


def run_ranks(
    program: str | Path | Callable[..., Any],
    world_size: int,
    arguments: Sequence[str] = (),
    timeout_seconds: float = 300.0,
    *,
    show: Callable[[str], Any] | None = None,
    **keywords: Any,
) -> list[Any]:
    """Run `program` on several ranks; returns their results, by rank.

    `program` is the path of a Python file or the name of a module, which get `arguments` and call
    `report(result)`, or a function, of a notebook too, which gets `keywords` that JSON can hold, imports what
    it needs by itself, finds no GPU, and whose value is its result. They run under torchrun, one thread a
    rank. `show` is called with each line that a rank prints, as it comes (`show=print`).

    Raises ValueError or TypeError for a program, arguments or a number of ranks that cannot be,
    RanksUnavailable where none can start, RankFailed with the last lines of the rank that failed first, or of
    those that had not finished in time. No process is left in any case, nor when interrupted.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size is {world_size!r}: a number of processes from 1 to {MOST_RANKS}")
    with tempfile.TemporaryDirectory(prefix="course-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        called, words = _words(program, arguments, keywords, folder)
        why = why_no_ranks()
        if why:
            raise RanksUnavailable(why)
        command = [*_launcher(world_size, folder), *words]
        with working(f"starting {world_size} ranks") as work:
            code = _run(command, folder, time.monotonic() + timeout_seconds, show, work)
        _check(code, Ranks(folder, called, world_size, timeout_seconds))
        results = [folder / f"{rank}.json" for rank in range(world_size)]
        return [json.loads(result.read_text(encoding="utf-8")) for result in results]


def why_no_ranks() -> str:
    """The reason that no ranks can start here, and what to do; empty if they can."""
    if sys.platform == "win32":
        return (
            "torchrun's processes do not run reliably on Windows. Open this course in WSL2 (`wsl --install`,"
            " then clone it there), or look at the stored outputs."
        )
    try:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
    except OSError as error:
        return (
            f"this computer opens no port at {HOST}, and ranks need one to find each other: {error.strerror}"
        )
    return ""


def _words(
    program: str | Path | Callable[..., Any], arguments: Sequence[str], keywords: dict[str, Any], folder: Path
) -> tuple[str, list[str]]:
    """The program's name, and torchrun's words for it. `course_utils.ranks.worker` runs it and watches."""
    worker = ["-m", "course_utils.ranks.worker"]
    if callable(program):
        if arguments:
            raise ValueError("a function takes its arguments by name: run_ranks(function, 2, steps=3)")
        path = folder / "function.json"
        path.write_text(json.dumps(packed(program, keywords, folder)), encoding="utf-8")
        return f"{program.__name__}()", [*worker, "function", str(path)]
    if keywords:
        raise ValueError(
            f"{program} is not a function: give its arguments as strings, not {', '.join(keywords)}="
        )
    is_file = Path(program).suffix == ".py"
    if is_file and not Path(program).is_file():
        raise ValueError(f"there is no program {program}")
    if not is_file and not re.fullmatch(r"\w+(\.\w+)*", str(program)):
        raise ValueError(f"{str(program)!r} is neither the path of a .py file nor the name of a module")
    return str(program), [*worker, "file" if is_file else "module", str(program), *map(str, arguments)]


def _launcher(world_size: int, folder: Path) -> list[str]:
    """torchrun with one machine: the loopback's address, as many a laptop cannot look up its own name."""
    program = ["course_utils.ranks.worker", "torchrun"] if FORKS else ["torch.distributed.run"]
    torchrun = [sys.executable, "-m", *program, f"--nproc-per-node={world_size}"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:0", f"--local-addr={HOST}"]
    return [*torchrun, *meeting, "--redirects=3", f"--log-dir={folder / 'logs'}"]


def _environment(folder: Path) -> dict[str, str]:
    paths = [str(Path(__file__).resolve().parents[2])]
    given = os.environ.get("PYTHONPATH")
    if given:
        paths.append(given)
    return os.environ | {
        RESULTS: str(folder),
        CALLER: str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        # Without it a rank that ends soon closes connections that a slower one is still waiting for.
        "TORCH_DIST_INIT_BARRIER": "1",
    }


def _run(
    command: list[str], folder: Path, deadline: float, show: Callable[[str], Any] | None, work: Work
) -> int | None:
    """The launcher's exit code; None if it took too long. It writes to a file, in a session of its own."""
    read: dict[Path, int] = {}
    with (folder / "launcher.log").open("wb") as said:
        launcher = subprocess.Popen(
            command,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while launcher.poll() is None and not _should_end(folder, deadline):
            _show(folder, read, show)
            words = work.words
            if any(folder.glob("*.pid")):
                words = words.replace("starting", "running")
            work.at(0.0, words)
            time.sleep(POLL_SECONDS)
        if any(folder.glob("*.error")):
            return 1
        if launcher.poll() is None:
            _ask_where(folder)
        return launcher.poll()
    finally:
        _end(launcher, folder)
        _show(folder, read, show, ended=True)


def _should_end(folder: Path, deadline: float) -> bool:
    """True if time is up, or a rank failed and the others had the time that they get to end by themselves."""
    if time.monotonic() > deadline:
        return True
    failed = [path.stat().st_mtime for path in folder.glob("*.error")]
    return bool(failed) and time.time() - min(failed) > GRACE_SECONDS


def _ask_where(folder: Path) -> None:
    """Let each rank that still runs write down which line it is at."""
    for path in folder.glob("*.pid"):
        if not path.with_suffix(".done").exists():
            _signal(os.kill, int(path.read_text()), signal.SIGUSR1)
    time.sleep(0.3)


def _end(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    """End the launcher and every rank, with all processes that ranks started: within seconds, or give up."""
    if launcher.poll() is None:
        launcher.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while _kill_ranks(folder) or launcher.poll() is None:
        if time.monotonic() > deadline:
            if launcher.poll() is None:
                _signal(os.killpg, launcher.pid, signal.SIGKILL)
            _kill_ranks(folder)
            launcher.wait(GRACE_SECONDS)
            return
        time.sleep(POLL_SECONDS)


def _kill_ranks(folder: Path) -> bool:
    """Kill each rank's process group, and say whether any was there.

    torchrun gives each rank a session of its own.
    """
    groups = {int(path.read_text()) for path in folder.glob("*.pid")} - {0, 1, os.getpgrp()}
    # Not any() of a generator, which would stop at the first.
    killed = [_signal(os.killpg, group, signal.SIGKILL) for group in groups]
    return any(killed)


def _signal(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """True if there was anything to send a signal to."""
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):  # macOS says PermissionError of processes that have ended
        return False
    return True


def _show(
    folder: Path, read: dict[Path, int], show: Callable[[str], Any] | None, ended: bool = False
) -> None:
    """Show each line that a rank has printed after the bytes `read` of its file.

    Once the ranks have `ended`, show an unfinished line too.
    """
    if show is None:
        return
    for path in sorted(folder.glob("logs/*/attempt_0/*/stdout.log")):
        with path.open("rb") as log:
            log.seek(read.get(path, 0))
            new = log.read()
        lines = new if ended else new[: new.rfind(b"\n") + 1]
        read[path] = read.get(path, 0) + len(lines)
        for line in lines.decode(errors="replace").splitlines():
            show(f"rank {path.parent.name}: {line}")


class Ranks(NamedTuple):
    """The files that the ranks of an ended run left in its folder."""

    folder: Path
    program: str
    world_size: int
    timeout_seconds: float

    def missing(self, suffix: str) -> list[int]:
        """The ranks that left no such file: json with a result, done at their end, pid at their start."""
        return [rank for rank in range(self.world_size) if not (self.folder / f"{rank}.{suffix}").is_file()]

    def read(self, name: str) -> str:
        """The end of a file's text, this folder's own name left out; empty if it is not there."""
        path = self.folder / name
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").replace(f"{self.folder}{os.sep}", "")

    def words(self, rank: int) -> str:
        # Reversed, as stdout comes first, then stderr.
        logs = sorted(self.folder.glob(f"logs/*/attempt_*/{rank}/std*.log"), reverse=True)
        return _last_lines("".join(self.read(str(log.relative_to(self.folder))) for log in logs))


def _check(code: int | None, ranks: Ranks) -> None:
    if code is None:
        raise RankFailed(_too_long(ranks))
    if code:
        raise RankFailed(_failure(code, ranks))
    for rank in ranks.missing("json"):
        raise RankFailed(f"rank {rank} of {ranks.program} ended without a result: let it call report(result)")


def _too_long(ranks: Ranks) -> str:
    took = (
        f"the {ranks.world_size} ranks of {ranks.program}"
        f" took more than {ranks.timeout_seconds:g} s and were ended"
    )
    if len(ranks.missing("pid")) == ranks.world_size:
        advice = "Give them more time, or see what torchrun says:"
        return f"{took} before any had started. {advice}\n{_last_lines(ranks.read('launcher.log'))}"
    unfinished = ranks.missing("done")
    names = ", ".join(f"rank {rank}" for rank in unfinished) or "threads"
    lines = [f"{took}. Not finished: {names}."]
    for rank in unfinished:
        where = program_lines(ranks.read(f"{rank}.where"))
        place = f"was at {where}" if where else "reported nothing"
        lines.append(f"rank {rank} {place}. {_said(ranks.words(rank))}")
    lines.append(
        "If it waits for another rank: do all ranks make the same calls, in the same order?"
        " If not: allow it more, by timeout_seconds."
    )
    return "\n".join(lines)


def _failure(code: int, ranks: Ranks) -> str:
    """The rank that failed first, with its last lines; or the launcher that was killed, ending all ranks."""
    if code < 0:
        return (
            f"torchrun, which runs the ranks of {ranks.program}, was killed by {signal_name(-code)}:"
            f" {BY_WHOM}"
        )
    said = ranks.read("launcher.log")
    found = re.findall(r"^ +rank *: (\d+) .*?^ +exitcode *: (-?\d+)", said, re.DOTALL | re.MULTILINE)
    codes = {int(rank): int(code) for rank, code in found}
    # A rank that was killed left no error of its own. torchrun ends the others by SIGTERM.
    for rank, code in codes.items():
        has_error = (ranks.folder / f"{rank}.error").is_file()
        if code < 0 and code != -signal.SIGTERM and not has_error:
            killed = f"rank {rank} of {ranks.program} was killed by {signal_name(-code)}: {BY_WHOM}."
            return f"{killed} {_said(ranks.words(rank))}"
    errors = sorted(ranks.folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        return f"rank {errors[0].stem} of {ranks.program} failed:\n{_last_lines(ranks.read(errors[0].name))}"
    for rank, code in codes.items():
        return f"rank {rank} of {ranks.program} ended with exit code {code}. {_said(ranks.words(rank))}"
    return f"{ranks.program} could not be started:\n{_last_lines(said)}"


def signal_name(number: int) -> str:
    """The name of a signal, "signal 99" for one that has none here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _said(words: str) -> str:
    return f"Its last output:\n{words}" if words else "It printed nothing."


def _last_lines(text: str) -> str:
    lines = []
    for line in text.strip().splitlines()[-LAST_LINES:]:
        too_long = len(line) > LONGEST_LINE
        lines.append(f"{line[:LONGEST_LINE]} …" if too_long else line)
    return "\n".join(lines)
