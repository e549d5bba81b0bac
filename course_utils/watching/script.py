"""Somebody's own training script, unchanged, for two optimizer steps on the simulated GPU or a real one."""

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ..errors import ScriptError, SimulationUnavailable, StepError
from ..estimating.workspaces import workspaces_of
from ..measurement import Measurement
from ..measuring import live
from ..measuring.call_site import described, is_machinery
from ..measuring.cuda_answers import CARD, Memory, answered
from ..measuring.patching import on_this_thread
from ..measuring.phases import PLACEHOLDER
from ..measuring.release import chain, let_go
from ..measuring.simulated import availability, simulated_gpu
from ..measuring.step import own_random_numbers, provenance_of
from ..measuring.tracker import FailedOperator, Tracker
from .patches import replaced
from .shield import NotAllowed, memory_limited, nothing_changed
from .steps import Finished, HostValues, ScriptWatch

STEPS = 2
OF_MEMORY = torch.cuda.memory
HISTORY = (
    (torch.cuda, "memory_summary"),
    (OF_MEMORY, "_record_memory_history"),
    (OF_MEMORY, "_dump_snapshot"),
)


def watch_script(path: str | Path, arguments: Sequence[str] = (), source: str = "simulated") -> Measurement:
    """Run a training script until each of its optimizers has stepped twice, and return where each byte went.

    Nothing of the user's is written or deleted, and the network is closed. What the script prints goes to
    stderr. Raises ScriptError, with the line, for a script that fails, trains nothing or cannot be followed,
    ValueError for a path that is no script's, SimulationUnavailable where no GPU can be simulated.
    """
    path = _checked(path)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ScriptError("a script is watched on one GPU: start it without torchrun (WORLD_SIZE is above 1)")
    simulated = _is_simulated(source)
    # The mode that is entered last sees an operator first: HostValues says where it runs, the watch in which
    # phase, the tracker what is made, and the simulated GPU makes it.
    with ExitStack() as stack:
        run = stack.enter_context
        run(own_random_numbers())
        elsewhere = run(nothing_changed())
        changes: dict[str, None] = {}
        run(replaced(changes, simulated))
        run(memory_limited())
        run(simulated_gpu("auto") if simulated else torch.autograd.set_multithreading_enabled(False))
        capability = CARD.capability if simulated else torch.cuda.get_device_capability()
        tracker = run(Tracker("cuda", workspaces_of(capability)))
        if simulated:  # scripts ask if torch has CUDA; HISTORY comes after `answered`, which refuses it
            run(answered(Memory(lambda: tracker.events)))
            run(on_this_thread(torch.backends.cuda, "is_built", lambda: True))
            for owner, name in HISTORY:
                run(mock.patch.object(owner, name, partial(_without_history, changes)))
        measured: list[Measurement] = []
        provenance = provenance_of("simulated" if simulated else "live")

        def finish(ends: list[int]) -> None:
            tracker.order_frees()
            measured.append(tracker.measurement(ends, [], provenance))

        watch = run(ScriptWatch(tracker, STEPS, simulated, finish))
        values = HostValues(watch.arrived)
        if simulated:  # after the watch: both answer for a fake tensor's numbers, and these know some
            run(values)
        _execute(path, arguments, watch)
        notes = [*_steps(watch, values), *changes, *elsewhere.notes()]
        if not any(item.kind != "workspaces" for item in measured[0].allocations):
            raise ScriptError(f"{path.name} trains, but not on the GPU: move model and data to 'cuda'")
    return replace(measured[0], provenance=replace(provenance, note="; ".join(notes)))


def _is_simulated(source: str) -> bool:
    """True for the simulated GPU, False for a real one. Raises if this machine has not the one asked for."""
    if source == "simulated" or (source == "auto" and live.usable_gpu()[0] is None):
        works, how = availability()
        if not works:
            raise SimulationUnavailable(how)
        return True
    live.demand_gpu()
    return False


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no script {str(path)!r}: give the path of a Python file")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = ""
        said = str(error)
        if isinstance(error, SyntaxError):
            said = error.msg
            if error.text:
                line = f":{error.lineno}  {error.text.strip()}"
        raise ScriptError(f"{path.name}{line}: this interpreter cannot read it as Python: {said}") from None
    return path


