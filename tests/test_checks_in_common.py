"""What every check does: it invites where nothing is solved yet, and knows an answer that is no function."""

import importlib
from typing import Any

import pytest
from checking import Check, every_check, said

from course_utils.interactive.feedback import NotSolved
from course_utils.interactive.progress import progress


def stub(*_: Any, **__: Any) -> Any:
    raise NotSolved("Your turn.")


def test_every_exercise_has_one_check() -> None:
    assert sorted(every_check()) == sorted(name for lesson in progress().lessons for name in lesson.exercises)


@pytest.mark.parametrize("check", every_check().values(), ids=every_check())
def test_stub_is_an_invitation_and_an_answer_that_is_no_function_gets_a_hint(check: Check) -> None:
    with pytest.raises(NotSolved, match="Your turn"):
        check(stub)
    assert "without parentheses" in said(check, 3)


@pytest.mark.parametrize("number", every_check())
def test_every_check_is_judged_by_three_right_answers_and_six_wrong_ones(number: str) -> None:
    answers = importlib.import_module(f"test_lesson_{number[:2]}_checks").ANSWERS[number]
    assert len(answers.right) >= 3 and len(answers.wrong) >= 6
    assert all(len(words) > 3 for _, words in answers.wrong)
