"""Every storage's birth and death during a genuine eager step, by kind.

It is the same on a GPU, a simulated GPU and the CPU. A dispatch mode sees each operator's outputs; a weak
reference on each new storage sees it die. What a storage was *for* follows from what it was bound to (a
parameter, its `.grad`, an optimizer's state, an input) and when it died.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from ..breakdown import MemoryBreakdown
from ..errors import StepError
from ..estimating.workspaces import Workspaces
from ..gpus import Gpu
from ..measurement import Allocation, Mark, Measurement, Provenance, Timeline
from ..pace import Work
from ..units import round_up
from . import convolutions
from .call_site import Place, calling_instruction, calling_place, described
from .cuda_kernels import SPECIAL, SUMS, WITH_BIAS, Own, Taken, not_on_the_gpu, own_scratch, taken_before
from .fake_mode import ASK_DEVICE, device_of
from .generated_code import is_generated, origin
from .patching import FOLLOWED, ONE_AT_A_TIME, UnlessCompiling, check_layout, on_this_thread

aten = torch.ops.aten

newest_node: Any = getattr(torch.autograd, "_get_sequence_nr", None)  # a torch without it is refused below

INTO_A_COPY = frozenset({aten.add.Tensor, aten.index_put.default, aten.scatter.src, aten.index_add.default})
"""Operators that autograd does in place; where a dispatch mode watches, it copies the first argument."""

MADE = "line and module that made it"
"""The name under which a node that backward made keeps where that was: its number may be another's, too."""

States = Callable[[], Iterable[tuple[str, Any]]]
"""Lists an optimizer's tensors by name, as in ("exp_avg of head.weight", tensor)."""

# Phases of one pass through the network: what outlives both was kept for backward
FORWARD = ("forward", "loss")


@dataclass(slots=True, eq=False)
class Storage:
    """One storage from birth to death; `_number_events` sets the numbers of events `born` and `died`."""

    key: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    module: str
    phase: str
    step: int
    micro_batch: int
    recomputation: int
    born: int = -1
    died: int | None = None
    kept: bool = True
    bound: str = ""
    place: Place | None = None
    exact: int = 0
    stream: int = 0

    @property
    def kind(self) -> str:
        if self.bound:
            return self.bound
        made_by_forward = self.phase in FORWARD or self.recomputation
        return "activations" if made_by_forward and self.kept else "temporaries"


SHARED = attrgetter(*(field.name for field in fields(Allocation) if field.name not in ("line", "stream")))
"""The values that an Allocation takes from its Storage as they are."""


@dataclass(frozen=True)
class FailedOperator:
    """An operator that raised: the error's identity, the tensors given as (shape, device), and the line."""

    error: int
    operation: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    line: str


