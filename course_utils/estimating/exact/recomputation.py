"""What backward runs again, or fetches back, instead of finding it kept: checkpoints and offloading on a tape.

As torch.utils.checkpoint does it without reentrance: in the first forward nothing is kept but the inputs; the first
tensor that backward asks for runs the function again, as far as the last tensor that is needed, and each tensor is
handed out once.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

from .operations import Step
from .tape import Handle, Storage, Tensor

Function = Callable[..., Tensor]


class _Stop(Exception):
    """The last tensor that is needed has been computed again."""


class Frame:
    """A checkpoint: the function, its inputs, and what has been computed again but not yet asked for."""

    def __init__(self, step: Step, function: Function, arguments: tuple[Any, ...], keep_products: bool) -> None:
        self.step, self.function, self.arguments = step, function, arguments
        self.place = step.tape.place
        self.products: list[Storage] | None = [] if keep_products else None
        self.count = 0
        self.again: dict[int, Storage | None] = {}

    def pack(self, _: Storage | None) -> Handle:
        """Keep nothing but the number of the tensor."""
        number = self.count
        self.count += 1
        return lambda: self.unpack(number)

    def unpack(self, number: int) -> Storage | None:
        """The tensor of that number, computed again with all others when the first is asked for."""
        if not self.again:
            self.run_again()
        return self.again.pop(number)

    def run_again(self) -> None:
        """Run the function again until everything that backward needs is there."""
        step, numbers = self.step, iter(range(self.count))

        def keep(storage: Storage | None) -> Handle:
            number = next(numbers)
            self.again[number] = storage
            if number == self.count - 1:
                raise _Stop
            return lambda: storage

        step.replayed_products = self.products
        with step.tape.recomputation(self.place), step.tape.packing(keep), step.autocast(), suppress(_Stop):
            self.function(*self.arguments)
        step.replayed_products = None


def checkpoint(step: Step, function: Function, *arguments: Any, keep_products: bool = False) -> Tensor:
    """`function(*arguments)`, to be run again in backward; `keep_products` keeps matrix products and attention."""
    frame = Frame(step, function, arguments, keep_products)
    step.kept_products = frame.products
    with step.tape.packing(frame.pack):
        out = function(*arguments)
    step.kept_products = None
    return out


class Offloading:
    """Saved tensors in host memory: each storage travels there once, and is back for as long as backward uses it."""

    def __init__(self, step: Step, is_small: Callable[[str], bool], resident: list[Tensor]) -> None:
        self.step, self.is_small = step, is_small
        self.resident = {id(tensor.storage) for tensor in resident}
        self.travelled: dict[int, tuple[Host, ref[Storage]]] = {}

    def pack(self, storage: Storage | None) -> Handle:
        """Leave weights, their copies, what all blocks share and what is small where it is; copy the rest away."""
        if storage is None or storage.record.kind or id(storage) in self.resident:
            return lambda: storage
        if self.is_small(storage.record.size):
            return lambda: storage
        key = id(storage)
        if key not in self.travelled:
            self.travelled[key] = Host(self.step, storage.record.size), ref(storage, lambda _: self.travelled.pop(key))
        return self.travelled[key][0].back_on_device


class Host:
    """A storage's copy in host memory."""

    def __init__(self, step: Step, size: str) -> None:
        self.step, self.size = step, size
        self.back: ref[Storage] | None = None

    def back_on_device(self) -> Storage:
        """A new copy on the device, or the one that is still in use there."""
        there = self.back() if self.back is not None else None
        if there is None:
            there = self.step.tape.make(self.size, "activations")
            self.back = ref(there)
        return there
