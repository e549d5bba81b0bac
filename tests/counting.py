"""Work counted in function calls: the same figure on a quiet machine and on a busy one."""

import sys
from collections.abc import Callable


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, that `work()` makes in this thread.

    A limit in a test is about twice what the code takes: room for another Python or torch, none for a loop
    too many.
    """
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted
