"""Answers of a simulated GPU when a step calls functions of `torch.cuda` or `torch.accelerator`.

Functions that ask, wait, give back a cache or begin another stream are answered; usual others raise
StepError. Counters of memory are those of the caching allocator's rules, for what a tracker sees.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
import torch._subclasses.fake_tensor as fake_tensor

from ..allocator.policy import CachingAllocator, OutOfMemory
from ..errors import StepError
from ..gpus import IMITATED, Gpu
from ..units import binary
from .call_site import calling_place, described
from .patching import on_this_thread

CARD = replace(IMITATED, name="simulated GPU")

INSTEAD = "Leave this out of the step, or measure it with source='live' on a GPU"

REFUSED = (
    "can_device_access_peer",
    "clock_rate",
    "device_memory_used",
    "graph",
    "host_memory_stats",
    "list_gpu_processes",
    "make_graphed_callables",
    "memory_snapshot",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "memory_usage",
    "power_draw",
    "set_per_process_memory_fraction",
    "temperature",
    "use_mem_pool",
    "utilization",
)
"""Functions of torch.cuda that need the hardware, its driver, or an allocator that hands its memory out."""

NAMES_OF_ACCELERATOR = {
    "current_device_index": "current_device", "device_index": "device", "empty_host_cache": "ipc_collect",
    "get_memory_info": "mem_get_info", "set_device_index": "set_device",
}  # fmt: skip
"""Functions of torch.accelerator that have torch.cuda's answers under another name."""


@contextmanager
def answered(memory: "Memory") -> Iterator[None]:
    """Inside, this thread's questions to torch.cuda and torch.accelerator are answered; see `answers`."""
    with ExitStack() as stack:
        for owner, name, answer in answers(memory):
            if isinstance(answer, type):
                answer = class_of_this_thread(getattr(owner, name), answer)
            plain_function = callable(answer) and not isinstance(answer, type)
            replace_it = on_this_thread if plain_function else mock.patch.object
            stack.enter_context(replace_it(owner, name, answer))
        yield


def answers(memory: "Memory") -> list[tuple[Any, str, Any]]:
    """The owner, name and replacement of everything that is answered, without names that this torch lacks.

    `memory` is what torch's counters are to say, and the card that they belong to.
    """
    refused = {name: partial(_refuse, name) for name in REFUSED}
    cuda = {**_of_card(memory.card), **OF_WORK, **_of_memory(memory), **refused}
    accelerator = {name: answer for name, answer in cuda.items() if name != "get_device_capability"}
    accelerator |= {name: cuda[same] for name, same in NAMES_OF_ACCELERATOR.items()}
    accelerator["current_accelerator"] = _always(torch.device("cuda"))
    marks = dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _always(0))
    found = [
        *((owner, cuda) for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)),
        (torch.cuda.graphs, cuda),
        (torch.cuda.nvtx, {**marks, "range": nullcontext}),
        (torch.cuda.profiler, {"start": _nothing, "stop": _nothing, "profile": nullcontext}),
        (torch.accelerator, accelerator),
        (torch.accelerator.memory, accelerator),
        (torch.Tensor, {"record_stream": _nothing}),
        # torch's fake tensors ask `is_available`, too, and would make a real tensor on a GPU that says yes.
        # This goes when torch asks its own build.
        (fake_tensor, {} if torch.cuda.is_available() else {"init_gpu_context": _nothing}),
        (fake_tensor.log, {"disabled": True}),  # else a wrong shape writes a page before its error
    ]
    return [
        (owner, name, answer)
        for owner, those in found
        for name, answer in those.items()
        if hasattr(owner, name)
    ]


def class_of_this_thread(original: Any, answer: type) -> type:
    """A class that makes `answer` on this thread, on others `original`; instances of both are of it."""
    here = threading.get_ident()

    class Chosen(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            make = answer if threading.get_ident() == here else original
            return make(*args, **kwargs)

        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, (original, answer))

    return Chosen(answer.__name__, (), {})


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise StepError(_where(f"a simulated GPU has no answer to torch.cuda.{name}(). {INSTEAD}"))


def _where(words: str) -> str:
    place, _ = calling_place()
    return f"{described(place)}: {words}" if place else words


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, as a simulated GPU does to wait, or to change the stream."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _of_one(answer: Callable[..., Any], device: Any = None) -> Any:
    """An answer about one device, which has to be the only one."""
    check_device(device)
    return answer()


def check_device(device: Any) -> None:
    """Raise StepError for a device that is neither None nor the simulated GPU."""
    if isinstance(device, int):
        asked = torch.device("cuda", max(device, 0))
    else:
        asked = torch.device(device or "cuda")
    if asked.type != "cuda" or asked.index not in (None, 0):
        raise StepError(_where(f"{device!r} does not exist: only one GPU is simulated, cuda:0"))


