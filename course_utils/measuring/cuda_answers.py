"""Answers of a simulated GPU when a step calls functions of `torch.cuda` or `torch.accelerator`.

Functions that ask, wait, give back a cache or begin another stream are answered; usual others raise
StepError.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
import torch._subclasses.fake_tensor as fake_tensor

from ..errors import StepError
from .call_site import calling_place, described
from .memory import CARD, Memory
from .patches import on_this_thread

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
def answered(memory: Memory) -> Iterator[None]:
    """Inside, this thread's questions to torch.cuda and torch.accelerator are answered; see `answers`."""
    with ExitStack() as stack:
        for owner, name, answer in answers(memory):
            if isinstance(answer, type):
                answer = class_of_this_thread(getattr(owner, name), answer)
            plain_function = callable(answer) and not isinstance(answer, type)
            replace_it = on_this_thread if plain_function else mock.patch.object
            stack.enter_context(replace_it(owner, name, answer))
        yield


def answers(memory: Memory) -> list[tuple[Any, str, Any]]:
    """The owner, name and replacement of everything that is answered, without names that this torch lacks.

    `memory` is what torch's counters are to say.
    """
    refused = {name: partial(_refuse, name) for name in REFUSED}
    cuda = {**OF_CARD, **OF_WORK, **_of_memory(memory), **refused}
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
        (fake_tensor.FakeTensorMode, {"avoid_device_init": True}),
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


PROPERTIES = SimpleNamespace(
    name=CARD.name,
    total_memory=CARD.room,
    warp_size=32,
    major=CARD.capability[0],
    minor=CARD.capability[1],
    multi_processor_count=108,
)
SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
OF_CARD: dict[str, Any] = {
    **dict.fromkeys(
        ("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported"), _always(True)
    ),
    "get_device_name": partial(_of_one, _always(CARD.name)),
    "get_device_capability": partial(_of_one, _always(CARD.capability)),
    "get_device_properties": partial(_of_one, _always(PROPERTIES)),
    "device_count": _always(1),
    "current_device": _always(0),
    "get_arch_list": _always(["sm_{}{}".format(*CARD.capability)]),
    "init": _nothing,
    "set_device": partial(_of_one, _nothing),
    "device": OneDevice,
    "device_of": nullcontext,
}
OF_WORK: dict[str, Any] = {
    **dict.fromkeys(("ipc_collect", "set_stream", *SEEDS), _nothing),
    **dict.fromkeys(("stream", "StreamContext"), nullcontext),
    **dict.fromkeys(("current_stream", "default_stream"), partial(_of_one, SimulatedStream)),
    "initial_seed": _always(0),
    "Stream": SimulatedStream,
    "Event": SimulatedEvent,
    "synchronize": partial(_of_one, _nothing),
    "is_current_stream_capturing": _always(False),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),  # a seed and an offset
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8, device="cpu")],
}


def _of_memory(memory: Memory) -> dict[str, Any]:
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
