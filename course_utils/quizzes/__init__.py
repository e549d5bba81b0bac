"""Quizzes, one for each lesson: questions whose right and wrong answers are computed, never typed.

A lesson's module is `lesson_NN`, with a function `questions()`. To add a quiz, add such a module. None of them needs
torch, and only drawing a quiz in a notebook needs ipywidgets.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..nearest import unknown
from .quiz import Attempt, Choice, Question, Quiz, ask

__all__ = ["Attempt", "Choice", "Question", "Quiz", "ask", "lessons", "quiz"]


def quiz(lesson: int) -> Quiz:
    """The quiz of a lesson, by its number: in a notebook it draws itself, and `ask` puts it in a terminal.

    Raises ValueError for a lesson that has no quiz; the message lists those that have one.
    """
    if lesson not in lessons():
        raise unknown("quiz", lesson, map(str, lessons()))
    return Quiz(lesson, import_module(f"{__name__}.lesson_{lesson:02d}").questions())


def lessons() -> list[int]:
    """The numbers of the lessons that have a quiz, in order."""
    names = (module.name for module in iter_modules(__path__))
    return sorted(int(name.removeprefix("lesson_")) for name in names if name.startswith("lesson_"))
