"""Execute one notebook that is graded: `grade` starts this in a process of its own, with a folder for it.

The task is in the folder's task.json, and the notebook may write in its home. For each check, a line of JSON
on stdout has its exercise and its result; another line may have a "problem". What a notebook prints is not
kept.
"""

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ..fence import enter

STATES = {"NotSolved": "not solved", "CheckFailed": "not right"}
LARGEST_FILE = 200_000_000


def main(folder: Path) -> None:
    home = folder / "home"
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    with suppress(OSError):  # when memory runs out, Linux ends this notebook and not the grader
        Path("/proc/self/oom_score_adj").write_text("1000")
    grader = os.dup(0)
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for standard in (0, 1):  # the kernel gets neither: what it prints past Jupyter goes nowhere
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    threading.Thread(target=_end_with, args=[grader], daemon=True).start()
    try:
        if task["fenced"]:
            writable = [home, Path("/dev/shm")]  # where Python's locks and torch's loaders meet
            enter(map(Path, task["readable"]), writable, [Path(path) for path in task["hidden"]])
        _limit(task["memory"])
        _execute(task["cells"], results)
    except Exception as error:
        problem = f"could not be executed ({type(error).__name__}: {error})"
        if type(error).__name__ == "DeadKernelError":
            problem = "its kernel died: it ended itself, crashed, or ran out of memory"
        _report(results, problem=problem)


def _end_with(grader: int) -> None:
    """End this process when the grader has ended, in whatever way. Its kernel notices, and ends too."""
    os.read(grader, 1)
    os._exit(1)


def _limit(memory: int) -> None:
    """Limit each process's memory to so many bytes, and each file's size. Windows has no such limits."""
    if sys.platform == "win32":
        return
    import resource

    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: LARGEST_FILE, resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        with suppress(ValueError):  # the machine allows less than that already
            resource.setrlimit(kind, (most, most))


def _report(results: TextIO, **line: str) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()


def _execute(cells: list[dict[str, str]], results: TextIO) -> None:
    """Run the cells one after another, whatever fails, and report what each check said."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook
    from traitlets.config import Config

    class Silent(NotebookClient):
        """Drops all output, so that no notebook fills memory by printing."""

        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> None:
            if msg["msg_type"] == "status":
                super().process_message(msg, cell, cell_index)

    def executed(cell: Any, cell_index: int, execute_reply: dict[str, Any]) -> None:
        reply = execute_reply["content"]
        result = "passed"
        if reply["status"] != "ok":
            name = reply["ename"]
            result = f"{STATES.get(name, f'error: {name}')}: {reply['evalue']}"
        if cell_index == 0 and result != "passed":
            raise RuntimeError(f"the course cannot be used here: {result}")
        if "exercise" in cells[cell_index]:
            _report(results, exercise=cells[cell_index]["exercise"], result=result)

    config = Config()
    if sys.platform != "win32":  # files in its home, in place of ports at which two notebooks could meet
        config.KernelManager.transport = "ipc"
        config.KernelManager.connection_file = "kernel.json"
    notebook = new_notebook(cells=[new_code_cell(cell["source"]) for cell in cells])
    client = Silent(
        notebook, config=config, on_cell_executed=executed, allow_errors=True, startup_timeout=600
    )
    client.execute()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
