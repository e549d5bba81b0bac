"""Somebody's own training script, unchanged, for a few optimizer steps on the simulated GPU or a real one."""

import atexit
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
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

from .. import fence
from ..errors import ScriptError, SimulationUnavailable, StepError
from ..estimating.workspaces import workspaces_of
from ..gpus import IMITATED, Gpu, gpu
from ..measurement import Measurement
from ..measuring import live
from ..measuring.call_site import described, is_machinery
from ..measuring.compiling import compiling
from ..measuring.cuda_answers import Memory, answered
from ..measuring.patching import on_this_thread
from ..measuring.phases import PLACEHOLDER
from ..measuring.release import chain, let_go
from ..measuring.replicated import RankTracker
from ..measuring.simulated import availability, simulated_gpu
from ..measuring.sources import MOST_STEPS, forced_source
from ..measuring.step import own_random_numbers, provenance_of
from ..measuring.tracker import FailedOperator, Tracker
from ..planning.twin import named
from .host import CountedHostValues
from .patches import replaced
from .ranks import PER_NODE, as_one_rank, check_ranks
from .shield import NotAllowed, memory_limited, nothing_changed
from .steps import Finished, HostValues, ScriptWatch
from .whole import WholeRun

OF_MEMORY = torch.cuda.memory
HISTORY = (
    (torch.cuda, "memory_summary"),
    (OF_MEMORY, "_record_memory_history"),
    (OF_MEMORY, "_dump_snapshot"),
)
FRACTION = "set_per_process_memory_fraction"
REFUSED = (
    "While it is watched, what Python's own functions write goes to a temporary folder. Another library's "
    "functions cannot write: leave them out while you watch it."
)


@dataclass(frozen=True)
class Place:
    """The card on which a script runs, whether it is simulated, and why this one: a sentence or ""."""

    card: Gpu
    simulated: bool
    why: str


def place_for(card: str | None = None, source: str = "simulated") -> Place:
    """The place where a script runs, by the name of a card or without one.

    A simulated GPU is the card that is named, else the one of this machine, else an A100. With
    COURSE_SOURCE=simulated it does not depend on the machine, and nothing has to be said about it. Raises
    ValueError for a card that is not known, or is not the one that `source` asks for, SimulationUnavailable
    where no GPU can be simulated.
    """
    asked = None if card is None else gpu(card)
    same_everywhere = forced_source() not in ("auto", "live")
    here = None if source == "simulated" and (asked or same_everywhere) else live.card_there()
    if source == "live" or (source == "auto" and here is not None and asked in (None, here)):
        live.demand_gpu()
        if here is None or asked not in (None, here):
            raise ValueError(f"the GPU of this machine is no {card}: leave out the card, or source='live'")
        return Place(here, False, f"executed on the GPU of this machine, {named(here)}")
    works, how = availability()
    if not works:
        raise SimulationUnavailable(how)
    if asked is not None:
        why = f"simulated as {named(asked)}" if asked == IMITATED else ""  # of another the provenance says so
        return Place(asked, True, why)
    if here is not None:
        return Place(here, True, f"simulated as the GPU of this machine, {named(here)}")
    why = "" if same_everywhere else f"simulated as {named(IMITATED)}: --gpu NAME chooses another card"
    return Place(IMITATED, True, why)


