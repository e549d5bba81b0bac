"""Lesson 14: what `fit` found as a figure and as a table, the catalog of cards, and the grade of a prediction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import log

from course_utils.figures import signed
from course_utils.figures.axes import OVER, stop
from course_utils.figures.canvas import GRID, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, number, text_width
from course_utils.gpus import GPUS, Gpu
from course_utils.interactive.guesses import Guess, stored_guesses
from course_utils.interactive.ledgers import show
from course_utils.planning.fit import Candidate, Plan
from course_utils.planning.twin import SAFETY
from course_utils.units import GB, aligned, format_bytes, html_table, percent

TOO_LARGE, FITS, PATH = "#BDBDBD", "#009E73", "#0072B2"

HEIGHT = 300.0
"""Pixels of the plot."""


# ------------------------------------------------------------------------------------------------------- the figure


def plan_figure(plan: Plan, title: str) -> Figure:
    """Every configuration that `fit` estimated: seconds lost against bytes at the peak, the card's line, the path.

    Both axes are logarithmic. The dots of the path carry the numbers of `path_table`'s rows.
    """
    canvas, limit = Canvas(), plan.card.room / SAFETY
    top = _legend(canvas, canvas.title(title) + 16) + 36
    x, y = _scales(plan, top)
    _axes(canvas, plan, x, y, top)
    for candidate in sorted(plan.tried, key=lambda one: one.fits(plan.card)):
        _dot(canvas, x(candidate.lost), y(candidate.peak), 3.5, FITS if candidate.fits(plan.card) else TOO_LARGE)
    name = f"{plan.card.name} less {percent(SAFETY - 1)} in reserve: {format_bytes(round(limit), 'GB', 1)}"
    canvas.line(LEFT, y(limit), RIGHT, y(limit), OVER, stroke_width=1.8, data_limit=round(limit))
    canvas.halo_text(LEFT + 4, y(limit) - 7, name.replace("%", " %"), 12, fill=OVER, font_weight="bold")
    _path(canvas, plan, x, y)
    note = f"{len(plan.tried)} estimated, {plan.covered:,} decided; times at the data sheet's rates, nothing overlapped"
    end = canvas.note(note, top + HEIGHT + 62)
    return Figure(canvas.svg(end, title, _alt(plan, title)), _alt(plan, title))


LEFT, RIGHT = 72.0, WIDTH - MARGIN - 16.0

Scale = Callable[[float], float]


def _scales(plan: Plan, top: float) -> tuple[Scale, Scale]:
    lost = [one.lost for one in (*plan.tried, *plan.path)]
    peaks = [one.peak for one in (*plan.tried, *plan.path)] + [plan.card.room / SAFETY]
    left, right = log(min(lost) / 1.1), log(max(lost) * 1.1)
    low, high = log(min(peaks) / 1.15), log(max(peaks) * 1.15)
    return (
        lambda seconds: LEFT + (RIGHT - LEFT) * (log(seconds) - left) / (right - left),
        lambda size: top + HEIGHT * (high - log(size)) / (high - low),
    )


def _axes(canvas: Canvas, plan: Plan, x: Scale, y: Scale, top: float) -> None:
    bottom = top + HEIGHT
    for tick in ROUND:
        if top - 1 <= y(tick * GB) <= bottom + 1:
            canvas.line(LEFT, y(tick * GB), RIGHT, y(tick * GB), GRID)
            canvas.text(LEFT - 8, y(tick * GB) + 4, number(tick), 12, QUIET, text_anchor="end")
        if LEFT - 1 <= x(tick) <= RIGHT + 1:
            canvas.line(x(tick), bottom, x(tick), bottom + 5, RULE)
            canvas.text(x(tick), bottom + 20, number(tick), 12, QUIET, text_anchor="middle")
    canvas.line(LEFT, bottom, RIGHT, bottom, RULE)
    canvas.text(MARGIN, top - 14, "estimated peak in GB", 12, QUIET)
    canvas.text((LEFT + RIGHT) / 2, bottom + 42, "seconds that a step loses", 12, QUIET, text_anchor="middle")


ROUND = tuple(digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5))


def _dot(canvas: Canvas, x: float, y: float, radius: float, color: str) -> None:
    canvas.rect(x - radius, y - radius, 2 * radius, 2 * radius, color, rx=radius)


def _legend(canvas: Canvas, y: float) -> float:
    x = float(MARGIN)
    for color, words in ((TOO_LARGE, "too large"), (FITS, "fits"), (PATH, "the path, in the order of the table")):
        _dot(canvas, x + 6, y - 4, 5, color)
        canvas.text(x + 17, y, words, 12)
        x += 38 + text_width(words, 12)
    return y


def _path(canvas: Canvas, plan: Plan, x: Scale, y: Scale) -> None:
    places = [(x(step.lost), y(step.peak)) for step in plan.path]
    line = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
    canvas.path(f"M{line}", fill="none", stroke=PATH, stroke_width=2.2)
    numbers: dict[tuple[int, int], list[str]] = {}
    for index, (a, b) in enumerate(places):
        near = next((key for key in numbers if abs(key[0] - a) < 17 and abs(key[1] - b) < 17), (round(a), round(b)))
        numbers.setdefault(near, []).append(str(index))
    for (a, b), names in numbers.items():
        words = ", ".join(names)
        half = max(9.0, text_width(words, 11) / 2 + 5)
        canvas.rect(a - half, b - 9, 2 * half, 18, PATH, rx=9, stroke="#FFFFFF", stroke_width=1.5)
        canvas.text(a, b + 4, words, 11, "#FFFFFF", text_anchor="middle", font_weight="bold")


def _alt(plan: Plan, title: str) -> str:
    fitting = sum(one.fits(plan.card) for one in plan.tried)
    steps = "; ".join(
        f"{index} {step.what}: {format_bytes(step.peak, 'GB', 1)}, {step.lost:.2f} seconds lost"
        for index, step in enumerate(plan.path)
    )
    return f"{stop(title)} {len(plan.tried)} dots, {fitting} of them fit {plan.card.name}. The path: {steps}."


# ------------------------------------------------------------------------------------------------------- the tables


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of text under a header; draws itself. The first column is words, the others end at the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __repr__(self) -> str:
        return aligned([self.header, *self.rows])

    def _repr_html_(self) -> str:
        return html_table([self.header, *self.rows])


def path_table(plan: Plan) -> Table:
    """The expert's path: each choice, by how much the peak moves, what is lost, and whether the run fits then."""
    rows, before = [], plan.path[0]
    for index, step in enumerate(plan.path):
        saved = before.peak - step.peak
        rows.append(
            (
                f"{index} · {step.what}",
                format_bytes(step.peak, "GB", 1),
                "" if index == 0 else signed(-saved, "GB", 1),
                f"{step.lost:.2f} s",
                "yes" if Candidate(step.run, step.peak, step.lost).fits(plan.card) else "no",
            )
        )
        before = step
    return Table(("choice", "peak", "by", "lost a step", "fits"), rows)


