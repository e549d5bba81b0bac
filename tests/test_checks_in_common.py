"""What every check does: it invites where nothing is solved yet, and knows an answer that is no function."""

import importlib
from typing import Any

import pytest
from checking import Check, every_check, said

from course_utils.interactive.feedback import NotSolved
from course_utils.interactive.progress import progress


def stub(*_: Any, **__: Any) -> Any:
    raise NotSolved("Your turn.")


def test_every_exercise_has_one_check_and_answers_that_judge_it() -> None:
    exercises = sorted(name for lesson in progress().lessons for name in lesson.exercises)
    assert sorted(every_check()) == exercises
    for number in exercises:
        answers = importlib.import_module(f"test_lesson_{number[:2]}").ANSWERS[number]
        assert len(answers.wrong) > 0, f"{number} is judged by no wrong answer"


@pytest.mark.parametrize("check", every_check().values(), ids=every_check())
def test_stub_is_an_invitation_and_an_answer_that_is_no_function_gets_a_hint(check: Check) -> None:
    with pytest.raises(NotSolved, match="Your turn"):
        check(stub)
    assert "without parentheses" in said(check, 3)
