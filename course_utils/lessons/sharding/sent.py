"""Bytes that the exchanges of a training step send, counted while it runs."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counts, in `by_kind`, the bytes that each rank sends inside the context, as the ZeRO paper counts them.

    An all-gather and a reduce-scatter send the whole tensor, an all-reduce sends it twice, a broadcast once.
    The factor (D−1)/D of a ring is left out, as in the paper.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "c10d::_allgather_base_":
            self.by_kind["all-gather"] += args[0].nbytes  # the output, which holds all ranks' shards
        elif name == "c10d::_reduce_scatter_base_":
            self.by_kind["reduce-scatter"] += args[1].nbytes  # the input
        elif name == "c10d::allreduce_":
            self.by_kind["all-reduce"] += 2 * sum(tensor.nbytes for tensor in args[0])
        elif name == "c10d::broadcast_":
            self.by_kind["broadcast"] += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))
