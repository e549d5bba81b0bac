"""Replacements for parts of torch that code cannot use on a simulated GPU, or in one process.

They are documented parts of torch, the same in every release, and replaced for all threads: to enter needs
`ONE_AT_A_TIME`. A note tells where figures change.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod, update_wrapper, wraps
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..measuring.cuda_answers import SimulatedEvent, class_of_this_thread
from ..measuring.phases import PLACEHOLDER
from .checkpoints import copied, load, reduced, save
from .shield import NotAllowed
from .steps import known_values

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
        if simulated:  # a plain tensor is copied by its `__reduce_ex__`
            stack.enter_context(mock.patch.object(FakeTensor, "__copy__", copied, create=True))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_default_device, _default_device())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        anomalies = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        stack.callback(torch.set_anomaly_enabled, *anomalies)
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
    yield loader, "__init__", _without_workers(notes, loader.__init__)
    yield torch.distributed, "init_process_group", _one_process
    yield torch, "save", partial(save, torch.serialization.save)
    if not simulated:
        return
    profile = torch.autograd.profiler.profile
    # until torch's profiler asks for no GPU's events where there is none: each failure is a page on stderr
    yield profile, "__init__", partialmethod(_make_profiler, notes, profile.__init__)
    for name in ("__enter__", "__exit__"):
        yield torch.autograd.profiler.emit_nvtx, name, lambda *_: None
    # a fake GPU gives no values to compare
    yield torch.jit, "trace", partial(_trace, notes, torch.jit.trace)
    # a fake GPU holds no values and draws no random numbers
    yield torch, "load", partial(load, torch.load)
    yield FakeTensor, "__reduce_ex__", reduced
    for owner in (torch, torch.random):  # the host's own, that came back with a checkpoint on the GPU
        yield owner, "set_rng_state", partial(_set_random_state, torch.set_rng_state)
    yield torch.Tensor, "pin_memory", lambda tensor, *_: tensor
    yield torch, "Generator", class_of_this_thread(torch.Generator, HostGenerator)
    # a dispatch mode keeps torch from taking lengths to the host, as it does where cuDNN has no part in it
    # with its name, which Dynamo asks for
    yield torch, "ctc_loss", update_wrapper(partial(_ctc_loss, torch.ctc_loss), torch.ctc_loss)
    # fake tensors know no shapes of a kernel for inference that does all of a Transformer's layer at once
    yield torch.backends.mha, "get_fastpath_enabled", partial(_no_fast_path, notes)
    # there is one GPU, on which events take no time
    yield torch.nn.DataParallel, "scatter", lambda _, inputs, kwargs, __: ((inputs,), (kwargs,))
    yield SimulatedEvent, "elapsed_time", lambda *_: PLACEHOLDER


def _without_workers(notes: dict[str, None], make: Any) -> Any:
    @wraps(make)  # Lightning reads its signature
    def made(loader: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("num_workers"):
            notes.setdefault("DataLoader: 0 workers here")
        make(loader, *args, **{name: value for name, value in kwargs.items() if name not in WORKERS})

    return made


def _make_profiler(profiler: Any, notes: dict[str, None], make: Any, *args: Any, **kwargs: Any) -> None:
    notes.setdefault("torch's profiler sees the host alone: a simulated GPU takes no time")
    make(profiler, *args, **kwargs | {"use_cpu": True, "use_cuda": False, "use_device": None})


def _trace(notes: dict[str, None], trace: Any, *args: Any, **kwargs: Any) -> Any:
    notes.setdefault("torch.jit.trace: results are not compared, and kernels are not fused")
    return trace(*args, **kwargs | {"check_trace": False})


def _set_random_state(set_state: Any, state: torch.Tensor) -> None:
    known = known_values(state)
    set_state(state if known is None else known)


def _one_process(*_: Any, **__: Any) -> NoReturn:
    raise NotAllowed(": asks for a process group, but a script is watched in one process on one GPU")


def _ctc_loss(
    ctc_loss: Any, log_probs: Any, targets: Any, heard: Any, lengths: Any, blank: int = 0, *rest: Any
) -> Any:
    """`torch.ctc_loss`, with lengths as numbers where cuDNN does not compute it (native/LossCTC.cpp)."""
    given = isinstance(heard, torch.Tensor)
    if given and not torch._use_cudnn_ctc_loss(log_probs, targets, heard, lengths, blank):
        heard, lengths = heard.tolist(), lengths.tolist()
    return ctc_loss(log_probs, targets, heard, lengths, blank, *rest)


def _no_fast_path(notes: dict[str, None]) -> bool:
    if not torch.is_grad_enabled():
        notes.setdefault("without gradients torch's Transformer layers run operator by operator here")
    return False


class HostGenerator(torch.Generator):
    """A generator of random numbers on the host, for any device: a simulated GPU draws none."""

    def __new__(cls, *_: Any, **__: Any) -> "HostGenerator":
        return super().__new__(cls, "cpu")  # pyrefly: ignore [bad-argument-count]
