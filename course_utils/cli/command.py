"""A command of the command line, and how it enters the course's environment before it runs."""

import os
import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ..interactive.course_files import HAS_FOLDER, ROOT, python_path
from .environment import NAME, SetupError, interpreter

SAME_ANSWERS = {"COURSE_SOURCE": "simulated", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables with which notebooks print the same everywhere: simulated measurements, one thread per kernel."""


def no_options(_: ArgumentParser) -> None:
    """The options of a command that has none."""


class Command(NamedTuple):
    """One command: `options` adds its arguments to a parser, `run` executes them and returns an exit code.

    A command with a `purpose` (the extra that it needs: "torch", "lab", "test" or "author") runs in the
    course's environment, with `variables`. Parsing needs the standard library alone. `failed` is the exit
    code for what cannot be done: 2 for a command whose 1 is an answer.
    """

    summary: str
    run: Callable[[Namespace], int]
    options: Callable[[ArgumentParser], None] = no_options
    purpose: str = ""
    variables: Mapping[str, str] = {}
    failed: int = 1


def later(module: str, function: str = "run") -> Callable[[Namespace], int]:
    """A function of a module that is imported when it runs: `--help` needs none of its packages."""
    return lambda chosen: getattr(import_module(f"course_utils.{module}"), function)(chosen)


def enter(name: str, command: Command, arguments: Sequence[str]) -> None:
    """Continue as the same command in the environment of its purpose. Returns if this process is in it."""
    python = interpreter(command.purpose, here="--here" in arguments)
    if not is_current(python):
        rest = [word for word in arguments if word != "--here"]
        again = [str(python), "-m", "course_utils", name, "--here", *rest]
        sys.exit(hand_over(again, course_environment(command.variables), folder=Path.cwd()))


def is_current(python: Path) -> bool:
    """True if that is the Python, or the Python of the environment, which runs this."""
    return python == Path(sys.executable) or python.parent.parent.resolve() == Path(sys.prefix).resolve()


def course_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables for started programs: the course importable from any folder, and `extra`."""
    return {**os.environ, "PYTHONPATH": python_path(), **(extra or {})}


def need_a_clone(name: str) -> None:
    """SetupError for a command that works on the repository itself, in a wheel's course or a release."""
    if not (ROOT / "tests" / "conftest.py").exists():
        raise SetupError(f"`{name}` needs a clone of the course's repository.")


def need_a_folder(name: str) -> None:
    """SetupError where there is only the wheel's own copy of the course, to which nothing may write."""
    if not HAS_FOLDER:
        copying = f"copy it with `{NAME} start FOLDER`"
        raise SetupError(f"No course here: {copying}, then run `{name}` in that folder.")


def hand_over(command: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT) -> int:
    """Replace this process by `command` in a folder; Windows cannot: run it there, return its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if platform.system() != "Windows":
        os.chdir(folder)
        os.execve(command[0], list(command), dict(environment))
    return subprocess.run(command, cwd=folder, env=dict(environment), check=False).returncode
