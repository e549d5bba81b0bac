"""Results of grading, of each exercise and notebook: as a table of them, and as a page for the class."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unicodedata import category

from ..interactive.learner_folder import write_whole
from ..units import html_table

STATES = {
    "passed": "✓",
    "not solved": "·",
    "not right": "✗",
    "error": "!",
    "not checked": "?",
    "not reached": "–",
}
"""The states of an exercise, each with its sign on the page of the class."""

FORMULA = tuple("=+-@＝＋－＠")
"""Characters with which a formula begins; a Japanese spreadsheet takes the wide ones, too."""

INNER_FORMULA = re.compile(r"([;\t\r\n]\s*)([=+\-@＝＋－＠])")
"""A formula after a character that begins a new cell in a spreadsheet that splits at semicolons or tabs."""

LONGEST = 1_000


class Outcome(NamedTuple):
    """The result of one exercise: one of `STATES`, and the message of its check."""

    state: str
    said: str = ""


class Graded(NamedTuple):
    """One notebook: its learner and lesson, and the outcomes of its exercises.

    `problem` says why the notebook could not be read or was ended, or is "". `file` is its path in what was
    handed in; `counts` is False if the same learner handed in a newer one of the same lesson.
    """

    learner: str
    lesson: str
    outcomes: dict[str, Outcome]
    problem: str
    seconds: float
    file: str = ""
    counts: bool = True

    @property
    def passed(self) -> int:
        """Number of exercises that passed."""
        return sum(outcome.state == "passed" for outcome in self.outcomes.values())


def write_table(graded: Iterable[Graded], path: Path) -> None:
    """Write a row for each notebook and exercise; `counts` is "no" where a newer notebook counts instead."""
    text = StringIO()
    rows = csv.writer(text)
    rows.writerow(["learner", "lesson", "exercise", "state", "said", "problem", "seconds", "file", "counts"])
    for one in graded:
        outcomes = one.outcomes or {"": Outcome("")}  # a row even for a notebook that could not be read
        for exercise, outcome in outcomes.items():
            row = [
                one.learner,
                one.lesson,
                exercise,
                outcome.state,
                outcome.said,
                one.problem,
                f"{one.seconds:.0f}",
                one.file,
                "yes" if one.counts else "no",
            ]
            rows.writerow([_plain(cell) for cell in row])
    write_whole(path, text.getvalue(), newline="")


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula, whatever blanks come first, wherever it splits a line."""
    inner = INNER_FORMULA.sub(r"\1'\2", text)
    first = next((letter for letter in text if letter.isprintable() and not letter.isspace()), "")
    if first in FORMULA or text.startswith(("\t", "\r", "\n")):
        return f"'{inner}"  # a quotation mark makes it a text
    return inner


def printable(text: str) -> str:
    """Text as one line for any file and terminal: no control characters, no lone surrogates, not too long."""
    cleaned = "".join(" " if category(letter) in ("Cc", "Cs", "Zl", "Zp") else letter for letter in text)
    shortened = " ".join(cleaned.split())
    if len(shortened) > LONGEST:
        return f"{shortened[:LONGEST]}…"
    return shortened


STYLE = Path(__file__).with_name("class_page.css").read_text(encoding="utf-8")


def class_page(graded: Sequence[Graded], isolation: str = "") -> str:
    """A page of HTML that needs no network: a table per lesson, the commonest messages, the isolation."""
    counted = [one for one in graded if one.counts]
    lessons = sorted({one.lesson for one in counted if one.lesson})
    parts = [_lesson(lesson, [one for one in counted if one.lesson == lesson]) for lesson in lessons]
    older = [f"{one.file}: {one.passed} of {len(one.outcomes)}" for one in graded if not one.counts]
    unread = [f"{one.file or one.learner}: {one.problem}" for one in graded if not one.lesson]
    if older:
        parts.append(_items("h2", "Not counted: their learners handed in newer ones", older))
    if unread:
        parts.append(_items("h2", "Not graded", unread))
    if isolation:
        parts.append(f"<h2>What kept the notebooks apart</h2><p>{escape(isolation)}</p>")
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>The class</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    )
    return f"{head}<style>\n{STYLE}</style></head><body><h1>The class</h1>{''.join(parts)}</body></html>"


def _items(tag: str, title: str, items: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<{tag}>{title}</{tag}><ul>{listed}</ul>"


def _lesson(lesson: str, graded: Sequence[Graded]) -> str:
    """One lesson's table, and below it the commonest messages of its checks: what to talk about in class."""
    exercises = list(dict.fromkeys(name for one in graded for name in one.outcomes))
    rows = [["learner", *exercises, "passed", "remarks"]]
    shares = []
    said = []
    for one in sorted(graded, key=lambda one: (-one.passed, one.learner)):
        states = [one.outcomes[name].state for name in exercises]
        signs = [f"{STATES[state]} {state}" for state in states]
        rows.append([one.learner, *signs, f"{one.passed} of {len(one.outcomes)}", one.problem])
    for name in exercises:
        outcomes = [one.outcomes[name] for one in graded]
        shares.append(f"{sum(one.state == 'passed' for one in outcomes)} of {len(graded)}")
        common = Counter(one.said for one in outcomes if one.state in ("not right", "error")).most_common(3)
        said += [f"{name}, {count} ×: {words}" for words, count in common]
    table = html_table([*rows, ["passed by", *shares, "", ""]], words=len(rows[0]), totals=True)
    wide = f"<div class='wide' role='region' aria-label='Lesson {lesson}' tabindex='0'>{table}</div>"
    section = f"<h2>Lesson {lesson}</h2>{wide}"
    if said:
        section += _items("h3", "What the checks said most often", said)
    return section
