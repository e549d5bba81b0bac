"""A demo on the screen: large type, one button, the meter below."""

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets

from ..live_meter import Meter
from .stage import DemoStep, Stage


class DemoWidget(ipywidgets.VBox):
    """What `demo` shows. Inherits because only a widget can be shown as one. `at` counts the steps done."""

    def __init__(self, steps: Sequence[DemoStep], stage: Stage) -> None:
        self.steps, self.stage, self.at = steps, stage, 0
        self.page, self.picture = ipywidgets.HTML(), ipywidgets.VBox()
        self.button = ipywidgets.Button(description="Start", layout={"width": "12em", "height": "3em"})
        self.button.on_click(self.go_on)
        stage.show = self._show_meter
        super().__init__([self.page, self.picture, self.button])
        self._write(f"{len(steps)} steps on {stage.words}", "Each press of the button, or of the space bar, goes on.")

    def go_on(self, _: Any = None) -> None:
        """Run the next step and show what came of it; after the last one, begin again."""
        step = self.steps[self.at % len(self.steps)]
        self.picture.children = ()
        self.button.disabled = True
        self._write(step.title, step.words)
        try:
            outcome = self.stage.perform(step)
        except (RuntimeError, ValueError) as problem:  # on a stage, words serve better than a traceback
            self._write(step.title, f"This step does not work here: {problem}")
            return
        finally:
            self.button.disabled = False
            self.button.focus()
        self.at += 1
        self.button.description = "Next" if self.at % len(self.steps) else "Again"
        self._write(step.title, step.words, outcome.summary)

    def _show_meter(self, meter: Meter) -> None:
        self.picture.children = (meter.widget,)

    def _write(self, title: str, *paragraphs: str) -> None:
        body = "".join(f"<p style='font-size:1.5em;line-height:1.4'>{escape(text)}</p>" for text in paragraphs)
        self.page.value = f"<h2 style='font-size:2.4em'>{escape(title)}</h2><div role='status'>{body}</div>"

    def __repr__(self) -> str:
        return "A demo: run this cell to use its button."