class OneDevice(nullcontext):
    """`torch.cuda.device`: a block on the one device that there is."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        check_device(device)
        self.idx = self.prev_idx = 0


class SimulatedStream(nullcontext):
    """A stream on which nothing happens, so that all of it has happened."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__(self)
        check_device(device)
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.stream_id = self.cuda_stream = self.device_index = 0

    def record_event(self, event: Any = None) -> Any:
        return event or SimulatedEvent()

    query = _always(True)
    is_capturing = _always(False)
    synchronize = wait_event = wait_stream = _nothing


class SimulatedEvent:
    """A mark that has been passed at once, and at no time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def elapsed_time(self, end_event: Any) -> float:
        raise StepError(_where(f"a simulated GPU computes nothing, so events measure no time. {INSTEAD}"))

    query = _always(True)
    record = wait = synchronize = _nothing


SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
OF_WORK: dict[str, Any] = {
    **dict.fromkeys(("ipc_collect", "set_stream", "set_sync_debug_mode", *SEEDS), _nothing),
    **dict.fromkeys(("stream", "StreamContext"), nullcontext),
    **dict.fromkeys(("current_stream", "default_stream"), partial(_of_one, SimulatedStream)),
    "initial_seed": _always(0),
    "Stream": SimulatedStream,
    "Event": SimulatedEvent,
    "synchronize": partial(_of_one, _nothing),
    "is_current_stream_capturing": _always(False),
    "get_sync_debug_mode": _always(0),
    "get_allocator_backend": _always("native"),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),  # a seed and an offset
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8, device="cpu")],
}


def _of_card(card: Gpu) -> dict[str, Any]:
    """Answers that depend on which card it is; a card of the catalog has the catalog's name."""
    return {
        **dict.fromkeys(("is_available", "is_initialized"), _always(True)),
        "is_bf16_supported": partial(_supports_bf16, card),
        "is_tf32_supported": _always(card.has_bf16),
        "get_device_name": partial(_of_one, _always(card.name)),
        "get_device_capability": partial(_of_one, _always(card.capability)),
        "get_device_properties": partial(_of_one, _always(properties_of(card))),
        "device_count": _always(1),
        "current_device": _always(0),
        "get_arch_list": _always(["sm_{}{}".format(*card.capability)]),
        "init": _nothing,
        "set_device": partial(_of_one, _nothing),
        "device": OneDevice,
        "device_of": nullcontext,
    }


def _supports_bf16(card: Gpu, including_emulation: bool = True) -> bool:
    """True where the card has bf16, or may emulate it, as every older one does (torch/cuda/__init__.py)."""
    return card.has_bf16 or including_emulation


THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Resident threads per multiprocessor, by compute capability; on every other card of the catalog 2,048.

