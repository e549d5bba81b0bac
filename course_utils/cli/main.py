"""The command line: finds the command, runs it, and turns what it refuses into one sentence and an exit code.

Standard library only until the environment exists.
"""

import io
import os
import sys
import warnings
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..errors import GpuOutOfMemory, SimulationUnavailable, check_known
from . import learn, maintain, teach
from .command import Parser, WrongOption, enter
from .environment import SetupError

GROUPS = {"To learn": learn.COMMANDS, "To teach": teach.COMMANDS, "To maintain": maintain.COMMANDS}
COMMANDS = learn.COMMANDS | teach.COMMANDS | maintain.COMMANDS

COURSE = "Where Did the GPU Memory Go? A course that accounts for every byte of a training step."
SCRIPT = "where-did-the-memory-go"
"""The console script that pyproject.toml names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (without arguments, this process's) and return its exit code.

    That is 1, with one sentence on stderr, for what cannot be done.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" for characters that the terminal does not have
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            code = dispatch(words)
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
        if not said.endswith((".", "?", "!")):
            said += "."
        print(said, file=sys.stderr)
        return 1


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(message, file=sys.stderr)


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name. Raises WrongOption, and ValueError for an unknown command."""
    chosen = parse(arguments)
    command = COMMANDS[chosen.command]
    if command.purpose:
        enter(chosen.command, command, arguments[1:])
    return command.run(chosen)


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the arguments into `command` and its options. For none and for `help`, print help and exit."""
    name, *rest = arguments or ["help"]
    if name == "help":
        name, *rest = [*rest, "--help"]
    if not name.startswith("-") or not name.strip("-"):
        check_known("command", name, COMMANDS)
    parser, parsers = everything()
    chosen, others = parser.parse_known_args([name, *rest])
    if others and "others" not in chosen:
        parsers.get(name, parser).refuse(others)
    chosen.others = others
    if "examine" in chosen:
        chosen.examine(chosen)
    return chosen


def everything() -> tuple[Parser, dict[str, Parser]]:
    """The one parser of the course, and within it that of each command."""
    called = SCRIPT if Path(sys.argv[0]).stem == SCRIPT else "python3 -m course_utils"
    usage = "%(prog)s COMMAND [options]; COMMAND --help lists them"
    parser = Parser(prog=called, usage=usage, description=COURSE, epilog=listing())
    parser.add_argument(
        "--version", action="version", version=f"{SCRIPT} {__version__}", help="show it and exit"
    )
    added = parser.add_subparsers(dest="command", metavar="COMMAND", prog=called, help=SUPPRESS)
    for name, command in COMMANDS.items():
        own = added.add_parser(name, description=f"{command.summary[:1].upper()}{command.summary[1:]}.")
        listed = command.purpose or name == "doctor"  # the others run in any Python
        here = "use the Python that runs this command instead of the course's own environment"
        own.add_argument("--here", action="store_true", help=here if listed else SUPPRESS)
        command.options(own)
    return parser, added.choices


def listing() -> str:
    """The commands by group, one per line."""
    *first, last = [name for name, command in COMMANDS.items() if command.purpose]
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<11} {command.summary}" for name, command in commands.items()]
        lines.append("")
    lines.append(
        f"{', '.join(first)} and {last} make the course's own environment in .venv when they first need it;"
        " with --here they use the Python that runs them."
        " COURSE_TORCH=cpu or cuda chooses torch's build."
    )
    return "\n".join(lines)
