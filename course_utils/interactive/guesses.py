"""A learner's guess: stored before the answer is shown, then drawn next to it.

Until then the answer, and with it all that its cell shows, is folded: see `FOLD`. A guess can be replaced
until its answer has been shown.
"""

import html
import math
import re
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..units import UNITS, format_bytes, percent
from .display import running_shell, show
from .learner_folder import remember, remembered

FOLD = (
    "<style>:is(.jp-OutputArea,.output_wrapper>.output,.cell_output,#output-body):has(details.course-answer:not([open]))"
    ">:not(:has(details.course-answer)){display:none}</style>"
)
"""While an answer is folded, the other outputs of its cell are not shown.

That holds in JupyterLab, in both of nbconvert's pages, on the website, and in Colab (by its outputs'
structure). A viewer that drops style sheets folds the answer alone.
"""

NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:[.,][0-9]+)?|[.,][0-9]+)\s*")
THOUSANDS_OR_DECIMALS = re.compile(r"[1-9][0-9_]*,[0-9]{3}")


@dataclass(frozen=True)
class Guess:
    """A learner's guess before looking: `value` in `unit`, locked on `day` (ISO date)."""

    value: float
    unit: str
    day: str

    def __str__(self) -> str:
        return f"{self.value:,.12g} {self.unit}".strip()

    @property
    def amount(self) -> float:
        """The value in bytes where `unit` is one of memory, else unchanged."""
        return self.value * UNITS.get(self.unit, 1)


def stored_guesses() -> dict[str, Guess]:
    """Every guess locked on this machine, by key. ValueError for a file that may not be read."""
    return _read()[0]


def shown_answers() -> set[str]:
    """Keys of the stored guesses whose answer has been shown. Raises ValueError like `stored_guesses`."""
    return _read()[1]


def _read() -> tuple[dict[str, Guess], set[str]]:
    """The last guess for each key before its answer was shown, and the keys whose answer was."""
    guesses: dict[str, Guess] = {}
    shown = set[str]()
    for event in remembered()[0]:
        if "guess" in event and event["guess"] not in shown:
            guesses[event["guess"]] = Guess(event["value"], event["unit"], event["day"])
        if "answered" in event:
            shown.add(event["answered"])
        if "forgotten" in event:
            guesses.pop(event["forgotten"], None)
            shown.discard(event["forgotten"])
    return guesses, shown


def lock_guess(key: str, value: float, unit: str) -> Guess:
    """Store a guess and return it; one whose answer has been shown stays.

    Raises ValueError, with what to do, if it cannot be kept.
    """
    guess = stored_guesses().get(key)
    is_new = guess is None or (guess.value, guess.unit) != (value, unit)
    if is_new and key not in shown_answers():
        remember(guess=key, value=value, unit=unit)
    return stored_guesses()[key]


def mark_shown(key: str) -> None:
    """Remember that an answer was shown: from then on the guess stored under `key`, if any, stays."""
    if key in stored_guesses() and key not in shown_answers():
        with suppress(ValueError):  # what cannot be remembered is shown all the same
            remember(answered=key)


def parse_guess(text: str, unit: str) -> float:
    """The number in "41", "41.5", "41,5" or, with the unit asked for, "41 GB". ValueError says what is taken.

    "1,000" is refused, being a thousand to some and one to others: a locked guess should not rest on a
    reading.
    """
    match = NUMBER.fullmatch(text.strip().removesuffix(unit))
    if match and THOUSANDS_OR_DECIMALS.fullmatch(match[1]):
        thousands = match[1].replace(",", "").replace("_", "")
        decimals = match[1].replace(",", ".")
        raise ValueError(f"{match[1]} can mean two numbers: write {thousands} or {float(decimals)}.")
    guess = math.inf
    if match:
        guess = float(match[1].replace("_", "").replace(",", "."))
    if guess == math.inf:  # no number, or one of hundreds of digits
        raise ValueError(f"Write your guess in {unit}, only the number." if unit else "Write only a number.")
    return guess


