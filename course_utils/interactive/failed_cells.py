"""A cell that ran out of GPU memory gives it back. IPython keeps the last traceback, whose frames keep every tensor.

Without this a cell of plain torch that fails leaves the GPU full until the kernel is started anew.
"""

import sys
from typing import Any


def running_shell() -> Any:
    """IPython's shell where this runs in a notebook, else None."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def watch_cells() -> None:
    """From now on, in a notebook, let go of what a cell held that ran out of memory; elsewhere nothing happens."""
    if shell := running_shell():
        shell.events.register("post_run_cell", give_back)  # which counts once


def give_back(result: Any) -> None:
    """Free what the frames of a cell's error hold, if that error is memory running out; its message stays."""
    error = result.error_in_exec
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return
    from ..measuring.live import is_out_of_memory, release

    if is_out_of_memory(error):
        release(error)
