"""A command, and the environment that it enters before it runs."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..interactive.command_line import Parser
from ..interactive.course_files import ROOT
from .environment import Home, interpreter

SAME_ANSWERS = {"COURSE_SOURCE": "simulated", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment variables with which notebooks print the same everywhere: simulated measurements, one thread a kernel."""

HERE = "use the Python that runs this command, not the course's own environment"


class Command(NamedTuple):
    """One command: `read` parses its arguments, `run` executes what `read` returned and returns an exit code.

    Between the two, a command with a `purpose` ("lab" or "test") enters the course's environment and makes it first if
    need be: wrong options are refused before that. `read` needs the standard library alone.
    """

    summary: str
    read: Callable[[list[str]], Any]
    run: Callable[[Any], int]
    purpose: str = ""
    variables: Mapping[str, str] = {}


def no_options(name: str, summary: str, run: Callable[[Any], int], purpose: str = "", here: str = "") -> Command:
    """A command whose only option is `--here`."""
    parser = Parser(name, f"{summary.capitalize()}.", here)
    return Command(summary, parser.parse_args, run, purpose)


def enter(name: str, command: Command, arguments: list[str]) -> None:
    """Continue as the same command in the environment of its purpose. Returns only if this process is in it already."""
    python = interpreter(Home(ROOT), command.purpose, here="--here" in arguments)
    if not is_current(python):
        rest = [word for word in arguments if word != "--here"]
        again = [str(python), "-m", "course_utils", name, "--here", *rest]
        sys.exit(hand_over(again, course_environment(command.variables), folder=Path.cwd()))


def is_current(python: Path) -> bool:
    return python == Path(sys.executable) or python.parent.parent.resolve() == Path(sys.prefix).resolve()


def course_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables for started programs: the course importable from any folder, and `extra`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}


def hand_over(
    command: list[str], environment: Mapping[str, str], system: str = platform.system(), folder: Path = ROOT
) -> int:
    """Replace this process by `command` in a folder; Windows cannot: there, run it and return its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if system != "Windows":
        os.chdir(folder)
        os.execve(command[0], command, dict(environment))
    return subprocess.run(command, cwd=folder, env=dict(environment), check=False).returncode
