"""Plain torch code on "cuda": on the card where there is one, else on a simulated GPU.

Tensors on a simulated GPU live on from one block to the next. Each card that is named is a GPU of its own,
with tensors of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..allocator.replay import EMPTY_CACHE, replay
from ..allocator.snapshots import snapshot_from, write_snapshot
from ..errors import SimulationUnavailable, StepError
from ..estimating.workspaces import workspaces_of
from ..gpus import Gpu, gpu
from ..measuring import live
from ..measuring.call_site import calling_place, described
from ..measuring.compiling import compiling
from ..measuring.cuda_answers import CARD, Memory, answered
from ..measuring.fake_mode import ASK_DEVICE, QuickFakeMode
from ..measuring.own_step import errors_told
from ..measuring.patching import ONE_AT_A_TIME, on_this_thread
from ..measuring.replicated import RankTracker
from ..measuring.sharded import own_streams, quick_plans, shards_without_seeds, simulated_ranks
from ..measuring.simulated import CHOICES, availability, simulated_gpu
from ..measuring.sources import forced_source
from ..measuring.step import provenance_of
from ..measuring.tracker import Storage, Tracker, tensors_in
from ..measuring.verdict import CONTEXT
from ..pace import working
from ..planning.twin import named
from ..units import parse_bytes
from .patches import replaced
from .ranks import fsdp1_refused
from .steps import HostValues, known_values

NO_VALUE = (
    "a simulated GPU has shapes, but no values: what needs them runs on the CPU, or where there is a GPU"
)
ELSEWHERE = "Run this on the CPU, or where there is a GPU"
ANYWHERE = (ASK_DEVICE, torch.ops.aten.detach.default)  # What is asked of a tensor that is only looked at


@contextmanager
def on_gpu(
    memory: int | str | None = None, ranks: int = 1, needs: int | str | None = None, card: str | None = None
) -> Iterator[None]:
    """Inside, `device="cuda"` is this machine's GPU, or a simulated one where there is none; prints which.

    Plain torch code runs there: modules, autocast, checkpoints, optimizers, hooks. Tensors live on from one
    block (or cell) to the next. torch.cuda answers: memory_allocated, max_memory_allocated, memory_reserved,
    memory_stats, mem_get_info, memory._snapshot and so on. `memory`, in bytes or as in "16 GB", is where
    torch.OutOfMemoryError is raised; without it a simulated GPU has no limit. With `ranks` over 1 this is
    rank 0 of so many simulated ones, always simulated, for DistributedDataParallel, FSDP2 and DTensors, and
    nothing lives on after the block. A GPU with less memory than the code `needs` (written as `memory` is)
    is simulated, too. Afterwards torch is as it was.

    `card` is a name of `gpus.GPUS`. The simulated GPU then is that card: what torch.cuda says of it, which
    attention kernel torch chooses, cuBLAS's workspaces, and its memory without CUDA's context, unless
    `memory` says otherwise. Only a GPU of this machine that is that card takes its place. Each card has
    tensors of its own, which live on in blocks that name it; without a name it is an A100 without a limit.

    Raises StepError, with the line, for what a simulated GPU cannot say, such as the value of a loss, and for
    a tensor of another card; ValueError for a memory, ranks or a card that are none; SimulationUnavailable
    where no GPU can be simulated.
    COURSE_SOURCE=simulated (or live) settles which it is.
    """
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}: a whole number of GPUs, 1 or more")
    limit = _bytes("memory", memory)
    least = _bytes("needs", needs)
    asked = None if card is None else gpu(card)
    source = forced_source()
    here = live.usable_gpu()[0] if source == "auto" and ranks == 1 else None
    reason = _why_not_here(here, least, asked)
    if ranks == 1 and (source == "live" or (here is not None and not reason)):
        live.demand_gpu()
        if source == "live" and asked is not None and live.card_there() != asked:
            raise ValueError(
                f"this machine's GPU is not {named(asked)}: leave card or COURSE_SOURCE=live out"
            )
        print(provenance_of("live"))
        with _limited(limit):
            yield
        return
    with working("getting ready"):
        works, how = availability()
    if not works:
        raise SimulationUnavailable(how)
    note = f"rank 0 of {ranks} simulated ranks" if ranks > 1 else reason
    print(provenance_of("simulated", note, card=asked))
    with _simulated(asked, ranks).entered(limit, ranks):
        yield


def _why_not_here(here: Gpu | None, least: int | None, asked: Gpu | None) -> str:
    """The reason why the GPU of this machine does not serve, if there is one; else ""."""
    if here is None:
        return ""
    if least is not None and here.memory < least:
        return f"a {here.name} is too small for this"
    if asked is not None and live.card_there() != asked:
        return f"the GPU of this machine is another one, {here.name}"
    return ""


def _simulated(asked: Gpu | None, ranks: int) -> "_Card":
    """The simulated GPU of a block: for one rank that on which tensors live on, else a new one."""
    if ranks > 1:
        workspaces = workspaces_of(asked.capability) if asked else None
        return _Card(
            RankTracker("cuda", workspaces, asked), asked or CARD, "a simulated rank of a block that is over"
        )
    return _card() if asked is None else _named_card(asked)


@contextmanager
def on_new_gpu(memory: int | None = None) -> Iterator[None]:
    """Act as `on_gpu`, silently, on a new simulated GPU, even where there is a real one; nothing lives on."""
    card = _new_card()
    with ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", COURSE_SOURCE="simulated"))
        stack.enter_context(mock.patch.dict(globals(), _card=lambda: card))
        stack.enter_context(card.entered(memory, ranks=1))
        yield


def _bytes(name: str, size: int | str | None) -> int | None:
    """A size in bytes, or None. Raises ValueError for one that is none."""
    found = None if size is None else parse_bytes(size)
    if found is not None and found < 1:
        raise ValueError(f"{name} is {size!r}: it takes bytes, or a text such as '16 GB'")
    return found


@contextmanager
def _limited(memory: int | None) -> Iterator[None]:
    """Inside, torch takes at most so many bytes of the GPU."""
    if memory is None:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory / torch.cuda.mem_get_info()[1]))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class _LastingTracker(Tracker):
    """A tracker that can be entered again: what it has seen goes on, and what died in between is gone."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        TorchDispatchMode.__exit__(self, exc_type, exc_val, exc_tb)
        self._patches.close()

    def _storage(self, key: int, size: int, shape: tuple[int, ...], dtype: str, operation: str) -> Storage:
        made = super()._storage(key, size, shape, dtype, operation)
        made.bound = "tensor"  # as on a GPU, whose snapshots know of no kinds
        return made


