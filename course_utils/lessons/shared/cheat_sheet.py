"""The cheat sheet, collected from the lessons: what to remember of each, how it breaks, and its line."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...interactive.course_files import ROOT, numbered, text_of
from ...units import html_table

PARTS = ("Remember", "Breaks when", "Cheat-sheet line")


class Entry(NamedTuple):
    """A lesson's number, its title, and three sentences in its own words."""

    number: str
    title: str
    remember: str
    breaks: str
    line: str


@dataclass(frozen=True, repr=False)
class CheatSheet:
    """All lessons' entries; shows itself as a page that fits on paper."""

    entries: tuple[Entry, ...]

    @property
    def markdown(self) -> str:
        """The page for the website."""
        parts = [
            "# Cheat sheet",
            "One entry per lesson, in the lesson's own words. Print it: it needs two pages.",
        ]
        for entry in self.entries:
            parts += [f'<span id="lesson-{entry.number}"></span>', f"## {entry.number} · {entry.title}"]
            parts += [f"**{entry.line}**", entry.remember, f"*Breaks when* {entry.breaks}"]
        return "\n\n".join(parts) + "\n"

    def __repr__(self) -> str:
        return f"The cheat sheet: the lines of {len(self.entries)} lessons."

    def _repr_html_(self) -> str:
        lines = [(f"{entry.number} {entry.title}", entry.line) for entry in self.entries]
        return html_table([("lesson", "line"), *lines], words=2)


def cheat_sheet(root: Path = ROOT) -> CheatSheet:
    """The cheat sheet of the lessons in `root`/notebooks. ValueError for a lesson that lacks a line."""
    return CheatSheet(tuple(map(_entry, numbered(root / "notebooks"))))


def _entry(path: Path) -> Entry:
    text = text_of(path)
    title = re.search(r"^# (\d\d) · (.+)$", text, re.MULTILINE)
    found = [
        re.search(rf"^\*\*{part}\*\* (.+?)(?:\n\s*\n|\Z)", text, re.MULTILINE | re.DOTALL) for part in PARTS
    ]
    if title is None or not all(found):
        raise ValueError(f"{path.name} lacks its title or one of {', '.join(PARTS)}")
    lines = [" ".join(match[1].split()) for match in found if match]
    said = [re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", line) for line in lines]  # links without their targets
    return Entry(title[1], title[2], *said)
