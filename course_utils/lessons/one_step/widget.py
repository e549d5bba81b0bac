"""A slider over the number of layers: what one layer more adds to the peak of a step."""

from dataclasses import replace

import ipywidgets

from course_utils import estimate
from course_utils.figures import stack_svg
from course_utils.figures.axes import segments_of, words
from course_utils.figures.canvas import Figure
from course_utils.figures.runs import NOT_COUNTED
from course_utils.gpus import gpu
from course_utils.interactive.widgets import LAYOUT, STYLE, Explorable, dropdown
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

MOST = 96


def layer_slider(run: TrainingRun, *, card: str = "RTX5090-32GB") -> "LayerSlider":
    """Controls for a run's layers, recomputation and attention, and its estimated peak with one layer more.

    ValueError for an unknown card, and for a model with more layers than the slider has.
    """
    if run.model.layers > MOST:
        raise ValueError(f"{run.model.name} has {run.model.layers} layers: the slider ends at {MOST}")
    return LayerSlider(run, card)


class LayerSlider(Explorable):
    """What `layer_slider` shows; `.runs` are the chosen run and the one that is a layer deeper."""

    invitation = "A slider over layers: run this cell to use it."

    def __init__(self, run: TrainingRun, card: str) -> None:
        self.first, self.card = run, gpu(card)
        look = {"style": STYLE, "layout": LAYOUT}
        super().__init__(
            {
                "layers": ipywidgets.IntSlider(run.model.layers, 1, MOST, description="layers L", **look),
                "recompute": dropdown("recompute", ("none", "full"), run.recompute),
                "attention": dropdown("attention", ("flash", "eager"), run.attention),
            }
        )

    @property
    def runs(self) -> tuple[TrainingRun, TrainingRun]:
        """With L layers, and with L + 1."""
        layers, recompute, attention = (control.value for control in self.controls.values())
        chosen = self.first.replace(recompute=recompute, attention=attention)
        shallow, deep = (replace(self.first.model, layers=L) for L in (layers, layers + 1))
        return chosen.replace(model=shallow), chosen.replace(model=deep)

    @property
    def more(self) -> int:
        """Bytes by which the peak rises with one layer more."""
        before, after = (estimate(run).total for run in self.runs)
        return after - before

    def redraw(self) -> tuple[Figure, str]:
        """Both runs as bars, and what the layer adds, in words."""
        rows = {f"L = {run.model.layers}": estimate(run) for run in self.runs}
        title = f"One layer more adds {format_bytes(self.more, 'GB', 2)} to the estimated peak"
        totals = "; ".join(f"{name}: {format_bytes(row.total, 'GB', 2)}" for name, row in rows.items())
        capacity = f"{self.card.name}: {format_bytes(self.card.memory, 'GB', 1)}"
        alt = f"{title}. Stacked bars. {totals}. The line marks {capacity}."
        bars = {name: segments_of(row) for name, row in rows.items()}
        note = f"estimated from formulas · {NOT_COUNTED}"
        svg = stack_svg(bars, title, self.card.memory, capacity, note, "GB", None, alt)
        before, after = rows.values()
        parts = {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]}
        return Figure(svg, alt), "One layer more: " + ", ".join(
            f"{words(kind)} {format_bytes(size)}" for kind, size in parts.items()
        )
