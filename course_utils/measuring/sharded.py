"""FSDP2 as one rank of many sees it: rank 0 of any number of simulated ranks, in one process without a GPU.

torch's fake process group sends nothing, but each buffer of the genuine `fully_shard` is allocated when it
would be, on the stream on which it would be. FSDP1 cannot be simulated: it compares addresses of storages,
and its frees wait for other streams (`record_stream`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ..networks import Transformer, build_network, default_dtype
from ..run import TrainingRun
from .cuda_answers import SimulatedEvent, SimulatedStream
from .optimizers import make_optimizer
from .patching import ONE_AT_A_TIME, Inside, check_layout, on_this_thread
from .step import Training
from .tracker import FORWARD, Storage, Tracker

aten = torch.ops.aten

PLAN = "_propagate_tensor_meta_non_cached"
INSIDE_FSDP = (
    Inside(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator",
        (PLAN,),
        "it finds the shapes of a DTensor's results with tensors that no rank holds",
        "it plans with meta tensors",
    ),
)


def quick_plans() -> Any:
    """Inside, a DTensor's plan asks for no shards that FSDP2 never makes.

    For n parameters torch 2.13 takes n² time to ask; other releases do not ask. Remove this when none does.
    """
    from torch.distributed.tensor import _sharding_prop

    name = "_propagate_use_strided_shard_flag"
    return mock.patch.object(_sharding_prop, name, lambda *_: None, create=True)


def shards_without_seeds() -> Any:
    """Inside, random numbers for a DTensor are drawn for the shard of this rank alone.

    torch shifts the random state of each rank, and a simulated GPU has none. Remove this when fake tensors
    need none.
    """
    from torch.distributed.tensor import _random

    plain = SimpleNamespace(
        distribute_region_enabled=False, _distribute_region=lambda *_, **__: nullcontext()
    )
    return mock.patch.object(_random, "_rng_tracker", plain)


@contextmanager
def simulated_ranks(ranks: int) -> Iterator[Any]:
    """Inside, this process is rank 0 of so many, whose other ranks are not there; gives their device mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(own_streams())
        # a group puts its rank before errors
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        # before any fake mode is entered: a mesh reads the values of its tensor of ranks
        yield dist.device_mesh.init_device_mesh("cuda", (ranks,))


@contextmanager
def own_streams() -> Iterator[None]:
    """Inside, torch.cuda has the streams that FSDP2 makes, beginning with the default one."""
    with ExitStack() as stack:
        _Stream.numbers = count()
        _Stream.entered = [_Stream()]
        for name, answer in STREAMS.items():
            stack.enter_context(on_this_thread(torch.cuda, name, answer))
        stack.enter_context(mock.patch.multiple(torch.cuda, Stream=_Stream, Event=SimulatedEvent))
        yield


class _Stream(SimulatedStream):
    """A CUDA stream on which nothing waits; its `stream_id` is 0 for the default stream, then 1, 2, …"""

    numbers: Iterator[int]
    entered: list["_Stream"]  # the innermost last
    device_type = 1  # of CUDA: newer releases of torch read it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stream_id = next(_Stream.numbers)


@contextmanager
def _on_stream(stream: _Stream) -> Iterator[None]:
    _Stream.entered.append(stream)
    try:
        yield
    finally:
        _Stream.entered.pop()


STREAMS: dict[str, Any] = {
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "stream": _on_stream,
    "current_stream": lambda *device: _Stream.entered[-1],
}
"""Answers to FSDP2's calls of torch.cuda: it has the streams that it makes, and no event waits.

They go when torch makes streams of a GPU that is not there.
"""


class ShardedTraining(Training):
    """The training step of `run`, its network sharded over `mesh`: each block by itself, then the rest."""

    def __init__(self, run: TrainingRun, mesh: Any) -> None:
        self.mesh = mesh
        super().__init__(run, "cuda", simulated=True)

    def _network(self) -> Transformer:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        run = self.run
        network, policy = self._whole()
        for block in network.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy, reshard_after_forward=run.zero_stage == 3)
        fully_shard(network, mesh=self.mesh, mp_policy=policy)  # these parameters stay until their backward
        if run.loss_chunks > 1:  # then forward ends before the head
            register_fsdp_forward_method(network, "features")
        return network

    def _whole(self) -> tuple[Transformer, Any]:
        """The network before anything of it is sharded, and the formats to gather and to reduce in."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        run = self.run
        low = getattr(torch, run.precision.dtype)
        if run.precision.master:
            policy = MixedPrecisionPolicy(low, torch.float32)
            kept = torch.float32
        else:
            policy = MixedPrecisionPolicy()
            kept = low
        with torch.device(self.device), default_dtype(kept):
            return build_network(run.model, run.attention, run.recompute), policy

    def _optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.run.optimizer, list(self.network.named_parameters()))


def _plan_unseen(plan: Callable[..., Any], *args: Any) -> Any:
    """A DTensor's plan, made as on a GPU: in a fake mode of torch's own, which no mode of ours sees.

    In torch 2.11, plans take gathered 16-bit weights for fp32. Our mode would multiply both formats on the
    host, which refuses that.
    """
    with _disable_current_modes():
        return plan(*args)


class ShardTracker(Tracker):
    """Knows FSDP2's buffers by the operators that fill and empty them; leaves out what DTensors plan with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_layout(INSIDE_FSDP)
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        super().__init__(*args, **kwargs)
        followed = partial(_plan_unseen, getattr(ShardingPropagator, PLAN))
        self._plans = on_this_thread(ShardingPropagator, PLAN, followed)

    def _storage(self, key: int, size: int, shape: tuple[int, ...], dtype: str, operation: str) -> Storage:
        made = super()._storage(key, size, shape, dtype, operation)
        if self.device == "cuda":  # the allocator gives each stream free blocks of its own
            made.stream = torch.cuda.current_stream().stream_id
        return made

    def __enter__(self) -> "ShardTracker":
        super().__enter__()
        self._patches.enter_context(self._plans)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        if func.namespace == "fsdp":
            self._bind_buffers(func, args, kwargs or {})
        elif func.namespace == "c10d" and "reduce_scatter" in func._schema.name:
            self.bind("communication", [args[0]])  # the share of rank 0, until it becomes its gradients
        elif func is aten._to_copy.default and (self.phase in FORWARD or self._recomputing):
            source = self.known(args[0])
            copy = self.known(out)
            gathered = source is not None and source.bound == "communication"
            if gathered and copy is not None and copy is not source:
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
        storage = self.known(tensor)
        return storage is not None and not storage.bound
