"""Quizzes: questions with one right choice, an explanation for every choice, and an attempt that keeps score."""

import html
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..figures.canvas import sentence
from ..units import format_bytes, marked

LETTERS = "abcdef"


@dataclass(frozen=True)
class Choice:
    """An answer to choose, and why it is right, or the misconception that leads to it."""

    text: str
    why: str


@dataclass(frozen=True)
class Question:
    """One question with exactly one right choice. Text between backticks is code.

    Raises ValueError when there are fewer than two wrong choices, when two choices read alike, or when one is not
    explained.
    """

    text: str
    right: Choice
    wrong: tuple[Choice, ...]

    def __post_init__(self) -> None:
        texts = [choice.text for choice in self.choices]
        if not 3 <= len(texts) <= len(LETTERS):
            raise ValueError(f"a question has 3 to {len(LETTERS)} choices, this one {len(texts)}: {self.text}")
        if len(set(texts)) < len(texts):
            raise ValueError(f"two choices read alike, {', '.join(sorted(texts))}: {self.text}")
        if not all(choice.why for choice in self.choices):
            raise ValueError(f"a choice is not explained: {self.text}")

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All choices, in an order that depends on the words of the question alone, not on its numbers."""
        mixed = [self.right, *self.wrong]
        random.Random(re.sub(r"[^A-Za-z]", "", self.text)).shuffle(mixed)
        return tuple(mixed)


Answer = tuple[str, str]


def question(text: str, right: Answer, *wrong: Answer) -> Question:
    """A question from its answers, each the text of a choice and why it is right or wrong."""
    return Question(text, Choice(*right), tuple(Choice(*answer) for answer in wrong))


@dataclass(frozen=True, repr=False)
class Quiz:
    """The questions of one lesson. In a notebook it draws itself as buttons that answer at once."""

    lesson: int
    questions: tuple[Question, ...]

    @property
    def title(self) -> str:
        """ "Quiz of lesson 01: 5 questions"."""
        return f"Quiz of lesson {self.lesson:02d}: {len(self.questions)} questions"

    def __repr__(self) -> str:
        return f"{self.title}. Run this cell in a notebook to take it."

    def __str__(self) -> str:
        """The questions with their choices, for a terminal; which one is right stays unsaid."""
        parts = [self.title]
        for number, question in enumerate(self.questions, start=1):
            parts.append("\n".join([f"{number}. {question.text}", *_lettered(question)]))
        return "\n\n".join(parts)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Buttons where there is a kernel, choices that unfold where there is none, always the same text."""
        from .quiz_form import QuizForm

        form: Any = QuizForm(self)._repr_mimebundle_()
        return {**form, "text/plain": repr(self), "text/html": self.page()}

    def attempt(self) -> "Attempt":
        """A new way through this quiz."""
        return Attempt(self)

    def page(self) -> str:
        """The quiz as HTML that needs no kernel and no script: each choice unfolds to what is to be said about it."""
        parts = [f"<p><b>{html.escape(self.title)}</b>. Open a choice to see whether it is right.</p>"]
        for number, question in enumerate(self.questions, start=1):
            parts.append(f"<p><b>{number}.</b> {marked(question.text)}</p>")
            parts += [
                f"<details><summary>{marked(choice.text)}</summary><p>{marked(verdict(question, choice))}</p></details>"
                for choice in question.choices
            ]
        return f"<div>{''.join(parts)}</div>"


def gb(size: int) -> str:
    """Bytes as most choices show them: in GB, with one decimal."""
    return format_bytes(size, "GB", 1)


class Attempt:
    """One learner's way through a quiz. A question counts for the score if its first choice was the right one."""

    def __init__(self, quiz: Quiz) -> None:
        self.quiz = quiz
        self.chosen: list[list[Choice]] = [[] for _ in quiz.questions]

    def choose(self, number: int, choice: Choice) -> str:
        """The verdict on `choice` for question `number`, from 0; it counts until the question is solved."""
        question = self.quiz.questions[number]
        if choice not in question.choices:
            raise ValueError(f"{choice.text!r} is no choice of question {number + 1}")
        again = not self.solved(number)
        if again:
            self.chosen[number].append(choice)
        return verdict(question, choice) + (" Try again." if again and not self.solved(number) else "")

    def solved(self, number: int) -> bool:
        """True if the right choice of question `number` has been found."""
        return self.quiz.questions[number].right in self.chosen[number]

    @property
    def finished(self) -> bool:
        """True if every question is solved."""
        return all(self.solved(number) for number in range(len(self.chosen)))

    @property
    def first_tries(self) -> list[bool]:
        """For each question, True if its first choice was the right one."""
        pairs = zip(self.quiz.questions, self.chosen, strict=True)
        return [chosen[:1] == [question.right] for question, chosen in pairs]

    @property
    def score(self) -> str:
        """The questions solved so far; at the end those right at the first try, and those to come back to."""
        count = len(self.chosen)
        if not self.finished:
            done = sum(self.solved(number) for number in range(count))
            return f"{done} of {count} questions solved."
        missed = [str(number) for number, right in enumerate(self.first_tries, start=1) if not right]
        first = f"All solved, {count - len(missed)} of {count} at the first try."
        if not missed:
            return first
        return f"{first} Come back to question{'s' * (len(missed) > 1)} {sentence(missed)} another day."


def verdict(question: Question, choice: Choice) -> str:
    """Say if `choice` is right, and why, or what is wrong with it."""
    return f"{'Right.' if choice == question.right else 'Not quite.'} {choice.why}"


def ask(quiz: Quiz, read: Callable[[str], str] = input, write: Callable[[str], None] = print) -> Attempt:
    """Put a quiz in a terminal, question by question until each is solved or the input ends; returns the attempt."""
    attempt = Attempt(quiz)
    write(quiz.title)
    try:
        for number, question in enumerate(quiz.questions):
            write("\n".join(["", f"{number + 1}. {question.text}", *_lettered(question)]))
            letters = LETTERS[: len(question.choices)]
            while not attempt.solved(number):
                letter = read(f"Your choice (a to {letters[-1]}): ").strip().lower().removesuffix(")")
                known = len(letter) == 1 and letter in letters
                said = attempt.choose(number, question.choices[letters.index(letter)]) if known else None
                write(said or f"Type one letter from a to {letters[-1]}.")
    except EOFError:
        write("")
    write(attempt.score)
    return attempt


def _lettered(question: Question) -> list[str]:
    return [f"   {letter}) {choice.text}" for letter, choice in zip(LETTERS, question.choices, strict=False)]
