"""The Explorer in a notebook: all choices of a training run, and what to change next as buttons. Only notebooks import
this module.
"""

import asyncio
from collections.abc import Mapping
from html import escape
from itertools import zip_longest
from typing import Any, ClassVar

import ipywidgets

from ..figures.canvas import Figure, below_one_another
from ..run import TrainingRun
from . import explorer as core
from .widgets import Explorer, button_css, wide_button

PAUSE = 0.12  # seconds without input after which it is weighed what to change next: pictures come first

BUTTON = ".course-explorer button.course-change"
CSS = f"""<style>{button_css(BUTTON)}
.course-changes button.course-change {{ border-left-color: #d55e00; }}
.course-changes button.course-fits {{ border-left-color: #009e73; }}
.course-explorer {{ color: var(--jp-content-font-color1, #111); }}
.course-explorer .course-groups {{ display: flex; flex-flow: row wrap; column-gap: 24px; }}
.course-explorer .course-group {{ flex: 1 1 320px; max-width: 460px; min-width: 0; }}
.course-explorer .course-group > .widget-inline-hbox {{ width: auto; max-width: 100%; margin: 2px 0; }}
.course-explorer .course-group .widget-label {{ width: 150px; }}
.course-explorer .course-group .widget-readout {{ flex: none; width: 96px; max-width: none; }}
.course-explorer .course-heading {{ font-weight: 600; margin: 6px 0 2px; }}
.course-explorer .course-verdict {{ border-left: 6px solid #d55e00; padding: 4px 12px; line-height: 1.6; }}
.course-explorer .course-verdict.course-fits {{ border-left-color: #009e73; }}
.course-explorer .course-verdict code {{ user-select: all; overflow-wrap: anywhere; white-space: normal; }}
.course-explorer .widget-html, .course-explorer .widget-html-content {{ max-width: 100%; height: auto; }}
.course-explorer .course-changes {{
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr));
}}
</style>"""
"""Colors of text are those of JupyterLab's theme, so that a dark one stays readable; pictures are on white."""


class DashboardWidget(Explorer):
    """The Explorer: controls for a training run and a GPU, its peak, its step, and what to change next.

    `chosen` are values of `explorer.CONTROLS` to begin with, the rest is the course's puzzle. In the next cell, `.run`
    and `.breakdown` are what has been chosen, `.changes` are what the buttons offer. ValueError for an impossible run.
    """

    invitation = "The Explorer: run this cell to use its controls."
    names = tuple(control.name for control in core.CONTROLS)
    width: ClassVar = {"width": "auto"}

    def __init__(self, **chosen: Any) -> None:
        core.dashboard(chosen)
        self.begin = core.complete(chosen)
        self.changes: tuple[core.Suggestion, ...] = ()
        self._waiting: asyncio.TimerHandle | None = None
        self._applying = False
        self.now: core.Dashboard | None = None
        self.words, self.heading = ipywidgets.HTML(), ipywidgets.HTML()
        press = lambda index: lambda _: self.choose(self.changes[index].chosen)  # noqa: E731
        self.buttons = [_button("", press(index)) for index in range(core.MOST)]
        super().__init__(core.run_of(chosen), self.begin["gpu"])
        self.add_class("course-explorer")

    def begins_with(self, name: str) -> Any:
        return self.begin[name]

    def parts(self) -> list[Any]:
        *columns, ranks, card = [self._group(name) for name in core.GROUPS]
        last = ipywidgets.VBox([*ranks.children, *card.children]).add_class("course-group")
        groups = ipywidgets.Box([*columns, last]).add_class("course-groups")
        changes = ipywidgets.Box(self.buttons).add_class("course-changes")
        arrange = _button("Arrange it for me (about a second)", self._arrange)
        reset = _button("Start over", lambda _: self.choose(self.begin))
        row = ipywidgets.Box([arrange, reset], layout={"flex_flow": "row wrap"})
        style = ipywidgets.HTML(CSS, layout={"display": "none"})
        return [style, groups, self.words, self.heading, changes, row, self.picture]

    def _group(self, name: str) -> ipywidgets.VBox:
        heading = ipywidgets.HTML(f"<div class='course-heading' role='heading' aria-level='4'>{name}</div>")
        members = [self.controls[control.name] for control in core.CONTROLS if control.group == name]
        return ipywidgets.VBox([heading, *members]).add_class("course-group")

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
        self.now = now = core.dashboard(self.chosen)
        look, mark = ("course-fits", "✓") if now.fits else ("", "✗")
        said = f"<b>{mark} {escape(now.verdict)}</b> {escape(now.peak_phase)}<br><code>{escape(now.code)}</code>"
        figure = below_one_another([now.stack, now.timeline], now.title)
        return figure, f"<div class='course-verdict {look}'>{said}</div>"

    def show(self, said: str, drawn: str) -> None:
        self.picture.value, self.words.value = drawn, said

    def show_changes(self) -> None:
        self.changes = core.next_changes(self.chosen) if self.now else ()
        told = "No single change of what is offered here makes it better."
        if self.now is None:
            told = "What to change next is said of a run that is possible."
        elif self.changes:
            told = "What to change next: press a button to apply it"
        self.heading.value = f"<div class='course-heading' role='heading' aria-level='4'>{told}</div>"
        for button, change in zip_longest(self.buttons, self.changes):
            button.layout.display = "none" if change is None else ""
            if change is not None:
                button.description = f"{'✓' if change.fits else '✗'} {change.words}: {change.effect}"
                (button.add_class if change.fits else button.remove_class)("course-fits")

    def _arrange(self, _: object) -> None:
        said = "No arrangement of this training that is better fits this card."
        try:
            if plan := core.best_plan(self.chosen):
                self.choose(plan.chosen)
                said = f"Arranged: {plan.words} ({plan.effect})."
        except ValueError as error:
            said = f"Not possible: {error}."
        self.words.value += f"<div role='status' style='line-height:1.6'>{escape(said)}</div>"


explore = DashboardWidget


def _button(text: str, pressed: Any) -> ipywidgets.Button:
    button = wide_button(text, "course-change")
    button.on_click(pressed)
    return button
