"""Answers of a simulated GPU when a step calls functions of `torch.cuda` or `torch.accelerator`.

There are three kinds. Functions that ask, or that have a GPU do what a simulated one need not do (wait, give back its
cache, begin another stream), are answered. Those that need a real GPU raise StepError. The rest works without a GPU.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NoReturn
from unittest import mock

import torch

from ..errors import StepError
from ..gpus import Gpu, gpu
from .patches import on_this_thread
from .places import calling_place, described

CARD = replace(gpu("A100-80GB"), name="simulated GPU")
"""The card that answers where none is named: it computes in bf16 and has every kernel that the course knows."""

INSTEAD = "Leave this out of the step, or measure it with source='live' on a GPU"

ONE_GPU = 0  # The index of the only simulated GPU

REFUSED = {
    "its memory is counted here, but no allocator hands it out": (
        "CUDAPluggableAllocator MemPool caching_allocator_alloc caching_allocator_delete caching_allocator_disabled "
        "caching_allocator_enable change_current_allocator host_memory_stats host_memory_stats_as_nested_dict "
        "memory_snapshot memory_stats_as_nested_dict memory_summary set_per_process_memory_fraction use_mem_pool"
    ),
    "nothing is computed, so nothing can be captured": "CUDAGraph graph graph_pool_handle make_graphed_callables",
    "there is no driver, and no library of NVIDIA's": (
        "ExternalStream GreenContext check_error cudart current_blas_handle current_solver_handle "
        "get_stream_from_external"
    ),
    "there is no hardware to look at": (
        "clock_rate device_memory_used list_gpu_processes memory_usage power_draw temperature utilization"
    ),
    "there is only one": "can_device_access_peer",
}
"""Functions and classes of torch.cuda that need a real GPU, by the reason that the message gives."""

REFUSED_OF_ACCELERATOR = {
    "nothing is computed, so nothing can be captured": "Graph",
    "of the formats that a GPU computes in, only bf16 is known": "get_device_capability",
}

SAME_OF_ACCELERATOR = (
    "current_stream", "device_count", "empty_cache", "is_available", "max_memory_allocated", "max_memory_reserved",
    "memory_allocated", "memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    "set_stream", "synchronize",
)  # fmt: skip
NAMES_OF_ACCELERATOR = {
    "current_device_idx": "current_device", "current_device_index": "current_device", "device_index": "device",
    "empty_host_cache": "ipc_collect", "get_memory_info": "mem_get_info", "set_device_idx": "set_device",
    "set_device_index": "set_device",
}  # fmt: skip
"""Functions of torch.accelerator that have torch.cuda's answers: of the same name, and of another one."""


