"""A command, its parser, and the environment that it enters before it runs.

The parser is argparse; its refusals are ours, because argparse prints the usage and names no near option.
"""

import os
import platform
import subprocess
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NamedTuple, NoReturn

from ..errors import nearest
from ..interactive.course_files import HAS_FOLDER, IS_CLONE, ROOT, SHIPPED, python_path
from .environment import NAME, Home, SetupError, interpreter

SAME_ANSWERS = {"COURSE_SOURCE": "simulated", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables with which notebooks print the same everywhere: simulated measurements, one thread per kernel."""

NEED_A_CLONE = ("lint", "build", "site")  # they work on the repository itself


class Command(NamedTuple):
    """One command: `options` adds its arguments to a parser, `run` executes them and returns an exit code.

    Between the two, a command with a `purpose` ("torch", "lab", "test", "author": the extra that it needs)
    enters the course's environment, with `variables`, and makes it first if need be: wrong options are
    refused before that. `options` needs the standard library alone. With `parser.set_defaults` it can ask for
    `others`, the words that the parser does not know, and for `examine`, which is called with what was parsed
    before the environment is entered.
    """

    summary: str
    options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    purpose: str = ""
    variables: Mapping[str, str] = {}


class WrongOption(ValueError):
    """An option of the command line that cannot be used; the message says which would."""


class Help(ArgumentDefaultsHelpFormatter):
    """Help of up to 100 columns with the defaults that say something; no name is broken at its hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)

    def _get_help_string(self, action: Action) -> str | None:
        says_nothing = action.default in (None, "", ()) or action.nargs == 0
        is_told = "(default" in (action.help or "")
        return action.help if says_nothing or is_told else super()._get_help_string(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(fill(line, width, break_on_hyphens=False) for line in text.splitlines())


class Parser(ArgumentParser):
    """The options of the course or of one of its commands. Raises WrongOption for what it does not take."""

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=Help, allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        """Raise WrongOption with argparse's message."""
        said = message.removeprefix("argument ").rstrip(".")
        raise WrongOption(f"{self.prog.split()[-1]}: {said}. See `{self.prog} --help`.")

    def refuse(self, others: Sequence[str]) -> NoReturn:
        """Raise WrongOption for the first word that is not known, with the nearest option."""
        name = others[0].partition("=")[0]
        if not name.startswith("-"):
            raise WrongOption(f"{self.prog.split()[-1]} does not take {name!r}. See `{self.prog} --help`.")
        listed = (action.option_strings for action in self._actions if action.help != SUPPRESS)
        known = [option for options in listed for option in options if option.startswith("--")]
        close = nearest(name, known, likeness=0.6)
        hint = f"Did you mean {close}?" if close else f"Options: {', '.join(known)}."
        raise WrongOption(f"Unknown option {name}. {hint}")


def no_options(_: ArgumentParser) -> None:
    """The options of a command that has none."""


def later(module: str, function: str = "run") -> Callable[[Namespace], int]:
    """A function of a module that is imported when it runs: `--help` needs none of its packages."""
    return lambda chosen: getattr(import_module(f"course_utils.{module}"), function)(chosen)


def enter(name: str, command: Command, arguments: Sequence[str]) -> None:
    """Continue as the same command in the environment of its purpose. Returns if this process is in it."""
    if name in NEED_A_CLONE and not IS_CLONE:
        problem = f"`{name}` needs a clone of the course's repository, but this is a wheel"
        raise SetupError(f"{problem}: run it in a clone.")
    python = interpreter(Home(SHIPPED), command.purpose, here="--here" in arguments)
    if not is_current(python):
        rest = [word for word in arguments if word != "--here"]
        again = [str(python), "-m", "course_utils", name, "--here", *rest]
        sys.exit(hand_over(again, course_environment(command.variables), folder=Path.cwd()))


def is_current(python: Path) -> bool:
    return python == Path(sys.executable) or python.parent.parent.resolve() == Path(sys.prefix).resolve()


def course_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables for started programs: the course importable from any folder, and `extra`."""
    return {**os.environ, "PYTHONPATH": python_path(), **(extra or {})}


def refuse_outside_a_course(name: str) -> None:
    """SetupError where there is only the wheel's own copy of the course, to which nothing may write."""
    if not HAS_FOLDER:
        copying = f"copy it with `{NAME} start FOLDER`"
        raise SetupError(f"No course here: {copying}, then run `{name}` in that folder.")


def hand_over(
    command: list[str], environment: Mapping[str, str], system: str = platform.system(), folder: Path = ROOT
) -> int:
    """Replace this process by `command` in a folder; Windows cannot: run it there, return its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if system != "Windows":
        os.chdir(folder)
        os.execve(command[0], command, dict(environment))
    return subprocess.run(command, cwd=folder, env=dict(environment), check=False).returncode