def watch_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    source: str = "simulated",
    *,
    card: str | None = None,
    steps: int = 2,
    ranks: int | None = None,
    rank: int = 0,
    whole: bool = False,
) -> Measurement:
    """Run a script until each of its optimizers has stepped `steps` times; return where each byte went.

    The peak is that of the last step. If `whole`, the script then goes on to its end, where loops that train
    end at once, and the peak of each of its parts is returned, too. `card` is a name of `gpus.GPUS`, on which
    `place_for` has the rest. A script made for torchrun is watched as `rank` of `ranks`, which are simulated.
    Nothing of the user's is written or deleted, and the network is closed. What the script prints goes to
    stderr. Raises ScriptError, with the line, for a script that fails, trains nothing or cannot be followed,
    ValueError for a path that is no script's, for other steps than 1 to 1000, for a rank that does not exist,
    and as `place_for`, SimulationUnavailable where no GPU can be simulated.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"steps is {steps}: a number from 1 to {MOST_STEPS}")
    check_ranks(ranks, rank)
    place = place_for(card, source)
    simulated = place.simulated
    if ranks is not None and not simulated:
        raise ValueError("several ranks are simulated only: leave --ranks out, or source='live'")
    path = _checked(path)
    if ranks is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ScriptError(
            "a script is watched in one process: start it without torchrun (WORLD_SIZE is above 1),"
            " and say --ranks 8 to watch it as one of 8 ranks"
        )
    # The mode that is entered last sees an operator first: HostValues says where it runs, the watch in which
    # phase, the tracker what is made, and the simulated GPU makes it.
    with ExitStack() as stack:
        run = stack.enter_context
        run(own_random_numbers())
        elsewhere = run(nothing_changed())
        changes: dict[str, None] = {}
        run(replaced(changes, simulated))
        run(memory_limited())
        if simulated:
            run(simulated_gpu("auto", card=place.card))
        else:
            run(torch.autograd.set_multithreading_enabled(False))
        follow = RankTracker if simulated else Tracker
        tracker = run(follow("cuda", workspaces_of(place.card.capability), place.card))
        memory = Memory(lambda: tracker.events, place.card)
        if simulated:  # scripts ask if torch has CUDA; HISTORY comes after `answered`, which refuses it
            run(answered(memory))
            run(on_this_thread(torch.backends.cuda, "is_built", lambda: True))
            for owner, name in HISTORY:
                run(mock.patch.object(owner, name, partial(_without_history, changes)))
            for owner in (torch.cuda, OF_MEMORY):
                run(mock.patch.object(owner, FRACTION, partial(_without_fraction, changes)))
            run(as_one_rank(ranks, rank, changes))
        measured: list[Measurement] = []
        provenance = provenance_of("simulated" if simulated else "live", card=place.card)

        def finish(ends: list[int]) -> None:
            tracker.order_frees()
            measured.append(tracker.measurement(ends, [], provenance))

        parts = WholeRun(tracker, path) if whole else None
        if parts:
            run(parts.entered())
        watch = run(ScriptWatch(tracker, steps, simulated, finish, parts))
        values = (CountedHostValues if whole or ranks else HostValues)(watch.arrived)
        if simulated:  # after the watch: both answer for a fake tensor's numbers, and these know some
            run(values)
            # until something else tells of the first tensor that another thread makes on the GPU
            begin = partial(watch.begin_gpu, torch.cuda._lazy_init)
            run(mock.patch.object(torch.cuda, "_lazy_init", begin))
            run(compiling(place.card, changes))
        _execute(path, arguments, watch)
        found = measured[0]
        if parts:
            found = replace(found, parts=parts.found(memory.emptied))
            changes |= parts.notes
        if simulated and isinstance(values, CountedHostValues):
            found = replace(found, host=values.found(min(ranks or 1, PER_NODE)))
        notes = [*_steps(watch, values), *changes, *elsewhere.notes(), *filter(None, [place.why])]
        if not place.card.has_bf16 and any(item.dtype == "bfloat16" for item in found.allocations):
            notes.append(f"{named(place.card)} does not compute in bf16: torch emulates it, which is slow")
        if not any(item.kind != "workspaces" for item in found.allocations):
            raise ScriptError(f"{path.name} trains, but not on the GPU: move model and data to 'cuda'")
    return replace(found, provenance=replace(provenance, note="; ".join(notes)))


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
    """Run the script to the end of its last step, or its own. Raises ScriptError without such a step."""
    places = [str(path.parent.resolve()), *sys.path]
    why = ""
    try:
        patched = mock.patch.multiple(sys, argv=[str(path), *arguments], path=places)
        # its own exit code would be taken for ours
        no_way_around = mock.patch.object(os, "_exit", sys.exit)
        register = partial(_register, atexit.register, path.parent.resolve())
        no_handlers = mock.patch.object(atexit, "register", register)
        with patched, no_way_around, no_handlers, redirect_stdout(sys.stderr):
            if watch.whole:
                watch.whole.execute(path)
            else:
                runpy.run_path(str(path.absolute()), run_name="__main__")  # as Python's own `__file__`
    except Finished as finished:
        let_go(finished)
        return
    except KeyboardInterrupt:
        raise
    except SystemExit as ended:
        why = f" by sys.exit({ended.code!r})" if ended.code else ""
    except BaseException as error:
        if len(watch.ends) == watch.steps:  # it was ended already, and fails while it cleans up
            if watch.whole:
                said = _sentence(error, path, watch.tracker.failure).splitlines()[0]
                watch.whole.notes.setdefault(f"what comes after this was not reached: {said}")
            let_go(error)
            return
        sentence = watch.in_a_thread or _sentence(error, path, watch.tracker.failure)
        let_go(error)
        raise ScriptError(sentence) from None
    if len(watch.ends) == watch.steps:
        return
    if watch.stepped:
        with contextlib.suppress(Finished):
            watch.end_step()
    if not watch.ends:
        nothing = f"{path.name} ends{why} without a step of a torch optimizer: nothing was trained"
        raise ScriptError(watch.in_a_thread or nothing)
    watch.last_step()


def _register(register: Callable[..., Any], folder: Path, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`atexit.register`, which leaves out the script's own handlers: they might write, unwatched."""
    caller = sys._getframe(1).f_code.co_filename
    if Path(caller).resolve().is_relative_to(folder):
        return function
    return register(function, *args, **kwargs)


