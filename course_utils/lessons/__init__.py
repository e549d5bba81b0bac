"""One folder per lesson: model code, figures, widget, checks, quiz. `shared` has what several lessons use."""

from importlib import import_module
from pathlib import Path

from ..errors import unknown
from ..interactive.course_files import LESSONS
from ..interactive.quiz import Quiz, worded

__all__ = ["lessons", "quiz"]


def quiz(lesson: int) -> Quiz:
    """The quiz of a lesson, by its number: in a notebook it draws itself, and `ask` puts it in a terminal.

    Its words are `lessons/FOLDER/quiz.toml`, their numbers are computed by `quiz.py` next to it, without
    torch; drawing it in a notebook needs ipywidgets. Raises ValueError for a lesson that has no quiz; the
    message lists those that have one.
    """
    if lesson not in lessons():
        raise unknown("quiz", lesson, map(str, lessons()))
    numbers = import_module(f".{LESSONS[lesson]}.quiz", __name__).numbers()
    return Quiz(lesson, worded(Path(__file__).parent / LESSONS[lesson] / "quiz.toml", numbers))


def lessons() -> list[int]:
    """The numbers of the lessons, in order: each has a quiz."""
    return [*LESSONS]
