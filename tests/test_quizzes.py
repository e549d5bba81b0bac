"""Quizzes: computed answers that follow the engine, one right choice, explanations that keep the secret."""

import importlib
import re
import subprocess
import sys
import tomllib
from math import sqrt
from pathlib import Path

import pytest
import torch

from course_utils.authoring.build import ROOT
from course_utils.interactive.course_files import LESSONS
from course_utils.interactive.quiz import Attempt, Choice, Question, Quiz, gb, worded
from course_utils.interactive.quiz_form import QuizForm
from course_utils.lessons import lessons, quiz
from course_utils.models import PRESETS
from course_utils.units import format_bytes

SMALL = Quiz(
    7,
    (
        Question(
            "One <b> or `two`?", Choice("two", "Because."), (Choice("one", "Add."), Choice("three", "Less."))
        ),
        Question(
            "Four?", Choice("four", "Yes."), (Choice("five", "Too many."), Choice("six", "Far too many."))
        ),
    ),
)
QUESTIONS = [
    pytest.param(question, id=f"{n:02d}.{i + 1}")
    for n in lessons()
    for i, question in enumerate(quiz(n).questions)
]


def named(question: Question, text: str) -> Choice:
    return next(choice for choice in question.choices if choice.text == text)


# --------------------------------------------------------------------------------------------------
# what is asked


@pytest.mark.parametrize("lesson", lessons())
def test_a_quiz_has_three_to_six_questions_and_its_right_choices_stand_in_different_places(
    lesson: int,
) -> None:
    questions = quiz(lesson).questions
    assert 3 <= len(questions) <= 6
    assert len({question.choices.index(question.right) for question in questions}) > 1


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_one_right_choice_and_explains_the_others_without_giving_it_away(
    question: Question,
) -> None:
    texts = [choice.text for choice in question.choices]
    assert 3 <= len(texts) == len(set(texts)) <= 6 and question.right.why
    number = re.match(r"[\d.,]+", question.right.text)
    secret = rf"(?<![\w.,/−⁻]){re.escape(number[0] if number else question.right.text)}(?![\w%]|[.,]\d)"
    for choice in question.wrong:
        assert len(choice.why) > 15 and choice.why.endswith((".", "?")), choice
        assert not re.search(secret, choice.why), f"{choice.why} tells that it is {question.right.text}"


@pytest.mark.parametrize("lesson", lessons())
def test_each_number_of_a_quiz_stands_in_its_words(lesson: int) -> None:
    folder = ROOT / "course_utils" / "lessons" / LESSONS[lesson]
    tables = tomllib.loads((folder / "quiz.toml").read_text(encoding="utf-8"))
    computed = dict(importlib.import_module(f"course_utils.lessons.{LESSONS[lesson]}.quiz").numbers())
    named = {name: set(re.findall(r"{(\w+)[:}]", str(table))) for name, table in tables.items()}
    given = {name: set(numbers) for name, numbers in computed.items()}
    assert given == {name: words for name, words in named.items() if words}


def test_words_without_their_number_are_refused(tmp_path: Path) -> None:
    words = tmp_path / "quiz.toml"
    words.write_text('[one]\ntext = "How many?"\nright = ["{n:,}", "So."]\nwrong = [["{m}", "No."]]\n')
    (question,) = worded(words, [("one", {"n": 1000, "m": 2})])
    assert question == Question("How many?", Choice("1,000", "So."), (Choice("2", "No."),))
    with pytest.raises(KeyError, match="m"):
        worded(words, [("one", {"n": 1000})])


def twice(n: int) -> Question:
    wrong = (Choice(str(n), "b"), Choice(str(n * n), "c"))
    return Question(f"How many are {n} and {n}?", Choice(str(2 * n), "a"), wrong)


def test_choices_keep_their_places_when_only_numbers_change() -> None:
    first = twice(5)
    second = twice(7)
    assert [first.choices.index(first.right)] == [second.choices.index(second.right)]
    assert [choice.why for choice in first.choices] == [choice.why for choice in second.choices]


def test_an_unknown_lesson_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"unknown quiz 99.*1, 2, 3"):
        quiz(99)


# --------------------------------------------------------------------------------------------------
# right, by another way than the quiz's own

LARGE, MEDIUM, LLAMA = (PRESETS[name] for name in ("gpt2-large", "gpt2-medium", "tinyllama-1.1b"))
COPY = 2 * (12 * MEDIUM.layers * MEDIUM.hidden**2 + MEDIUM.vocab * MEDIUM.hidden)
"""Bytes of 16-bit copies of every matrix of a block, 12·h², and of the tied head, V·h."""

BY_HAND = {
    (1, 0): gb(16 * LARGE.parameters),
    (1, 1): gb(12 * LLAMA.parameters),
    (1, 2): format_bytes(2 * 1024 * 4 * LARGE.hidden, "MB", 1),
    (1, 4): "activations",
    (2, 0): gb(8 * MEDIUM.parameters),
    (2, 1): f"{(1 - 0.9) / sqrt(1 - 0.999):.3g}·η",
    (2, 2): "Lion",
    (2, 3): gb(4 * MEDIUM.parameters),
    (2, 4): f"{2 + 12 + 4 + 4} bytes",
    (3, 2): gb(16 * MEDIUM.parameters + COPY),
    (3, 3): f"{2 + 4 + 12} bytes",
    (3, 4): f"{2 * (34 - 2) + 2}·s·b·h",
}
"""Only activations shrink with the micro-batch; Lion keeps one number per parameter; masks do not double."""


