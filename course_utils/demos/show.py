"""A demo on the screen: large type, one key a step, the meter or a picture below.

JupyterLab hands presses of buttons to a second thread of the kernel, which no interrupt reaches. So steps run
on the kernel's own: interrupting the kernel ends a step, and cells wait for it.
"""

import signal
import threading
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from ..figures.meters import STAGE
from ..interactive.meter import Meter
from .stage import Demo, DemoStep, Stage

TITLE = "font-size:30px;margin:0 0 0 12px;line-height:44px"
TEXT = "font-size:22px;line-height:1.35;margin:8px 0 0"

# A picture takes a little more than half of the window's height, so that text and picture are seen at once.
LOOK = f"<style>\n{Path(__file__).with_name('show.css').read_text(encoding='utf-8')}</style>"

LONG = 120  # letters: more than that leave no room for the step's own words and a picture
# Seconds after which the button takes the keyboard's focus: before that it is not on the page.
UNTIL_SHOWN = 0.5


class DemoWidget(ipywidgets.VBox):
    """The demo on a page. Inherits because only a widget can be shown as one.

    `pages` were shown so far: title, text and picture, the demo's own first; `shown` is the current one's
    number.
    """

    def __init__(self, demo: Demo, stage: Stage) -> None:
        self.demo = demo
        self.stage = stage
        self.heading = ipywidgets.HTML()
        self.page = ipywidgets.HTML()
        self.picture = ipywidgets.VBox()
        self.back = _button("Back", "6em")
        self.button = _button("Start", "9em")
        self.loop: AbstractEventLoop | None = None
        self.button.on_click(lambda _: self._pressed(self.go_on))
        self.back.on_click(lambda _: self._pressed(lambda: self._turn_to(max(0, self.shown - 1))))
        stage.show = self._show_meter
        self.pages: list[tuple[str, str, tuple[Any, ...]]] = []
        top = ipywidgets.HBox([self.button, self.back, self.heading])
        super().__init__([ipywidgets.HTML(LOOK, layout={"display": "none"}), top, self.page, self.picture])
        self.add_class("course-demo")
        self._begin()

    def go_on(self) -> None:
        """Show the next page, or run the next step where there is none yet; after the last, begin again."""
        if self.shown + 1 < len(self.pages):
            self._turn_to(self.shown + 1)
        elif self.shown == len(self.demo.steps):
            self._begin()
        else:
            self._run(self.demo.steps[self.shown])

    def _pressed(self, action: Callable[[], None]) -> None:
        """Act on the kernel's thread, with buttons off: no key pressed meanwhile counts for the next step."""
        self._set_disabled(True)
        if self.loop is None or threading.current_thread() is threading.main_thread():
            self._act(action)
        else:
            self.loop.call_soon_threadsafe(self._act, action)

    def _act(self, action: Callable[[], None]) -> None:
        action()
        self._set_disabled(False)
        self.button.focus()

    def _set_disabled(self, disabled: bool) -> None:
        self.button.disabled = disabled
        self.back.disabled = disabled

    def _begin(self) -> None:
        self.pages = []
        place = f"{len(self.demo.steps)} steps on {self.stage.words}."
        if not self.demo.runs:
            place += " All of it is estimated: nothing is run."
        elif not self.stage.live:
            place += " No GPU is used: each run is simulated, and played back at reading speed."
        keys = "Press Space or Enter for the next step. Tab selects the button that goes back."
        self._keep(self.demo.title, _text(self.demo.shows, place, keys), ())

    def _run(self, step: DemoStep) -> None:
        title = f"{self.shown + 1} · {step.title}"
        self._write(title, _text(step.words))
        self.picture.children = ()
        try:
            with interruptible():
                outcome = self.stage.perform(step)
        except KeyboardInterrupt:
            self._write(title, _text("Stopped. The next key runs this step again."))
        except (RuntimeError, ValueError) as problem:  # on a stage, words serve better than a traceback
            self._write(title, _text(f"This step does not work here: {problem}"))
        else:
            picture = self.picture.children  # the meter, if the step has shown it
            if outcome.figure:
                picture = (ipywidgets.HTML(outcome.figure.html),)
            crowded = bool(picture) and len(outcome.words) > LONG
            text = _text(outcome.words) if crowded else _text(step.words, outcome.words)
            self._keep(title, text, picture)

    def _keep(self, title: str, text: str, picture: tuple[Any, ...]) -> None:
        self.pages.append((title, text, picture))
        self._turn_to(len(self.pages) - 1)

    def _turn_to(self, number: int) -> None:
        self.shown = number
        title, text, self.picture.children = self.pages[number]
        self._write(title, text)
        if number == len(self.demo.steps):
            self.button.description = "Again"
        else:
            self.button.description = "Next" if number else "Start"

    def _write(self, title: str, text: str) -> None:
        self.heading.value = f"<h2 style='{TITLE}'>{escape(title)}</h2>"
        self.page.value = text

    def _show_meter(self, meter: Meter) -> None:
        meter.look = STAGE
        self.picture.children = (meter.widget,)

    def __repr__(self) -> str:
        return f"The demo “{self.demo.title}”: run this cell, then press its button."

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, whose button gets the keyboard's focus; its text, for readers who have no kernel."""
        with suppress(RuntimeError):  # without an event loop nobody is there to press keys
            self.loop = get_running_loop()
            self.loop.call_later(UNTIL_SHOWN, self.button.focus)
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        return {**bundle, "text/html": f"{self.heading.value}{self.page.value}", "text/plain": repr(self)}


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, an interrupt is a KeyboardInterrupt; a kernel lets interrupts pass while no cell runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _button(words: str, width: str) -> Any:
    button = ipywidgets.Button(description=words, layout={"width": width, "height": "44px"})
    button.style.font_size = "22px"
    return button


def _text(*paragraphs: str) -> str:
    body = "".join(f"<p style='{TEXT}'>{escape(text)}</p>" for text in paragraphs)
    return f"<div role='status'>{body}</div>"
