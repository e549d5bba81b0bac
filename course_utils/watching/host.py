"""Tensors in the host's memory while a script is watched: the most bytes at once, and those pinned."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..measurement import HostMemory
from ..measuring.call_site import Place, calling_place, described
from ..measuring.fake_mode import ASK_DEVICE
from ..measuring.patching import on_this_thread
from ..measuring.tracker import tensors_in
from .steps import HostValues


class CountedHostValues(HostValues):
    """Host values that count each storage on the host, from the operator that makes it until it is freed.

    A pinned one takes the next power of two, as torch's allocator of pinned memory rounds it up
    (CachingHostAllocator.h); that it keeps what was freed is not counted.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._now = self._pinned = 0
        self._at_peak: tuple[int, int, Place | None] = (0, 0, None)  # bytes, of them pinned, and where
        self._pins = False  # True while a tensor is copied into pinned memory
        self._alive: dict[int, tuple[int, bool, weakref.ref]] = {}

    def __enter__(self) -> "CountedHostValues":
        super().__enter__()
        self._stack.enter_context(on_this_thread(torch.Tensor, "pin_memory", self._pin))
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pinned = bool(kwargs and kwargs.get("pin_memory"))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is not ASK_DEVICE and not func.is_view:
            self._see(tensors_in((out,)), pinned or self._pins)
        return out

    def _without_values(self, _: Any, __: str, weight: Any) -> None:
        super()._without_values(_, __, weight)
        self._see(tensors_in((weight,)), False)

    def _see(self, tensors: Iterable[torch.Tensor], pinned: bool) -> None:
        for tensor in tensors:
            device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
            if device.type == "cpu" and tensor.layout is torch.strided:
                self._count(tensor.untyped_storage(), pinned)

    def _count(self, storage: torch.UntypedStorage, pinned: bool) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._alive or size == 0:
            return
        if pinned:
            size = 1 << (size - 1).bit_length()
        self._alive[key] = (size, pinned, weakref.ref(storage, lambda _: self._free(key)))
        self._now += size
        self._pinned += size * pinned
        if self._now > self._at_peak[0]:
            self._at_peak = (self._now, self._pinned, calling_place()[0])

    def _free(self, key: int) -> None:
        size, pinned, _ = self._alive.pop(key)
        self._now -= size
        self._pinned -= size * pinned

    def _pin(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        """Copy a tensor as `Tensor.pin_memory` does, into memory that is counted as pinned."""
        self._pins = True
        try:
            return tensor.clone()
        finally:
            self._pins = False

    def found(self, ranks: int) -> HostMemory:
        """The count at its peak, for so many ranks of a node."""
        peak, pinned, place = self._at_peak
        return HostMemory(peak, pinned, described(place), ranks)
