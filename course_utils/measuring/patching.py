"""Changes of torch during a measurement: one measurement at a time, and functions for its own thread."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

ONE_AT_A_TIME = threading.RLock()
"""Held while a step is followed, and a second thread's measurement waits for it.

Widgets and demos have threads of their own, but torch's functions, its random numbers and a GPU's peaks are
the whole process's.
"""


@contextmanager
def on_this_thread(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside, the function `owner.name` is `replacement` for this thread, and for no other."""
    here = threading.get_ident()
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        function = replacement if threading.get_ident() == here else original
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, chosen):
        yield
