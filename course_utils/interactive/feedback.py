"""Feedback of checks: an invitation, a misconception named, or a friendly line; never the expected value."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import permutations
from numbers import Real
from types import FunctionType, NoneType, UnionType
from typing import Any, NoReturn, get_args

from ..measurement import Measurement
from ..units import UNITS, marked
from .display import show
from .progress import Passed, mark_passed

Kinds = type | UnionType | tuple[type, ...]


HIDE_ERROR = (
    "<style>.jp-OutputArea-child:has(.course-told)+.jp-OutputArea-child,"
    ".output_area:has(.course-told)+.output_area,#output-body>:has(.course-told)+*{display:none!important}</style>"
)
"""Hides the error after a card, which says the same: in JupyterLab, both of nbconvert's pages, and Colab."""


class _OneLine(Exception):
    """An exception that a notebook shows as a card without a traceback: its message is for the learner.

    It stays an error: the cell fails, and "Run All" stops. Where a page drops style sheets, a line follows
    the card.
    """

    opening = ""
    color = ""

    def _render_traceback_(self) -> list[str]:
        return [f"{self.opening} {self.message}"]

    @property
    def message(self) -> str:
        return " ".join(str(self).split())

    @property
    def card(self) -> str:
        """The message as HTML, as `Passed` draws itself."""
        look = f"border-left:6px solid {self.color};padding:4px 14px;line-height:1.6;overflow-wrap:break-word"
        said = f"<b>{self.opening}</b> {marked(self.message)}"
        return f"<div class='course-told' role='status' style='{look}'>{said}</div>{HIDE_ERROR}"


class NotSolved(_OneLine):
    """Raised where a learner's answer is still to be written: an invitation, not an error."""

    opening = "Not solved yet."
    color = "#8f8f8f"


class CheckFailed(_OneLine):
    """Raised by a check whose answer is off: says what is off, and never what it should have been."""

    opening = "Not quite."
    color = "#d55e00"


def exercise(
    number: str, praise: str, first: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a check, which praises and remembers its `exercise`, of a function that returns for right answers.

    A check that takes more than five seconds says `first` what it does and about how long that takes.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def checked(*answers: Any) -> None:
            if first:
                print(first, flush=True)
            with torch_defaults():
                _run(check, answers)
            problem = ""
            try:
                mark_passed(number)
            except ValueError as reason:  # the answer is right all the same
                problem = f"This is not remembered. {reason}"
            show(Passed(number, praise, problem))

        vars(checked)["exercise"] = number
        return checked

    return decorate


def _run(check: Callable[..., None], answers: Sequence[Any]) -> None:
    """Run a check. What it raises holds nothing, and CheckFailed takes the place of the program's end."""
    try:
        check(*answers)
    except (Exception, SystemExit) as error:
        # the website's pages, which check nothing, have no such part
        from ..measuring.release import let_go

        let_go(error)  # else it holds tensors, and the modes and hooks that torch 2.11's checkpoint leaves on
        if isinstance(error, SystemExit):
            raise CheckFailed(EXITS) from error
        raise


EXITS = "Your answer calls `sys.exit()`, which ends the whole program. Use `return` to leave a function."


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Begin and end with torch's default settings, and say which ones had to be restored."""
    _restore("Before this check, torch's settings were changed")
    try:
        yield
    finally:
        _restore("Your answer left torch's settings changed")


def _restore(opening: str) -> None:
    if "torch" not in sys.modules:
        return
    from .torch_settings import restore_defaults

    if restored := restore_defaults():
        print(f"{opening}: {', '.join(restored)}. The check restored torch's defaults.", flush=True)


def fail(message: str) -> NoReturn:
    raise CheckFailed(message)


def expect(condition: object, message: str) -> None:
    """Raise CheckFailed with `message` unless `condition` holds."""
    if not condition:
        fail(message)


def call(
    answer: Any,
    *arguments: Any,
    returns: Kinds = Real,
    finite: bool = True,
    may_change: Collection[int | str] = (),
    hints: Mapping[str, str] = {},
    **named: Any,
) -> Any:
    """The result of the function `answer` for these arguments; its NotSolved and CheckFailed pass through.

    Raises CheckFailed when `answer` is no function, does not take these arguments, raises (`hints` maps a
    part of the error's text to what is said instead), changes a list, dictionary or tensor that is not in
    `may_change` by its name or position, or returns something that is no `returns`, or a number that is not
    `finite`. Where None is an answer, too, and no forgotten return, `returns` is a union with None.
    """
    kind = _kind_name(type(answer))
    instead = f"Hand over the function or class itself, not {kind}. Write its name without parentheses."
    expect(callable(answer), instead)
    _expect_signature(answer, arguments, named)
    given = {**dict(enumerate(arguments)), **named}
    guarded = {key: (value, _copied(value)) for key, value in given.items() if key not in may_change}
    try:
        value = answer(*arguments, **named)
    except (NotSolved, CheckFailed):
        raise
    except SystemExit as error:
        raise CheckFailed(EXITS) from error
    except Exception as error:  # whatever a learner's code raises is turned into words
        problem = f"{type(error).__name__}: {error}".removesuffix(": ")
        raised = f"{_opening(answer, arguments, named, 'raised')} {problem}"
        fitting = [hint for part, hint in hints.items() if part in problem]
        raise CheckFailed(fitting[0] if fitting else raised) from error
    for key, (now, before) in guarded.items():
        name = repr(key) if isinstance(key, str) else f"argument {key + 1}"
        changed = f"Your function changes {name}, but its caller still needs it. Work on a copy."
        expect(_same(now, before), changed)
    return of_kind(value, returns, _opening(answer, arguments, named), finite=finite)


def call_for_effect(answer: Any, *arguments: Any, **named: Any) -> None:
    """Call the learner's function for what it does: what it returns, even nothing, plays no part."""
    everything = (*range(len(arguments)), *named)
    call(answer, *arguments, returns=(object, NoneType), finite=False, may_change=everything, **named)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value.detach().clone() if hasattr(value, "detach") else value  # a tensor


def _same(now: Any, before: Any) -> bool:
    """True if nothing has changed since `before` was copied from `now`; NaN equals NaN."""
    if isinstance(now, Mapping):
        return list(now) == list(before) and all(_same(now[key], before[key]) for key in before)
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_same, now, before))
    if hasattr(now, "detach"):
        alike = now.shape == before.shape and now.dtype == before.dtype
        # NaN is the value that differs from itself
        return alike and bool(((now == before) | ((now != now) & (before != before))).all())
    return now is before


