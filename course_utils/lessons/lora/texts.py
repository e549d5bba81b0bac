"""Lesson 16's second text, which its small language model has not learned."""

from functools import cache

from ..shared.language_model import CORPUS


@cache
def sonnets() -> str:
    """Five of Shakespeare's (18, 29, 73, 116, 130; 1609, public domain), in the first text's characters."""
    text = CORPUS.with_name("sonnets.txt").read_text(encoding="utf-8").lower()
    characters = str.maketrans({";": ".", "?": ".", "!": ".", "-": " ", "'": "", "j": "i"})
    return " ".join(text.translate(characters).split())
