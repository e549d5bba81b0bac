"""What every check does: it invites where nothing is solved yet, and knows an answer that is no function."""

from typing import Any

import pytest
from checking import Check, every_check, said

from course_utils.checks import NotSolved
from course_utils.progress import progress


def stub(*_: Any, **__: Any) -> Any:
    raise NotSolved("Your turn.")


def test_every_exercise_has_one_check() -> None:
    assert sorted(every_check()) == sorted(name for lesson in progress().lessons for name in lesson.exercises)


@pytest.mark.parametrize("check", every_check().values(), ids=every_check())
def test_stub_is_an_invitation(check: Check) -> None:
    with pytest.raises(NotSolved, match="Your turn"):
        check(stub)


@pytest.mark.parametrize("check", every_check().values(), ids=every_check())
def test_answers_that_are_no_functions_get_a_hint(check: Check) -> None:
    assert "without parentheses" in said(check, 3)
