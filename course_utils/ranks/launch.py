"""Real processes from a notebook: a program run by torchrun's launcher as several ranks, and their results.

A process that has used torch cannot be forked, nor a notebook's function pickled: so a program is a file, a
module, or the source of a function, and results are JSON. No rank outlives the call; see `loaded` for the
process that they start from, and `worker` for the other side.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..pace import working
from .functions import packed
from .loaded import loaded
from .worker import RESULTS

MOST_RANKS = 64
LAST_LINES = 12
LONGEST_LINE = 500  # Characters of a line that a message repeats; a rank may print a whole tensor in one
TAIL_BYTES = 100_000  # Of a file, as much as its last lines can be in; a rank may have printed gigabytes
POLL_SECONDS = 0.05


class RankFailed(RuntimeError):
    """A rank failed, left no result, or they all took too long. Every process has ended."""


class RanksUnavailable(RuntimeError):
    """Raised where this computer cannot start ranks; says what to do instead."""


def run_ranks(
    program: str | Path | Callable[..., Any],
    world_size: int,
    arguments: Sequence[str] = (),
    timeout_seconds: float = 300.0,
    **keywords: Any,
) -> list[Any]:
    """Run `program` on several ranks; returns their results, by rank.

    `program` is the path of a Python file or the name of a module, which get `arguments` and call
    `report(result)`, or a function, of a notebook too, which gets `keywords` that JSON can hold, imports what
    it needs by itself, finds no GPU, and whose value is its result. They run as under torchrun, one thread a
    rank.

    Raises ValueError or TypeError for a program, arguments or a number of ranks that cannot be,
    RanksUnavailable where none can start, RankFailed with the last lines of the rank that failed first, or of
    those that had not finished in time. No rank is left in any case, nor when interrupted.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size is {world_size!r}: a number of processes from 1 to {MOST_RANKS}")
    with tempfile.TemporaryDirectory(prefix="course-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        task = _task(program, arguments, keywords, folder)
        why = why_no_ranks()
        if why:
            raise RanksUnavailable(why)
        task |= {"ranks": world_size, "until": time.time() + timeout_seconds}
        code = _run(task, folder)
        if code is None:
            raise RankFailed(_too_long(task, folder, timeout_seconds))
        if code:
            raise RankFailed(_failure(task, folder, code))
        for rank in _unfinished(task, folder):
            raise RankFailed(
                f"rank {rank} of {task['name']} ended without a result: let it call report(result)"
            )
        return [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(world_size)]


def why_no_ranks() -> str:
    """The reason that no ranks can start here, and what to do; empty if they can."""
    if sys.platform != "win32":
        return ""
    return (
        "torchrun's processes do not run reliably on Windows. Open this course in WSL2 (`wsl --install`,"
        " then clone it there), or look at the stored outputs."
    )


def _task(
    program: str | Path | Callable[..., Any], arguments: Sequence[str], keywords: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """The task that `worker.launch` performs, as JSON can hold it."""
    if callable(program):
        if arguments:
            raise ValueError("a function takes its arguments by name: run_ranks(function, 2, steps=3)")
        function = packed(program, keywords, folder)
        return {"kind": "function", "name": f"{program.__name__}()", "function": function, "arguments": []}
    name = str(program)
    if keywords:
        raise ValueError(
            f"{name} is not a function: give its arguments as strings, not {', '.join(keywords)}="
        )
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise ValueError(f"there is no program {name}")
    if not is_file and not re.fullmatch(r"\w+(\.\w+)*", name):
        raise ValueError(f"{name!r} is neither the path of a .py file nor the name of a module")
    return {"kind": "file" if is_file else "module", "name": name, "arguments": [*map(str, arguments)]}


def _run(task: dict[str, Any], folder: Path) -> int | None:
    """The launcher's exit code; None if it took too long. All ranks have ended then."""
    own = {RESULTS: str(folder)}
    if task["kind"] == "function":
        own["CUDA_VISIBLE_DEVICES"] = ""
    with loaded(_environment()) as start, working(f"running {task['ranks']} ranks") as work:
        start.begin(task, folder, own)
        while start.code() is None and time.time() < task["until"]:
            work.go_on()
            time.sleep(POLL_SECONDS)
        return start.code()


def _environment() -> dict[str, str]:
    """The environment that all sets of ranks have, without what one set has for itself."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # Without it a rank that ends soon closes connections that a slower one is still waiting for.
        "TORCH_DIST_INIT_BARRIER": "1",
    }
    return os.environ | own


def _unfinished(task: dict[str, Any], folder: Path) -> list[int]:
    return [rank for rank in range(task["ranks"]) if not (folder / f"{rank}.json").is_file()]


def _too_long(task: dict[str, Any], folder: Path, timeout_seconds: float) -> str:
    names = ", ".join(f"rank {rank}" for rank in _unfinished(task, folder)) or "threads"
    took = f"the {task['ranks']} ranks of {task['name']} took more than {timeout_seconds:g} s and were ended"
    lines = [f"{took}. Not finished: {names}."]
    for rank in _unfinished(task, folder):
        printed, _, where = _printed(folder, rank).rpartition("(most recent call first):\n")
        if where:
            lines += [f"rank {rank} was here, the innermost line first:", *where.splitlines()[:4]]
        lines.append(f"rank {rank}: {_said(printed.partition('Timeout (')[0])}")
    lines.append(
        "If it waits for another rank: do all ranks make the same calls, in the same order?"
        " If not: allow it more, by timeout_seconds."
    )
    return _without(folder, "\n".join(lines))


def _failure(task: dict[str, Any], folder: Path, code: int) -> str:
    """The rank that failed first, with the end of its traceback or else of its output."""
    if not (folder / "failure.json").is_file():
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed"
        said = _last_lines(_tail(folder / "launcher.log"))
        return f"the launcher of the ranks of {task['name']} {ended}:\n{said}"
    failure = json.loads((folder / "failure.json").read_text(encoding="utf-8"))
    rank = f"rank {failure['rank']} of {task['name']}"
    if failure["traceback"]:
        return _without(folder, f"{rank} failed:\n{_last_lines(failure['traceback'])}")
    said = _said(_printed(folder, failure["rank"]))
    if failure["code"] >= 0:
        return f"{rank} ended with exit code {failure['code']}. {said}"
    name = signal.Signals(-failure["code"]).name
    return (
        f"{rank} was killed by {name}: by a person, by a crash, or by this computer because it ran out of"
        f" memory (use fewer or smaller ranks). {said}"
    )


def _without(folder: Path, text: str) -> str:
    """A message without the name of the temporary folder, in which a function's source lies."""
    return text.replace(f"{folder}{os.sep}", "")


def _printed(folder: Path, rank: int) -> str:
    """The end of what a rank has printed: its stdout, then its stderr."""
    logs = sorted(folder.glob(f"logs/*/attempt_*/{rank}/std*.log"), reverse=True)
    return "".join(_tail(log) for log in logs)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _said(printed: str) -> str:
    return f"Its last output:\n{_last_lines(printed)}" if printed.strip() else "It printed nothing."


def _last_lines(text: str) -> str:
    return "\n".join(line[:LONGEST_LINE] for line in text.strip().splitlines()[-LAST_LINES:])