def of_kind(value: Any, kinds: Kinds, opening: str = "Your answer is", *, finite: bool = True) -> Any:
    """`value` as one of `kinds` (True is no number), also from another form.

    Raises CheckFailed saying what it is instead, and for a number that is not finite unless `finite` is
    False.
    """
    allowed: tuple[Any, ...] = kinds if isinstance(kinds, tuple) else (get_args(kinds) or (kinds,))
    expect(value is not None or NoneType in allowed, f"{opening} nothing: does every path end in `return`?")
    given = value
    value = in_other_form(value, allowed)
    may_be_bool = bool in allowed or object in allowed  # else True would count as the number 1
    right = isinstance(value, allowed) and (may_be_bool or not isinstance(value, bool))
    names = " or ".join(map(_kind_name, allowed))
    kind = type(given if isinstance(value, list) else value)
    expect(right, f"{opening} {_kind_name(kind)}, but the exercise asks for {names}.")
    endless = finite and isinstance(value, float) and not math.isfinite(value)
    expect(not endless, f"{opening} a number that is not finite.")
    return value


def entries(got: Mapping[str, Any], names: Sequence[str], kinds: Kinds = Real) -> dict[str, Any]:
    """A learner's dictionary with these names alone. CheckFailed for a missing name or another kind."""
    missing = [name for name in names if name not in got]
    expect(not missing, f"Your dictionary has no {' and no '.join(map(repr, missing))}.")
    return {name: of_kind(got[name], kinds, f"{name} is") for name in names}


def alike(got: Iterable[float], wanted: Iterable[float], tolerance: float = 1e-6) -> bool:
    """True if two lists of numbers are equal in pairs, to a part of `tolerance`; next to 0, to 10⁻¹²."""
    pairs = zip(got, wanted, strict=True)
    return all(math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12) for one, other in pairs)


Mistakes = Mapping[str, Callable[..., Any]]
"""The one shape of all tables of mistakes: what is said to a learner, and the function that is wrong so."""


