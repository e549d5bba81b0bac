"""Run one notebook that is graded: `graded_process` starts this, task on stdin, results on stdout.

The learner's cells run one after another as in a notebook. Each check cell is the course's own, not the
learner's copy of it, with the functions of the checks put back to what they were before the learner's code
ran.
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .graded_process import NOT_FENCED

LONGEST_MESSAGE = 300


def main() -> int:
    """Run the task on stdin, and write the outcome of each check, after each of them, to what was stdout."""
    task = json.load(sys.stdin)
    if task["kind"] == "fence":
        from .sandbox import enclose

        try:
            enclose(map(Path, task["shown"]), Path(task["home"]))
        except OSError:
            return NOT_FENCED
    limit(task["limits"]["memory"], task["limits"]["seconds"])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(nowhere, standard)
        for outcome in run(task["cells"], importlib.import_module(task["checks"])):
            results.write(json.dumps(outcome) + "\n")
            results.flush()
    return 0


def limit(memory: int, seconds: float) -> None:
    """Let the system end this process, or refuse it, beyond these limits, or 100 MB per file.

    `memory` is in bytes, `seconds` are of the processor. Windows has no such limits: there only the time-out
    of the process that started it holds.
    """
    if sys.platform == "win32":
        return
    import resource

    limits = {"AS": memory, "CPU": int(seconds) + 1, "FSIZE": 100_000_000, "CORE": 0}
    for name, most in limits.items():
        with contextlib.suppress(ValueError):  # the machine allows less than that already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def run(cells: list[dict[str, str]], checks: ModuleType) -> Iterator[dict[str, str]]:
    """The outcome of each check, in order: `cells` have "source", and "exercise" where they are checks."""
    from IPython.core.interactiveshell import InteractiveShell

    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "course_utils"]
    genuine = [(module, dict(vars(module))) for module in ours]
    shell = InteractiveShell.instance()
    if shell.history_manager is not None:
        shell.history_manager.enabled = False
    for cell in cells:
        if "exercise" in cell:
            for module, names in genuine:
                vars(module).update(names)
            shell.user_ns["check"] = checks
        said = Shortened()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(Shortened()):
            result = shell.run_cell(cell["source"], store_history=False)
        if "exercise" in cell:
            state, words = outcome(result.error_before_exec or result.error_in_exec, said.getvalue())
            yield {"exercise": cell["exercise"], "state": state, "said": words[:LONGEST_MESSAGE]}


def outcome(error: BaseException | None, said: str) -> tuple[str, str]:
    """The state of an exercise after its check, and the message for the learner."""
    from ..interactive.feedback import CheckFailed, NotSolved

    if error is None:
        passed = re.search("^✓", said, re.MULTILINE)
        return ("passed" if passed else "not checked"), ""
    words = " ".join(str(error).split())
    if isinstance(error, NotSolved):
        return "not solved", words
    if isinstance(error, CheckFailed):
        return "not right", words
    return "error", f"{type(error).__name__}: {words}"


class Shortened(io.StringIO):
    """Keeps as many first characters as a person would read, so that endless printing fills no memory."""

    def write(self, text: str, /) -> int:
        if self.tell() < 10_000:
            super().write(text[:10_000])
        return len(text)


if __name__ == "__main__":
    sys.exit(main())
