"""Real processes from a notebook: a program run by torchrun as several ranks, and what each of them reports.

A notebook's own functions cannot be sent to other processes, and a process that has used torch cannot be forked: so a
program is a file or a module of its own, and what it finds out comes back as JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = "COURSE_RANK_RESULTS"
"""Names the environment variable that tells each rank where to leave its result."""

MOST_RANKS = 64
LAST_LINES = 12
PATIENCE_SECONDS = 45
"""torchrun gives its ranks 30 seconds to end before it kills them."""


class RankFailed(RuntimeError):
    """A rank failed, left no result, or they all took too long. Every process has ended; the message has its words."""


def run_ranks(
    program: str | Path, world_size: int, arguments: Sequence[str] = (), timeout_seconds: float = 300.0
) -> list[Any]:
    """What each rank of `program` reported, by rank: `program` is the path of a Python file or the name of a module.

    Runs `python -m torch.distributed.run --standalone` with one thread a rank. Inside, a rank calls `report(result)`.
    Raises ValueError for a number of ranks or a program that cannot be, RankFailed with the last lines of the rank that
    failed first, and for a time-out; no process is left in either case, nor if interrupted.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size is {world_size!r}: a number of processes from 1 to {MOST_RANKS}")
    with tempfile.TemporaryDirectory(prefix="course-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [*_launcher(world_size, folder), *_named(program), *arguments]
        code, said = _run(command, _environment(folder), timeout_seconds)
        if code is None:
            raise RankFailed(f"the {world_size} ranks of {program} took more than {timeout_seconds:g} s and were ended")
        if code:
            raise RankFailed(_failure(folder, said, program))
        return [_result(folder, rank, program) for rank in range(world_size)]


def report(result: Any) -> None:
    """Hand back this rank's result, anything that JSON can hold. Raises RuntimeError outside of `run_ranks`."""
    folder = os.environ.get(RESULTS)
    if folder is None:
        raise RuntimeError("nobody waits for this report: start this program with course_utils.distributed.run_ranks")
    whole = Path(folder, f"{os.environ['RANK']}.json")
    partial = whole.with_suffix(".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(whole)


def _launcher(world_size: int, folder: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    return [*torchrun, "--redirects=3", f"--log-dir={folder / 'logs'}"]


def _named(program: str | Path) -> list[str]:
    path = Path(program)
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"there is no program {program}")
        return [str(path)]
    if not re.fullmatch(r"\w+(\.\w+)*", str(program)):
        raise ValueError(f"{str(program)!r} is neither the path of a .py file nor the name of a module")
    return ["-m", str(program)]


def _environment(folder: Path) -> dict[str, str]:
    package = str(Path(__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {RESULTS: str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _run(command: list[str], environment: dict[str, str], timeout_seconds: float) -> tuple[int | None, str]:
    """The launcher's exit code and what it said; None for its code if it took too long."""
    said = subprocess.PIPE
    launcher = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = launcher.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        _end(launcher)
    return launcher.returncode, output


def _end(launcher: subprocess.Popen[str]) -> None:
    """End the launcher if it still runs: asked to, it ends its ranks, which are in sessions of their own."""
    if launcher.poll() is not None:
        return
    launcher.terminate()
    try:
        launcher.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.communicate()


def _failure(folder: Path, said: str, program: str | Path) -> str:
    """Which rank failed first, as torchrun noticed, and the last lines that it said."""
    cause = re.search(r"Root Cause.*?rank\s*:\s*(\d+)", said, re.DOTALL)
    if cause is None:
        return f"{program} could not be started:\n{_last_lines(said)}"
    rank = int(cause[1])
    logs = sorted(folder.glob(f"logs/*/attempt_*/{rank}/stderr.log"))
    words = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    return f"rank {rank} of {program} failed:\n{_last_lines(words) or 'it said nothing'}"


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def _result(folder: Path, rank: int, program: str | Path) -> Any:
    path = folder / f"{rank}.json"
    if not path.is_file():
        raise RankFailed(f"rank {rank} of {program} ended without a result: let it call report(result)")
    return json.loads(path.read_text(encoding="utf-8"))
