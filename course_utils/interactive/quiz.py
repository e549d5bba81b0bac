"""Quizzes: questions with one right choice, an explanation for every choice, and attempts that keep score."""

import random
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..palette import sentence
from ..units import format_bytes, marked


class Choice(NamedTuple):
    """An answer to choose, and why it is right, or the misconception that leads to it."""

    text: str
    why: str


class Question(NamedTuple):
    """One question with exactly one right choice. Text between backticks is code."""

    text: str
    right: Choice
    wrong: tuple[Choice, ...]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All choices, in an order that depends on the words of the question alone, not on its numbers."""
        mixed = [self.right, *self.wrong]
        random.Random(re.sub(r"[^A-Za-z]", "", self.text)).shuffle(mixed)
        return tuple(mixed)


Numbers = tuple[str, Mapping[str, Any]]
"""The name of a question, and by name what stands in the braces of its words."""


def worded(words: Path, numbers: Iterable[Numbers]) -> tuple[Question, ...]:
    """The questions of a TOML file in its order, with their numbers; KeyError for braces without a number.

    Each question is a table: its `text`, the `right` choice and why, and each `wrong` one and why.
    """
    known = dict(numbers)
    tables = tomllib.loads(words.read_text(encoding="utf-8"))
    return tuple(_question(table, known.get(name, {})) for name, table in tables.items())


def _question(table: Mapping[str, Any], numbers: Mapping[str, Any]) -> Question:
    def filled(texts: Iterable[str]) -> list[str]:
        return [" ".join(text.split()).format_map(numbers) for text in texts]

    (text,) = filled([table["text"]])
    right = Choice(*filled(table["right"]))
    wrong = tuple(Choice(*filled(answer)) for answer in table["wrong"])
    return Question(text, right, wrong)


@dataclass(frozen=True, repr=False)
class Quiz:
    """The questions of one lesson. In a notebook it draws itself as buttons that answer at once."""

    lesson: int
    questions: tuple[Question, ...]

    @property
    def title(self) -> str:
        return f"Quiz of lesson {self.lesson:02d}: {len(self.questions)} questions"

    def __repr__(self) -> str:
        return f"{self.title}. Run this cell in a notebook to take it."

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Buttons where there is a kernel, choices that unfold where there is none, always the same text."""
        from .quiz_form import QuizForm

        form: Any = QuizForm(self)._repr_mimebundle_()
        return {**form, "text/plain": repr(self), "text/html": self.page()}

    def attempt(self) -> "Attempt":
        return Attempt(self)

    def page(self) -> str:
        """The quiz as HTML that needs no kernel and no script: each choice unfolds to its verdict."""
        parts = [f"<p><b>{self.title}</b>. Open a choice to see whether it is right.</p>"]
        for number, question in enumerate(self.questions, start=1):
            parts.append(f"<p><b>{number}.</b> {marked(question.text)}</p>")
            for choice in question.choices:
                said = marked(verdict(question, choice))
                parts.append(f"<details><summary>{marked(choice.text)}</summary><p>{said}</p></details>")
        return f"<div>{''.join(parts)}</div>"


def gb(size: int) -> str:
    """Bytes as most choices show them: in GB, with one decimal."""
    return format_bytes(size, "GB", 1)


class Attempt:
    """One learner's way through a quiz. A question counts for the score if its first choice was right."""

    def __init__(self, quiz: Quiz) -> None:
        self.quiz = quiz
        self.chosen: list[list[Choice]] = [[] for _ in quiz.questions]

    def choose(self, number: int, choice: Choice) -> str:
        """The verdict on `choice` for question `number`, from 0; it counts until the question is solved."""
        said = verdict(self.quiz.questions[number], choice)
        if self.solved(number):
            return said
        self.chosen[number].append(choice)
        return said if self.solved(number) else f"{said} Try again."

    def solved(self, number: int) -> bool:
        return self.quiz.questions[number].right in self.chosen[number]

    @property
    def finished(self) -> bool:
        return all(map(self.solved, range(len(self.chosen))))

    @property
    def first_tries(self) -> list[bool]:
        """A list with True for each question whose first choice was right."""
        pairs = zip(self.quiz.questions, self.chosen, strict=True)
        return [chosen[:1] == [question.right] for question, chosen in pairs]

    @property
    def score(self) -> str:
        """The questions solved so far; at the end those right at the first try, and those to come back to."""
        count = len(self.chosen)
        if not self.finished:
            return f"{sum(map(self.solved, range(count)))} of {count} questions solved."
        missed = [str(number) for number, right in enumerate(self.first_tries, start=1) if not right]
        again = ""
        if missed:
            questions = "question" if len(missed) == 1 else "questions"
            again = f" Repeat {questions} {sentence(missed)} another day."
        return f"All solved, {count - len(missed)} of {count} at the first try.{again}"


def verdict(question: Question, choice: Choice) -> str:
    """Say if `choice` is right, and why, or what is wrong with it."""
    opening = "Right." if choice == question.right else "Not quite."
    return f"{opening} {choice.why}"
