"""Changes of torch during a measurement: one measurement at a time, and functions for its own thread.

`FOLLOWED` and `SIMULATED` list what measuring replaces or asks inside torch, with the condition under which a
row can go; `check_layout` names what a torch lacks. Smaller replacements say the same where they are made.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..errors import SimulationUnavailable

TRIED = "2.11 to 2.13"
"""Releases of torch on which the tests have run."""

ONE_AT_A_TIME = threading.RLock()
"""Held while a step is followed, and a second thread's measurement waits for it.

Widgets and demos have threads of their own, but torch's functions, its random numbers and a GPU's peaks are
the whole process's.
"""


class Inside(NamedTuple):
    """Names inside torch, in this module and class of it ("torch.amp:GradScaler"); why, and until when."""

    owner: str
    names: tuple[str, ...]
    why: str
    until: str


FOLLOWED = (
    Inside(
        "torch:UntypedStorage",
        ("_cdata",),
        "the tracker knows a storage by this number",
        "torch has a documented identity of a storage",
    ),
    Inside(
        "torch:UntypedStorage",
        ("resize_",),
        "FSDP2 frees and fills its buffers with it, which no dispatch mode sees: the tracker follows it",
        "resizing is an operator",
    ),
    Inside(
        "torch._C:",
        ("_current_graph_task_id", "_current_autograd_node"),
        "the tracker asks whether backward runs, and whose",
        "torch has a documented way to ask",
    ),
    Inside(
        "torch.autograd:",
        ("_get_sequence_nr",),
        "what backward makes is shown with the line of its forward",
        "torch has a documented way to ask",
    ),
    Inside(
        "torch._C:_functions.AccumulateGrad",
        ("_set_sequence_nr", "metadata"),
        "the nodes of a gradient's gradient get the numbers that a GPU's thread of backward would give them",
        "the simulated GPU's backward has a thread of its own",
    ),
    Inside(
        "torch.autograd.graph:",
        ("_engine_run_backward",),
        "a line of code is in backward if this function is among its callers",
        "torch has a documented way to ask",
    ),
    Inside(
        "torch._C._functorch:",
        ("get_unwrapped", "is_functorch_wrapped_tensor"),
        "inside of torch.func.grad or vmap, a weight is a wrapper without a storage",
        "torch has a documented way to ask",
    ),
    Inside(
        "torch._subclasses.fake_tensor:",
        ("unset_fake_temporarily",),
        "copies of a model and real values are made outside of a simulation",
        "it is documented",
    ),
)
"""What every tracker needs, on a GPU and the CPU, too."""

SIMULATED = (
    Inside(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        ("_dispatch_impl", "_get_output_tensor_from_cache_entry", "_prep_args_for_hash"),
        "`QuickFakeMode` has shorter keys for its cache, and makes results in fewer calls",
        "torch's own cache is as quick",
    ),
    Inside(
        "torch._subclasses.fake_tensor:",
        ("in_kernel_invocation_manager",),
        "`QuickFakeMode` makes results as torch's fake mode does, in fewer calls",
        "torch's own cache is as quick",
    ),
    Inside(
        "torch.utils._python_dispatch:",
        ("_get_current_dispatch_mode_stack",),
        "a simulated GPU within another is refused",
        "torch has a documented way to ask",
    ),
    Inside(
        "torch._C:",
        ("_set_throw_on_mutable_data_ptr",),
        "`QuickFakeMode` makes fake tensors as their constructor does, in less time",
        "torch's own cache is as quick",
    ),
    Inside(
        "torch.cuda.amp.common:",
        ("amp_definitely_not_available",),
        "autocast and GradScaler switch themselves off where CUDA is not there",
        "they accept a CUDA whose tensors are fake",
    ),
    Inside(
        "torch.cuda:",
        ("is_bf16_supported",),
        "autocast to bf16 is refused where no card says that it has bf16",
        "they accept a CUDA whose tensors are fake",
    ),
    Inside(
        "torch.amp:GradScaler",
        ("_maybe_opt_step",),
        "it reads on the host whether gradients are finite; fake ones have no value, so it always steps",
        "the choice is made on the device",
    ),
    Inside(
        "torch.optim.optimizer:",
        ("_foreach_supported_types",),
        "foreach=None looks at the exact type of the parameters, which is FakeTensor",
        "FakeTensor is among these types",
    ),
    Inside(
        "torch.nn.functional:",
        ("scaled_dot_product_attention",),
        "on fake tensors it takes plain mathematics, where a GPU has one kernel",
        "its choice of a kernel works for fake CUDA tensors",
    ),
    Inside(
        "torch._C:",
        ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        "torch tries attention's kernels in an order that a program can set, and sets it for a card it sees",
        "its choice of a kernel works for fake CUDA tensors",
    ),
    Inside(
        "torch._C:",
        ("_jit_can_fuse_on_gpu", "_jit_override_can_fuse_on_gpu"),
        "TorchScript fuses CUDA tensors' operators into a kernel, which it compiles with the driver",
        "it leaves fake tensors alone",
    ),
)
"""What a simulated GPU needs in addition. `sharded` has what FSDP2 needs."""


@functools.cache
def check_layout(needed: tuple[Inside, ...]) -> None:
    """Raise SimulationUnavailable, naming what is missing, for a torch without one of the names needed."""
    for owner, names, why, _ in needed:
        module, _, inner = owner.partition(":")
        try:
            found: Any = import_module(module)
            for part in filter(None, inner.split(".")):
                found = getattr(found, part)
            missing = [name for name in names if not hasattr(found, name)]
        except (ImportError, AttributeError):
            missing = list(names)
        if missing:
            place = ".".join(filter(None, (module, inner, missing[0])))
            raise SimulationUnavailable(
                f"torch {torch.__version__} is laid out in another way: there is no {place}"
                f" ({why}). Measuring was tried with torch {TRIED}: install one of these"
            )


@contextmanager
def on_this_thread(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside, the function `owner.name` is `replacement` for this thread, and for no other."""
    here = threading.get_ident()
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        function = replacement if threading.get_ident() == here else original
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, chosen):
        yield


class UnlessCompiling:
    """A module's hook that torch.compile does not see, which would trace it as a part of the model."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.hook(*args, **kwargs)
