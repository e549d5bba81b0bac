"""A slider over layers: what one more layer adds to a step's estimated peak. Only notebooks import this."""

from dataclasses import replace

import ipywidgets

from ... import TrainingRun, estimate, format_bytes
from ...interactive.html_bars import Picture, stacked_bars
from ...interactive.widgets import LAYOUT, STYLE, RunSliders
from ...palette import words

MOST = 96
CARD = "RTX5090-32GB"


class LayerSlider(RunSliders):
    """Controls for layers, recomputation and attention, and the peak of a step with one more layer.

    In the next cell, `.more` is what the layer adds. ValueError for a run with more layers than the slider
    has.
    """

    invitation = "A slider over layers: run this cell to use it."
    names = ("layers", "recompute", "attention")

    def __init__(self, run: TrainingRun) -> None:
        layers = run.model.layers
        if layers > MOST:
            raise ValueError(f"{run.model.name} has {layers} layers: the slider ends at {MOST}")
        slider = ipywidgets.IntSlider(layers, 1, MOST, description="layers L", style=STYLE, layout=LAYOUT)
        super().__init__(run, CARD, {"layers": slider})

    @property
    def runs(self) -> tuple[TrainingRun, TrainingRun]:
        """The chosen run, and the same run with one more layer."""
        chosen = self.chosen
        layers = chosen.pop("layers")
        shallow = replace(self.first.model, layers=layers)
        deep = replace(self.first.model, layers=layers + 1)
        return self.first.replace(**chosen, model=shallow), self.first.replace(**chosen, model=deep)

    @property
    def more(self) -> int:
        """Bytes by which the estimated peak rises with one more layer."""
        before, after = map(estimate, self.runs)
        return after.total - before.total

    def redraw(self) -> tuple[Picture, str]:
        """Both runs as bars, and what the layer adds, by kind."""
        shallow, deep = self.runs
        before = estimate(shallow)
        after = estimate(deep)
        added = format_bytes(after.total - before.total, "GB", 2)
        figure = stacked_bars(
            {f"L = {shallow.model.layers}": before, f"L = {deep.model.layers}": after},
            f"One more layer adds {added} to the estimated peak",
            limit=self.card.room,
            limit_name=f"{self.card.name}: a program gets {format_bytes(self.card.room, 'GB', 1)}",
            note="estimated",
        )
        grown = {words(kind): after[kind] - before[kind] for kind in after if after[kind] > before[kind]}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in grown.items())
        return figure, f"One more layer: {parts}"


layer_slider = LayerSlider
