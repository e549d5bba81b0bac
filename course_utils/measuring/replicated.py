"""One rank of many as its GPU sees it: DistributedDataParallel's reducer, and what is sent.

Nothing is sent, as in `sharded`. The reducer itself makes its buckets, fills them, and rebuilds them after
the first backward. For that it needs the values of tensors on the host, where `HostSide` leaves them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as of_ddp
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..errors import StepError
from ..estimating.sharding import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from ..measurement import Measurement, Messages, Provenance
from .call_site import calling_place, described
from .fake_mode import LIFT
from .patching import Inside, check_layout, on_this_thread
from .sharded import ShardTracker
from .tracker import States, Storage, tensors_in

INSIDE_DDP = (
    Inside(
        "torch.nn.parallel.distributed:",
        ("_verify_param_shape_across_processes",),
        "it reads the shapes of the other ranks, which are not there",
        "a fake process group answers with those of this rank",
    ),
    Inside(
        "torch._C._distributed_c10d:Logger",
        ("set_runtime_stats_and_log",),
        "it asks for times of CUDA events, which the CPU build of torch has not",
        "it leaves out times that nobody took",
    ),
    Inside(
        "torch.nn.parallel:DistributedDataParallel",
        ("_ddp_init_helper", "register_comm_hook"),
        "tensors that are made in here are buffers of the communication",
        "an operator makes them",
    ),
    Inside(
        "torch._C._distributed_c10d:Reducer",
        ("_rebuild_buckets",),
        "tensors that are made in here are buffers of the communication",
        "an operator makes them",
    ),
    Inside(
        "torch._C._distributed_c10d:Reducer",
        ("prepare_for_forward", "_set_static_graph"),
        "it counts steps, and takes CUDA's times of those that it has counted",
        "it asks for times only where CUDA is there",
    ),
    Inside(
        "torch.distributed:",
        ("_broadcast_coalesced",),
        "tensors that are made in here are buffers of the communication",
        "an operator makes them",
    ),
    Inside(
        "torch._C._distributed_c10d:",
        ("_create_work_from_future", "_resolve_process_group"),
        "the future of a fake group's work has no result, and a reducer waits for one",
        "a fake process group gives a result",
    ),
)

RESULT = ""
WHOLE = {
    "allreduce_": ("all-reduce", "tensors"),
    "allreduce_coalesced_": ("all-reduce", "tensors"),
    "all_reduce": ("all-reduce", "input"),
    "all_reduce_": ("all-reduce", "input"),
    "all_reduce_coalesced": ("all-reduce", "inputs"),
    "all_reduce_coalesced_": ("all-reduce", "inputs"),
    "allgather_": ("all-gather", "output_tensors"),
    "_allgather_base_": ("all-gather", "output_tensor"),
    "allgather_coalesced_": ("all-gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all-gather", "outputs"),
    "all_gather_into_tensor": ("all-gather", RESULT),
    "all_gather_into_tensor_out": ("all-gather", RESULT),
    "all_gather_into_tensor_coalesced": ("all-gather", RESULT),
    "reduce_scatter_": ("reduce-scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce-scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs"),
    "reduce_scatter_tensor": ("reduce-scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce-scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs"),
    "broadcast_": ("broadcast", "tensors"),
    "broadcast": ("broadcast", "input"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "output_tensors"),
    "scatter_": ("scatter", "input_tensors"),
    "alltoall_": ("all-to-all", "input_tensors"),
    "alltoall_base_": ("all-to-all", "input"),
    "all_to_all_single": ("all-to-all", "input"),
    "shard_dim_alltoall": ("all-to-all", "input"),
}
"""Collectives by the operator's name: the kind, and the argument that holds the whole of what is sent."""

BETWEEN_TWO = {"send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"}
OF_GROUPS = {"c10d", "_c10d_functional", "_dtensor"}
SENDS: dict[str, Callable[[int, int], int]] = {
    "all-reduce": all_reduce_bytes,
    "all-gather": all_gather_bytes,
    "reduce-scatter": reduce_scatter_bytes,
    "all-to-all": reduce_scatter_bytes,
}
"""Bytes that each rank sends of a message of so many bytes to so many ranks; by other kinds all of it."""


