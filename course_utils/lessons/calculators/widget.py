"""A calculator to correct by hand: tick its wrong terms, and watch its answer move. For notebooks only."""

from collections.abc import Mapping
from html import escape

import ipywidgets

from ...interactive.html_bars import Picture
from ...interactive.widgets import SliderBox, dropdown
from ...palette import signed_percent
from ...run import TrainingRun
from .calculators import CALCULATORS, TERMS, Truth, add_back, calculator, gaps
from .figures import corrected


class Mender(SliderBox):
    """Controls for a calculator, a model and the closed list of terms, and the answer that they make.

    `cases` maps a model's name to its run and its step's peak. In the next cell, `.terms` is what has been
    ticked. Raises ValueError for an unknown calculator.
    """

    invitation = "Correct a calculator, term by term: run this cell to tick the terms."

    def __init__(self, cases: Mapping[str, tuple[TrainingRun, Truth]], name: str = "ZeRO") -> None:
        self.cases = cases
        calculators = dropdown("calculator", [one.name for one in CALCULATORS], calculator(name).name)
        boxes = {
            term.name: ipywidgets.Checkbox(False, description=term.name, tooltip=term.why, indent=False)
            for term in TERMS
        }
        models = dropdown("model", cases, next(iter(cases)))
        super().__init__({"calculator": calculators, "model": models, **boxes})

    @property
    def terms(self) -> list[str]:
        """The names of the terms that are ticked."""
        return [term.name for term in TERMS if self.controls[term.name].value]

    def redraw(self) -> tuple[Picture, str]:
        """The answer, corrected step by step, and its error now."""
        name = self.controls["calculator"].value
        model = self.controls["model"].value
        one = calculator(name)
        run, real = self.cases[model]
        said = one.total(run)
        now = add_back(name, self.terms, run, real)
        before, after = (signed_percent(size - real.peak, real.peak) for size in (said, now))
        if now == real.peak:
            after = "exact"
        title = f"{name}, {model}: {before}, with {len(self.terms)} of {len(TERMS)} terms corrected {after}"
        rank = ""
        found = gaps(name, run, real)
        if len(self.terms) == 1:
            larger = sum(abs(size) > abs(found[self.terms[0]]) for size in found.values())
            rank = f"By size, this term is number {larger + 1} of the eight."
        message = f"Made for: {escape(one.made_for)}. Off by {before}; now <b>{after}</b>. {rank}"
        return corrected(name, self.terms, run, real, title, real.provenance), message


mender = Mender