@pytest.mark.parametrize("place", BY_HAND, ids=str)
def test_right_choices_are_those_worked_out_by_hand(place: tuple[int, int]) -> None:
    assert quiz(place[0]).questions[place[1]].right.text == BY_HAND[place]


def test_a_peak_is_the_sum_of_what_stays_and_the_larger_of_the_two() -> None:
    question = quiz(1).questions[3]
    stays, activations, gradients = map(float, re.findall(r"([\d.]+) GB", question.text))
    assert question.right.text == f"{stays + max(activations, gradients):.1f} GB"
    assert named(question, f"{stays + activations + gradients:.1f} GB") in question.wrong


def test_what_is_stored_and_scaled_is_what_torch_stores() -> None:
    vanishing, scale = quiz(3).questions[:2]
    stored = torch.tensor(1.0, dtype=torch.bfloat16).add_(0.003).item()
    assert vanishing.right.text == f"{stored:.6g}"
    smallest = int(scale.right.text)
    assert torch.tensor(1e-8 * smallest).half().item() > 0 == torch.tensor(1e-8 * smallest / 2).half().item()


# --------------------------------------------------------------------------------------------------
# taking it


def test_score_counts_first_tries_alone() -> None:
    attempt = Attempt(SMALL)
    first, second = SMALL.questions
    assert attempt.choose(0, named(first, "one")) == "Not quite. Add. Try again."
    assert attempt.score == "0 of 2 questions solved."
    assert attempt.choose(0, first.right) == "Right. Because."
    assert attempt.choose(0, named(first, "three")) == "Not quite. Less."
    attempt.choose(1, second.right)
    assert attempt.finished and attempt.first_tries == [False, True]
    assert attempt.score == "All solved, 1 of 2 at the first try. Repeat question 1 another day."
    perfect = Attempt(SMALL)
    poor = Attempt(SMALL)
    for number, question in enumerate(SMALL.questions):
        perfect.choose(number, question.right)
        poor.choose(number, question.wrong[0])
        poor.choose(number, question.right)
    assert perfect.score == "All solved, 2 of 2 at the first try."
    assert poor.score == "All solved, 0 of 2 at the first try. Repeat questions 1 and 2 another day."


def button(form: QuizForm, number: int, text: str):
    return next(button for button in form.buttons[number] if button.description.endswith(text))


def test_buttons_answer_at_once_and_can_be_pressed_again() -> None:
    form = QuizForm(SMALL)
    heading = next(child for child in form.children if "role='heading'" in getattr(child, "value", ""))
    assert "<b>1.</b> One &lt;b&gt; or <code>two</code>?" in heading.value
    button(form, 0, "one").click()
    assert button(form, 0, "one").description == "✗ one"
    assert "Not quite. Add. Try again." in form.said[0].value
    assert "role='status'" in form.said[0].value and form.said[1].value == ""
    button(form, 0, "two").click()
    assert button(form, 0, "two").description == "✓ two" and "Right. Because." in form.said[0].value
    assert "1 of 2 questions solved." in form.score.value
    button(form, 1, "four").click()
    assert "1 of 2 at the first try. Repeat question 1" in form.score.value
    assert not any(button.disabled for buttons in form.buttons for button in buttons)
    form.restart.click()
    texts = [choice.text for choice in SMALL.questions[0].choices]
    assert [button.description for button in form.buttons[0]] == texts
    assert form.said[0].value == "" and "0 of 2 questions solved." in form.score.value
    assert form.restart.layout.display == "none"


# --------------------------------------------------------------------------------------------------
# what is stored


@pytest.mark.parametrize("lesson", lessons())
def test_what_is_printed_holds_no_secret_and_is_the_same_each_time(lesson: int) -> None:
    shown = quiz(lesson)
    title = f"Quiz of lesson {lesson:02d}: {len(shown.questions)} questions"
    assert repr(shown) == f"{title}. Run this cell in a notebook to take it."
    first, second = (quiz(lesson)._repr_mimebundle_() for _ in range(2))
    view = "application/vnd.jupyter.widget-view+json"
    assert {**first, view: None} == {**second, view: None} and view in first
    assert first["text/plain"] == repr(shown) and first["text/html"] == shown.page()
    page = SMALL.page()
    assert page.count("<details>") == 6 and page.count("Right.") == 2 and "<script" not in page
    assert "<summary>one</summary><p>Not quite. Add.</p>" in page


def test_questions_need_the_standard_library_alone() -> None:
    code = (
        "import sys; from course_utils.lessons import lessons, quiz; "
        "print(*(quiz(n) for n in lessons()));"
        "assert not {'torch', 'numpy', 'ipywidgets', 'IPython'} & set(sys.modules), 'too much is imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    assert "Quiz of lesson 03" in done.stdout