def _execute(path: Path, arguments: Sequence[str], watch: ScriptWatch) -> None:
    """Run the script to the end of its second step. Raises ScriptError if it does not get there."""
    places = [str(path.parent.resolve()), *sys.path]
    why = ""
    try:
        patched = mock.patch.multiple(sys, argv=[str(path), *arguments], path=places)
        with patched, redirect_stdout(sys.stderr):
            runpy.run_path(str(path), run_name="__main__")
    except Finished as finished:
        let_go(finished)
        return
    except KeyboardInterrupt:
        raise
    except SystemExit as ended:
        why = f" by sys.exit({ended.code!r})" if ended.code else ""
    except BaseException as error:
        sentence = _sentence(error, path, watch.tracker.failure)
        let_go(error)
        raise ScriptError(sentence) from None
    if watch.stepped:
        with contextlib.suppress(Finished):
            watch.end_step()
    if not watch.ends:
        raise ScriptError(f"{path.name} ends{why} without a step of a torch optimizer: nothing was trained")
    watch.last_step()


def _sentence(error: BaseException, path: Path, failure: FailedOperator | None) -> str:
    """One sentence on what a script cannot do here, with its line; for its own error the traceback, too.

    The line is the innermost one of the script's own files that the exception went through.
    """
    own = [one for one in traceback.extract_tb(error.__traceback__) if not is_machinery(one.filename)]
    frames = [one for one in own if Path(one.filename).resolve().is_relative_to(path.parent.resolve())]
    line = described((frames[-1].filename, frames[-1].lineno or 0)) if frames else path.name
    operation = failure.operation if failure else "this"
    for each in chain(error):
        why = _why_not(each, operation)
        if why is not None:
            return f"{line}: {why}"
    said = traceback.format_exception_only(error)[-1].strip()
    shown = "".join(traceback.format_list(frames))
    return f"{line}: the script itself fails: {said}\n{shown.rstrip()}"


def _why_not(error: BaseException, operation: str) -> str | None:
    """The reason why a script cannot do here what raised this error; None if it would fail anywhere."""
    if isinstance(error, NotAllowed | StepError):
        return str(error).partition(": ")[2] or str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "ran out of host memory: tensors on the CPU are real here, only GPU tensors are simulated"
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"{operation} needs the values of its input, but a simulated GPU has only shapes, no values"
    no_rule = "no rule registered for HigherOrderOperator" in str(error)
    if isinstance(error, UnsupportedOperatorException) or no_rule:
        return f"{operation} cannot be simulated: torch can tell what this kernel makes only by running it"
    if any("triton" in frame.filename for frame in traceback.extract_tb(error.__traceback__)[-3:]):
        return "runs its own triton kernel, which needs a real GPU"
    return None


def _without_history(notes: dict[str, None], *_: Any, **__: Any) -> str:
    """Replace questions to torch's allocator, which allocates nothing here."""
    notes.setdefault("the script's own memory summaries, histories and snapshots are skipped")
    return ""


def _steps(watch: ScriptWatch, values: HostValues) -> Iterator[str]:
    each = " and ".join(f"{times} of {name}" for name, times in watch.taken[-1].items())
    steps = "1 step" if len(watch.ends) == 1 else f"{len(watch.ends)} steps"
    yield f"{steps} taken, the last one {each}"
    if len(watch.ends) < STEPS:
        yield "the script ended after its first step, whose optimizer states appear only at its end"
    if values.read:
        lines = ", ".join(list(values.read)[:3])
        yield f"values that the script reads on the GPU are placeholders of {PLACEHOLDER}: {lines}"
