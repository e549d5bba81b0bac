"""Refusing an unknown name in words: what is known, and what was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """A ValueError to raise for `name`, which is no known `what`: lists the known ones and the nearest match."""
    names = list(known)
    close = get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return ValueError(f"unknown {what} {name!r}{hint} Known: {', '.join(names)}.")
