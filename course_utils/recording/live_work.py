"""One task of a recording that executes cells, done in a process of its own, as `recording.work` does others.

Apart from those it needs the course's environment: Jupyter's packages.
"""

import sys
from typing import Any

from ..interactive.course_files import ROOT
from ..measuring.devices import Device
from ..measuring.recording_file import AS
from .tasks import TIMES_OUT_OF_MEMORY, Task
from .work import Send, main


def perform(task: Task, device: Device, send: Send) -> None:
    """Do one task and send its part."""
    {"cells": out_of_memory, "notebook": lesson, "demos": rehearsal}[task.kind](task, device, send)


def out_of_memory(task: Task, device: Device, send: Send) -> None:
    """Part "cells": how often a kind of cell ran out of memory and left nothing behind."""
    from ..interactive.failed_cells import watch_cells
    from .cells import little_memory, prepared_shell, run_out

    rehearse = device.kind == "cpu"
    with little_memory(rehearse) as (card, times):
        prepared_shell(card)
        watch_cells()
        send("cells", **run_out(task.topic, card, times(TIMES_OUT_OF_MEMORY)))


def lesson(task: Task, device: Device, send: Send) -> None:
    """Part "notebook": how a lesson went. RuntimeError, after it was sent, if a cell failed."""
    from .notebooks import execute_live

    facts: dict[str, Any] = device.facts()["device"]
    as_card = facts["name"].partition(AS)[2]
    source = "simulated" if device.kind == "cpu" else "auto"
    found = execute_live(ROOT / task.topic, as_card, source)
    send("notebook", **found)
    if found["failed"]:
        raise RuntimeError(f"{len(found['failed'])} cells fail, the first: {found['failed'][0]}")


def rehearsal(task: Task, device: Device, send: Send) -> None:
    """Part "demos": what `rehearse` says here. RuntimeError, after it was sent, if a demo does not go as it says."""
    from ..demos import rehearse

    found = rehearse()
    send("demos", text=str(found), problems=list(found.problems))
    if found.problems:
        raise RuntimeError(f"{len(found.problems)} things do not go as the demos say, the first: {found.problems[0]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], perform))