@contextmanager
def answered(card: Gpu = CARD, sizes: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
    """Inside, this thread's questions to torch.cuda and torch.accelerator are answered for `card`; see `answers`."""
    with ExitStack() as stack:
        for path, answer in answers(card, sizes).items():
            owner, name = _named(path.rpartition(".")[0]), path.rpartition(".")[2]
            if isinstance(answer, type):
                answer = _class_of_this_thread(getattr(owner, name), answer)
            plain_function = callable(answer) and not isinstance(answer, type)
            replace_it = on_this_thread if plain_function else mock.patch.object
            stack.enter_context(replace_it(owner, name, answer))
        yield


def answers(card: Gpu = CARD, sizes: Callable[[], Sequence[int]] = tuple) -> dict[str, Any]:
    """The replacement for each name, as in {"torch.cuda.get_device_name": …}, while `card` is simulated.

    `sizes` returns the bytes of every allocation so far, and of every free, negative, in order. Names that this torch
    lacks are left out.
    """
    cuda = {**_of_card(card), **_of_work(), **Memory(sizes, card).answers(), **_refusals("torch.cuda", REFUSED)}
    accelerator = {
        **{name: cuda[name] for name in SAME_OF_ACCELERATOR},
        **{name: cuda[same] for name, same in NAMES_OF_ACCELERATOR.items()},
        "current_accelerator": _always(torch.device("cuda")),
        **_refusals("torch.accelerator", REFUSED_OF_ACCELERATOR),
    }
    marks = {**dict.fromkeys(("range_push", "range_pop", "range_start"), _always(0)), "range": nullcontext}
    found = {
        "torch.cuda": cuda,
        **{f"torch.cuda.{module}": cuda for module in ("memory", "random", "streams", "graphs")},
        "torch.cuda.nvtx": {**marks, "range_end": _nothing, "mark": _nothing},
        "torch.cuda.profiler": {"start": _nothing, "stop": _nothing, "profile": nullcontext},
        "torch.accelerator": accelerator,
        "torch.accelerator.memory": accelerator,
        "torch.Tensor": {"record_stream": _nothing},
        # torch's fake tensors ask `is_available`, too, and would make a real tensor on a GPU that says yes.
        "torch._subclasses.fake_tensor.FakeTensorMode": {"avoid_device_init": True},
        "torch._subclasses.fake_tensor": {} if torch.cuda.is_available() else {"init_gpu_context": _nothing},
    }
    named = {(path, name): answer for path, those in found.items() for name, answer in those.items()}
    return {f"{path}.{name}": answer for (path, name), answer in named.items() if hasattr(_named(path), name)}


def _named(path: str) -> Any:
    thing: Any = torch
    for part in path.split(".")[1:]:
        thing = getattr(thing, part, None)
    return thing


def _class_of_this_thread(original: Any, answer: type) -> type:
    """A class that makes `answer` on this thread, on others `original`; what either has made is of this class."""
    here = threading.get_ident()

    class Chosen(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (answer if threading.get_ident() == here else original)(*args, **kwargs)

        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, (original, answer))

    return Chosen(answer.__name__, (), {})


def _refusals(module: str, names: dict[str, str]) -> dict[str, Any]:
    return {name: _refusal(f"{module}.{name}", reason) for reason, several in names.items() for name in several.split()}


def _refusal(name: str, reason: str) -> Any:
    """A function that raises StepError, or a class, as others ask whether a thing is of that class."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StepError(_where(f"a simulated GPU has no answer to {name}(): {reason}. {INSTEAD}"))

    short = name.rpartition(".")[2]
    is_class = isinstance(getattr(torch.cuda, short, None), type)
    return type(short, (), {"__new__": refuse}) if is_class else refuse


def _where(words: str) -> str:
    place, _ = calling_place()
    return f"{described(place)}: {words}" if place else words


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, as a simulated GPU does to wait, or to change the stream."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class Properties:
    """The result of `get_device_properties`: of the card what is known."""

    def __init__(self, card: Gpu) -> None:
        self.name, self.total_memory, self.warp_size = card.name, card.room, 32
        self.major, self.minor = card.capability

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StepError(_where(f"a simulated GPU has no {name}. {INSTEAD}"))


def _of_card(card: Gpu) -> dict[str, Any]:
    architecture = "".join(map(str, card.capability))
    facts = {
        "get_device_name": card.name,
        "get_device_capability": card.capability,
        "get_device_properties": Properties(card),
        "get_per_process_memory_fraction": 1.0,
    }
    others = {
        **dict.fromkeys(("is_available", "is_initialized"), True),
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), card.has_bf16),
        "device_count": 1,
        "current_device": ONE_GPU,
        "get_arch_list": [f"sm_{architecture}"],
        "get_gencode_flags": f"-gencode compute=compute_{architecture},code=sm_{architecture}",
        "get_allocator_backend": "native",
    }
    return {
        **{name: _of_one(_always(value)) for name, value in facts.items()},
        **{name: _always(value) for name, value in others.items()},
        "init": _nothing,
        "set_device": _of_one(_nothing),
        "device": OneDevice,
        "device_of": nullcontext,
    }


def _of_one(answer: Callable[..., Any]) -> Callable[..., Any]:
    """An answer about one device, which has to be the only one."""

    def asked(device: Any = None) -> Any:
        _check_device(device)
        return answer()

    return asked


def _check_device(device: Any) -> None:
    """Raise StepError for a device that is neither None nor the simulated GPU."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    kind = "cuda" if isinstance(device, int) or device is None else torch.device(device).type
    if kind != "cuda" or index not in (None, ONE_GPU, -1):
        raise StepError(_where(f"{device!r} is not there: one GPU is simulated, cuda:{ONE_GPU}"))


class OneDevice(nullcontext):
    """`torch.cuda.device`: a block on the one device that there is."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        _check_device(device)
        self.idx = self.prev_idx = ONE_GPU


class SimulatedStream(nullcontext):
    """A stream on which nothing happens, so that all of it has happened."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__()
        _check_device(device)
        self.device, self.priority = torch.device("cuda", ONE_GPU), priority
        self.stream_id = self.cuda_stream = self.device_index = 0

    def record_event(self, event: Any = None) -> Any:
        return event or SimulatedEvent()

    def __enter__(self) -> "SimulatedStream":
        return self

    query, is_capturing = _always(True), _always(False)
    synchronize = wait_event = wait_stream = _nothing


class SimulatedEvent:
    """A mark that has been passed at once, and at no time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", ONE_GPU)

    def elapsed_time(self, end_event: Any) -> float:
        raise StepError(_where(f"a simulated GPU computes nothing, so no time passes between two events. {INSTEAD}"))

    query = _always(True)
    record = wait = synchronize = _nothing


def _of_work() -> dict[str, Any]:
    seeds = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
    return {
        **dict.fromkeys(("ipc_collect", "set_sync_debug_mode", "set_stream", *seeds), _nothing),
        **dict.fromkeys(("stream", "StreamContext"), nullcontext),
        **dict.fromkeys(("current_stream", "default_stream"), _of_one(SimulatedStream)),
        **dict.fromkeys(("get_sync_debug_mode", "initial_seed"), _always(0)),
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "synchronize": _of_one(_nothing),
        "is_current_stream_capturing": _always(False),
        "get_rng_state": _rng_state,
        "get_rng_state_all": lambda: [_rng_state()],
    }


def _rng_state(*_: Any) -> torch.Tensor:
    """A seed and an offset, as a GPU's generator has them, in 16 bytes of the host's memory."""
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
RESETS_OF_NOTHING = (
    "reset_accumulated_memory_stats", "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats",
)  # fmt: skip


@dataclass
class Memory:
    """Bytes that the simulation has counted, as torch's own counters give them.

    `reserved` is what was allocated at the highest point since the step began: the allocator keeps what it once had.
    A real one reserves somewhat more, as it splits and rounds; `course_utils.allocator.replay` says how much.
    """

    sizes: Callable[[], Sequence[int]]
    card: Gpu
    since: int = 0

    def allocated(self) -> int:
        return sum(self.sizes())

    def peak(self) -> int:
        """The most bytes in tensors since the peak began anew."""
        return max(list(accumulate(self.sizes(), initial=0))[self.since :])

    def reserved(self) -> int:
        """The most bytes in tensors since the step began."""
        return max(accumulate(self.sizes(), initial=0))

    def reset_peak(self) -> None:
        self.since = len(self.sizes())

    def statistics(self) -> dict[str, int]:
        """The counters that `torch.cuda.memory_stats` has, as far as they are known here."""
        now, peak, reserved = self.allocated(), self.peak(), self.reserved()
        counted = {"allocated_bytes": (now, peak), "active_bytes": (now, peak), "reserved_bytes": (reserved, reserved)}
        found = {"num_alloc_retries": 0, "num_ooms": 0}
        for name, (current, most) in counted.items():
            found |= {f"{name}.all.current": current, f"{name}.all.peak": most}
        return found

    def answers(self) -> dict[str, Any]:
        reserved = ("memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached")
        of_one = {
            "memory_allocated": self.allocated,
            "max_memory_allocated": self.peak,
            **dict.fromkeys(reserved, self.reserved),
            "memory_stats": self.statistics,
            "mem_get_info": lambda: (self.card.room - self.reserved(), self.card.room),
            **dict.fromkeys(RESETS, self.reset_peak),
            **dict.fromkeys(RESETS_OF_NOTHING, _nothing),
        }
        return {"empty_cache": _nothing, **{name: _of_one(answer) for name, answer in of_one.items()}}
