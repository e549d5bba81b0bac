"""A GPU that is not there: the genuine eager step on fake CUDA tensors, dispatched as on a real one.

torch's FakeTensorMode gives tensors that have a shape, a dtype and the device "cuda", but no memory. Three
things keep it from working without a GPU, and this file fixes each inside of torch's libraries:

1. The CPU build has no device guard for CUDA, and its CUDA hooks say that CUDA was not built, so backward
   refuses.
2. A CUDA build without a GPU has both, but backward asks the hooks for a device's context.
3. The CPU build lacks three CUDA kernels whose operators it then takes apart; on a GPU each is one kernel.

What the Python side of torch needs is in `patching.SIMULATED`. `attention` chooses the attention kernel.

To be removed when torch's no-op guard for CUDA (pytorch's pull request 163187) also serves builds without
CUDA, and backward asks the hooks for no context.
"""

import contextlib
import ctypes
import gc
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.optim.optimizer as torch_optimizer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch

from ..errors import SimulationUnavailable, StepError
from ..gpus import Gpu
from .attention import attending
from .cuda_answers import CARD
from .fake_mode import QuickFakeMode
from .patching import FOLLOWED, ONE_AT_A_TIME, SIMULATED, check_layout, on_this_thread

# of a fake mode; fallback kernels would run on a real device, with real memory
CHOICES = {"allow_fallback_kernels": False}
CUDA, META = 1, 14  # c10::DeviceType
GUARD_TYPE, GUARD_DEVICE_COUNT = 0, 15
"""Slots of c10::impl::DeviceGuardImplInterface's table of virtual functions, in the order of its header."""
HOOKS_IS_BUILT, HOOKS_HAS_CONTEXT = 2, 4
"""Slots of at::AcceleratorHooksInterface's table; the first two are its destructors."""


def availability() -> tuple[bool, str]:
    """(True, "CPU build of torch …") where a GPU can be simulated; else (False, reason)."""
    with ONE_AT_A_TIME:  # two threads that ask at once would both set it up
        return _availability()


@cache
def _availability() -> tuple[bool, str]:
    try:
        return True, self_test()
    except SimulationUnavailable as error:
        return False, str(error)


def self_test() -> str:
    """Run a small step on the simulated GPU; returns on which build. Raises SimulationUnavailable."""
    check_layout(FOLLOWED + SIMULATED)
    how = _enable()
    try:
        gradient = _gradient_of_a_small_step()
    except torch.OutOfMemoryError as error:  # torch's fake tensors begin with a real one where there is a GPU
        raise SimulationUnavailable(
            "the GPU of this machine is full, and a simulation next to it needs its context:"
            " set CUDA_VISIBLE_DEVICES= to hide that GPU, and name a card"
        ) from error
    except RuntimeError as error:  # of a build that this file does not fix, which misses its device
        raise SimulationUnavailable(
            f"a simulated step fails on torch {torch.__version__}: {error}"
        ) from error
    if gradient is None or gradient.shape != (4, 8) or gradient.device.type != "cuda":
        raise SimulationUnavailable(f"a simulated backward gave no gradient on torch {torch.__version__}")
    return how


def _gradient_of_a_small_step() -> torch.Tensor | None:
    with simulated_gpu("flash"):
        weight = torch.empty(4, 8, device="cuda", requires_grad=True)
        torch.nn.functional.rms_norm(torch.empty(2, 8, device="cuda") @ weight.t(), (4,)).sum().backward()
        return weight.grad


@cache
def _enable() -> str:
    """Once per process, before its first backward: the autograd engine counts devices only then."""
    if torch.cuda.is_available():
        return "fake tensors next to a real GPU"
    if sys.platform == "win32":
        raise SimulationUnavailable(
            "simulating a GPU needs Linux or macOS, as torch's libraries are laid out differently on Windows:"
            " open the course in WSL2 (`wsl --install`)"
        )
    try:
        if torch.backends.cuda.is_built():
            _patch_hooks({HOOKS_HAS_CONTEXT: _answer_no(ctypes.c_bool, ctypes.c_int8)})
            return "CUDA build of torch without a GPU"
        _register_device_guard()
        # a function of torch's that takes no arguments and says yes, if only to another question
        yes = _address(_library("torch_cpu")._ZN2at7Context9hasOpenMPEv)
        _patch_hooks({HOOKS_IS_BUILT: yes, HOOKS_HAS_CONTEXT: None})
    except (AttributeError, OSError, ValueError) as error:
        raise SimulationUnavailable(
            f"torch {torch.__version__} is laid out in a way this course does not know: {error}"
        ) from error
    _register_missing_kernels()
    return "CPU build of torch"


