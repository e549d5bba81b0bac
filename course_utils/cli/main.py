"""The command line: finds the command, runs it, and turns what it refuses into one sentence and an exit code.

Standard library only until the environment exists.
"""

import io
import os
import sys
import warnings
from collections.abc import Sequence
from textwrap import fill

from ..errors import GpuOutOfMemory, SimulationUnavailable, check_known
from ..interactive.command_line import WrongOption
from . import learn, maintain, teach
from .command import enter
from .environment import SetupError

GROUPS = {"To learn": learn.COMMANDS, "To teach": teach.COMMANDS, "To maintain": maintain.COMMANDS}
COMMANDS = learn.COMMANDS | teach.COMMANDS | maintain.COMMANDS


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code: 1, with one sentence on stderr, for what cannot be done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" for characters that the terminal does not have
    name = arguments[0] if arguments else ""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
            code = dispatch(name, list(arguments[1:]))
        sys.stdout.flush()
        return code
    except SystemExit as ended:  # argparse has printed its help
        return int(ended.code or 0)
    except BrokenPipeError:  # a reader such as head has seen enough; Python's own last flush would fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except (SetupError, ValueError, OSError, GpuOutOfMemory, SimulationUnavailable) as problem:
        if name in maintain.COMMANDS and not isinstance(problem, (SetupError, WrongOption)):
            raise
        said = " ".join(str(problem).split())  # torch's messages may have several lines
        print(said if said[-1:] in (".", "?", "!") else f"{said}.", file=sys.stderr)
        return 1


def dispatch(name: str, arguments: list[str]) -> int:
    """Run the command of this name; without a name, print the commands. ValueError for another name."""
    if name in ("", "help", "-h", "--help"):
        print(usage())
        return 0
    check_known("command", name, COMMANDS)
    command = COMMANDS[name]
    options = command.read(arguments)
    if command.purpose:
        enter(name, command, arguments)
    return command.run(options)


def usage() -> str:
    """The commands by group, one per line."""
    *first, last = [name for name, command in COMMANDS.items() if command.purpose]
    setting_up = (
        f"{', '.join(first)} and {last} make the course's own environment in .venv when they first need it; "
        "with --here they use the Python that runs them. COURSE_TORCH=cpu or cuda chooses torch's build."
    )
    lines = ["Where Did the GPU Memory Go? A course that accounts for every byte of a training step.", ""]
    lines += ["python3 -m course_utils COMMAND [options]; COMMAND --help lists them", ""]
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<9} {command.summary}" for name, command in commands.items()), ""]
    return "\n".join([*lines, fill(setting_up, 100, break_on_hyphens=False)])
