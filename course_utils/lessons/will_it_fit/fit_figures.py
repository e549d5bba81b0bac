"""Lesson 19: results of `fit` as a figure and a table, the catalog of cards, the grade of a prediction."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ...figures.style import NUMBERED, SMALL, WIDTH, CourseFigure, bare, look, sheet
from ...gpus import GPUS
from ...interactive.display import show
from ...interactive.guesses import Guess, mark_shown, stored_guesses
from ...palette import COLOURS, OVER, signed, stop
from ...planning.fit import Candidate, Plan
from ...planning.twin import SAFETY
from ...units import GB, Table, format_bytes, percent, plus_minus

PATH = COLOURS["parameters"]
# The largest relative error of each grade, the grade, and words for it; 5 % is `SAFETY`.
GRADES = (
    (0.01, "A", "You could quote this."),
    (0.05, "B", "Within the reserve of the rule."),
    (0.15, "C", "Near, but a smaller error can fill a card. Which moment of the step did you take?"),
    (0.5, "D", "One of the large parts is missing, or counted twice."),
)


def plan_figure(plan: Plan, title: str) -> CourseFigure:
    """All configurations that `fit` estimated: seconds lost against peak bytes, the card's line, the path."""
    limit = plan.card.room / SAFETY
    fitting = [one for one in plan.tried if one.fits(plan.card)]
    others = [one for one in plan.tried if not one.fits(plan.card)]
    name = f"{plan.card.name}\nless {percent(SAFETY - 1)}\nin reserve:\n{format_bytes(round(limit), 'GB', 1)}"
    note = (
        f"{len(plan.tried)} estimated, {plan.covered:,} decided; times at data-sheet rates, without overlap"
    )
    with look():
        figure = sheet(title, 344, note)
        ax = figure.place(64, 28, WIDTH - 64 - 118, 270)
        # Those that fit come after those that do not, and so on top of them.
        for label, candidates, style, color in (
            ("too large", others, "o", "#BDBDBD"),
            ("fits", fitting, "o", COLOURS["activations"]),
            ("the path, in the order of the table", plan.path, "-", PATH),
        ):
            places = [one.lost for one in candidates], [one.peak / GB for one in candidates]
            ax.plot(*places, style, color=color, markersize=6, linewidth=2, label=label)
        ax.axhline(limit / GB, color=OVER, linewidth=1.8)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        ax.annotate(name, (1, limit / GB), (6, 0), color=OVER, fontweight="bold", **place)
        ax.set(xscale="log", yscale="log", xlabel="seconds lost per step", ylabel="estimated peak in GB")
        ax.margins(0.06, 0.08)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(NUMBERED)
        ax.minorticks_off()
        ax.grid(axis="y")
        bare(ax, "bottom")
        _number(ax, plan.path)
        ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1.03))
    first, last = (format_bytes(plan.path[at].peak, "GB", 1) for at in (0, -1))
    told = f"{len(fitting)} of {len(plan.tried)} configurations fit; the path goes from {first} to {last}"
    figure.alt = f"{stop(title)} Peak against seconds lost: {told}."
    return figure


def _number(ax: Axes, path: Sequence[Candidate]) -> None:
    """The numbers of the path's steps; those at places that are close share a mark."""
    ax.autoscale_view()
    points = ax.transData.transform([(step.lost, step.peak / GB) for step in path])
    marks: dict[int, list[str]] = {}  # by the first step of each
    for index, point in enumerate(points):
        near = (first for first in marks if abs(points[first] - point).max() < 15)
        marks.setdefault(next(near, index), []).append(str(index))
    style = {"color": "white", "fontweight": "bold", "fontsize": SMALL, "ha": "center", "va": "center"}
    for first, numbers in marks.items():
        shape = "circle,pad=0.25" if len(numbers) == 1 else "round,pad=0.3,rounding_size=0.8"
        ring = {"boxstyle": shape, "facecolor": PATH, "edgecolor": "white"}
        ax.text(path[first].lost, path[first].peak / GB, ", ".join(numbers), bbox=ring, **style)


def path_table(plan: Plan) -> Table:
    """The expert's path: each choice, how far it moves the peak, what is lost, and whether the run fits."""
    rows = [("choice", "peak", "change", "lost per step", "fits")]
    for index, step in enumerate(plan.path):
        before = plan.path[max(0, index - 1)]
        name = f"{index} · {step.what}"
        peak = format_bytes(step.peak, "GB", 1)
        by = signed(step.peak - before.peak, "GB", 1) if index else ""
        fits = "yes" if step.fits(plan.card) else "no"
        rows.append((name, peak, by, f"{step.lost:.2f} s", fits))
    return Table(rows)


def catalog() -> Table:
    """The cards: memory by the driver and as a program gets it, bandwidth and rate, and the source."""
    rows = [("card", "driver lists", "program gets", "GB/s", "16-bit TFLOP/s", "seen in")]
    for card in GPUS.values():
        assert card.rates is not None  # the catalog has the rates of each; a test says so
        told = format_bytes(card.usable, "GiB", 2) if card.usable else "unknown"
        seen = card.usable_source.removeprefix("https://github.com/") or "–"
        memory = f"{card.rates.memory / 1e9:,.0f}"
        rate = f"{card.rates.tensor / 1e12:,.0f}"
        rows.append((card.name, format_bytes(card.memory, "GiB", 2), told, memory, rate, seen))
    return Table(rows)


class Graded(NamedTuple):
    """A locked prediction and its error, `guess` minus `actual` bytes; these are `word`: "simulated"."""

    actual: int
    guess: Guess | None
    word: str

    def __repr__(self) -> str:
        if self.guess is None:
            return "You locked no guess, so there is nothing to grade."
        error = self.guess.amount / self.actual - 1
        found = ((grade, words) for most, grade, words in GRADES if abs(error) <= most)
        grade, words = next(found, ("E", "Go through the step moment by moment, and take the fullest one."))
        return f"Grade {grade}: prediction − {self.word} = {plus_minus(100 * error, 1)} %. {words}"

    def _repr_html_(self) -> str:
        return f"<p style='font-size:115%'>{escape(repr(self))}</p>"


def grade(key: str, actual: int, word: str) -> None:
    """Show the grade of the prediction locked under `key` against `actual` bytes, a measurement's `word`."""
    mark_shown(key)
    show(Graded(actual, stored_guesses().get(key), word))
