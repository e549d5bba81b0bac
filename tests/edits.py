"""Wrong answers by one slip: a right answer's text, with one place changed."""

import inspect
import sys
from typing import Any

from checking import written


def edited(answer: Any, old: str, new: str) -> Any:
    """The function or class `answer` of a test file, with `new` in place of `old` in its text."""
    source = inspect.getsource(answer)
    assert old in source, f"{answer.__name__} has no {old!r}"
    return written(
        source.replace(old, new).splitlines(), answer.__name__, vars(sys.modules[answer.__module__])
    )
