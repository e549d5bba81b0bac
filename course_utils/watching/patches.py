"""Replacements for parts of torch that code cannot use on a simulated GPU, or in one process.

They are documented parts of torch, the same in every release, and replaced for all threads: to enter needs
`ONE_AT_A_TIME`. A note tells where figures change.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_map_only

from ..measuring.cuda_answers import SimulatedEvent, class_of_this_thread
from ..measuring.phases import PLACEHOLDER
from .shield import NotAllowed

WORKERS = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "timeout",
)


@contextmanager
def replaced(notes: dict[str, None], simulated: bool) -> Iterator[None]:
    """Inside, what plain torch code cannot use here is replaced, which adds to `notes`.

    Afterwards torch's defaults are what they were.
    """
    with ExitStack() as stack:
        for owner, name, replacement in _replacements(notes, simulated):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_default_device, _default_device())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        yield


def _default_device() -> torch.device | None:
    """The device that `torch.set_default_device` has set, not that of a block; None for none."""
    context = getattr(
        torch._GLOBAL_DEVICE_CONTEXT, "device_context", None
    )  # `get_default_device` starts CUDA
    return None if context is None else context.device


def _replacements(notes: dict[str, None], simulated: bool) -> Iterator[tuple[Any, str, Any]]:
    """Replacements for what such code cannot use: owner, name, and a function that may add notes."""
    loader = torch.utils.data.DataLoader  # its workers are processes, and only one process is followed
    yield loader, "__init__", partialmethod(_make_loader, notes, loader.__init__)
    yield torch.distributed, "init_process_group", _one_process
    if not simulated:
        return
    # a fake GPU holds no values and draws no random numbers
    yield torch, "load", partial(_load, torch.load)
    yield torch.Tensor, "pin_memory", lambda tensor, *_: tensor
    yield torch, "Generator", class_of_this_thread(torch.Generator, HostGenerator)
    # there is one GPU, on which events take no time
    yield torch.nn.DataParallel, "scatter", lambda _, inputs, kwargs, __: ((inputs,), (kwargs,))
    yield SimulatedEvent, "elapsed_time", lambda *_: PLACEHOLDER


def _make_loader(loader: Any, notes: dict[str, None], make: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("num_workers"):
        notes.setdefault("DataLoader: 0 workers here")
    make(loader, *args, **{name: value for name, value in kwargs.items() if name not in WORKERS})


def _one_process(*_: Any, **__: Any) -> NoReturn:
    raise NotAllowed(": asks for a process group, but a script is watched in one process on one GPU")


def _load(load: Any, file: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load` with real values on the host; what is asked for on the GPU goes to the simulated one."""
    with fake_tensor.unset_fake_temporarily():
        found = load(file, map_location="cpu", **kwargs)
    to = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(to), found)


class HostGenerator(torch.Generator):
    """A generator of random numbers on the host, for any device: a simulated GPU draws none."""

    def __new__(cls, *_: Any, **__: Any) -> "HostGenerator":
        return super().__new__(cls, "cpu")  # pyrefly: ignore [bad-argument-count]