class Tracker(TorchDispatchMode):
    """Tracks one device type's storages while it is entered, and cuBLAS's `workspaces` once per thread.

    Where a `card` is given, also what sums and the backward of embeddings take on it.
    """

    def __init__(self, device: str, workspaces: Workspaces | None = None, card: Gpu | None = None) -> None:
        check_layout(FOLLOWED)
        super().__init__()
        self.device = device
        self._workspaces = workspaces
        self._card = card
        self._convolutions = convolutions.Workspaces()
        self._noted_workspaces: set[tuple[bool, str]] = (
            set()
        )  # workspaces: whether backward's thread has them, and name
        self._left_out: dict[int, weakref.ref] = {}
        self.storages: list[Storage] = []
        self.events: list[tuple[int, Storage]] = []
        self.marks: list[Mark] = []
        self.borders: set[int] = set()  # events over which no free is sorted, besides those of marks
        self.phase = ""
        self.step = 0
        self.micro_batch = 0
        self._live: dict[int, tuple[Storage, weakref.ref]] = {}
        self._recomputation = 0
        self._recomputing = False
        self._recomputing_for = (-1, -1)
        self.modules: list[str] = [""]
        self._hooks: list[Any] = []
        # What the last operator may have added to, and the sum: of two gradients the older one, or a product
        # of matrices. If it dies at once, torch would have added the other into it, had nobody watched.
        self._join: tuple[Storage, Storage] | None = None
        # The newest product of two matrices, and the instruction that called it
        self._product: tuple[Storage | None, tuple[int, int]] = (None, (0, 0))
        self._closed = False
        # line and module of each forward operator, by the number of its autograd node
        self._made: dict[int, tuple[Place | None, str]] = {}
        # how many nodes backward itself has made
        self._by_backward = 0
        self._place: Place | None = None
        self._fused = ""  # the operators of the generated kernel that is about to run
        self._module = ""
        self.states: States = list
        self._patches = ExitStack()
        self.failure: FailedOperator | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in fake_mode

    def __enter__(self) -> "Tracker":
        self._patches.enter_context(ONE_AT_A_TIME)
        self._patches.enter_context(on_this_thread(torch.UntypedStorage, "resize_", self._following_resize()))
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASK_DEVICE:
            return device_of(args[0]) if type(args[0]) is FakeTensor else func(*args)
        if has_made_of_others(types):
            return NotImplemented
        if Work.outermost:
            Work.outermost.go_on()
        # a checkpoint's second forward packs what it saves with gradients off
        if func is not aten.detach.default:
            self._notice_recomputation()
        self._notice_place()
        # As a kernel does it: copies and scratch first, then its results, then what the backward of attention
        # takes for itself; in the end all but the results is free again.
        special = SPECIAL[func] if func in SPECIAL else None  # noqa: SIM401  `get` would be one call more
        taken = taken_before(func, args, self._workspaces) if special and self.device == "cuda" else []
        inside = self._note_scratch(func, taken) if taken and _device(args[0]) == "cuda" else []
        try:
            out = func(*args, **(kwargs or {}))
        except Exception as error:
            self.failure = _failure(error, func, (args, kwargs), self._place)
            raise
        newest = None
        if special:
            for number in not_on_the_gpu(func, args):
                self._leave_out(out[number].untyped_storage())
        results = (out,) if type(out) is FakeTensor else tensors_in((out,))
        for tensor in results:
            newest = self._see(tensor, func) or newest
        if newest is not None:
            self._recognize(func, args, newest)
        if special and special.product:
            self._product = newest, calling_instruction()
        if special and special.own_scratch and self.device == _device(args[0]) == "cuda":
            summed = tuple(args[0].shape) if func in SUMS else ()
            inside += self._note_own_scratch(func, own_scratch(func, args, self._card), summed)
        if special and special.convolution and _device(args[0]) == "cuda":
            self._convolutions.note(func, args, out)
        if special and special.cublas and self._workspaces and _device(args[0]) == self.device:
            self._note_workspaces(func, self._workspaces)
        if inside:
            self.events += [(-one.bytes, one) for one in inside]
        return out

    def _leave_out(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._left_out[key] = weakref.ref(storage, lambda _: self._left_out.pop(key, None))

    def _note_scratch(self, func: Any, taken: Taken) -> list[Storage]:
        """Note what an operator's kernel takes before it begins, and frees when it is done."""
        return [
            self._note_unseen(size, shape, _name(dtype), _operation(func)) for size, shape, dtype in taken
        ]

    def _note_own_scratch(self, func: Any, taken: Own, summed: tuple[int, ...]) -> list[Storage]:
        """Note what an operator's kernel takes after its results; returns what it keeps until it is done.

        What a sum takes is shown with the shape of what is summed.
        """
        kept: list[Storage] = []
        passing: list[Storage] = []
        for size, stays in taken:
            made = self._note_unseen(size, summed or (size,), "uint8", _operation(func))
            (kept if stays else passing).append(made)
            if stays:
                self.events += [(-one.bytes, one) for one in passing]
                passing = []
        return kept + passing

    def _note_unseen(
        self, size: int, shape: tuple[int, ...], dtype: str, operation: str, bound: str = ""
    ) -> Storage:
        """Note memory that is taken inside a kernel, so that no tensor shows it."""
        made = self._storage(0, size, shape, dtype, operation)
        made.kept = False
        made.bound = bound
        return made

    def _note_workspaces(self, func: Any, sizes: Workspaces) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        wanted = {"cuBLAS workspace": sizes.cublas}
        if func in WITH_BIAS:
            wanted["cuBLASLt workspace"] = sizes.lt
        for name, size in wanted.items():
            if size and (in_backward, name) not in self._noted_workspaces:
                self._noted_workspaces.add((in_backward, name))
                self._note_unseen(size, (size,), "uint8", name, "workspaces")

    def _notice_recomputation(self) -> None:
        """Note whether a checkpoint runs its forward again; how is said in `_runs_forward_in_backward`."""
        recomputing = self._runs_forward_in_backward()
        if recomputing and not self._recomputing:
            node = torch._C._current_autograd_node()
            number = node._sequence_nr() if node else -1
            running = (torch._C._current_graph_task_id(), number)
            if running != self._recomputing_for:  # for the same node it is the same recomputation
                self._recomputation += 1
                self._recomputing_for = running
        self._recomputing = recomputing

    def _runs_forward_in_backward(self) -> bool:
        """True if a checkpoint runs its forward again, inside of backward.

        The autograd engine runs with gradients off, and a checkpoint turns them on. Within a module it is
        forward even where a function of its own switches gradients off.
        """
        in_engine = torch._C._current_graph_task_id() != -1
        return in_engine and (torch.is_grad_enabled() or self.modules[-1] != "")

    def _notice_place(self) -> None:
        """Note line and module of this operator; in backward those of the operator's forward.

        A forward operator makes the node with the newest number, and its backward runs for that node.
        """
        self._place, in_engine = calling_place()
        self._fused = ""
        if self._place and is_generated(self._place[0]):
            self._fused, self._place = origin(*self._place)
        # the first part again spares most operators a call
        self._module = self.modules[-1] or self._running()
        if in_engine:
            node: Any = torch._C._current_autograd_node()
            number = node._sequence_nr() if node else -1
            self._place, self._module = self._made.get(number, (None, self._module))
            if self._by_backward and node and MADE in node.metadata:
                self._place, self._module = node.metadata[MADE]
        else:
            self._made.setdefault(newest_node() - 1, (self._place, self._module))

    def number_anew(self, gradients: Iterable[Any], first: int) -> None:
        """Give the nodes that backward made, from number `first` on, the numbers that a GPU's would have.

        Autograd runs the node with the highest number first, and each thread counts for itself. On a GPU
        backward has a thread of its own, so what it makes for a gradient of a gradient runs after all that
        the program made since. Condition of removal: the simulated GPU's backward has such a thread.
        """
        end = newest_node()
        made = calling_place()[0], self._running()
        for node in _nodes(gradients):
            number = node._sequence_nr()
            if first <= number < end:
                node._set_sequence_nr(self._by_backward + number - first)
                node.metadata[MADE] = made
        self._by_backward += end - first

    def _running(self) -> str:
        """The innermost module that runs; outside of all the phase in parentheses, "" in the set-up."""
        if self.modules[-1]:
            return self.modules[-1]
        return f"({self.phase})" if self.phase else ""

    def _see(self, tensor: torch.Tensor, func: Any = None) -> Storage | None:
        """The Storage just born with this tensor; None for a view, an empty one, or another device."""
        if _device(tensor) != self.device:
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:
            raise StepError(
                f"{described(self._place)}: {_operation(func)} makes a tensor of layout {tensor.layout},"
                " and only dense ones are measured: for an embedding leave out sparse=True"
            ) from error
        known = self._live.get(storage._cdata)
        size = storage.nbytes()
        unchanged = known is not None and known[0].exact == size
        if unchanged or storage._cdata in self._left_out:
            return None
        if known is not None:  # resized in place: what was there is gone
            self._free(storage._cdata)
        # compiled code allocates what a kernel then fills
        operation = (self._fused if func is aten.empty_strided.default else "") or _operation(func)
        return self._born(storage, tuple(tensor.shape), _name(tensor.dtype), operation)

    def _born(
        self, storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: str, operation: str
    ) -> Storage | None:
        key = storage._cdata
        size = storage.nbytes()
        if size == 0:
            return None
        born = self._storage(key, size, shape, dtype, operation)
        self._live[key] = (born, weakref.ref(storage, lambda _: self._free(key)))
        return born

    def _storage(self, key: int, size: int, shape: tuple[int, ...], dtype: str, operation: str) -> Storage:
        made = Storage(
            key=key,
            bytes=round_up(size),
            exact=size,
            shape=shape,
            dtype=dtype,
            operation=operation,
            module=self._module,
            phase=self.phase,
            step=self.step,
            micro_batch=self.micro_batch,
            recomputation=self._recomputation if self._recomputing else 0,
            place=self._place,
        )
        self.storages.append(made)
        self.events.append((made.bytes, made))
        return made

    def _following_resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """`UntypedStorage.resize_`, followed: no operator, and FSDP2 frees and fills its buffers with it."""
        resize = torch.UntypedStorage.resize_
        freed: dict[int, Storage] = {}

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            known = self._live.get(storage._cdata)
            before = known[0] if known else freed.pop(storage._cdata, None)
            out = resize(storage, size)
            if before is None or (known is not None and storage.nbytes() == before.exact):
                return out
            if known is not None:
                self._free(storage._cdata)
            self._place = calling_place()[0]
            self._module = self._running()
            born = self._born(storage, before.shape, before.dtype, "resize_")
            if born is None:
                freed[storage._cdata] = before
            else:
                born.bound = before.bound
            return out

        return resize_

    def _free(self, key: int) -> None:
        storage, _ = self._live.pop(key)
        if self._closed:
            return
        if self._join is not None and self._join[0] is storage:
            self._undo_join(*self._join)
            return
        storage.kept = self._outlived_its_pass(storage)
        self.events.append((-storage.bytes, storage))

    def _outlived_its_pass(self, storage: Storage) -> bool:
        if storage.recomputation:
            recomputing = self._recomputing or self._runs_forward_in_backward()
            return not (recomputing and storage.recomputation == self._recomputation)
        same_pass = (self.step, self.micro_batch) == (storage.step, storage.micro_batch)
        return not (same_pass and self.phase in FORWARD)

    def _recognize(self, func: Any, args: Any, newest: Storage) -> None:
        """Recognize, by the operator, autocast's copy of a weight, and what torch adds in place unwatched."""
        self._join = None
        adds = func in INTO_A_COPY
        source = self.known(args[0]) if adds or func is aten._to_copy.default else None
        if source is None:
            return
        copies_weight = func is aten._to_copy.default and source.bound == "parameters"
        # a weight stored in few bits, on its way to numbers, has no floating point
        if copies_weight and args[0].dtype.is_floating_point and (self.phase in FORWARD or self._recomputing):
            newest.bound = "weight_copies"
        joining = adds and self.phase == "backward" and not self._recomputing
        if joining and source.bytes == newest.bytes and not args[0]._is_view():
            self._join = source, newest
        to_a_product = func is aten.add.Tensor and self._product[0] is source and source.bytes == newest.bytes
        if to_a_product and self._product[1] == calling_instruction():
            self._join = source, newest

    def _undo_join(self, old: Storage, new: Storage) -> None:
        """Undo an effect of the observer: unwatched, torch adds into the older of two tensors.

        Autograd does so with gradients, `linear` with a bias, attention with a mask. Condition of removal:
        torch's `InputBuffer::accumulate`, the formulas of derivatives, `linear` (Linear.cpp) and
        `_scaled_dot_product_attention_math` no longer ask whether a dispatch mode or a Python tensor is there
        (`isTensorSubclassLike`).
        """
        self._join = None
        del self.events[last_index(self.events, (new.bytes, new))]
        del self.storages[last_index(self.storages, new)]
        _, reference = self._live.pop(new.key)
        self._live[new.key] = (old, reference)
        old.key = new.key

    def certain(self) -> int:
        """The number of events so far, without the last one if it may be a join that is undone."""
        return len(self.events) - (self._join is not None)

    def known(self, tensor: torch.Tensor) -> Storage | None:
        """The storage of this tensor; None for one that is not followed."""
        if _device(tensor) != self.device:
            return None
        found = self._live.get(tensor.untyped_storage()._cdata)
        return found[0] if found else None

    def bind(self, kind: str, tensors: Iterable[Any], name: str = "") -> None:
        """Say that these tensors' storages are of `kind`, whenever they were born, and whose they are."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._see(part)
                storage = self.known(part)
                if storage is not None:
                    storage.bound = kind
                    storage.module = name or storage.module

    def watch(self, network: torch.nn.Module, states: States) -> None:
        """Follow a network's parameters, gradients and modules; `states` lists the optimizer's tensors."""
        self.states = states
        for name, parameter in network.named_parameters():
            self.bind("parameters", [parameter], name)
            if parameter.requires_grad:
                hook = partial(self._bind_gradient, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        for name, buffer in network.named_buffers():  # weights stored in few bits are buffers
            self.bind("parameters", [buffer], name)
        self.bind_states()
        for path, module in network.named_modules():
            name = path or type(network).__name__
            enter = UnlessCompiling(partial(self._enter_module, name))
            self._hooks.append(module.register_forward_pre_hook(enter))
            leave = UnlessCompiling(self._leave_module)
            self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _bind_gradient(self, name: str, owner: torch.Tensor) -> None:
        self.bind("gradients", [owner.grad], name)

    def _enter_module(self, name: str, *_: Any) -> None:
        self.modules.append(name)

    def _leave_module(self, *_: Any) -> None:
        self.modules.pop()

    def bind_states(self) -> None:
        """Bind the optimizer's tensors, at the end of its step."""
        for name, tensor in self.states():
            self.bind("optimizer_states", [tensor], name)

    def begin(self, phase: str) -> AbstractContextManager[None]:
        """Name what happens from now on."""
        self.phase = phase
        self.marks.append(Mark(len(self.events), self.step, phase))
        return nullcontext()

    in_phase = begin

    def _number_events(self) -> None:
        """Write down when each storage was born and died.

        Not before, as Python may free one between any two lines.
        """
        for index, (size, storage) in enumerate(self.events):
            if size > 0:
                storage.born = index
            else:
                storage.died = index

    def order_frees(self) -> None:
        """Sort each unbroken run of frees by birth: autocast drops its copies in a hash table's order."""
        self._number_events()
        borders = self.borders | {mark.event for mark in self.marks}
        unbroken: list[int] = []
        closed = [*self.events, (1, None)]  # one more birth, which ends the last run
        for event, (size, _) in enumerate(closed):
            if size > 0 or event in borders:
                freed = sorted((self.events[index] for index in unbroken), key=lambda item: item[1].born)
                for index, item in zip(unbroken, freed, strict=True):
                    self.events[index] = item
                unbroken = []
            if size < 0:
                unbroken.append(event)

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._patches.close()
        self._closed = True
        self._left_out.clear()
        self._live.clear()  # nothing is to be heard of any more, and nothing to be kept alive
        self.states = list
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.order_frees()

    def measurement(self, ends: list[int], losses: list[float], provenance: Provenance) -> Measurement:
        """The measurement of the steps that ended at these event counts; the peak is that of the last one."""
        last_step = ends[-2] if len(ends) > 1 else 0
        peak = self.peak_event(since=last_step)
        return Measurement(
            breakdown=self.at(peak, "peak"),
            moments=self._moments(ends),
            timeline=self.timeline(),
            provenance=provenance,
            peak_event=peak,
            allocations=self.allocations(),
            losses=losses,
            phase_peaks=self.phase_peaks(last_step),
            not_predicted=dict(self._convolutions.seen) if provenance.source == "simulated" else {},
        )

    def _moments(self, ends: list[int]) -> dict[str, MemoryBreakdown]:
        """Moments of the last pass with a backward, as far as it had them, and each step's end, by name."""
        phases = [mark.phase for mark in self.marks]
        starts = [*(mark.event for mark in self.marks), ends[-1]]
        events: dict[str, int] = {}
        if "backward" in phases:
            backward = last_index(phases, "backward")
            forward = last_index(phases[:backward], "forward")
            after_forward = phases.index("loss", forward) if "loss" in phases[forward:backward] else backward
            events |= {"end of forward": starts[after_forward], "after loss": starts[backward]}
            events["end of backward"] = starts[backward + 1]
        events |= {f"end of step {step}": end for step, end in enumerate(ends, start=1)}
        return {name: self.at(event, name) for name, event in events.items()}

    def timeline(self) -> Timeline:
        """Every allocation and free so far, with its kind."""
        return Timeline([(size, storage.kind) for size, storage in self.events], list(self.marks))

    def peak_event(self, since: int = 0) -> int:
        """The number of events up to the moment with the most bytes allocated, from event `since` on."""
        now = 0
        peak = -1
        event = since
        for index, (size, _) in enumerate(self.events):
            now += size
            if index >= since and now > peak:
                peak = now
                event = index + 1
        return event

    def phase_peaks(self, since: int) -> dict[str, MemoryBreakdown]:
        """The highest point of each phase from event `since` on, by the phase's name."""
        totals = list(accumulate(size for size, _ in self.events))
        ends = [mark.event for mark in self.marks[1:]] + [len(self.events)]
        highest: dict[str, int] = {}
        for mark, end in zip(self.marks, ends, strict=True):
            if mark.event >= since and end > mark.event:
                event = max(range(mark.event, end), key=totals.__getitem__)
                if mark.phase not in highest or totals[event] > totals[highest[mark.phase]]:
                    highest[mark.phase] = event
        return {phase: self.at(event + 1, f"peak of {phase}") for phase, event in highest.items()}

    def at(self, event: int, label: str = "") -> MemoryBreakdown:
        """Bytes by kind when `event` events had happened."""
        sizes: Counter[str] = Counter()
        for size, storage in self.events[:event]:
            sizes[storage.kind] += size
        phases = [mark.phase for mark in self.marks if mark.event < event]
        return MemoryBreakdown(dict(sizes), phase=phases[-1] if phases else "", label=label)

    def allocations(self) -> list[Allocation]:
        """Every storage, in order of birth."""
        self._number_events()
        line_of = cache(described)  # many storages are of one place
        return [
            Allocation(*SHARED(item), line=line_of(item.place), stream=item.stream) for item in self.storages
        ]


def _nodes(gradients: Iterable[Any]) -> Iterator[Any]:
    """Every node of autograd that these gradients come from."""
    left = [one.grad_fn for one in gradients if one is not None and one.grad_fn is not None]
    seen = set[Any]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions if before is not None]
            yield node