The CUDA C++ programming guide has them, and 65,536 registers for all ("Compute Capabilities").
"""


def properties_of(card: Gpu) -> SimpleNamespace:
    """The answer of `get_device_properties`, as far as it is known of this card."""
    major, minor = card.capability
    known = {"multi_processor_count": card.processors} if card.processors else {}
    return SimpleNamespace(
        name=card.name,
        gcnArchName=card.name,  # of an NVIDIA card torch has its name here, too
        total_memory=card.room,
        warp_size=32,
        major=major,
        minor=minor,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=THREADS.get(card.capability, 2048),
        **known,
    )


def _of_memory(memory: "Memory") -> dict[str, Any]:
    of_one: dict[str, Callable[[], Any]] = {
        "memory_allocated": lambda: memory.followed().allocator.allocated,
        "max_memory_allocated": lambda: memory.followed().most_allocated,
        "memory_reserved": lambda: memory.followed().allocator.reserved,
        "max_memory_reserved": lambda: memory.followed().most_reserved,
        "memory_stats": memory.statistics,
        "mem_get_info": memory.free_and_total,
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), memory.reset_peaks),
        "empty_cache": memory.empty_cache,
        "reset_accumulated_memory_stats": _nothing,
    }
    return {name: partial(_of_one, answer) for name, answer in of_one.items()}


class Memory:
    """A card's counters after the events so far: (bytes, storage) allocates, (−bytes, storage) frees."""

    def __init__(self, events: Callable[[], Sequence[tuple[int, Any]]], card: Gpu = CARD) -> None:
        self.card = card
        self._events = events
        self._since = 0
        self._room: int | None = None
        self._fraction = 1.0
        self._capacity: int | None = None
        self._taken = 0
        self._emptied_at = set[int]()  # the numbers of events after which a program called empty_cache
        self._begin()

    def _begin(self) -> None:
        self.allocator = CachingAllocator(self._capacity)
        self._addresses: dict[int, int] = {}
        self._done: list[tuple[int, Any]] = []
        self.emptied: list[int] = []  # the numbers of events after which the cache was given back
        self.most_allocated = self.most_reserved = self.most_requested = self.failures = 0

    def limit(self, capacity: int | None, taken: int = 0) -> None:
        """Run out of memory at `capacity` bytes from now on; with None, never.

        `taken` are bytes of the card that no tensor has, such as CUDA's context.
        """
        self._room = capacity
        self._taken = taken
        self._set_capacity()

    def allow(self, fraction: float, device: Any = None) -> None:
        """Answer torch.cuda.set_per_process_memory_fraction: run out of memory at this part of the card.

        Raises ValueError as torch does for what is no part.
        """
        check_device(device)
        if not isinstance(fraction, float) or not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._fraction = fraction
        self._set_capacity()

    def _set_capacity(self) -> None:
        capacity = self._room
        if self._fraction < 1:
            there = self.card.room if capacity is None else capacity + self._taken
            allowed = int(self._fraction * there)
            capacity = allowed if capacity is None else min(capacity, allowed)
        self._capacity = self.allocator.capacity = capacity

    def followed(self, certain: int | None = None) -> "Memory":
        """These counters, up to the newest event or the number of those that are `certain`.

        Raises torch.OutOfMemoryError, with torch's own words, for the allocation that finds no room.
        """
        events = self._events()
        done = len(self._done)
        taken_back = done > 0 and (len(events) < done or events[done - 1] is not self._done[-1])
        if taken_back:  # the tracker undid an event that these counters include
            self._begin()
        for event in events[len(self._done) : certain]:
            self._follow(*event)
            self._done.append(event)
            if self.count in self._emptied_at:
                self._give_back()
        return self

    def _follow(self, size: int, storage: Any) -> None:
        if len(self._done) == self._since:
            self._restart_peaks()
        if size < 0:
            self.allocator.free(self._addresses.pop(id(storage)))
            return
        retries = self.allocator.retries
        refused = ""
        try:
            self._addresses[id(storage)] = self.allocator.malloc(size, getattr(storage, "stream", 0))
        except OutOfMemory as error:
            refused = _as_torch_says_it(error, self._taken)
        # the allocator gives its cache back before it tries again
        self.emptied += [len(self._done)] * (self.allocator.retries - retries)
        if refused:  # raised here, without a context whose frames would keep the caller's tensors alive
            self.failures += 1
            raise torch.OutOfMemoryError(refused)
        self.most_allocated = max(self.most_allocated, self.allocator.allocated)
        self.most_reserved = max(self.most_reserved, self.allocator.reserved)
        self.most_requested = max(self.most_requested, self.allocator.requested)

    @property
    def limited(self) -> bool:
        """True if there is a capacity."""
        return self._capacity is not None

    @property
    def count(self) -> int:
        """The number of events that these counters include."""
        return len(self._done)

    def reset_peaks(self) -> None:
        """Count the most allocated and reserved anew from here."""
        self.followed()
        self._since = len(self._done)
        self._restart_peaks()

    def _restart_peaks(self) -> None:
        self.most_allocated = self.allocator.allocated
        self.most_reserved = self.allocator.reserved
        self.most_requested = self.allocator.requested

    def empty_cache(self) -> None:
        """Give back to the driver what holds no tensor."""
        self._emptied_at.add(self.followed().count)
        self._give_back()

    def _give_back(self) -> None:
        self.allocator.empty_cache()
        self.emptied.append(self.count)

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that the driver still has, and all that a program gets of the card."""
        capacity = self._room or self.card.room
        return max(0, capacity - self.followed().allocator.reserved), capacity + self._taken

    def statistics(self) -> dict[str, int]:
        """The counters that `torch.cuda.memory_stats` has, as far as they are known here."""
        allocator = self.followed().allocator
        segments = allocator.segments()
        now = {
            "allocated_bytes": (allocator.allocated, self.most_allocated),
            "active_bytes": (allocator.allocated, self.most_allocated),
            "reserved_bytes": (allocator.reserved, self.most_reserved),
            "requested_bytes": (allocator.requested, self.most_requested),
            "inactive_split_bytes": (allocator.stuck, None),
            "segment": (len(segments), None),
            "active": (sum(block.allocated for blocks in segments for block in blocks), None),
        }
        found = {"num_alloc_retries": allocator.retries, "num_ooms": self.failures}
        for name, (current, most) in now.items():
            found[f"{name}.all.current"] = current
            if most is not None:
                found[f"{name}.all.peak"] = most
        return found


def _as_torch_says_it(error: OutOfMemory, taken: int) -> str:
    free = max(0, error.capacity - error.reserved)
    return (
        f"CUDA out of memory. Tried to allocate {binary(error.attempted)}."
        f" GPU 0 (simulated) has a total capacity of {binary(error.capacity + taken)}"
        f" of which {binary(free)} is free."
        f" Of the allocated memory {binary(error.allocated)} is allocated by PyTorch,"
        f" and {binary(error.reserved - error.allocated)} is reserved by PyTorch but unallocated."
    )
