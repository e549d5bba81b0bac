"""The two layouts of a figure that reflows: one for a page, one for a phone or a small window."""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

WIDE, NARROW = 720, 400  # pixels
Given = ParamSpec("Given")
asked_width: ContextVar[int] = ContextVar("asked_width", default=0)  # 0 outside of `reflowing` functions


def reflowing(draw: Callable[Given, Any]) -> Callable[Given, Any]:
    """A function that draws a `Figure` as wide as its `Canvas` says, made to draw it in both layouts."""

    @wraps(draw)
    def drawn(*given: Given.args, **named: Given.kwargs) -> Any:
        def at(width: int) -> Any:
            asked_width.set(width)
            return draw(*given, **named)

        if asked_width.get():  # part of another figure
            return draw(*given, **named)
        wide, narrow = (copy_context().run(at, width) for width in (WIDE, NARROW))
        return replace(wide, narrow=narrow.svg)

    return drawn