def catalog(names: Sequence[str] = tuple(GPUS)) -> Table:
    """The cards: what the driver lists, what a program was told, bandwidth and rate, and who saw it."""
    header = ("card", "driver lists", "program gets", "GB/s", "16-bit TFLOP/s", "seen in")
    return Table(header, [_card(GPUS[name]) for name in names])


def _card(card: Gpu) -> tuple[str, ...]:
    assert card.rates is not None  # the catalog has the rates of each; a test says so
    told = format_bytes(card.usable, "GiB", 2) if card.usable else "nobody has told"
    seen = card.usable_source.removeprefix("https://github.com/") or "–"
    rates = (f"{card.rates.memory / 1e9:,.0f}", f"{card.rates.tensor / 1e12:,.0f}")
    return (card.name, format_bytes(card.memory, "GiB", 2), told, *rates, seen)


# ---------------------------------------------------------------------------------------------------- the prediction

GRADES = (
    (0.01, "A", "You could quote this."),
    (0.05, "B", "Within the reserve: your plan would have held."),
    (0.15, "C", "Near, but a card can run out on less. Which moment of the step did you take?"),
    (0.5, "D", "One of the large parts is missing, or counted twice."),
)
"""The largest relative error of each grade, the grade, and words for it. 5 % is `fitting.SAFETY`."""


@dataclass(frozen=True, repr=False)
class Graded:
    """A locked prediction, judged by its error: `guess` minus `actual` bytes, as everywhere in the course.

    `word` says what the actual bytes are, a measurement's own word: "measured", "simulated" or "recorded".
    """

    actual: int
    guess: Guess | None
    word: str = "measured"

    @property
    def grade(self) -> str:
        """ "A" to "E", or "–" where nothing was predicted."""
        return self._verdict()[0]

    def _verdict(self) -> tuple[str, str]:
        if self.guess is None:
            return "–", "Nothing was locked, so there is nothing to grade."
        error = abs(self.guess.amount / self.actual - 1)
        found = ((grade, words) for most, grade, words in GRADES if error <= most)
        return next(found, ("E", "Go through the step moment by moment, and take the fullest."))

    def __repr__(self) -> str:
        grade, words = self._verdict()
        if self.guess is None:
            return words
        error = self.guess.amount - self.actual
        off = f"{'+' if error > 0 else '−'}{percent(abs(error) / self.actual, 1)}"
        return f"Grade {grade}: prediction − {self.word} = {off}. {words}"

    def _repr_html_(self) -> str:
        return f"<p style='font-size:115%'>{escape(repr(self))}</p>"


def grade(key: str, actual: int, word: str = "measured") -> None:
    """Show the grade of the prediction locked under `key`, against `actual` bytes, which are `word`. ValueError for no
    bytes at all.
    """
    if actual <= 0:
        raise ValueError(f"{actual} bytes were {word}: there is nothing to grade against")
    show(Graded(actual, stored_guesses().get(key), word))
