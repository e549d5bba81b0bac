"""Quizzes: computed answers that follow the engine, one right choice, explanations that keep the secret."""

import re
from math import sqrt
from typing import Any

import pytest
import torch

from course_utils.interactive.quiz import Choice, Question, Quiz, gb
from course_utils.interactive.quiz_form import QuizForm
from course_utils.lessons import lessons, quiz
from course_utils.models import PRESETS
from course_utils.units import format_bytes

ONE = Choice("one", "Add.")
TWO = Choice("two", "Because.")
FOUR = Choice("four", "Yes.")
FIVE = Choice("five", "Too many.")
SMALL = Quiz(7, (Question("One <b> or `two`?", TWO, (ONE,)), Question("Four?", FOUR, (FIVE,))))


# What is asked


@pytest.mark.parametrize("lesson", lessons())
def test_a_quiz_explains_each_choice_without_giving_the_right_one_away(lesson: int) -> None:
    questions = quiz(lesson).questions
    assert 3 <= len(questions) <= 6
    assert len({question.choices.index(question.right) for question in questions}) > 1
    for question in questions:
        texts = [choice.text for choice in question.choices]
        assert 3 <= len(texts) == len(set(texts)) <= 6 and question.right.why
        number = re.match(r"[\d.,]+", question.right.text)
        secret = rf"(?<![\w.,/−⁻]){re.escape(number[0] if number else question.right.text)}(?![\w%]|[.,]\d)"
        for choice in question.wrong:
            assert len(choice.why) > 15 and choice.why.endswith((".", "?")), choice
            assert not re.search(secret, choice.why), f"{choice.why} tells that it is {question.right.text}"


# Right, by another way than the quiz's own

LARGE, MEDIUM = PRESETS["gpt2-large"], PRESETS["gpt2-medium"]
COPY = 2 * (12 * MEDIUM.layers * MEDIUM.hidden**2 + MEDIUM.vocab * MEDIUM.hidden)
"""Bytes of 16-bit copies of every matrix of a block, 12·h², and of the tied head, V·h."""

BY_HAND = {
    (1, 0): gb(16 * LARGE.parameters),
    (1, 2): format_bytes(2 * 1024 * 4 * LARGE.hidden, "MB", 1),
    (2, 1): f"{(1 - 0.9) / sqrt(1 - 0.999):.3g}·η",
    (3, 0): f"{torch.tensor(1.0, dtype=torch.bfloat16).add_(0.003).item():.6g}",
    (3, 2): gb(16 * MEDIUM.parameters + COPY),
    (3, 4): f"{2 * (34 - 2) + 2}·s·b·h",
}


def test_right_choices_are_those_worked_out_by_hand() -> None:
    right = {(lesson, place): quiz(lesson).questions[place].right.text for lesson, place in BY_HAND}
    assert right == BY_HAND


# Taking it


def press(form: QuizForm, number: int, text: str) -> Any:
    [button] = [button for button in form.buttons[number] if button.description.endswith(text)]
    button.click()
    return button


def test_buttons_answer_at_once_and_can_be_pressed_again() -> None:
    form = QuizForm(SMALL)
    heading = next(child for child in form.children if "role='heading'" in getattr(child, "value", ""))
    assert "<b>1.</b> One &lt;b&gt; or <code>two</code>?" in heading.value
    assert press(form, 0, "one").description == "✗ one"
    assert "Not quite. Add. Try again." in form.said[0].value
    assert "role='status'" in form.said[0].value and form.said[1].value == ""
    assert press(form, 0, "two").description == "✓ two" and "Right. Because." in form.said[0].value
    assert "1 of 2 questions solved." in form.score.value
    press(form, 1, "four")
    assert "1 of 2 at the first try. Repeat question 1" in form.score.value
    assert not any(button.disabled for buttons in form.buttons for button in buttons)
    form.restart.click()
    assert {button.description for button in form.buttons[0]} == {"one", "two"}
    assert form.said[0].value == "" and "0 of 2 questions solved." in form.score.value


# What is stored


def test_what_is_printed_holds_no_secret_and_is_the_same_each_time() -> None:
    shown = quiz(1)
    title = f"Quiz of lesson 01: {len(shown.questions)} questions"
    assert repr(shown) == f"{title}. Run this cell in a notebook to take it."
    first, second = (quiz(1)._repr_mimebundle_() for _ in range(2))
    view = "application/vnd.jupyter.widget-view+json"
    assert {**first, view: None} == {**second, view: None}
    assert first["text/plain"] == repr(shown) and first["text/html"] == shown.page()
    page = SMALL.page()
    assert page.count("<details>") == 4 and page.count("Right.") == 2 and "<script" not in page
    assert "<summary>one</summary><p>Not quite. Add.</p>" in page


def twice(n: int) -> list[str]:
    """The explanations of a question about this number, in the order in which they are shown."""
    wrong = (Choice(str(n), "b"), Choice(str(n * n), "c"))
    question = Question(f"How many are {n} and {n}?", Choice(str(2 * n), "a"), wrong)
    return [choice.why for choice in question.choices]


def test_choices_keep_their_places_when_only_numbers_change() -> None:
    assert twice(5) == twice(7)