def recognized(
    got: Sequence[Any],
    cases: Iterable[Sequence[Any]],
    right: Callable[..., Any],
    mistakes: Mistakes,
    otherwise: str = "",
    same: Callable[[Sequence[Any], Sequence[Any]], bool] = alike,
) -> bool:
    """True if `got`, a learner's answers for `cases` (each the arguments of one call), are those of `right`.

    Raises CheckFailed with the message of the first mistake that gives the `same` answers; if none does, with
    `otherwise`, unless that is empty.
    """
    cases = list(cases)
    if same(got, [right(*case) for case in cases]):
        return True
    for message, mistaken in mistakes.items():
        expect(not same(got, [mistaken(*case) for case in cases]), message)
    expect(not otherwise, otherwise)
    return False


def in_other_form(value: Any, kinds: tuple[type, ...]) -> Any:
    """`value` as one of `kinds` if only its form differs: out of an array or tensor, whole, or as a tuple."""
    if hasattr(value, "tolist") and (not isinstance(value, kinds) or type(value).__module__ == "numpy"):
        value = value.tolist()  # without axes it is a number
    if isinstance(value, list) and tuple in kinds and list not in kinds:
        return tuple(value)
    could_be_whole = int in kinds and isinstance(value, Real) and not isinstance(value, kinds)
    if could_be_whole and math.isfinite(value) and value == math.floor(value):
        return math.floor(value)
    return value


def unit_slip(got: Any, wanted: Any) -> str | None:
    """The slip of units that turns `wanted` into `got`, in words, or None when their ratio betrays none."""
    if not (isinstance(got, Real) and isinstance(wanted, Real)) or not wanted or not got:
        return None
    ratio = float(got) / float(wanted)
    for factor, words in _unit_slips():
        if math.isclose(ratio, factor, rel_tol=2e-3):
            return words
    return None


def _unit_slips() -> Iterator[tuple[float, str]]:
    yield 8.0, "8 times too large. Did you return bits instead of bytes?"
    yield 1 / 8, "8 times too small. A byte has eight bits: did you divide by 8 once too often?"
    for pair in (("KB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB")):
        for got, asked in permutations(pair):
            factor = UNITS[asked] / UNITS[got]
            yield factor, f"off by {factor:.3f}: {got} where {asked} was asked?"
    for name, size in UNITS.items():
        if size > 1:
            yield size, f"bytes where {name} was asked?"
            yield 1 / size, f"{name} where bytes were asked?"


def divisors(number: int) -> list[int]:
    """Every whole number that divides `number`, smallest first."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _expect_signature(answer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    with suppress(ValueError):  # some built-in functions have no signature to look at
        try:
            inspect.signature(answer).bind(*arguments, **named)
        except TypeError as error:
            wanted = ", ".join([*("a value" for _ in arguments), *named])
            told = f"Your function should take ({wanted}): keep its first line unchanged."
            raise CheckFailed(told) from error


def _opening(
    answer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any], verb: str = "returned"
) -> str:
    texts = [_short(value) for value in arguments]
    texts += [f"{name}={_short(value)}" for name, value in named.items()]
    who = f"{answer.__name__}()" if inspect.ismethod(answer) else "function"
    return f"Called with {', '.join(texts) or 'no arguments'}, your {who} {verb}"


def _short(value: Any) -> str:
    if hasattr(value, "named_modules"):
        return f"a {type(value).__name__}"
    if isinstance(value, (list, tuple)) and value and all(hasattr(one, "detach") for one in value):
        return f"a {_kind_name(type(value))[2:]} of {len(value)} tensors"
    if hasattr(value, "detach") and value.numel() > 8:
        return f"a tensor of {tuple(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Measurement):
        return "a measurement"
    if isinstance(value, (functools.partial, FunctionType)):
        return "a function"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = f"{value:_}" if is_number else " ".join(repr(value).split())
    if " at 0x" in text or hasattr(value, "param_groups"):  # Python's own repr, or an optimizer's
        text = _kind_name(type(value))
    return text if len(text) <= 60 else text[:57] + "..."


KIND_NAMES: dict[Any, str] = {
    Real: "a number",
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    list: "a list",
    dict: "a dictionary",
    tuple: "a tuple",
    Mapping: "a dictionary",
    NoneType: "None",
}


def _kind_name(kind: type) -> str:
    if kind in KIND_NAMES:
        return KIND_NAMES[kind]
    name = "array" if kind.__name__ == "ndarray" else kind.__name__
    article = "an" if name[0] in "aAEIOU" else "a"
    return f"{article} {name}"