class RankTracker(ShardTracker):
    """Knows the buckets of DistributedDataParallel as well, and notes each message to other ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_layout(INSIDE_DDP)
        super().__init__(*args, **kwargs)
        self._messages: list[tuple[int, str, int, int]] = []  # step, kind, bytes, bytes sent
        self.buffering = False
        self._counts: set[int] = set()  # the reducers that have to count their steps, by id

    def __enter__(self) -> "RankTracker":
        super().__enter__()
        enter = self._patches.enter_context
        enter(on_this_thread(of_ddp, "_verify_param_shape_across_processes", _nothing))
        enter(on_this_thread(c10d.Logger, "set_runtime_stats_and_log", _nothing))
        reducer = c10d.Reducer
        for name, follow in (
            ("prepare_for_forward", self._prepare_for_forward),
            ("_set_static_graph", self._set_static_graph),
        ):
            enter(on_this_thread(reducer, name, partial(follow, getattr(reducer, name))))
        for owner, name in (
            (DistributedDataParallel, "_ddp_init_helper"),
            (reducer, "_rebuild_buckets"),
            (dist, "_broadcast_coalesced"),
        ):
            enter(on_this_thread(owner, name, partial(self._call_buffering, getattr(owner, name))))
        register = DistributedDataParallel.register_comm_hook
        enter(
            on_this_thread(DistributedDataParallel, "register_comm_hook", partial(self._register, register))
        )
        return self

    def _register(self, register: Any, ddp: Any, state: Any, hook: Any) -> None:
        """`register_comm_hook`: what a hook of the script's makes, as a copy in 16 bits, is a buffer."""

        @wraps(hook)  # torch checks its annotations
        def followed(state: Any, bucket: c10d.GradBucket) -> Any:
            return self._call_buffering(hook, state, bucket)

        followed.__name__ = "followed"  # by name torch asks some hooks for NCCL's version, which is not there
        register(ddp, state, followed)

    def _prepare_for_forward(self, prepare: Callable[[Any], None], reducer: Any) -> None:
        """Let a reducer count its step, if its buckets depend on it: all else in here is the time."""
        if id(reducer) in self._counts:
            prepare(reducer)

    def _set_static_graph(self, set_it: Callable[[Any], None], reducer: Any) -> None:
        if torch.version.cuda:  # such a reducer would take times of the driver
            place = described(calling_place()[0])
            raise StepError(f"{place}: static_graph=True is followed by the CPU build of torch only")
        self._counts.add(id(reducer))
        set_it(reducer)

    def _call_buffering(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.buffering
        self.buffering = True
        try:
            return function(*args, **kwargs)
        finally:
            self.buffering = before

    def _storage(self, *args: Any, **kwargs: Any) -> Storage:
        made = super()._storage(*args, **kwargs)
        if self.buffering:
            made.bound = "communication"
        return made

    def watch(self, network: torch.nn.Module, states: States) -> None:
        super().watch(network.module if isinstance(network, DistributedDataParallel) else network, states)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in OF_GROUPS:
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if name in BETWEEN_TWO:
            raise StepError(
                f"{described(calling_place()[0])}: exchanges tensors with one other rank, as a pipeline does,"
                " and only collectives of a whole group are followed"
            )
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or name not in WHOLE:
            return out
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        self._note_message(*WHOLE[name], given, out)
        return _with_result(out, given) if func.namespace == "c10d" else out

    def _note_message(self, kind: str, argument: str, given: dict[str, Any], out: Any) -> None:
        whole = out if argument == RESULT else given[argument]
        size = sum(one.numel() * one.element_size() for one in tensors_in((whole,)))
        ranks = _group(given).size()
        if ranks > 1:
            sent = SENDS[kind](size, ranks) if kind in SENDS else size
            self._messages.append((self.step, kind, size, sent))

    def measurement(self, ends: list[int], losses: list[float], provenance: Provenance) -> Measurement:
        of_kind: dict[str, Counter[str]] = {}
        for step, kind, size, sent in self._messages:
            if step == len(ends):
                of_kind.setdefault(kind, Counter()).update(count=1, bytes=size, sent=sent)
        messages = tuple(Messages(kind, **numbers) for kind, numbers in sorted(of_kind.items()))
        return replace(super().measurement(ends, losses, provenance), messages=messages)


class HostSide(TorchDispatchMode):
    """Gives a reducer real tensors on the host, where it reads and writes the order of its buckets.

    It is for steps of the course. Scripts and blocks have `HostValues` in `watching/steps.py`.
    """

    def __init__(self, tracker: RankTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __enter__(self) -> "HostSide":
        self._fake = torch.empty(0, device="cuda").fake_mode  # pyrefly: ignore [missing-attribute]
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._tracker.buffering:
            device: Any = kwargs.get("device") or torch.device("cpu")
            if FakeTensor not in types and device.type == "cpu":
                with no_dispatch():
                    return func(*args, **kwargs)
            if func is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor):
                return args[0]  # what comes back from the group is what this rank sent
        if func is not LIFT and not all(isinstance(one, FakeTensor) for one in tensors_in(args)):
            args = tree_map_only(torch.Tensor, self._let_in, args)
        return func(*args, **kwargs)

    def _let_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


def _group(given: dict[str, Any]) -> Any:
    """The process group of a collective, by its arguments' names."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    return c10d._resolve_process_group(given["group_name"])


def _with_result(out: Any, given: dict[str, Any]) -> Any:
    """Return a collective's results, with work whose future has the tensors of this rank, as NCCL's has."""
    results = given.get("tensors") or given.get("outputs") or given.get("output_tensors")
    if results is None:
        results = [given[name] for name in ("output_tensor", "output") if name in given]
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors_in((results,))))
    work = c10d._create_work_from_future(future).boxed()  # pyrefly: ignore [missing-attribute]
    return (out[0], work) if isinstance(out, tuple) else work


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, as a rank that has no others to compare with, and no clock."""
