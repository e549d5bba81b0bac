"""A script made for torchrun, as one rank of many whose others are not there."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from ..measuring.call_site import calling_place, described
from ..measuring.patching import on_this_thread
from ..measuring.sharded import own_streams, quick_plans, shards_without_seeds
from .shield import NotAllowed

PER_NODE = 8
"""The most ranks that share a node."""

ALONE = "no other rank is there, so each collective leaves the values of this one"


def check_ranks(ranks: int | None, rank: int) -> None:
    """Raise ValueError, naming what is possible, for a rank that is not one of so many."""
    if ranks is None and rank:
        raise ValueError(f"rank {rank} is one of several: say of how many with --ranks")
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks is {ranks}: a whole number of GPUs, 1 or more")
    if ranks is not None and not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}: of {ranks} ranks it is one from 0 to {ranks - 1}")


@contextmanager
def as_one_rank(ranks: int | None, rank: int, notes: dict[str, None]) -> Iterator[None]:
    """Inside, a script finds torchrun's variables, and a group of so many ranks when it asks for one.

    Without `ranks` it finds neither, but may begin a group of one.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        # a group puts its rank before errors
        enter(mock.patch.object(sys, "excepthook", sys.excepthook))
        stack.callback(_end_group, dist.destroy_process_group)
        begin = partial(_begin_group, distributed_c10d.init_process_group, stack, ranks or 1, rank)
        for owner in (dist, distributed_c10d, device_mesh):
            enter(mock.patch.object(owner, "init_process_group", begin))
        group = partial(_new_group, distributed_c10d.new_group)
        for owner in (dist, distributed_c10d):
            enter(mock.patch.object(owner, "new_group", group))
        for name, answer in OF_OBJECTS.items():
            for owner in (dist, distributed_c10d):
                enter(mock.patch.object(owner, name, answer))
        for name in ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"):
            own = partial(_refuse, f"torch.cuda.nccl.{name} is not followed: torch.distributed.{name} is")
            enter(mock.patch.object(torch.cuda.nccl, name, own))
        enter(mock.patch.object(dist, "is_nccl_available", lambda: True))
        if ranks is not None:
            notes.setdefault(f"rank {rank} of {ranks}: {ALONE}")
            enter(mock.patch.dict(os.environ, torchrun_variables(ranks, rank)))
        # FSDP2 has streams of its own, and asks for the accelerator
        if ranks is not None or "WORLD_SIZE" in os.environ:
            enter(own_streams())
            enter(on_this_thread(torch._C, "_get_accelerator", lambda *_: torch.device("cuda")))
            enter(quick_plans())
            enter(shards_without_seeds())
            enter(shards_moved())
        yield


def torchrun_variables(ranks: int, rank: int) -> dict[str, str]:
    """Environment variables as torchrun sets them. Each rank sees one GPU, its own, so it is local rank 0."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": min(ranks, PER_NODE),
        "GROUP_RANK": rank // PER_NODE,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in values.items()}


def _begin_group(
    begin: Callable[..., None],
    stack: ExitStack,
    ranks: int,
    number: int,
    /,
    backend: Any = None,
    init_method: Any = None,
    timeout: Any = None,
    world_size: int = -1,
    *_: Any,
    **__: Any,
) -> None:
    """`init_process_group` of any backend: torch's fake group, of as many ranks as are simulated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    asked = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0"))
    if asked == 0:
        _refuse("asks for a process group: watch it as one of 8 ranks, for example, with --ranks 8")
    if asked != ranks:
        _refuse(f"asks for a process group of {asked}: watch it with --ranks {asked}")
    stack.enter_context(fsdp1_refused())
    begin("fake", rank=number, world_size=ranks, store=FakeStore())


def fsdp1_refused() -> AbstractContextManager[Any]:
    """Inside, FullyShardedDataParallel is refused; `sharded` says why it cannot be simulated."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    words = "FullyShardedDataParallel (FSDP1) cannot be simulated: fully_shard (FSDP2) can"
    return mock.patch.object(FullyShardedDataParallel, "__init__", lambda *_, **__: _refuse(words))


def shards_moved() -> AbstractContextManager[Any]:
    """Inside, FSDP2 takes a model on the host to the GPU as a module does, which swaps simulated tensors.

    torch sets `tensor.data`, which leaves a fake tensor where it is. Remove this when it swaps these as well.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    def moved(parameters: list[torch.Tensor], buffers: list[torch.Tensor], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            if tensor.device.type == "cpu":
                there = tensor.detach().to(device)
                if isinstance(tensor, torch.nn.Parameter):
                    there = torch.nn.Parameter(there, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, there)

    return mock.patch.object(_fsdp_init, "_move_states_to_device", moved)


def _new_group(make: Callable[..., Any], ranks: Any = None, *_: Any, **how: Any) -> Any:
    """`new_group` of any backend: torch's fake one."""
    how.pop("backend", None)
    return make(ranks, **how)


def _gather_objects(objects: list[Any], mine: Any, *_: Any, **__: Any) -> None:
    objects[:] = [mine] * len(objects)


def _gather_objects_at_one(mine: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        objects[:] = [mine] * len(objects)


def _leave_objects(*_: Any, **__: Any) -> None:
    """Leave objects as they are on this rank."""


OF_OBJECTS = {
    "all_gather_object": _gather_objects,
    "gather_object": _gather_objects_at_one,
    "broadcast_object_list": _leave_objects,
}
"""Replacements for collectives of Python objects, whose bytes a simulated GPU does not hold."""


def _end_group(end: Callable[[], None]) -> None:
    if dist.is_initialized():
        end()


def _refuse(why: str, *_: Any, **__: Any) -> NoReturn:
    raise NotAllowed(f"{described(calling_place()[0])}: {why}")
