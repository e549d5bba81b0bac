"""The one parser of commands' options: argparse, with refusals of one sentence."""

from argparse import SUPPRESS, ArgumentParser, HelpFormatter
from textwrap import wrap
from typing import Any, NoReturn

from ..errors import nearest


class WrongOption(ValueError):
    """An option of the command line that cannot be used; the message says which would."""


class Help(HelpFormatter):
    """Help of up to 100 columns that never breaks a name at its hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)


class Parser(ArgumentParser):
    """The options of one command, and `--here`, listed if `here` describes it. Raises WrongOption for others."""

    def __init__(self, command: str, summary: str | None, here: str | None = None, **options: Any) -> None:
        given: dict[str, Any] = {"formatter_class": Help, "description": summary, "allow_abbrev": False} | options
        super().__init__(f"python3 -m course_utils {command}", **given)
        self.add_argument("--here", action="store_true", help=here or SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise WrongOption with argparse's message, or with the nearest name of an unknown option."""
        command = self.prog.split()[-1]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if not unknown:
            said = message.removeprefix("argument ")
            raise WrongOption(f"{command}: {said}. See `{self.prog} --help`.")
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise WrongOption(f"{command} does not take {name!r}. See `{self.prog} --help`.")
        listed = (action.option_strings for action in self._actions if action.help != SUPPRESS)
        known = [option for options in listed for option in options if option.startswith("--")]
        close = nearest(name, known, likeness=0.6)
        hint = f"Did you mean {close}?" if close else f"Options: {', '.join(known)}."
        raise WrongOption(f"Unknown option {name}. {hint}")