def predict(key: str, unit: str = "GB", guess: float | None = None, *, asks: str = "") -> None:
    """Show a field for a guess, in `unit` ("" for a mere number), and store it under `key` once it is locked.

    `guess` locks one without the field. `asks` says what is guessed where a cell has several fields.
    """
    if guess is not None:
        lock_guess(key, guess, unit)
    show(Prediction(key, unit, asks))


@dataclass(frozen=True, repr=False)
class Prediction:
    """A question for a guess: draws itself as a field with a button, or as the guess that has been locked."""

    key: str
    unit: str
    asks: str = ""

    def __repr__(self) -> str:
        guess = stored_guesses().get(self.key)
        about = f" ({self.asks})" if self.asks else ""
        if guess:
            return f"Your guess{about} is locked: {guess}"
        asked = f"Your guess{about}, {_in(self.unit)}" if self.unit else f"Your guess{about}"
        return f"{asked}: run this cell and type it in."

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """A field where there is a kernel, and the same text everywhere, which a page may make a field of."""
        guess = stored_guesses().get(self.key)
        if guess and self.key in shown_answers():
            return {"text/html": _locked(guess), "text/plain": repr(self)}
        asked = asked_on_a_page(self.key, self.unit, repr(self))
        text = f"{guess.value:.12g}" if guess else ""
        written = _locked(guess) if guess else asked
        return {**self.form(text)._repr_mimebundle_(), "text/html": written, "text/plain": repr(self)}

    def form(self, text: str = "") -> Any:
        """A field that begins with this text, and says what is stored; only in a notebook."""
        from .guess_form import GuessForm

        return GuessForm(self, text)

    @property
    def placeholder(self) -> str:
        return f"your guess {_in(self.unit)}".strip()

    def store(self, text: str) -> None:
        """Store the number in this text. Raises ValueError for no number, and if it cannot be stored."""
        guess = lock_guess(self.key, parse_guess(text, self.unit), self.unit)
        folded = _SHOWN.pop(self.key, ())
        for handle, thing in folded:
            handle.update(replace(thing, guess=guess))
        if folded:
            mark_shown(self.key)

    def about(self, text: str) -> "About":
        """Say what is stored while this text is in the field."""
        try:
            guess = stored_guesses().get(self.key)
            is_final = self.key in shown_answers()
        except ValueError as unreadable:
            return About("Lock it in", problem=str(unreadable))
        if guess is None:
            return About("Lock it in")
        if _says(text, guess):
            return About("✓ Locked", _locked(guess))
        if is_final:
            return About(
                "✓ Locked", _locked(guess), f"Your guess of {guess} stays: its answer has been shown."
            )
        return About("Lock this instead", _locked(guess))


class About(NamedTuple):
    """Words next to a field for a guess: its button, the locked guess as HTML, and what is wrong."""

    button: str
    locked: str = ""
    problem: str = ""


def asked_on_a_page(key: str, unit: str, asked: str) -> str:
    """Words that ask for a guess, which the website's script makes a field of."""
    return f"<p class='course-ask' {_data(key, unit)}>{html.escape(asked)}</p>"


def _data(key: str, unit: str, actual: float | None = None) -> str:
    """The attribute by which the website's script finds a guess."""
    data: dict[str, Any] = {"guess": key, "unit": unit}
    if actual is not None:
        data["actual"] = actual
    return " ".join(f"data-{name}='{html.escape(str(value))}'" for name, value in data.items())


def _says(text: str, guess: Guess) -> bool:
    """True if a text says the number that is locked, or nothing."""
    try:
        return not text.strip() or parse_guess(text, guess.unit) == guess.value
    except ValueError:
        return False


def _in(unit: str) -> str:
    """ "in GB", but "of two", and nothing for a plain number."""
    return unit if not unit or unit.startswith("of ") else f"in {unit}"


