"""How a check speaks: an invitation, a misconception named, or one friendly line; never the expected value."""

import functools
import inspect
import math
import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NoReturn

from ..measurement import Measurement, Timeline
from ..units import UNITS
from .progress import mark_passed

Kinds = type | tuple[type, ...]


class _OneLine(Exception):
    """An exception that a notebook shows as one line, without a traceback: its message is for the learner."""

    opening = ""

    def _render_traceback_(self) -> list[str]:
        return [f"{self.opening} {' '.join(str(self).split())}"]


class NotSolved(_OneLine):
    """Raised where a learner's answer is still to be written: an invitation, not an error."""

    opening = "Not solved yet."


class CheckFailed(_OneLine):
    """Raised by a check whose answer is off: says what is off, and never what it should have been."""

    opening = "Not quite."


def exercise(number: str, praise: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function that returns when an answer is right into a check that then says so, and remembers it.

    The check has the number as its attribute `exercise`.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def checked(*answers: Any) -> None:
            check(*answers)
            print(f"✓ {number} {praise}")
            try:
                mark_passed(number)
            except ValueError as problem:  # the answer is right all the same
                print(f"  (This is not remembered. {problem})")

        vars(checked)["exercise"] = number
        return checked

    return decorate


def fail(message: str) -> NoReturn:
    """Raise CheckFailed with `message`."""
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
    """What the learner's function `answer` returns for these arguments.

    NotSolved and CheckFailed pass through. Raises CheckFailed, in one line, when `answer` is no function, does not
    take these arguments, raises, changes a list, dictionary or tensor that it was given (those named in `may_change`,
    or at these positions, excepted), or returns something that is no `returns` (any number, unless said otherwise),
    or, unless `finite` is False, a number that is not finite. `hints` maps a part of an error's text to the message
    that replaces the error.
    """
    opening = f"Called with {_spelled(arguments, named)}, your function returned"
    return of_kind(_returned(answer, arguments, named, may_change, hints), returns, opening, finite=finite)


def by_name(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """The values under these names, to be unpacked into `call`."""
    return dict(zip(names, values, strict=True))


def call_or_none(answer: Any, *arguments: Any, returns: Kinds = Real, **named: Any) -> Any:
    """Like `call`, where None is an answer too, and no forgotten return."""
    value = _returned(answer, arguments, named, ())
    if value is None:
        return None
    kinds = (*returns, type(None)) if isinstance(returns, tuple) else (returns, type(None))
    return of_kind(value, kinds, f"Called with {_spelled(arguments, named)}, your function returned")


def call_for_effect(answer: Any, *arguments: Any, **named: Any) -> None:
    """Call the learner's function for what it does: what it returns, or that it returns nothing, plays no part."""
    _returned(answer, arguments, named, may_change=None)


def _returned(
    answer: Any,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    may_change: Collection[int | str] | None,
    hints: Mapping[str, str] = {},
) -> Any:
    """What the function returns, whatever it is; CheckFailed, in one line, where it cannot be called, raises, or
    changes what it may not. With None for `may_change` it may change everything.
    """
    expect(callable(answer), f"Hand over the function itself, not {_article(answer)}: its name, without parentheses.")
    _expect_signature(answer, arguments, named)
    given = {} if may_change is None else {**dict(enumerate(arguments)), **named}
    guarded = {key: (value, _copied(value)) for key, value in given.items() if key not in (may_change or ())}
    try:
        value = answer(*arguments, **named)
    except (NotSolved, CheckFailed):
        raise
    except Exception as error:  # whatever a learner's code raises is turned into words
        problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raised = f"Called with {_spelled(arguments, named)}, your function raised {problem}"
        raise CheckFailed(next((hint for part, hint in hints.items() if part in problem), raised)) from error
    for key, (now, before) in guarded.items():
        name = repr(key) if isinstance(key, str) else f"argument {key + 1}"
        expect(_same(now, before), f"Your function changes {name}, which its caller still needs: work on a copy.")
    return value


def _copied(value: Any) -> Any:
    """A copy to compare with later, of containers and tensors; anything else is taken as it is."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value.detach().clone() if _is_tensor(value) else value


def _same(now: Any, before: Any) -> bool:
    """True if nothing has changed since `before` was copied from `now`; NaN equals NaN."""
    if isinstance(now, Mapping):
        return list(now) == list(before) and all(_same(now[key], before[key]) for key in before)
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_same, now, before))
    if _is_tensor(now) and _is_tensor(before):
        alike = now.shape == before.shape and now.dtype == before.dtype
        return alike and bool(((now == before) | ((now != now) & (before != before))).all())
    return now is before


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # estimates and their checks need no torch
    return torch is not None and isinstance(value, torch.Tensor)


def of_kind(value: Any, kinds: Kinds, opening: str = "Your answer is", *, finite: bool = True) -> Any:
    """`value` as one of `kinds` (True is no number). Raises CheckFailed saying what it is instead.

    What says the same in another form is taken: 3.0 for 3, a number or a list of NumPy's or PyTorch's, a list for a
    tuple. Numbers have to be `finite`, unless that is False.
    """
    expect(value is not None, f"{opening} nothing: does every path end in `return`?")
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    value = in_other_form(value, kinds)
    right = isinstance(value, kinds) and (bool in kinds or object in kinds or not isinstance(value, bool))
    names = " or ".join(_kind_name(kind) for kind in kinds)
    expect(right, f"{opening} {_article(value)}, where {names} is asked for.")
    is_finite = not finite or not isinstance(value, float) or math.isfinite(value)
    expect(is_finite, f"{opening} a number that is not finite.")
    return value


def entries(got: Mapping[str, Any], names: Sequence[str], kinds: Kinds = Real) -> dict[str, Any]:
    """The values of a learner's dictionary under these names. Raises CheckFailed for a name that it lacks, and for a
    value that is none of `kinds`.
    """
    missing = [name for name in names if name not in got]
    expect(not missing, f"Your dictionary has no {' and no '.join(map(repr, missing))}.")
    return {name: of_kind(got[name], kinds, f"{name} is") for name in names}


def alike(got: Iterable[float], wanted: Iterable[float], tolerance: float = 1e-6) -> bool:
    """True if two lists of numbers are equal in pairs, to a part of `tolerance`; next to 0, to 10⁻¹²."""
    pairs = zip(got, wanted, strict=True)
    return all(math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12) for one, other in pairs)


Mistakes = Mapping[str, Callable[..., Any]]
"""The one shape of all tables of mistakes: what is said to a learner, and the function that is wrong in this way."""


def recognized(
    got: Sequence[Any],
    cases: Iterable[Sequence[Any]],
    right: Callable[..., Any],
    mistakes: Mistakes,
    otherwise: str = "",
    same: Callable[[Sequence[Any], Sequence[Any]], bool] = alike,
) -> bool:
    """True if `got`, a learner's answers for `cases` (each the arguments of one call), are those of `right`.

    Raises CheckFailed with the message of the first mistake that gives these answers; if none does, with `otherwise`,
    unless that is empty. `same` compares two lists of answers: as numbers, to a part in a million, unless given.
    """
    cases = list(cases)
    if same(got, [right(*case) for case in cases]):
        return True
    for message, mistaken in mistakes.items():
        expect(not same(got, [mistaken(*case) for case in cases]), message)
    expect(not otherwise, otherwise)
    return False


def in_other_form(value: Any, kinds: tuple[type, ...]) -> Any:
    """`value` as one of `kinds` where it only looks different: out of an array or a tensor, whole, or as a tuple."""
    if hasattr(value, "tolist") and (not isinstance(value, kinds) or type(value).__module__ == "numpy"):
        value = value.tolist()  # without axes it is a number
    if isinstance(value, list) and tuple in kinds and list not in kinds:
        return tuple(value)
    if int in kinds and isinstance(value, Real) and not isinstance(value, kinds) and math.isfinite(value):
        return math.floor(value) if value == math.floor(value) else value
    return value


def unit_slip(got: Any, wanted: Any) -> str | None:
    """The slip of units that turns `wanted` into `got`, in words, or None when their ratio betrays none."""
    if not (isinstance(got, Real) and isinstance(wanted, Real)) or not wanted or not got:
        return None
    ratio = float(got) / float(wanted)
    return next((words for factor, words in _SLIPS if math.isclose(ratio, factor, rel_tol=2e-3)), None)


def _unit_slips() -> list[tuple[float, str]]:
    slips: list[tuple[float, str]] = [(8.0, "8 times too much: bits where bytes were asked?")]
    slips += [(1 / 8, "an eighth of it: bytes are eight bits; did you divide once too often?")]
    for decimal, binary in (("KB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB")):
        factor = UNITS[binary] / UNITS[decimal]
        slips += [(factor, f"off by {factor:.3f}: {decimal} where {binary} was asked?")]
        slips += [(1 / factor, f"off by {1 / factor:.3f}: {binary} where {decimal} was asked?")]
    for name, size in UNITS.items():
        if size > 1:
            slips += [(size, f"bytes where {name} was asked?"), (1 / size, f"{name} where bytes were asked?")]
    return slips


_SLIPS = _unit_slips()


def seeded_sizes(count: int, low: int = 2, high: int = 100_000, seed: int = 0) -> list[int]:
    """`count` different sizes from `low` to `high`, the same for everybody. ValueError if there are too few."""
    return random.Random(seed).sample(range(low, high + 1), count)


def divisors(number: int) -> list[int]:
    """Every whole number that divides `number`, smallest first."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def handed(measurement: Measurement) -> Measurement:
    """Return a copy to hand to a learner's function, whose changes to its lists do not reach `measurement`."""
    timeline = Timeline(list(measurement.timeline.changes), list(measurement.timeline.marks))
    return replace(measurement, moments=dict(measurement.moments), timeline=timeline)


def _expect_signature(answer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(answer)
    except ValueError:  # some built-in functions have none to look at; calling them will tell
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        wanted = ", ".join([*("a value" for _ in arguments), *named])
        raise CheckFailed(f"Your function should take ({wanted}): keep its first line as it was given.") from error


def _spelled(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    texts = [_short(value) for value in arguments] + [f"{name}={_short(value)}" for name, value in named.items()]
    return ", ".join(texts) or "no arguments"


def _short(value: Any) -> str:
    number = isinstance(value, int) and not isinstance(value, bool)
    text = f"{value:_}" if number else " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _article(value: Any) -> str:
    return {"NoneType": "nothing", "function": "a function"}.get(type(value).__name__, _kind_name(type(value)))


def _kind_name(kind: type) -> str:
    names = {Real: "a number", int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    names |= {list: "a list", dict: "a dictionary", tuple: "a tuple", Mapping: "a dictionary", type(None): "None"}
    return names.get(kind, f"a {kind.__name__}")
