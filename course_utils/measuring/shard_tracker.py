"""The tracker of FSDP2: it knows gathered parameters and the buffers of collectives."""

from collections.abc import Callable
from typing import Any

import torch

from ..estimating.workspaces import Workspaces
from .patches import on_this_thread
from .tracker import FORWARD, Tracker

aten = torch.ops.aten

PLAN = "_propagate_tensor_meta_non_cached"
"""The method with which torch's ShardingPropagator finds out the shapes that an operator gives."""


class ShardTracker(Tracker):
    """Knows FSDP2's buffers by the operators that fill and empty them: they are communication.

    Before a DTensor does an operation for the first time, it plans it on fake tensors as large as if nothing were
    sharded. On a simulated GPU they look like all others, but no GPU ever has them: they are left out.
    """

    def __init__(self, device: str, workspaces: Workspaces | None = None) -> None:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        super().__init__(device, workspaces)
        self._planning = False
        self._plans = on_this_thread(ShardingPropagator, PLAN, self._unseen(getattr(ShardingPropagator, PLAN)))

    def _unseen(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        def planning(*args: Any) -> Any:
            self._planning = True
            try:
                return plan(*args)
            finally:
                self._planning = False

        return planning

    def __enter__(self) -> "ShardTracker":
        super().__enter__()
        self._patches.enter_context(self._plans)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._planning:
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        if func.namespace == "fsdp":
            self._bind_buffers(func, args, kwargs or {})
        elif func.namespace == "c10d" and "reduce_scatter" in func._schema.name:
            self.bind("communication", [args[0]])  # the share of rank 0, until it becomes its gradients
        elif func is aten._to_copy.default and (self.phase in FORWARD or self._recomputing):
            source, copy = self._known(args[0]), self._known(out)
            if source is not None and copy is not None and source.bound == "communication" and source is not copy:
                copy.bound = "weight_copies"  # autocast's, of a gathered weight
        return out

    def _bind_buffers(self, func: Any, args: Any, kwargs: Any) -> None:
        operator = func._schema.name.removeprefix("fsdp::")
        if operator == "all_gather_copy_in":
            shards, gathered = args[0], args[1]
            self.bind("communication", [gathered, *(shard for shard in shards if self._is_unbound(shard))])
        elif operator == "split_with_sizes_copy":
            self.bind("communication", kwargs["out"])
        elif operator == "chunk_cat":
            self.bind("gradients", (gradient for gradient in args[0] if self._is_unbound(gradient)))
            self.bind("communication", [kwargs["out"]])

    def _is_unbound(self, tensor: torch.Tensor) -> bool:
        storage = self._known(tensor)
        return storage is not None and not storage.bound