def _keep_for_ever(thing: Any) -> None:
    """Never free `thing`: torch's libraries use it until the process is gone, longer than Python lives."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.{suffix}"))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _answer_no(result: Any, *arguments: Any) -> int:
    function = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(lambda *_: 0)
    _keep_for_ever(function)
    return _address(function)


def _table_with(instance: int, changes: dict[int, int], slots: int) -> int:
    """A copy of `instance`'s table of virtual functions, changed; returns where they begin.

    In front of them are two other words, an offset and the type's description (Itanium C++ ABI).
    """
    functions = ctypes.cast(instance, ctypes.POINTER(ctypes.c_void_p))[0]
    words = (ctypes.c_void_p * (slots + 2)).from_address(functions - 2 * ctypes.sizeof(ctypes.c_void_p))
    copy = (ctypes.c_void_p * (slots + 2))(*words)
    for slot, function in changes.items():
        copy[slot + 2] = function
    _keep_for_ever(copy)
    return ctypes.addressof(copy) + 2 * ctypes.sizeof(ctypes.c_void_p)


def _register_device_guard() -> None:
    """Give CUDA the no-op guard that torch makes where a guard counts no devices.

    What counts none is a copy of the `meta` device's guard, lent until torch has replaced it.
    """
    c10 = _library("c10")
    table = (ctypes.c_void_p * 32).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    functions = ctypes.cast(table[META], ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]

    def ask(slot: int) -> int:
        return ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(functions[slot])(table[META])

    if ask(GUARD_TYPE) != META or ask(GUARD_DEVICE_COUNT) != 1:
        raise SimulationUnavailable(f"torch {torch.__version__} lays out its device guards in an unknown way")
    no_devices = {GUARD_DEVICE_COUNT: _answer_no(ctypes.c_int8)}
    lent = ctypes.c_void_p(_table_with(table[META], no_devices, slots=32))
    _keep_for_ever(lent)
    register = c10._ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
    register.argtypes = [ctypes.c_int8, ctypes.c_void_p]
    register.restype = None
    register(CUDA, ctypes.addressof(lent))
    torch._C._ensureCUDADeviceGuardSet()
    if table[CUDA] == ctypes.addressof(lent):
        raise SimulationUnavailable(
            f"torch {torch.__version__} did not replace the lent device guard by its own"
        )


def _patch_hooks(changes: dict[int, int | None]) -> None:
    """Change what the CUDA hooks answer. None means the old answer to "is CUDA built?", which is no."""
    get = _library("torch_cpu")._ZN2at6detail12getCUDAHooksEv
    get.restype = ctypes.c_void_p
    hooks = get()
    table = ctypes.cast(hooks, ctypes.POINTER(ctypes.c_void_p))
    functions = ctypes.cast(table[0], ctypes.POINTER(ctypes.c_void_p))
    is_built = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(functions[HOOKS_IS_BUILT])(hooks)
    if is_built != torch.backends.cuda.is_built():
        raise SimulationUnavailable(f"torch {torch.__version__} lays out its CUDA hooks in an unknown way")
    no = functions[HOOKS_IS_BUILT]
    answers = {slot: no if answer is None else answer for slot, answer in changes.items()}
    if HOOKS_IS_BUILT in changes and not _library("torch_cpu")._ZN2at7Context9hasOpenMPEv() & 1:
        raise SimulationUnavailable("this torch is built without OpenMP, which the simulated GPU needs")
    table[0] = _table_with(hooks, answers, slots=96)


def _register_missing_kernels() -> None:
    """Output shapes of the three CUDA kernels that the CPU build of torch 2.13 lacks, under the CUDA key."""
    half = (torch.float16, torch.bfloat16)

    def rms_norm(
        x: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
        exact = torch.float32 if x.dtype in half else x.dtype
        return torch.empty_like(x), x.new_empty(rows, dtype=exact)

    library = torch.library.Library("aten", "IMPL")
    _keep_for_ever(library)
    library.impl("_fused_rms_norm", rms_norm, "CUDA")
    for operator in ("silu_backward", "mish_backward"):
        library.impl(operator, lambda gradient, x: torch.empty_like(x), "CUDA")


@contextlib.contextmanager
def simulated_gpu(attention: str, mode: QuickFakeMode | None = None, card: Gpu = CARD) -> Iterator[None]:
    """Inside, every tensor on "cuda" is fake, of `mode` or a new one; `attention` is the kernel that runs.

    With "auto" it is the one that torch chooses on `card`.

    Raises SimulationUnavailable.
    """
    if any(isinstance(one, QuickFakeMode) for one in _python_dispatch._get_current_dispatch_mode_stack()):
        raise StepError("a simulated GPU is already in use here: measure outside of `with on_gpu():`")
    with ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        _enable()
        enter = stack.enter_context
        # `patching` says why each of these is needed, and until when. Their order is free.
        amp = importlib.import_module("torch.cuda.amp.common")
        enter(on_this_thread(amp, "amp_definitely_not_available", lambda: False))
        enter(on_this_thread(torch.cuda, "is_bf16_supported", lambda *_, **__: True))
        enter(on_this_thread(torch.amp.GradScaler, "_maybe_opt_step", _always_step))
        enter(attending(attention, card.capability))
        supported = [*torch_optimizer._foreach_supported_types, FakeTensor]
        enter(mock.patch.object(torch_optimizer, "_foreach_supported_types", supported))
        # A CUDA build asks cuDNN, and cuDNN the driver, how to run an LSTM; the CPU build runs it cell by
        # cell. This goes when fake tensors know what cuDNN makes.
        stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False
        # TorchScript would compile kernels for fake CUDA tensors and ask the driver: see `patching`.
        stack.callback(torch._C._jit_override_can_fuse_on_gpu, torch._C._jit_can_fuse_on_gpu())
        torch._C._jit_override_can_fuse_on_gpu(False)
        enter(torch.autograd.set_multithreading_enabled(False))  # an idle device thread can abort at exit
        # On a GPU that the mode sees when entered, torch.tensor(0.0, device="cuda") makes a real tensor. This
        # goes when the mode asks for no device.
        enter(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        enter(mode or QuickFakeMode(**CHOICES))
        yield


@contextlib.contextmanager
def cycles_left_alone() -> Iterator[None]:
    """Inside, Python searches for no cycles of references: no tensor of the course's own steps is in one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _always_step(_: Any, optimizer: Any, __: Any, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)