@cache
def has_made_of_others(kinds: tuple[type, ...]) -> bool:
    """True if one of these classes, as DTensor, turns each operator into some on tensors that it holds."""
    return any(issubclass(kind, torch.Tensor) and is_traceable_wrapper_subclass_type(kind) for kind in kinds)


def _parts(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's data: itself, or those that a tensor made of others is made of."""
    if not isinstance(value, torch.Tensor):
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # inside of torch.func.grad or vmap
        yield from _parts(torch._C._functorch.get_unwrapped(value))
    elif is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    else:
        yield value


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, and in its lists of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def last_index(items: list[Any], wanted: Any) -> int:
    return next(index for index in range(len(items) - 1, -1, -1) if items[index] == wanted)


def _failure(error: Exception, func: Any, given: Any, place: Place | None) -> FailedOperator:
    """Describe the arguments of an operator that raised, without keeping a tensor alive."""
    leaves = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
    tensors = tuple((tuple(leaf.shape), _device(leaf)) for leaf in leaves)
    return FailedOperator(id(error), _operation(func), tensors, described(place))


def _device(tensor: torch.Tensor) -> str:
    """The type of a tensor's device. A fake tensor's `.device` is an operator, which costs a dispatch."""
    if type(tensor) is FakeTensor:
        return tensor.fake_device.type
    return tensor.device.type


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _operation(func: Any) -> str:
    if func is None:
        return "set-up"
    return str(func).removeprefix("aten.").rsplit(".", 1)[0]
