"""How the tests of checks ask: a right answer passes, a wrong one is refused with words."""

import importlib
from collections.abc import Callable
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


def every_check() -> dict[str, Check]:
    """The check of every exercise of the course, by its number."""
    found: dict[str, Check] = {}
    for lesson in progress().lessons:
        module = importlib.import_module(f"course_utils.checks.lesson_{lesson.number:02d}")
        found |= {thing.exercise: thing for thing in vars(module).values() if hasattr(thing, "exercise")}
    return found