def _locked(guess: Guess) -> str:
    return f"<div role='status'>Your guess is locked: <b>{html.escape(str(guess))}</b>. Now look.</div>"


def reveal(key: str, actual: float, unit: str | None = None) -> None:
    """Show the guess stored under `key` next to `actual`, which is in bytes, or in `unit`.

    A guess's own unit counts; without a guess and a unit, it is GB. Without a guess the answer is folded,
    with all else that the cell shows, until the learner makes one or opens it.
    """
    guess = stored_guesses().get(key)
    if guess:
        mark_shown(key)
        unit = guess.unit
    elif unit is None:
        unit = "GB"
    _show_folded(Revelation(actual, guess, unit, key))


def waits_for(key: str) -> None:
    """Fold what this cell shows until a guess is stored under `key`, or the learner asks to see it."""
    if key in stored_guesses():
        mark_shown(key)
    elif running_shell():
        _show_folded(Waiting(key))


_SHOWN: dict[str, list[Any]] = defaultdict(list)
"""By key, what is folded in this notebook, each with what redraws it once its guess is locked."""


def _show_folded(thing: "Revelation | Waiting") -> None:
    if thing.guess or not running_shell():
        show(thing)
        return
    handle = sys.modules["IPython"].display.display(thing, display_id=True)
    _SHOWN[thing.key].append((handle, thing))


def _folded(inner: str, data: str) -> str:
    shown = f"<summary style='cursor:pointer'>Show me (or lock your guess first)</summary>{inner}"
    blank = " \n"  # what JupyterLab shows of a closed output is the first line of its first one
    return f"{blank}<details class='course-answer' {data}>{shown}</details>{FOLD}"


@dataclass(frozen=True, repr=False)
class Waiting:
    """The markup that folds the rest of a cell while there is no `guess`."""

    key: str
    guess: Guess | None = None

    def __repr__(self) -> str:
        return ""

    def _repr_html_(self) -> str:
        return "" if self.guess else _folded("", _data(self.key, ""))


@dataclass(frozen=True, repr=False)
class Revelation:
    """A guess next to the answer. `actual` is in bytes if the unit is one of memory; `guess` may be None."""

    actual: float
    guess: Guess | None
    unit: str = "GB"
    key: str = ""

    def __repr__(self) -> str:
        said = self._spell(self.actual)
        if self.guess is None:
            return f"It is {said}."
        return f"You said {self.guess}, it is {said}: {self._distance(self.guess.amount)}"

    def _distance(self, amount: float) -> str:
        if not (amount and self.actual):
            return "right." if amount == self.actual else "one of the two is zero."
        ratio = amount / self.actual
        if abs(ratio - 1) <= 0.05:
            return "spot on, within 5 %."
        word = "too much" if ratio > 1 else "too little"
        factor = max(ratio, 1 / ratio)
        if factor < 1.5:
            return f"{percent(abs(ratio - 1))} {word}."
        return f"{factor:,.1f} times {word}."

    def _spell(self, amount: float) -> str:
        if self.unit in UNITS:
            return format_bytes(round(amount), self.unit, 0 if self.unit == "B" else 1)
        return f"{amount:,.4g} {self.unit}".strip()

    def _repr_html_(self) -> str:
        verdict = f"<p>{html.escape(repr(self))}</p>"
        if self.guess is None:
            return _folded(verdict, _data(self.key, self.unit, self.actual))
        most = max(self.guess.amount, self.actual, 1e-300)
        bars = ""
        for name, amount, color in (
            ("guess", self.guess.amount, "#8f8f8f"),
            ("answer", self.actual, "#56b4e9"),
        ):
            bars += (
                f"<div style='display:flex;gap:.6em;white-space:nowrap'><span style='width:4em'>{name}</span>"
                f"<span style='background:{color};width:{amount / most * 60:.2f}%'>&nbsp;</span>"
                f"<span>{html.escape(self._spell(amount))}</span></div>"
            )
        return verdict + bars
