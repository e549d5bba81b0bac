"""A quiz as buttons in a notebook. Only notebooks import this module."""

from functools import partial
from typing import Any

import ipywidgets

from ..units import marked
from .progress import mark_quiz
from .widgets import read, wide_button

HEADING = "role='heading' aria-level='4'"


class QuizForm(ipywidgets.VBox):
    """Questions in a column, a button for each choice. Inherits because only a widget can be shown as one."""

    def __init__(self, quiz: Any) -> None:
        self.quiz = quiz
        self.buttons: list[list[ipywidgets.Button]] = []
        self.said: list[ipywidgets.HTML] = []
        parts = [part for number in range(len(quiz.questions)) for part in self._question(number)]
        self.score = ipywidgets.HTML()
        self.restart = wide_button("Start over", "course-choice")
        self.restart.on_click(self._start_over)
        self._start_over()
        style = ipywidgets.HTML(f"<style>{read('widgets.css')}</style>", layout={"display": "none"})
        super().__init__([style, *parts, self.score, self.restart])
        self.add_class("course-quiz")

    def _question(self, number: int) -> list[Any]:
        question = self.quiz.questions[number]
        text = f"<b>{number + 1}.</b> {marked(question.text)}"
        heading = ipywidgets.HTML(f"<div class='course-text course-question' {HEADING}>{text}</div>")
        buttons = [wide_button(choice.text, "course-choice") for choice in question.choices]
        for button, choice in zip(buttons, question.choices, strict=True):
            button.on_click(partial(self._choose, number, choice))
        self.buttons.append(buttons)
        self.said.append(ipywidgets.HTML())
        return [heading, *buttons, self.said[-1]]

    def _choose(self, number: int, choice: Any, button: ipywidgets.Button) -> None:
        """Say at once what is right or wrong with a choice; the button stays enabled for the keyboard."""
        was_finished = self.attempt.finished
        words = self.attempt.choose(number, choice)
        if choice == self.quiz.questions[number].right:
            mark, look = "✓", "course-right"
        else:
            mark, look = "✗", "course-wrong"
        button.description = f"{mark} {choice.text}"
        button.add_class(look)
        said = f"<div class='course-text course-said {look}' role='status'>{marked(words)}</div>"
        self.said[number].value = said
        self._show_score()
        if self.attempt.finished and not was_finished:
            tries = self.attempt.first_tries
            try:
                mark_quiz(self.quiz.lesson, sum(tries), len(tries))
            except ValueError as problem:
                self.score.value += f"<div class='course-text' role='alert'>{marked(str(problem))}</div>"

    def _start_over(self, _: object = None) -> None:
        self.attempt = self.quiz.attempt()
        for question, buttons, said in zip(self.quiz.questions, self.buttons, self.said, strict=True):
            said.value = ""
            for button, choice in zip(buttons, question.choices, strict=True):
                button.description = choice.text
                button.remove_class("course-right").remove_class("course-wrong")
        self._show_score()

    def _show_score(self) -> None:
        score = f"<b>{self.attempt.score}</b>"
        self.score.value = f"<div class='course-text course-question' role='status'>{score}</div>"
        self.restart.layout.display = "" if any(self.attempt.chosen) else "none"

    def __repr__(self) -> str:
        return repr(self.quiz)
