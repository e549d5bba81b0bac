"""Sliders for lessons: those of a training run, and what others are made of.

Only notebooks import this. Pictures are strings set into an HTML widget: unlike `interact` and `Output`, that
leaves stored outputs as they were. A picture is plain HTML, or a figure of matplotlib, which takes longer.
"""

from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from threading import RLock
from typing import Any

import ipywidgets

from .. import MemoryBreakdown, TrainingRun, estimate
from ..gpus import Gpu, gpu
from ..palette import number
from ..planning.twin import fit_words
from .explorer import CONTROL, Control, peak_stack, verdict_words
from .html_bars import Picture

STYLE = {"description_width": "160px"}
LAYOUT = {"width": "auto"}


def run_sliders(model: str = "gpt2-xl", *, gpu: str = "V100-32GB", **choices: Any) -> "RunSliders":
    """Controls for a training run, and a picture of its estimated memory with a GPU's capacity.

    `choices` are those of a `TrainingRun` to begin with, and raise its ValueErrors; `.run` is what has been
    chosen.
    """
    first: dict[str, Any] = {"micro_batch": 32} | choices
    return RunSliders(TrainingRun(model, **first), gpu)


def read(name: str) -> str:
    """A style sheet or a script of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def wide_button(text: str, look: str) -> ipywidgets.Button:
    return ipywidgets.Button(description=text, layout={"width": "auto", "height": "auto"}).add_class(look)


class SliderBox(ipywidgets.VBox):
    """Controls above a picture, drawn by a subclass's `redraw`.

    Inherits because only a widget can be shown as one.
    """

    invitation = ""
    redraw: Callable[[], tuple[Picture, str]]

    def __init__(self, controls: Mapping[str, Any]) -> None:
        self.controls = controls
        self.turn = RLock()
        self.picture = ipywidgets.HTML()
        self.message = ""
        self.figure: Picture | None = None
        self.drawn = ""
        for control in controls.values():
            control.observe(self.update, names="value")
        style = f'<style onload="{escape(read("names.js"))}">{read("widgets.css")}</style>'
        super().__init__([ipywidgets.HTML(style, layout={"display": "none"}), *self.parts()])
        self.add_class("course-explorable")
        self.update()

    def parts(self) -> list[Any]:
        return [ipywidgets.Box([*self.controls.values()]).add_class("course-grid"), self.picture]

    def update(self, change: object = None) -> None:
        """Draws what the controls say, or explains why they are impossible and greys the last picture.

        Words and picture are set in one message: on the page they never contradict each other. Two threads
        may ask at once (see `GuessForm`); the last to draw has read what the controls say by then.
        """
        with self.turn:
            try:
                self.figure, self.message = self.redraw()
                role = "status"
                look = ""
                self.drawn = self.figure.html
            except ValueError as error:
                self.message = f"<b>✗ Not possible:</b> {escape(str(error))}."
                role = "alert"
                look = " style='opacity:0.25'"
            said = f"<div role='{role}' style='line-height:1.6'>{self.message}</div>"
            self.picture.value = f"{said}<div{look}>{self.drawn}</div>"

    def __repr__(self) -> str:
        return self.invitation

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and its picture for readers of the notebook who have no kernel."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        return {**bundle, "text/html": self.drawn, "text/plain": self.invitation}


class RunSliders(SliderBox):
    """Choices of a training run as controls, and its estimate in a picture.

    `names` are the controls to offer, of `explorer.CONTROLS` or of `own`: a lesson's own widgets by choice of
    a `TrainingRun`. `.run` and `.gpu` are what has been chosen, `.breakdown` is the estimate at the peak.
    """

    invitation = "Sliders for a training run: run this cell to use them."
    names: tuple[str, ...] = (
        "model", "gpu", "micro_batch", "accumulation_steps", "seq_len", "optimizer", "precision", "attention",
        "recompute",
    )  # fmt: skip

    def __init__(self, run: TrainingRun, card: str, own: Mapping[str, Any] | None = None) -> None:
        self.first = run
        self.card = gpu(card)
        own = own or {}
        super().__init__({name: own.get(name) or self._widget(CONTROL[name]) for name in self.names})

    def _widget(self, control: Control) -> ipywidgets.Widget:
        make = slider if control.kind == "steps" else dropdown
        return make(control.label, control.options, self.begins_with(control.name))

    def begins_with(self, name: str) -> Any:
        value = self.card if name == "gpu" else getattr(self.first, name)
        return getattr(value, "name", value)

    @property
    def chosen(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    @property
    def gpu(self) -> Gpu:
        return gpu(self.chosen.get("gpu", self.card.name))

    @property
    def run(self) -> TrainingRun:
        """The run that has been chosen. Raises ValueError, saying why, if choices contradict each other."""
        chosen = {name: value for name, value in self.chosen.items() if name != "gpu"}
        if chosen.get("model") == self.first.model.name:
            chosen["model"] = self.first.model  # a configuration of the learner's own is known by no name
        if chosen.get("lora_rank") == 0:
            chosen["lora_targets"] = ()
        return self.first.replace(**chosen)

    @property
    def breakdown(self) -> MemoryBreakdown:
        return estimate(self.run)

    def redraw(self) -> tuple[Picture, str]:
        run = self.run
        card = self.gpu
        breakdown = self.breakdown
        figure = peak_stack(run, breakdown, card, fit_words(breakdown.total, card))
        return figure, f"{verdict_html(run, breakdown.total, card)}{code_html(run)}"


def verdict_html(run: TrainingRun, total: int, card: Gpu) -> str:
    mark = "✓" if total <= card.room else "✗"
    return f"<b>{mark} {escape(verdict_words(run, total, card))}</b>"


def code_html(run: TrainingRun) -> str:
    """The line of code that makes a run, to be selected with one click."""
    return f"<br><code style='user-select:all'>{escape(run.code())}</code>"


def dropdown(description: str, options: Iterable[Any], value: Any) -> ipywidgets.Dropdown:
    """A list of values, or of (label, value), to choose from; a `value` that is not among them is added."""
    choices = _with(value, options, str)
    return ipywidgets.Dropdown(
        options=choices, value=value, description=description, style=STYLE, layout=LAYOUT
    )


def slider(
    description: str,
    options: Iterable[Any],
    value: float,
    spelled: Callable[[float], str] = number,
    continuous: bool = True,
) -> ipywidgets.SelectionSlider:
    """A slider over numbers, or (label, number), and the one to begin with, in rising order.

    One that is not `continuous` speaks when it is let go: for pictures of matplotlib, which take longer.
    """
    choices = sorted(_with(value, options, spelled), key=lambda choice: choice[1])
    return ipywidgets.SelectionSlider(
        options=choices,
        value=value,
        description=description,
        continuous_update=continuous,
        style=STYLE,
        layout=LAYOUT,
    )


def _with(value: Any, options: Iterable[Any], spelled: Callable[[Any], str]) -> list[tuple[str, Any]]:
    choices = [option if isinstance(option, tuple) else (spelled(option), option) for option in options]
    if value not in (chosen for _, chosen in choices):
        choices.append((spelled(value), value))
    return choices
