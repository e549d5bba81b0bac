"""The learner's folder, which never leaves this machine, and safe ways to write there.

What is to be remembered is one line of JSON, appended to one file: two notebooks can write at once, nothing
is ever overwritten, and a newer course reads what an older one wrote. A line that cannot be read costs itself
alone.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from .. import __version__

NUMBERING = 2
"""How an event numbers the lessons. Events without it are older: `carried_over` reads them."""

RENUMBERED = {"07": "08", "08": "10", "09": "11", "10": "12", "11": "14", "12": "16", "13": "18", "14": "19"}
"""The lessons' numbers in numbering 1, from 00 to 14, and today's; 00 to 06 have not changed."""

MOVED_GUESSES = {
    "07.steps": "09.steps",
    "07.noise": "09.noise",
    "07.ramp": "09.ramp",
    "07.goyal": "09.goyal",
    "09.tensor": "15.tensor",
    "11.plan": "15.plan",
    "11.4": "15.1",
    "12.bit": "17.bit",
    "12.nf4": "17.nf4",
    "12.enough": "17.enough",
    "12.split": "17.split",
    "12.qlora": "17.qlora",
    "12.2": "17.1",
    "12.3": "17.2",
    "12.4": "17.3",
}
"""Guesses and exercises of numbering 1 that moved to another lesson: of 07b, of 11, quantization."""


def course_home() -> Path:
    """The folder of a learner's guesses and progress on this machine; `COURSE_HOME` names another."""
    if os.environ.get("COURSE_HOME"):
        return Path(os.environ["COURSE_HOME"])
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library/Application Support"
    else:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return base / "where-did-the-memory-go"


def progress_file() -> Path:
    return course_home() / "progress.jsonl"


def remember(**event: Any) -> None:
    """Append an event with today's date. Raises ValueError, saying what to do, where nothing can be kept."""
    file = progress_file()
    stamp = {"day": date.today().isoformat(), "course": __version__, "numbering": NUMBERING}
    line = json.dumps({**event, **stamp}).encode() + b"\n"
    with clear_problems():
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab+") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - 1))
            complete = lines.read(1) in (b"", b"\n")
            if not complete:  # half a line would take the next one down with it
                line = b"\n" + line
            lines.write(line)  # in one piece, so that two kernels cannot mix theirs


def remembered() -> tuple[list[dict[str, Any]], list[str]]:
    """All events, oldest first, and a sentence per unreadable line. Raises ValueError like `remember`."""
    file = progress_file()
    with clear_problems():
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    events = []
    damaged = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if line:  # two kernels that both saw half a line leave an empty one
                event = json.loads(line)
                date.fromisoformat(event["day"])
                events.append(carried_over(event))
        except (ValueError, TypeError, KeyError, AttributeError):
            damaged.append(f"Line {number} of {file} cannot be read and does not count. You may delete it.")
    return events, damaged


def carried_over(event: dict[str, Any]) -> dict[str, Any]:
    """An event with today's numbers of lessons, also one that was written before them.

    The file stays as it is, so nothing of a learner's can be lost on the way.
    """
    if event.get("numbering", 1) == NUMBERING:
        return event
    exercises_and_guesses = ("passed", "guess", "answered", "forgotten")
    read: dict[str, Any] = {name: _renumbered(event[name]) for name in exercises_and_guesses if name in event}
    if "quiz" in event:
        read["quiz"] = int(RENUMBERED.get(f"{event['quiz']:02d}", event["quiz"]))
    return {**event, **read}


def _renumbered(key: str) -> str:
    """An exercise or a guess, "07.1" or "07.tokens", by its lesson's number today."""
    if key in MOVED_GUESSES:
        return MOVED_GUESSES[key]
    lesson, dot, rest = key.partition(".")
    return RENUMBERED.get(lesson, lesson) + dot + rest


@contextmanager
def clear_problems() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"Guesses and progress cannot be kept in {course_home()} ({error.strerror or error}): "
            "set the environment variable COURSE_HOME to a folder that you may write to."
        ) from error


def write_whole(file: Path, text: str, newline: str = "\n") -> None:
    """Write a file in which a reader finds the old text or the new: never half of it, even on a full disk."""
    scratch = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with scratch.open("w", encoding="utf-8", newline=newline) as written:
            written.write(text)
            written.flush()
            os.fsync(written.fileno())  # or a machine that stops may have the new name, and nothing below it
        scratch.replace(file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
