"""Turns on the GPU, for tasks that are at work at the same time: files next to a task's results carry them.

A task does what needs no GPU first, then asks. The recorder gives it a turn, and says if others share the
GPU with it.
"""

import os
import time
from pathlib import Path

VARIABLE = "COURSE_TURN"  # The environment variable with the path of the file that gives a task its turn
ASKED, GIVEN = "turn.asked", "turn.given"
SHARED, ALONE = "shared", "alone"
BETWEEN = 0.02  # Seconds


def give(file: Path, shared: bool) -> None:
    new = file.with_suffix(".new")
    new.write_text(SHARED if shared else ALONE)
    new.replace(file)  # whole or not at all


def await_turn() -> bool:
    """Wait for this task's turn on the GPU, if it has to; True if other tasks use the GPU meanwhile."""
    path = os.environ.pop(VARIABLE, "")
    if not path:
        return False
    file = Path(path)
    file.with_name(ASKED).touch()
    while not file.exists():
        time.sleep(BETWEEN)
    return file.read_text() == SHARED
