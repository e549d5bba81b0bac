"""Checkpoints and offloading on a tape: backward gets tensors that forward did not keep.

It runs forward again, or fetches them back.

As torch.utils.checkpoint does it without reentrance: in the first forward nothing is kept but the inputs; the
first tensor that backward asks for runs the function again, as far as the last tensor that is needed, and
each tensor is handed out once.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

from .operations import Step
from .tape import Recovered, Saved, Storage, Tensor, operation, tensors_in

SMALLEST_TO_OFFLOAD = 2**20
"""Bytes: below this a copy to the host is all latency (`networks/recompute.py` offloads the same)."""

Function = Callable[..., Tensor]


class _Stop(Exception):
    """The last tensor that is needed has been computed again."""


class Frame:
    """A checkpoint: the function, its inputs, and what has been computed again but not yet asked for.

    It holds its inputs, and the products that it keeps, until the last of the tensors that it stands for is
    released.
    """

    def __init__(
        self, step: Step, function: Function, arguments: tuple[Any, ...], keep_products: bool
    ) -> None:
        self.step = step
        self.function = function
        self.arguments = arguments
        self.place = step.tape.place
        self.held = [tensor.storage.retain() for tensor in tensors_in(arguments)]
        self.products: list[Storage] | None = [] if keep_products else None
        self.count = 0
        self.holders = 1
        self.again: dict[int, Storage] = {}

    def pack(self, _: Storage) -> Saved:
        """Keep nothing but the number of the tensor."""
        self.count += 1
        self.holders += 1
        return Recovered(partial(self.unpack, self.count - 1), self.release)

    def unpack(self, number: int) -> Storage:
        """The tensor of that number, computed again with all others when the first is asked for."""
        if not self.again:
            self.run_again()
        return self.again.pop(number)

    def run_again(self) -> None:
        """Run the function again until everything that backward needs is there."""
        step = self.step

        def keep(storage: Storage) -> Saved:
            self.again[len(self.again)] = storage.retain()
            if len(self.again) == self.count:
                raise _Stop
            return storage  # for a node that will not run: the graph of the second forward is of no use

        step.found_products = self.products
        with step.tape.recomputation(self.place, keep), step.autocast(), suppress(_Stop):
            self.function(*self.arguments)
        step.found_products = None

    def release(self) -> None:
        """One of its tensors, or the function's first run, needs it no more."""
        self.holders -= 1
        if not self.holders:
            for storage in (*self.held, *(self.products or [])):
                storage.release()


@operation
def checkpoint(step: Step, function: Function, *arguments: Any, keep_products: bool = False) -> Tensor:
    """`function(*arguments)`, to be run again in backward.

    `keep_products` keeps matrix products and attention.
    """
    frame = Frame(step, function, arguments, keep_products)
    step.kept_products = frame.products
    with step.tape.packing(frame.pack):
        out = function(*arguments)
    step.kept_products = None
    frame.release()
    return out


class Offloading:
    """Saved tensors in host memory: each storage is copied there once.

    It is back for as long as backward uses it.
    """

    def __init__(self, step: Step, resident: list[Tensor]) -> None:
        self.step = step
        self.resident = {tensor.storage for tensor in resident}
        self.numbers = dict(step.structure.numbers)
        self.back: dict[Storage, Storage] = {}

    def pack(self, storage: Storage) -> Saved:
        """Leave weights, their copies, what all blocks share and what is small where it is; copy the rest."""
        if storage.kind or storage in self.resident:
            return storage.retain()
        if prod(self.numbers[symbol] for symbol in storage.size.split("·")) < SMALLEST_TO_OFFLOAD:
            return storage.retain()
        return Recovered(partial(self.unpack, storage), lambda: None)

    def unpack(self, left: Storage) -> Storage:
        """A new copy on the device of a storage that left it, or the one that is still in use there."""
        if left in self.back and self.back[left].holders:
            return self.back[left].retain()
        self.back[left] = self.step.tape.make(left.size, "activations")
        return self.back[left]
