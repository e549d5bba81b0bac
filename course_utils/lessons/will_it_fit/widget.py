"""Six broken runs to diagnose by hand: choose a case, look at its timeline and its message, name a cause."""

from html import escape

from ...figures import timeline
from ...interactive.html_bars import Picture
from ...interactive.widgets import SliderBox, dropdown
from .detective import CAUSES, ORDER, WORDS, Case, case


class Detective(SliderBox):
    """The six cases, their evidence, and a list of causes to choose from; `.solved` are those got right."""

    invitation = "Six runs that ran out of memory: run this cell to diagnose them."

    def __init__(self) -> None:
        self.solved: set[int] = set()
        self.shown = 1
        numbers = [(f"case {number}", number) for number in range(1, len(ORDER) + 1)]
        causes = [("choose when you are sure", ""), *((words, name) for name, words in CAUSES.items())]
        cause = dropdown("cause", causes, "")
        cause.layout.width = "640px"
        super().__init__({"case": dropdown("case", numbers, 1), "cause": cause})

    def redraw(self) -> tuple[Picture, str]:
        """The timeline of the case up to its failure, and the evidence for and against the chosen cause."""
        number = self.controls["case"].value
        if number != self.shown:  # a new case begins without a diagnosis
            self.shown = number
            self.controls["cause"].value = ""
        found = case(number)
        cause = self.controls["cause"].value
        verdict = ""
        if cause == ORDER[number - 1][0]:
            self.solved |= {number}
            verdict = f"<b>✓ Yes: {escape(CAUSES[cause])}.</b> "
        elif cause:
            verdict = f"<b>✗ No.</b> {escape(against(cause, found))} "
        score = f"{verdict}Solved: {len(self.solved)} of {len(ORDER)}."
        title = f"Case {number}: out of memory in {found.evidence.when}"
        unit = "GB" if found.measured.peak > 10**9 else "MB"
        figure = timeline(found.measured, title, unit=unit)
        return figure, f"{escape(found.told)}<br><code>{escape(found.message)}</code><br>{score}"


detective = Detective


def against(cause: str, found: Case) -> str:
    """The evidence against a cause that is wrong for this case: where to look, not the answer."""
    seen = found.evidence
    return WORDS[cause]["against"].format(when=seen.when, free=100 * seen.free_share)