class _LastingMode(QuickFakeMode):
    """A fake mode whose tensors may outlive its block, and then say so when they are computed with.

    `where` says where they can be used.
    """

    entered = False

    def __init__(self, where: str) -> None:
        super().__init__(**CHOICES)
        self.elsewhere = f"this tensor is on {where}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.entered and func not in ANYWHERE:
            raise StepError(self.elsewhere)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Card:
    """A simulated GPU that goes on from block to block: its fake mode, what lives on it, and its memory.

    `where` says of its tensors where they can be used.
    """

    def __init__(self, tracker: Tracker, card: Gpu, where: str) -> None:
        self.tracker = tracker
        self.mode = _LastingMode(where)
        self.memory = Memory(lambda: tracker.events, card)
        self.recorded_from: int | None = None

    @contextmanager
    def entered(self, limit: int | None, ranks: int) -> Iterator[None]:
        """Inside, "cuda" is this card, and torch.OutOfMemoryError is raised at `limit` bytes."""
        if self.mode.entered:
            raise StepError("this code is on the GPU already: leave the inner on_gpu() out")
        card = self.memory.card
        if limit is None and card is not CARD:  # a real one keeps CUDA's context, too
            self.memory.limit(card.room - CONTEXT, CONTEXT)
        else:
            self.memory.limit(limit)
        notes: dict[str, None] = {}
        # The lock comes first: what two threads replace in turn would never be put back. The ranks come
        # before the fake mode, as their mesh reads values, and before `replaced`, which refuses process
        # groups; their streams come after `answered`, whose streams are all one. The mode that is entered
        # last sees an operator first: _NoValues says where it runs, the tracker what is made, the fake mode
        # makes it.
        with ExitStack() as stack:
            run = stack.enter_context
            run(ONE_AT_A_TIME)
            run(working("running on the simulated GPU"))
            stack.callback(_print_each, notes)
            if ranks > 1:
                run(simulated_ranks(ranks))
            run(replaced(notes, simulated=True))
            if ranks > 1:  # FSDP2 asks for the accelerator, and the group is there already
                run(on_this_thread(torch._C, "_get_accelerator", lambda *_: torch.device("cuda")))
                run(mock.patch.multiple(dist, init_process_group=_is_there, destroy_process_group=_is_there))
                run(quick_plans())
                run(shards_without_seeds())
                run(fsdp1_refused())
            run(simulated_gpu("auto", self.mode, card))
            run(errors_told(self.tracker, "the simulated GPU", ELSEWHERE))
            run(mock.patch.object(self.mode, "entered", True))
            run(self.tracker)
            run(answered(self.memory))
            if ranks > 1:
                run(own_streams())
            # torch's own ask its allocator, which has allocated nothing; they go when it can be a replay
            for name in ("_record_memory_history", "_snapshot", "_dump_snapshot"):
                run(on_this_thread(torch.cuda.memory, name, getattr(self, name)))
            run(on_this_thread(FakeTensor, "__repr__", _shown))
            for owner in (torch.cuda, torch.cuda.memory):
                run(on_this_thread(owner, "set_per_process_memory_fraction", self.memory.allow))
            run(_NoValues(self))
            run(compiling(card, notes, lasting=True))
            yield

    def check_room(self) -> None:
        """Send what is certain through the allocator. torch.OutOfMemoryError where it finds no room."""
        self.memory.followed(self.tracker.certain())

    def forget_the_last(self) -> None:
        """Take back what found no room, now that it is dead: it never was."""
        events = self.tracker.events
        first = self.memory.count
        refused = {storage for size, storage in events[first:] if size > 0}
        events[first:] = [event for event in events[first:] if event[1] not in refused]
        self.tracker.storages[:] = [one for one in self.tracker.storages if one not in refused]

    def _record_memory_history(self, enabled: str | None = "all", *_: Any, **__: Any) -> None:
        self.recorded_from = None if enabled is None else len(self._events())

    def _events(self) -> list[tuple[int, Any]]:
        """The tracker's events, storages by their numbers, and the moments at which the cache was emptied."""
        number = {storage: index for index, storage in enumerate(self.tracker.storages)}
        events: list[tuple[int, Any]] = [(size, number[storage]) for size, storage in self.tracker.events]
        # from the last to the first, so that an insertion moves none of the places to come
        for place in reversed(self.memory.followed().emptied):
            events.insert(place, EMPTY_CACHE)
        return events

    def _snapshot(self, *_: Any, **__: Any) -> dict[str, Any]:
        replayed = replay(self._events())
        start = len(replayed) if self.recorded_from is None else self.recorded_from
        return snapshot_from(replace(replayed, allocations=self.tracker.allocations()), start)

    def _dump_snapshot(self, filename: str = "dump_snapshot.pickle") -> None:
        write_snapshot(self._snapshot(), filename)


