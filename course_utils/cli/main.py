"""The command line: finds the command, runs it, and turns what it refuses into one sentence and an exit code.

Standard library only until the environment exists.
"""

import io
import os
import sys
import traceback
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..errors import GpuOutOfMemory, SimulationUnavailable, check_known, nearest
from . import learn, maintain, teach
from .command import enter
from .environment import NAME, SetupError

GROUPS = {"To learn": learn.COMMANDS, "To teach": teach.COMMANDS, "To maintain": maintain.COMMANDS}
COMMANDS = learn.COMMANDS | teach.COMMANDS | maintain.COMMANDS
COURSE = "Where Did the GPU Memory Go?\nA course that accounts for every byte of a training step."
ABOUT_SETUP = """\
Commands that need packages make the course's own environment in .venv first;
with --here they use the Python that runs them. COURSE_TORCH=cpu or cuda chooses
torch's build."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (without arguments, this process's) and return its exit code.

    That is 1, with one sentence on stderr, for what cannot be done, and 2 for what cannot be understood. It
    is 2 for both in commands whose 1 is an answer (`Command.failed`), an error of the course's own included.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" for characters that the terminal does not have
    words = list(sys.argv[1:] if arguments is None else arguments)
    failed = COMMANDS[words[0]].failed if words and words[0] in COMMANDS else 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            chosen = parse(words)
            command = COMMANDS[chosen.command]
            if command.purpose:
                enter(chosen.command, command, words[1:])
            code = command.run(chosen)
        sys.stdout.flush()
        return code
    except SystemExit as ended:  # argparse has printed its help, or what it does not understand
        return int(ended.code or 0)
    except BrokenPipeError:  # a reader such as head has seen enough; Python's own last flush would fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failed
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except (SetupError, ValueError, OSError, GpuOutOfMemory, SimulationUnavailable) as problem:
        if words[0] in maintain.COMMANDS and not isinstance(problem, SetupError):
            raise  # a maintainer wants to see where
        said = " ".join(str(problem).split())  # torch's messages may have several lines
        print(said if said.endswith((".", "?", "!")) else f"{said}.", file=sys.stderr)
        return failed
    except Exception:
        if failed == 1:
            raise  # Python's own exit code for it is 1, too
        traceback.print_exc()
        return failed


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(message, file=sys.stderr)


class Parser(ArgumentParser):
    """An argparse parser that refuses in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        said = f"{message[:1].upper()}{message[1:]}"
        self.exit(2, f"{said.rstrip('.')}. See `{self.prog} --help`.\n")


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the arguments into `command` and its options. Without any, print the help and exit."""
    name, *rest = arguments or ["--help"]
    if not name.startswith("-"):
        check_known("command", name, COMMANDS)
    parser, parsers = everything()
    chosen, others = parser.parse_known_args([name, *rest])
    if others and "others" not in chosen:
        refuse(parsers.get(name, parser), others[0].partition("=")[0])
    chosen.others = others
    return chosen


def refuse(parser: Parser, word: str) -> NoReturn:
    """Exit with an error for a word that a command does not take, and name the nearest option."""
    if not word.startswith("-"):
        parser.error(f"{word!r} is one word too many")
    close = nearest(word, parser._option_string_actions, likeness=0.6)
    parser.error(f"unknown option {word}" + (f": {close} is the nearest" if close else ""))


def everything() -> tuple[Parser, dict[str, Parser]]:
    """The one parser of the course, and within it that of each command."""
    called = NAME if Path(sys.argv[0]).stem == NAME else "python3 -m course_utils"
    usage = "%(prog)s COMMAND [options]; COMMAND --help lists them"
    shape = RawDescriptionHelpFormatter
    parser = Parser(prog=called, usage=usage, description=COURSE, epilog=listing(), formatter_class=shape)
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    added = parser.add_subparsers(dest="command", metavar="COMMAND", prog=called, help=SUPPRESS)
    for name, command in COMMANDS.items():
        about = f"{command.summary[:1].upper()}{command.summary[1:]}."
        own = added.add_parser(name, description=about, allow_abbrev=False)
        here = "use the Python that runs this command, not the course's own environment"
        own.add_argument("--here", action="store_true", help=here)
        command.options(own)
    return parser, added.choices


def listing() -> str:
    """The commands by group, one per line."""
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<11} {command.summary}" for name, command in commands.items()]
        lines.append("")
    return "\n".join([*lines, ABOUT_SETUP])
