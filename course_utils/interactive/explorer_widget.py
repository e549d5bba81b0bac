"""The Explorer in a notebook: all choices of a training run, and what to change next as buttons.

Only notebooks import this module. Every rule is in `explorer`.
"""

from collections.abc import Mapping
from functools import partial
from html import escape
from itertools import zip_longest
from typing import Any

import ipywidgets

from ..run import TrainingRun
from . import explorer as core
from .html_bars import HtmlPicture, Picture
from .widgets import RunSliders, wide_button


class Explorer(RunSliders):
    """The Explorer: controls for a training run and a GPU, its peak, its step, and what to change next.

    `chosen` are values of `explorer.CONTROLS` to begin with, the rest is the course's puzzle. In the next
    cell, `.run` and `.breakdown` are what has been chosen, `.changes` are what the buttons offer. ValueError
    for an impossible run.
    """

    invitation = "The Explorer: run this cell to use its controls."
    names = tuple(control.name for control in core.CONTROLS)

    def __init__(self, **chosen: Any) -> None:
        core.dashboard(chosen)
        self.begin = core.complete(chosen)
        self.changes: tuple[core.Suggestion, ...] = ()
        self.is_applying = False
        self.heading = ipywidgets.HTML()
        self.buttons = [_button("", partial(self._apply, index)) for index in range(core.MOST)]
        super().__init__(core.run_of(chosen), self.begin["gpu"])
        self.add_class("course-explorer")

    def begins_with(self, name: str) -> Any:
        return self.begin[name]

    def parts(self) -> list[Any]:
        groups = [part for name in core.GROUPS for part in self._group(name)]
        controls = ipywidgets.Box(groups).add_class("course-controls")
        seen = ipywidgets.Box([self.picture]).add_class("course-seen")
        columns = ipywidgets.Box([controls, seen]).add_class("course-columns")
        changes = ipywidgets.Box(self.buttons).add_class("course-changes")
        self.arrange = _button("Arrange it for me (about a second)", self._arrange)
        reset = _button("Start over", lambda _: self.choose(self.begin))
        row = ipywidgets.Box([self.arrange, reset], layout={"flex_flow": "row wrap"})
        return [columns, self.heading, changes, row]

    def _group(self, name: str) -> list[ipywidgets.Widget]:
        members = [self.controls[control.name] for control in core.CONTROLS if control.group == name]
        return [ipywidgets.HTML(f"<b>{name}</b>"), *members]

    @property
    def run(self) -> TrainingRun:
        return core.run_of(self.chosen)

    def choose(self, chosen: Mapping[str, Any]) -> None:
        """Set several controls and draw once."""
        self.is_applying = True
        try:
            for name, value in chosen.items():
                self.controls[name].value = value
        finally:
            self.is_applying = False
        self.update()

    def _apply(self, index: int, _: object) -> None:
        self.choose(self.changes[index].chosen)
        if not self.changes:
            self.arrange.focus()  # the button that was pressed is gone

    def update(self, change: object = None) -> None:
        """Draw, then weigh what to change next: the page has the picture before that is known."""
        if not self.is_applying:
            super().update(change)
            self.show_changes()

    def redraw(self) -> tuple[Picture, str]:
        self.now = now = core.dashboard(self.chosen)
        mark, look = ("✓", "course-fits") if now.fits else ("✗", "")
        verdict = f"<b>{mark} {escape(now.verdict)}</b> {escape(now.peak_phase)}"
        said = f"<div class='course-verdict {look}'>{verdict}<br><code>{escape(now.code)}</code></div>"
        both = (now.stack, now.timeline)
        alt = " ".join(part.alt for part in both)
        return HtmlPicture("".join(part.html for part in both), alt), said

    def show_changes(self) -> None:
        try:
            self.changes = core.next_changes(self.chosen)
            told = "It fits. Arranging it may still make it faster."
            if self.changes:
                told = "What to change next: press a button to apply it"
            elif not core.dashboard(self.chosen).fits:
                told = "None of the single changes on offer makes this run better."
        except ValueError:
            self.changes = ()
            told = "Suggestions appear once the run is possible."
        self.heading.value = f"<div class='course-heading' role='heading' aria-level='4'>{told}</div>"
        for button, change in zip_longest(self.buttons, self.changes):
            button.layout.display = "none"
            if change is not None:
                button.description = f"{'✓' if change.fits else '✗'} {change.words}: {change.effect}"
                button.layout.display = ""

    def _arrange(self, _: object) -> None:
        said = "No better arrangement of this training fits this card."
        try:
            if plan := core.best_plan(self.chosen):
                self.choose(plan.chosen)
                said = f"Arranged: {plan.words} ({plan.effect})."
        except ValueError as error:
            said = f"Not possible: {error}."
        self.heading.value += f"<div role='status'>{escape(said)}</div>"


explore = Explorer


def _button(text: str, pressed: Any) -> ipywidgets.Button:
    button = wide_button(text, "course-change")
    button.on_click(pressed)
    return button
