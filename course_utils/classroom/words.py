"""Words from a submission, made fit for tables, pages and terminals."""

from unicodedata import category

LONGEST = 1_000


def printable(text: str) -> str:
    """Text as one line that any file and terminal takes: no control characters, no lone surrogates, not too long."""
    cleaned = "".join(" " if category(letter) in ("Cc", "Cs", "Zl", "Zp") else letter for letter in text)
    shortened = " ".join(cleaned.split())
    return shortened if len(shortened) <= LONGEST else f"{shortened[:LONGEST]}…"
