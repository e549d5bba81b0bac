"""Errors that import without torch, and the refusal of an unknown name.

It lists what is known, and what was probably meant.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """A ValueError to raise for `name`, no known `what`: lists the known ones and the nearest match."""
    names = list(known)
    meant = nearest(str(name), names)
    hint = f": did you mean {meant!r}?" if meant else "."
    return ValueError(f"unknown {what} {name!r}{hint} Known: {', '.join(names)}.")


def check_known(what: str, name: object, known: Collection[Any]) -> None:
    """Raise the ValueError of `unknown` unless `name` is among the known ones."""
    if name not in tuple(known):  # in a dictionary, a list would raise Python's own TypeError
        raise unknown(what, name, known)


def nearest(name: str, known: Iterable[str], likeness: float = 0.5) -> str | None:
    """The first name that begins with what was asked, else the one that resembles it most, else None.

    `likeness`, from 0 to 1, is how much it has to.
    """
    asked = _bare(name)
    bare = {_bare(known_name): known_name for known_name in known}
    begins = [name for short, name in bare.items() if asked and short.startswith(asked)]
    if begins:
        return begins[0]
    alike = get_close_matches(asked, bare, n=1, cutoff=likeness)
    return bare[alike[0]] if alike else None


def _bare(name: str) -> str:
    """Letters and digits alone, so that "GPT2_XL" is "gpt2-xl" and "a100" begins "A100-40GB"."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


class GpuOutOfMemory(RuntimeError):
    """The GPU was too small for a run. Its memory has been released; the message says what would fit."""


class StepError(RuntimeError):
    """A step of a learner's own cannot be measured; the message says in which line, and what to write."""


class ScriptError(RuntimeError):
    """A script cannot be watched; the message says where and why.

    If the error is the script's own, it has its traceback.
    """


class SimulationUnavailable(RuntimeError):
    """This build of torch, or this platform, cannot simulate a GPU; the message says why."""
