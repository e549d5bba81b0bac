"""A card that is not there: torch's CPU tensors, counted, and no more of them than fit.

What asks torch for a CUDA GPU gets the CPU's tensors, these counters, and torch's error when
the memory is full; everything else is the code that runs on a GPU.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils.measuring import live, own_step
from course_utils.measuring.devices import Cuda
from course_utils.units import GiB, MiB, round_up

NAME = "a stand-in"
CAPABILITY = (8, 0)


class LimitedMemory(TorchDispatchMode):
    """Counts bytes of CPU tensors made inside; torch's error beyond `room`. Only a mode is told of all
    operators.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.allocated, self.peak = room, 0, 0
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and not isinstance(tensor, FakeTensor)
                and tensor.device.type == "cpu"
            ):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = round_up(storage.nbytes())
        if key in self._live or not size:
            return
        if self.allocated + size > self.room:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / MiB:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.room / GiB:.2f} GiB of which {(self.room - self.allocated) / MiB:.2f} MiB is free."
            )
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self._live[key] = (size, weakref.ref(storage, lambda _, key=key: self._free(key)))

    def _free(self, key: int) -> None:
        self.allocated -= self._live.pop(key)[0]

    def reset_peak(self) -> None:
        self.peak = self.allocated


@contextmanager
def stand_in(room: int) -> Iterator[LimitedMemory]:
    """Inside, torch seems to have a CUDA GPU with `room` bytes, whose tensors are the CPU's."""
    memory = LimitedMemory(room)
    told = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: CAPABILITY,
        "mem_get_info": lambda *_: (room - memory.allocated, room),
        "memory_allocated": lambda *_: memory.allocated,
        "memory_reserved": lambda *_: memory.allocated,
        "max_memory_allocated": lambda *_: memory.peak,
        "max_memory_reserved": lambda *_: memory.peak,
        "reset_peak_memory_stats": lambda *_: memory.reset_peak(),
        "memory_stats_as_nested_dict": lambda *_: _nested(memory),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }
    with ExitStack() as stack:
        for name, answer in told.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True))
        stack.enter_context(patch.object(Cuda, "kind", "cpu"))
        stack.enter_context(patch.dict(own_step.DEVICE_TYPE, live="cpu"))
        stack.enter_context(patch.dict(live.KERNELS, clear=True))  # a CPU has none of them to insist on
        stack.enter_context(memory)
        yield memory


def _nested(memory: LimitedMemory) -> dict[str, Any]:
    now = {"all": {"current": memory.allocated, "peak": memory.peak}}
    return {"allocated_bytes": now, "reserved_bytes": now}
