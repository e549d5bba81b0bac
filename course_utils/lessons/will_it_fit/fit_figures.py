"""Lesson 19: results of `fit` as a figure and a table, the catalog of cards, the grade of a prediction."""

from collections.abc import Callable, Sequence
from html import escape
from math import log
from typing import NamedTuple

from ...figures import signed
from ...figures.axes import OVER, legend, stop
from ...figures.canvas import MARGIN, QUIET, RULE, Canvas, Figure, ink_on, number, reflowing, text_width, wrap
from ...gpus import GPUS
from ...interactive.guesses import Guess, mark_shown, stored_guesses
from ...interactive.ledgers import show
from ...planning.fit import Plan
from ...planning.twin import SAFETY
from ...units import GB, Table, format_bytes, percent

TOO_LARGE, FITS, PATH = "#BDBDBD", "#009E73", "#0072B2"
LEGEND = {TOO_LARGE: "too large", FITS: "fits", PATH: "the path, in the order of the table"}
HEIGHT = 300.0  # of the plot, in pixels
# The largest relative error of each grade, the grade, and words for it; 5 % is `SAFETY`.
GRADES = (
    (0.01, "A", "You could quote this."),
    (0.05, "B", "Within the reserve of the rule."),
    (0.15, "C", "Near, but a smaller error can fill a card. Which moment of the step did you take?"),
    (0.5, "D", "One of the large parts is missing, or counted twice."),
)


@reflowing
def plan_figure(plan: Plan, title: str) -> Figure:
    """All configurations that `fit` estimated: seconds lost against peak bytes, the card's line, the path."""
    canvas = Canvas()
    limit = plan.card.room / SAFETY
    everything = (*plan.tried, *plan.path)

    def swatch(x: float, y: float, _: float, color: str) -> None:
        _dot(canvas, x + 6, y + 6, 5, color)

    top = 30 + legend(canvas, LEGEND.items(), canvas.title(title) + 4, swatch)
    bottom = top + HEIGHT
    left = 50.0 if canvas.narrow else 72.0
    right = canvas.width - MARGIN - 16.0
    x = _logarithmic([one.lost for one in everything], 1.1, left, right)
    y = _logarithmic([limit, *(one.peak for one in everything)], 1.15, bottom, top)
    _axes(canvas, x, y, (left, right, top, bottom))
    # Those that fit come last, and so on top of those that do not.
    for candidate in sorted(plan.tried, key=lambda one: one.fits(plan.card)):
        color = FITS if candidate.fits(plan.card) else TOO_LARGE
        _dot(canvas, x(candidate.lost), y(candidate.peak), 3.5, color)
    name = f"{plan.card.name} less {percent(SAFETY - 1)} in reserve: {format_bytes(round(limit), 'GB', 1)}"
    canvas.line(left, y(limit), right, y(limit), OVER, stroke_width=1.8, data_limit=round(limit))
    for index, line in enumerate(reversed(wrap(name.replace("%", " %"), 12, right - left, bold=True))):
        canvas.halo_text(left + 4, y(limit) - 7 - 15 * index, line, 12, fill=OVER, font_weight="bold")
    _path(canvas, [(x(step.lost), y(step.peak)) for step in plan.path])
    counts = f"{len(plan.tried)} estimated, {plan.covered:,} decided"
    note = f"{counts}; times at data-sheet rates, without overlap"
    steps = "; ".join(
        f"{index} {step.what}: {format_bytes(step.peak, 'GB', 1)}, {step.lost:.2f} seconds lost"
        for index, step in enumerate(plan.path)
    )
    fitting = f"{sum(one.fits(plan.card) for one in plan.tried)} of them fit {plan.card.name}"
    alt = f"{stop(title)} {len(plan.tried)} dots, {fitting}. The path: {steps}."
    return canvas.figure(bottom, title, alt, note)


Axis = Callable[[float], float]
"""The pixel of a value."""


def _logarithmic(values: Sequence[float], room: float, start: float, end: float) -> Axis:
    """An axis from `start` to `end` with all `values`, and a factor of `room` at both ends."""
    low = log(min(values) / room)
    high = log(max(values) * room)
    return lambda value: start + (end - start) * (log(value) - low) / (high - low)


def _axes(canvas: Canvas, x: Axis, y: Axis, box: tuple[float, float, float, float]) -> None:
    """Grid, ticks and names of both axes; `box` is left, right, top and bottom."""
    left, right, top, bottom = box
    written = left  # up to here, ticks of the horizontal axis have their numbers
    for tick in (digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)):
        across = x(tick)
        down = y(tick * GB)
        if top - 1 <= down <= bottom + 1:
            canvas.line(left, down, right, down)
            canvas.text(left - 8, down + 4, number(tick), 12, QUIET, text_anchor="end")
        if left - 1 <= across <= right + 1:
            canvas.line(across, bottom, across, bottom + 5, RULE)
            half = text_width(number(tick), 12) / 2
            if across - half >= written:
                canvas.text(across, bottom + 20, number(tick), 12, QUIET, text_anchor="middle")
                written = across + half + 4
    canvas.line(left, bottom, right, bottom, RULE)
    canvas.text(MARGIN, top - 14, "estimated peak in GB", 12, QUIET)
    canvas.text((left + right) / 2, bottom + 42, "seconds lost per step", 12, QUIET, text_anchor="middle")


def _dot(canvas: Canvas, x: float, y: float, radius: float, color: str) -> None:
    canvas.rect(x - radius, y - radius, 2 * radius, 2 * radius, color, rx=radius)


def _path(canvas: Canvas, places: Sequence[tuple[float, float]]) -> None:
    """A line through the places, and their numbers; places that are close share a mark."""
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    canvas.path(line, fill="none", stroke=PATH, stroke_width=2.2)
    numbers: dict[tuple[int, int], list[str]] = {}
    for index, (x, y) in enumerate(places):
        near = (mark for mark in numbers if abs(mark[0] - x) < 17 and abs(mark[1] - y) < 17)
        mark = next(near, (round(x), round(y)))
        numbers.setdefault(mark, []).append(str(index))
    for (x, y), names in numbers.items():
        words = ", ".join(names)
        half = max(9.0, text_width(words, 11) / 2 + 5)
        canvas.rect(x - half, y - 9, 2 * half, 18, PATH, rx=9, stroke="#FFFFFF", stroke_width=1.5)
        canvas.text(x, y + 4, words, 11, ink_on(PATH), text_anchor="middle", font_weight="bold")


def path_table(plan: Plan) -> Table:
    """The expert's path: each choice, how far it moves the peak, what is lost, and whether the run fits."""
    rows = [("choice", "peak", "change", "lost per step", "fits")]
    before = plan.path[0]
    for index, step in enumerate(plan.path):
        name = f"{index} · {step.what}"
        peak = format_bytes(step.peak, "GB", 1)
        by = signed(step.peak - before.peak, "GB", 1) if index else ""
        fits = "yes" if step.fits(plan.card) else "no"
        rows.append((name, peak, by, f"{step.lost:.2f} s", fits))
        before = step
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
        sign = "+" if error > 0 else "−"
        off = f"{sign}{percent(abs(error), 1)}"
        return f"Grade {grade}: prediction − {self.word} = {off}. {words}"

    def _repr_html_(self) -> str:
        return f"<p style='font-size:115%'>{escape(repr(self))}</p>"


def grade(key: str, actual: int, word: str) -> None:
    """Show the grade of the prediction locked under `key` against `actual` bytes, a measurement's `word`."""
    mark_shown(key)
    show(Graded(actual, stored_guesses().get(key), word))
