"""How the tests of checks ask: a right answer passes, a wrong one is refused with words."""

import functools
import importlib
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from course_utils.interactive.course_files import LESSONS
from course_utils.interactive.feedback import CheckFailed
from course_utils.interactive.progress import progress

Check = Callable[..., None]


def said(check: Check, answer: Any) -> str:
    """The message with which `check` refuses `answer`."""
    with pytest.raises(CheckFailed) as failure:
        check(answer)
    return str(failure.value)


@functools.cache
def every_check() -> dict[str, Check]:
    """The check of every exercise of the course, by its number."""
    found: dict[str, Check] = {}
    for lesson in progress().lessons:
        module = importlib.import_module(f"course_utils.lessons.{LESSONS[lesson.number]}.checks")
        found |= {thing.exercise: thing for thing in vars(module).values() if hasattr(thing, "exercise")}
    return found


@dataclass(frozen=True)
class Answers:
    """What learners hand in for one exercise: a right answer, and some wrong ones with words of the hint.

    Written here as a learner would write them, never taken from the tables of the check that they judge.
    """

    right: Any
    wrong: Sequence[tuple[Any, str]]


def hint(number: str, answer: Any) -> str:
    """The message with which the check of that exercise refuses `answer`."""
    return said(every_check()[number], answer)


def written(lines: Sequence[str], name: str, known: dict[str, Any]) -> Any:
    """The function or class `name` of these lines; its source can be found, as that of a cell's function."""
    source = "\n".join(lines)
    found = dict(known)
    file = f"<{name} {hash(source)}>"
    linecache.cache[file] = (len(source), None, [f"{line}\n" for line in lines], file)
    exec(compile(source, file, "exec"), found)
    return found[name]


class JudgedAnswers:
    """The two tests of a lesson's answers. A class, so that they run with the fixtures of the file that
    inherits it.
    """

    answers: ClassVar[dict[str, Answers]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "right" in metafunc.fixturenames:
            cases = {f"{number}-right": (number, one.right) for number, one in self.answers.items()}
            metafunc.parametrize("number, right", cases.values(), ids=cases)
        else:
            wrong = {
                f"{number}-wrong-{place}": (number, *given)
                for number, one in self.answers.items()
                for place, given in enumerate(one.wrong, 1)
            }
            metafunc.parametrize("number, wrong, words", wrong.values(), ids=wrong)

    def test_a_right_answer_passes(self, number: str, right: Any, capsys: pytest.CaptureFixture[str]) -> None:
        every_check()[number](right)
        assert f"✓ {number} " in capsys.readouterr().out

    def test_a_wrong_answer_gets_its_hint(self, number: str, wrong: Any, words: str) -> None:
        assert words in hint(number, wrong)
