"""How the tests of checks ask: a right answer passes, a wrong one is refused with words."""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from course_utils.checks import CheckFailed
from course_utils.progress import progress

Check = Callable[..., None]


def said(check: Check, answer: Any) -> str:
    """The message with which `check` refuses `answer`."""
    with pytest.raises(CheckFailed) as failure:
        check(answer)
    return str(failure.value)


def passes(check: Check, answer: Any, capsys: pytest.CaptureFixture[str], number: str) -> None:
    check(answer)
    assert capsys.readouterr().out.startswith(f"✓ {number} ")


@functools.cache
def every_check() -> dict[str, Check]:
    """The check of every exercise of the course, by its number."""
    found: dict[str, Check] = {}
    for lesson in progress().lessons:
        module = importlib.import_module(f"course_utils.checks.lesson_{lesson.number:02d}")
        found |= {thing.exercise: thing for thing in vars(module).values() if hasattr(thing, "exercise")}
    return found


@dataclass(frozen=True)
class Answers:
    """What learners hand in for one exercise: right answers in several styles, and wrong ones with words of the hint.

    Written here as a learner would write them, never taken from the tables of the check that they judge.
    """

    right: Sequence[Any]
    wrong: Sequence[tuple[Any, str]]


def right_answers(answers: dict[str, Answers]) -> list[Any]:
    """One parameter set (number, answer) for each right answer."""
    return [pytest.param(number, given, id=f"{number}-right-{place}")
            for number, one in answers.items() for place, given in enumerate(one.right, 1)]  # fmt: skip


def wrong_answers(answers: dict[str, Answers]) -> list[Any]:
    """One parameter set (number, answer, words of the hint) for each wrong answer."""
    return [pytest.param(number, given, words, id=f"{number}-wrong-{place}")
            for number, one in answers.items() for place, (given, words) in enumerate(one.wrong, 1)]  # fmt: skip


def hint(number: str, answer: Any) -> str:
    """The message with which the check of that exercise refuses `answer`."""
    return said(every_check()[number], answer)


def praise(number: str, answer: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """What the check of that exercise prints about `answer`, which has to pass."""
    every_check()[number](answer)
    return capsys.readouterr().out