def _sentence(error: BaseException, path: Path, failure: FailedOperator | None) -> str:
    """One sentence on what a script cannot do here, with its line; for its own error the traceback, too.

    The line is the innermost one of the script's own files that the exception went through.
    """
    own = [one for one in traceback.extract_tb(error.__traceback__) if not is_machinery(one.filename)]
    frames = [one for one in own if Path(one.filename).resolve().is_relative_to(path.parent.resolve())]
    line = described((frames[-1].filename, frames[-1].lineno or 0)) if frames else path.name
    operation = failure.operation if failure else "this"
    for each in chain(error):
        why = _why_not(each, operation, line)
        if why is not None:
            return f"{line}: {why}"
    said = traceback.format_exception_only(error)[-1].strip()
    if fence.is_up() and "Permission denied" in said:
        said += f"\n{REFUSED}"
    shown = "".join(traceback.format_list(frames))
    return f"{line}: the script itself fails: {said}\n{shown.rstrip()}"


def _why_not(error: BaseException, operation: str, line: str) -> str | None:
    """The reason why a script cannot do here what raised this error; None if it would fail anywhere."""
    if isinstance(error, NotAllowed | StepError):
        said = str(error)
        if said.startswith(f"{line}: "):  # code may have a colon of its own
            return said.removeprefix(f"{line}: ")
        return said.partition(": ")[2] or said
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


def _without_fraction(notes: dict[str, None], fraction: float, *_: Any) -> None:
    """Replace the limit of a script, which is watched whether it fits or not."""
    notes.setdefault(f"the script's own limit, {fraction:g} of the card, is not applied: see what it needs")


def _steps(watch: ScriptWatch, values: HostValues) -> Iterator[str]:
    each = " and ".join(f"{times} of {name}" for name, times in watch.taken[-1].items())
    steps = "1 step" if len(watch.ends) == 1 else f"{len(watch.ends)} steps"
    yield f"{steps} taken, the last one {each}"
    if len(watch.ends) < watch.steps:
        yield f"the script ended after step {len(watch.ends)} of {watch.steps}"
    if len(watch.ends) == 1:
        yield "this is the first step, whose optimizer states appear only at its end"
    if values.read:
        lines = ", ".join(list(values.read)[:3])
        yield f"values that the script reads on the GPU are placeholders of {PLACEHOLDER}: {lines}"
    if values.anomalies:
        yield "torch's anomaly detection finds nothing here: no simulated gradient is NaN"