def _print_each(notes: dict[str, None]) -> None:
    for note in notes:
        print(note)


def _new_card(card: Gpu = CARD) -> _Card:
    argument = "" if card is CARD else f"card={card.name!r}"
    where = f"the simulated GPU: go on inside a block `with on_gpu({argument}):`"
    return _Card(_LastingTracker("cuda", workspaces_of(card.capability), card), card, where)


_card = cache(_new_card)  # the one on which tensors live on
_named_card = cache(_new_card)


class _NoValues(HostValues):
    """Host values, with a clear error for those that nobody knows; watches the card's room as well."""

    GUESSES = False

    def __init__(self, card: _Card) -> None:
        super().__init__(lambda _: None)
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:
            self._check_owner((args, kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._card.memory.limited:
            try:
                self._card.check_room()
            except torch.OutOfMemoryError:
                del out
                self._card.forget_the_last()
                raise
        return out

    def _check_owner(self, given: tuple[Any, dict[str, Any]]) -> None:
        """Raise StepError for a tensor of another simulated GPU."""
        args, kwargs = given
        for tensor in (*tensors_in(args), *tensors_in(kwargs.values())):
            mode = getattr(tensor, "fake_mode", self._card.mode)
            if mode is not self._card.mode and isinstance(mode, _LastingMode):
                raise StepError(f"{described(calling_place()[0])}: {mode.elsewhere}")

    def _let_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.nn.Parameter and not tensor.is_meta:
            place = described(calling_place()[0])
            advice = "make the model inside a block `with on_gpu():`"
            raise StepError(
                f"{place}: a weight of the host has values, and a simulated GPU holds none: {advice}"
            )
        return super()._let_in(tensor)

    def _values(self, tensor: FakeTensor) -> torch.Tensor:
        if (value := known_values(tensor)) is None:
            raise StepError(f"{described(calling_place()[0])}: {NO_VALUE}")
        return value


def _shown(tensor: FakeTensor, **_: Any) -> str:
    with no_dispatch():
        value = known_values(tensor)
        if value is not None:
            return f"{str(value.detach())[:-1]}, device='{tensor.fake_device}')"
    return (
        f"tensor(…, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.fake_device}':"
        " no values here)"
    )


def _is_there(*_: Any, **__: Any) -> None:
    """The group of processes is there from the block's beginning to its end."""
