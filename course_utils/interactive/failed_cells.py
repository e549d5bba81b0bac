"""Show how a cell failed: a check's message as a card, a learner's mistake as one line, all else with its
traceback.

`%tb` shows the traceback of the former. A fault of the course, and what fails in a learner's own code, keep
theirs. A cell that ran out of GPU memory gives it back, too. IPython keeps the last traceback, whose frames
keep every tensor: else a cell of plain torch that fails leaves the GPU full until the kernel is started anew.
"""

import builtins
import dis
import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from operator import attrgetter
from types import SimpleNamespace, TracebackType
from typing import Any

from ..errors import nearest
from ..pace import running_shell

SPOKEN = (ValueError, TypeError, AttributeError, OSError)
"""Python's own exceptions whose words are for the learner, where the course raises them."""

RAISE = dis.opmap["RAISE_VARARGS"]


def watch_cells() -> None:
    """From now on, in a notebook, show a learner's mistake as one line and give back memory that ran out."""
    if shell := running_shell():
        shell.events.register("post_run_cell", give_back)  # which counts once
        if not shell.custom_exceptions:  # another library's way to show errors stays
            shell.set_custom_exc((Exception, KeyboardInterrupt), _show)


def _show(
    shell: Any, kind: type, error: BaseException, traceback: TracebackType, tb_offset: int | None = None
) -> None:
    line = None
    with suppress(Exception):  # what cannot be told in one line is shown in full
        line = one_line(error, shell.user_ns)
    if line is None:
        if hasattr(error, "card") and hasattr(shell, "kernel"):  # a check's, on a page
            sys.modules["IPython"].display.display({"text/html": error.card, "text/plain": ""}, raw=True)
        shell.showtraceback(running_compiled_code=True)
        return
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, traceback  # which %tb and %debug show
    shell._showtraceback(kind, error, [line])


def one_line(error: BaseException, names: Mapping[str, Any]) -> str | None:
    """The line for a learner's mistake in a cell whose global names are `names`; None for any other error."""
    entries = list[TracebackType]()
    entry = error.__traceback__
    while entry := entry and entry.tb_next:  # the first is IPython's
        entries.append(entry)
    own = [index for index, one in enumerate(entries) if one.tb_frame.f_globals is names]
    if not own or hasattr(error, "_render_traceback_"):
        return None
    line = entries[own[-1]].tb_lineno
    within = entries[own[-1] + 1 :]
    bold = "\x1b[1m{}\x1b[0m in line {}"
    if isinstance(error, KeyboardInterrupt):
        ours = (
            f"in {within[0].tb_frame.f_code.co_name}()"
            if within and "course_utils" in _packages(within[:1])
            else ""
        )
        doing = next(iter(getattr(error, "__notes__", [])), ours)
        return None if not doing else f"{bold.format('Interrupted', line)}, {doing}. Nothing is left running."
    said = _raised(error, entries) if within else _mistaken(error, entries, names)
    end = "" if not said or said.endswith((".", "?")) else "."
    return said and f"{bold.format(type(error).__name__, line)}: {said}{end} (%tb shows the full traceback.)"


def _packages(entries: list[TracebackType]) -> set[str]:
    return {str(one.tb_frame.f_globals.get("__name__")).partition(".")[0] for one in entries}


def _raised(error: BaseException, entries: list[TracebackType]) -> str | None:
    """The words of an exception that the course raised by `raise`: any of its own, or in a call from the
    cell.
    """
    code, instruction = entries[-1].tb_frame.f_code, entries[-1].tb_lasti
    if _packages(entries[-1:]) != {"course_utils"} or code.co_code[instruction] != RAISE:
        return None
    called = _packages(entries) <= {"course_utils", "__main__", *sys.stdlib_module_names}
    told = type(error).__module__.startswith("course_utils") or (called and isinstance(error, SPOKEN))
    return re.sub(r"(did you mean [^?]*\?) Known: .*", r"\1", str(error)) if told else None


def _mistaken(error: Any, entries: list[TracebackType], names: Mapping[str, Any]) -> str | None:
    """The mistake in a line of the cell: a name that is not defined, or one that the course does not have."""
    said = str(error)
    name = str(getattr(error, "name", ""))
    offered = sys.modules["course_utils"].__all__
    if isinstance(error, ImportError) and name.startswith("course_utils"):
        meant = nearest(said.partition("'")[2].partition("'")[0], offered)
        return said.partition(" (")[0] + (f": did you mean {meant}?" if meant else "")
    if type(error) is NameError and all(one.tb_frame.f_code.co_name.startswith("<") for one in entries):
        alike = get_close_matches(name, {*names, *dir(builtins)} - {name}, n=1, cutoff=0.8)
        hint = f"write {alike[0]}, if you mean that" if alike else "check its spelling"
        hint = f"`from course_utils import {name}`" if name in offered else hint
        return f"{name} is not defined yet: run the cells above this one first, or {hint}"
    call = re.match(r"([\w.]+)\(\) (?:got an unexpected keyword argument '(\w+)')?", said)
    called: Any = attrgetter(call[1])(SimpleNamespace(**names)) if call and type(error) is TypeError else None
    if not call or not getattr(called, "__module__", "").startswith("course_utils"):
        return None
    name = call[1].removesuffix(".__init__")
    takes = inspect.signature(called).parameters
    meant = nearest(call[2], takes) if call[2] else None
    hint = f"did you mean {meant}?" if meant else f"it takes {', '.join(takes)}"
    return f"{name}() has no {call[2]}: {hint}" if call[2] else said.replace(call[1], name, 1)


def give_back(result: Any) -> None:
    """Free what the frames of a cell's error hold, if that error is memory running out; its message stays."""
    error = result.error_in_exec
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return
    from ..measuring.live import is_out_of_memory, release

    if is_out_of_memory(error):
        release(error)
