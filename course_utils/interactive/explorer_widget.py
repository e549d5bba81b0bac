"""The Explorer in a notebook: all choices of a training run, and what to change next as buttons.

Only notebooks import this module.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from html import escape
from itertools import zip_longest
from typing import Any

import ipywidgets

from ..figures.canvas import Figure, below_one_another
from ..run import TrainingRun
from . import explorer as core
from .widgets import RunSliders, wide_button

PAUSE = 0.12  # seconds without input after which it is weighed what to change next: pictures come first


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
        self._waiting: asyncio.TimerHandle | None = None
        self._applying = False
        self.now: core.Dashboard | None = None
        self.words = ipywidgets.HTML()
        self.heading = ipywidgets.HTML()
        self.step = ipywidgets.HTML()
        self.buttons = [_button("", partial(self._apply, index)) for index in range(core.MOST)]
        super().__init__(core.run_of(chosen), self.begin["gpu"])
        self.add_class("course-explorer")

    def begins_with(self, name: str) -> Any:
        return self.begin[name]

    def parts(self) -> list[Any]:
        groups = [part for name in core.GROUPS for part in self._group(name)]
        controls = ipywidgets.Box(groups).add_class("course-controls")
        seen = ipywidgets.VBox([self.words, self.picture]).add_class("course-seen")
        step = self.step.add_class("course-step")
        columns = ipywidgets.Box([controls, seen, step]).add_class("course-columns")
        changes = ipywidgets.Box(self.buttons).add_class("course-changes")
        arrange = _button("Arrange it for me (about a second)", self._arrange)
        reset = _button("Start over", lambda _: self.choose(self.begin))
        row = ipywidgets.Box([arrange, reset], layout={"flex_flow": "row wrap"})
        return [columns, self.heading, changes, row]

    def _group(self, name: str) -> tuple[ipywidgets.Button, ipywidgets.VBox]:
        """A button that folds a group of controls, and the group; those of several GPUs begin folded."""
        members = [self.controls[control.name] for control in core.CONTROLS if control.group == name]
        group = ipywidgets.VBox(members)
        button = wide_button(name, "course-change").add_class("course-group")

        def fold(_: object, folded: bool | None = None) -> None:
            if folded is None:
                folded = group.layout.display != "none"
            group.layout.display = "none" if folded else ""
            button.description = f"{'▸' if folded else '▾'} {name}"

        fold(None, name == core.RANKS and self.begin["world_size"] == 1)
        button.on_click(fold)
        return button, group

    @property
    def run(self) -> TrainingRun:
        return core.run_of(self.chosen)

    def choose(self, chosen: Mapping[str, Any]) -> None:
        """Set several controls and draw once."""
        self._applying = True
        try:
            for name, value in chosen.items():
                self.controls[name].value = value
        finally:
            self._applying = False
        self.update()

    def _apply(self, index: int, _: object) -> None:
        self.choose(self.changes[index].chosen)

    def update(self, change: object = None) -> None:
        if self._applying:
            return
        super().update(change)
        if self._waiting is not None:
            self._waiting.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a script or a test, where nothing would come back to it
            self.show_changes()
        else:
            self._waiting = loop.call_later(PAUSE, self.show_changes)

    def redraw(self) -> tuple[Figure, str]:
        self.now = None  # and stays so where the choices are refused
        now = core.dashboard(self.chosen)
        self.now = now
        if now.fits:
            mark, look = "✓", "course-fits"
        else:
            mark, look = "✗", ""
        verdict = f"<b>{mark} {escape(now.verdict)}</b> {escape(now.peak_phase)}"
        said = f"{verdict}<br><code>{escape(now.code)}</code>"
        figure = below_one_another([now.stack, now.timeline], now.title)
        return figure, f"<div class='course-verdict {look}'>{said}</div>"

    def show(self, said: str, drawn: str) -> None:
        if self.now is not None:  # else both stay, greyed
            self.picture.value = self.now.stack.inline
            self.step.value = self.now.timeline.inline
        self.words.value = said
        if self.now is None:
            self.add_class("course-stale")
        else:
            self.remove_class("course-stale")

    def show_changes(self) -> None:
        self.changes = core.next_changes(self.chosen) if self.now else ()
        if self.now is None:
            told = "Suggestions appear once the run is possible."
        elif self.changes:
            told = "What to change next: press a button to apply it"
        else:
            told = "None of the single changes on offer makes this run better."
        self.heading.value = f"<div class='course-heading' role='heading' aria-level='4'>{told}</div>"
        for button, change in zip_longest(self.buttons, self.changes):
            if change is None:
                button.layout.display = "none"
                continue
            button.layout.display = ""
            if change.fits:
                button.description = f"✓ {change.words}: {change.effect}"
                button.add_class("course-fits")
            else:
                button.description = f"✗ {change.words}: {change.effect}"
                button.remove_class("course-fits")

    def _arrange(self, _: object) -> None:
        said = "No better arrangement of this training fits this card."
        try:
            if plan := core.best_plan(self.chosen):
                self.choose(plan.chosen)
                said = f"Arranged: {plan.words} ({plan.effect})."
        except ValueError as error:
            said = f"Not possible: {error}."
        self.words.value += f"<div role='status' style='line-height:1.6'>{escape(said)}</div>"


explore = Explorer


def _button(text: str, pressed: Any) -> ipywidgets.Button:
    button = wide_button(text, "course-change")
    button.layout.display = "" if text else "none"  # until there is a change to offer
    button.on_click(pressed)
    return button
