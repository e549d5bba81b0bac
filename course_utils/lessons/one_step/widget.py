"""The Explorer with a slider over layers: what one layer more adds to the peak of a step."""

from dataclasses import replace

import ipywidgets

from course_utils import estimate
from course_utils.figures import stack
from course_utils.figures.axes import words
from course_utils.figures.canvas import Figure
from course_utils.figures.runs import NOT_COUNTED
from course_utils.interactive.widgets import LAYOUT, STYLE, Explorer
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

MOST = 96


class LayerSlider(Explorer):
    """Controls for layers (ValueError beyond the slider), recomputation and attention; the peak with a layer more."""

    invitation = "A slider over layers: run this cell to use it."
    names = ("layers", "recompute", "attention")

    def __init__(self, run: TrainingRun) -> None:
        layers = run.model.layers
        if layers > MOST:
            raise ValueError(f"{run.model.name} has {layers} layers: the slider ends at {MOST}")
        slider = ipywidgets.IntSlider(layers, 1, MOST, description="layers L", style=STYLE, layout=LAYOUT)
        super().__init__(run, "RTX5090-32GB", {"layers": slider})

    @property
    def runs(self) -> tuple[TrainingRun, TrainingRun]:
        """With L layers, and with L + 1."""
        chosen = self.chosen
        layers = chosen.pop("layers")
        shallow, deep = (replace(self.first.model, layers=L) for L in (layers, layers + 1))
        return self.first.replace(**chosen, model=shallow), self.first.replace(**chosen, model=deep)

    @property
    def more(self) -> int:
        """Bytes by which the peak rises with one layer more."""
        before, after = (estimate(run).total for run in self.runs)
        return after - before

    def redraw(self) -> tuple[Figure, str]:
        """Both runs as bars, and what the layer adds, by kind."""
        rows = {f"L = {run.model.layers}": estimate(run) for run in self.runs}
        title = f"One layer more adds {format_bytes(self.more, 'GB', 2)} to the estimated peak"
        totals = "; ".join(f"{name}: {format_bytes(row.total, 'GB', 2)}" for name, row in rows.items())
        capacity = f"{self.card.name}: {format_bytes(self.card.memory, 'GB', 1)}"
        alt = f"{title}. Stacked bars. {totals}. The line marks {capacity}."
        note = f"estimated from formulas · {NOT_COUNTED}"
        before, after = rows.values()
        parts = (f"{words(kind)} {format_bytes(after[kind] - before[kind])}"
                 for kind in after if after[kind] > before[kind])  # fmt: skip
        figure = stack(rows, title, capacity=self.card.memory, capacity_label=capacity, provenance=note, alt=alt)
        return figure, f"One layer more: {', '.join(parts)}"


layer_slider = LayerSlider
