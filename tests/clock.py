"""How long something takes, on a machine that does other things too."""

import time
from collections.abc import Callable


def quickest(call: Callable[[], object], tries: int = 3) -> float:
    """Seconds of this thread's processor time, the best of several tries.

    Waiting does not count, nor do other threads; collecting the garbage of earlier tests spoils one try, not all.
    """
    took = []
    for _ in range(tries):
        began = time.thread_time()
        call()
        took.append(time.thread_time() - began)
    return min(took)
