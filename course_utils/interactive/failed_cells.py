"""Show how a cell failed: a check as a card, a learner's mistake as one line, all else with its traceback.

`%tb` shows the traceback of the first two. A fault of the course, and what fails in a learner's own code,
keep theirs. A cell that ran out of GPU memory gives it back, too. IPython keeps the last traceback, whose
frames keep every tensor: else a cell of plain torch that fails leaves the GPU full until the kernel is
started anew.
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
    # %tb and %debug show these
    sys.last_type = kind
    sys.last_value = error
    sys.last_traceback = traceback
    shell._showtraceback(kind, error, [line])


def one_line(error: BaseException, names: Mapping[str, Any]) -> str | None:
    """The line for a learner's mistake in a cell whose global names are `names`; None for any other error."""
    entries = list[TracebackType]()
    entry = error.__traceback__.tb_next if error.__traceback__ else None  # the first is IPython's
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    own = [index for index, one in enumerate(entries) if one.tb_frame.f_globals is names]
    if not own or hasattr(error, "_render_traceback_"):
        return None
    line = entries[own[-1]].tb_lineno
    within = entries[own[-1] + 1 :]
    bold = "\x1b[1m{}\x1b[0m in line {}"
    if isinstance(error, KeyboardInterrupt):
        doing = _interrupted(error, within)
        return f"{bold.format('Interrupted', line)}, {doing}. Nothing is left running." if doing else None
    said = _raised(error, entries) if within else _mistaken(error, entries, names)
    if not said:
        return said
    end = "" if said.endswith((".", "?")) else "."
    return f"{bold.format(type(error).__name__, line)}: {said}{end} (%tb shows the full traceback.)"


def _interrupted(error: BaseException, within: list[TracebackType]) -> str:
    """The words for what the course was doing when it was interrupted; "" where other code ran."""
    notes = getattr(error, "__notes__", [])
    if notes:
        return notes[0]
    if within and "course_utils" in _packages(within[:1]):
        return f"in {within[0].tb_frame.f_code.co_name}()"
    return ""


def _packages(entries: list[TracebackType]) -> set[str]:
    return {str(one.tb_frame.f_globals.get("__name__")).partition(".")[0] for one in entries}


def _raised(error: BaseException, entries: list[TracebackType]) -> str | None:
    """The words of what the course raised by `raise`: an exception of its own, or in a call from the cell."""
    last = entries[-1]
    if _packages([last]) != {"course_utils"}:
        return None
    # Any other instruction that fails, as a subscript, is a fault of the course: it keeps its traceback.
    if last.tb_frame.f_code.co_code[last.tb_lasti] != RAISE:
        return None
    called = _packages(entries) <= {"course_utils", "__main__", *sys.stdlib_module_names}
    own = type(error).__module__.startswith("course_utils")
    if not own and not (called and isinstance(error, SPOKEN)):
        return None
    return re.sub(r"(did you mean [^?]*\?) Known: .*", r"\1", str(error))


def _mistaken(error: Any, entries: list[TracebackType], names: Mapping[str, Any]) -> str | None:
    """The mistake in a line of the cell: a name that is not defined, or one that the course does not have."""
    said = str(error)
    name = str(getattr(error, "name", ""))
    offered = sys.modules["course_utils"].__all__
    if isinstance(error, ImportError) and name.startswith("course_utils"):
        meant = nearest(said.partition("'")[2].partition("'")[0], offered)
        hint = f": did you mean {meant}?" if meant else ""
        return said.partition(" (")[0] + hint
    # names of code that is no function begin so: "<module>", "<listcomp>"
    if type(error) is NameError and all(one.tb_frame.f_code.co_name.startswith("<") for one in entries):
        alike = get_close_matches(name, {*names, *dir(builtins)} - {name}, n=1, cutoff=0.8)
        if name in offered:
            hint = f"`from course_utils import {name}`"
        elif alike:
            hint = f"write {alike[0]}, if you mean that"
        else:
            hint = "check its spelling"
        return f"{name} is not defined yet: run the cells above this one first, or {hint}"
    return _wrong_call(said, names) if type(error) is TypeError else None


def _wrong_call(said: str, names: Mapping[str, Any]) -> str | None:
    """The mistake in a call of something that the course has, from the words of a TypeError."""
    call = re.match(r"([\w.]+)\(\) (?:got an unexpected keyword argument '(\w+)')?", said)
    if not call:
        return None
    called: Any = attrgetter(call[1])(SimpleNamespace(**names))
    if not getattr(called, "__module__", "").startswith("course_utils"):
        return None
    name = call[1].removesuffix(".__init__")
    takes = inspect.signature(called).parameters
    if not call[2]:
        return said.replace(call[1], name, 1)
    meant = nearest(call[2], takes)
    hint = f"did you mean {meant}?" if meant else f"it takes {', '.join(takes)}"
    return f"{name}() has no {call[2]}: {hint}"


def give_back(result: Any) -> None:
    """Free what the frames of a cell's error hold, if that error is memory running out; its message stays."""
    error = result.error_in_exec
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return
    from ..measuring.live import is_out_of_memory, release

    if is_out_of_memory(error):
        release(error)
