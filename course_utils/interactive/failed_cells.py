"""Show how a cell failed: a check as a card, a refusal as one line, all else with its traceback.

A cell that ran out of GPU memory gives it back, too. IPython keeps the last traceback, whose frames keep
every tensor: else a cell of plain torch that fails leaves the GPU full until the kernel is started anew.
"""

import dis
import re
import sys
from types import TracebackType
from typing import Any

from .display import running_shell

SPOKEN = (ValueError, TypeError, AttributeError, OSError)
"""Python's own exceptions whose words are for the learner, where the course raises them."""

RAISE = dis.opmap["RAISE_VARARGS"]


def watch_cells() -> None:
    """From now on, in a notebook, show refusals as one line, and give back memory that ran out."""
    shell = running_shell()
    if shell is None:
        return
    shell.events.register("post_run_cell", give_back)  # which counts once
    if not shell.custom_exceptions:  # another library's way to show errors stays
        shell.set_custom_exc((Exception,), _show)


def _show(shell: Any, kind: type, error: Exception, traceback: TracebackType, tb_offset: Any = None) -> None:
    if is_refused(error):
        # %tb and %debug show these
        sys.last_type = kind
        sys.last_value = error
        sys.last_traceback = traceback
        said = re.sub(r"(did you mean [^?]*\?) Known: .*", r"\1", str(error))  # the list is in the traceback
        line = f"\x1b[1m{kind.__name__}\x1b[0m: {said} (%tb shows the full traceback.)"
        shell._showtraceback(kind, error, [line])
        return
    if hasattr(error, "card") and hasattr(shell, "kernel"):  # a check's, on a page
        sys.modules["IPython"].display.display({"text/html": error.card, "text/plain": ""}, raw=True)
    shell.showtraceback(running_compiled_code=True)


def is_refused(error: Exception) -> bool:
    """True if the course raised this by `raise`, to say something to a learner.

    What any other instruction raises, such as a subscript, is a fault of the course. It keeps its traceback.
    """
    if hasattr(error, "_render_traceback_"):  # a check's, which has its own form
        return False
    last: Any = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    frame = last.tb_frame
    raised_here = str(frame.f_globals.get("__name__")).startswith("course_utils")
    spoken = isinstance(error, SPOKEN) or type(error).__module__.startswith("course_utils")
    return raised_here and spoken and frame.f_code.co_code[last.tb_lasti] == RAISE


def give_back(result: Any) -> None:
    """Free what the frames of a cell's error hold, if that error is memory running out; its message stays."""
    error = result.error_in_exec
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return
    from ..measuring.release import is_out_of_memory, release

    if is_out_of_memory(error):
        release(error)
