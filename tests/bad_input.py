"""What tests of bad input draw from: odd values, JSON with faults in it, bytes that arrive damaged.

The sample is the same each time; with COURSE_FULL=1 it is far larger, and another each time.
"""

import copy
import math
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FULL = os.environ.get("COURSE_FULL") == "1"

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    4.0,
    math.nan,
    math.inf,
    10**7,
    10**30,
    10**400,
    "",
    "fp32",
    "none",
    "\ud800",
    "x" * 300,
    b"x",
    ("q",),
    [],
    [1],
    {"a": 1},
    set(),
    1j,
    object,
)
ODD_JSON = tuple(value for value in ODD if isinstance(value, str | int | float | list | dict | None))


def many(sample: int, full: int) -> Any:
    """So many examples: the same each time, or with COURSE_FULL others."""
    return settings(
        max_examples=full if FULL else sample,
        derandomize=not FULL,
        deadline=None,
        database=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
    )


def names(message: str, *words: Any) -> bool:
    """Whether a message has one of these in it: a choice's name, or its value as a reader would write it."""
    return any(word and word in message for word in words)


def spelled(value: Any) -> tuple[str, ...]:
    """A value as a message may write it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}", str(value)
    if isinstance(value, tuple | list) and value:
        return repr(value), repr(value[0])
    return (value if isinstance(value, str) else repr(value), repr(value))


def broken(draw: Any, content: Any, most: int = 2) -> tuple[Any, set[str]]:
    """A copy of JSON content in which values are odd or missing; and the keys where it was changed."""
    content = copy.deepcopy(content)
    touched: set[str] = set()
    for _ in range(draw(st.integers(1, most))):
        place = content
        last = ""
        for _ in range(draw(st.integers(0, 4))):
            inner = [key for key, value in _items(place) if isinstance(value, dict | list) and value]
            if not inner:
                break
            last = draw(st.sampled_from(inner))
            place = place[last]
        where = draw(st.sampled_from([key for key, _ in _items(place)])) if place else None
        if where is None:
            continue
        touched.add(str(where if isinstance(where, str) else last))
        if draw(st.integers(0, 3)) == 0:
            del place[where]
        else:
            # or the next change would be of the list
            place[where] = copy.deepcopy(draw(st.sampled_from(ODD_JSON)))
            touched.update(spelled(place[where]))
    return content, touched


def _items(place: Any) -> list[tuple[Any, Any]]:
    return list(place.items()) if isinstance(place, dict) else list(enumerate(place))


def bytes_of(draw: Any, text: str) -> bytes:
    """The text as it may arrive: whole, cut off, or with other bytes in it."""
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    how = draw(st.sampled_from(["whole"] * 6 + ["cut", "flipped"]))
    if how == "cut":
        return bytes(raw[: draw(st.integers(0, len(raw)))])
    if how == "flipped" and raw:
        for _ in range(draw(st.integers(1, 3))):
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)
