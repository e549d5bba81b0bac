"""torch.compile on a simulated GPU: torch's own compiler generates code for a card that is not there.

Dynamo traces, AOTAutograd parts forward and backward, and Inductor plans the buffers and writes its wrapper,
all as for the card. The wrapper then executes on fake tensors: it allocates and frees as on the card. Its
kernels are generated, not compiled, and do nothing.

Each change of torch is in `_changes`, with its reason and the condition for its removal. They hold for all
threads while code compiles or runs compiled: to enter needs `ONE_AT_A_TIME`.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from importlib import import_module
from typing import Any, cast
from unittest import mock

import torch
from torch.nn import functional as F
from torch.nn.modules import module as all_modules
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..gpus import TERA, Gpu, Rates
from ..units import GB
from .call_site import described
from .cuda_answers import IMITATED, properties_of
from .fake_mode import QuickFakeMode
from .generated_code import FOLDER
from .patching import TRIED, UnlessCompiling
from .simulated import CHOICES
from .triton_stub import triton_there

SKIPPED = "torch.compile is skipped: the step runs eagerly and keeps other tensors than a compiled step"
EARLIER = "what was compiled before the block runs eagerly in it: call torch.compile inside"
CUDA_GRAPHS = (
    "CUDA graphs keep their tensors in a pool of their own, which is not predicted:"
    " the compiled step is shown without them"
)
GENUINE = torch.compile
PACKAGE = __name__.partition(".")[0]
UNKNOWN_RATES = cast(Rates, IMITATED.rates)
"""The rates of a card of which none are known; a note says so."""
WITH_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes of torch.compile with CUDA graphs, and the same without."""
MAY_LACK = ("_cuda_getCurrentRawStream", "triton", "copy_if_misaligned")
"""Names that a torch has with CUDA, with triton, or from 2.12 on."""
MOST_BLOCKS = 1000
NO_RACE = "max-autotune races kernels on the card: here cuBLAS wins each race"


class Compiler:
    """Replaces `torch.compile` for a simulated GPU; its changes of torch end with `stack`."""

    def __init__(self, card: Gpu, notes: dict[str, None], lasting: bool, stack: ExitStack) -> None:
        self.card = card
        self.notes = notes
        self.lasting = lasting
        self.stack = stack
        self.is_ready: bool | None = None  # None until it is asked for
        self.until_ready = ExitStack()

    def compile(self, model: Any = None, **choices: Any) -> Any:
        """Act as `torch.compile`; where this torch cannot compile here, return what was given."""
        if not self.ready():
            return model if model is not None else lambda function: function
        compiled = GENUINE(model, **self._without_graphs(choices))
        owner = getattr(model, "__self__", None)
        if isinstance(model, torch.nn.Module):
            _carry_over(_hooks_of(model), compiled)
        elif isinstance(owner, torch.nn.Module) and model.__name__ == "_call_impl":  # of `Module.compile`
            return _between(_hooks_of(owner, everywhere=True), owner, compiled)
        return compiled

    def ready(self) -> bool:
        """True if code can be compiled, prepared at the first call; else a note says why not."""
        if self.is_ready is None:
            self.until_ready.close()
            reason = unavailable(self.card)
            self.is_ready = not reason
            if reason:
                self.notes.setdefault(f"{SKIPPED} ({reason})")
                self.until_ready.enter_context(_left_alone(self.notes))
            else:
                self.stack.enter_context(_prepared(self.card, self.notes))
                if self.card.rates is None:
                    self.notes.setdefault(f"compiled with the rates of an {IMITATED.name}")
                if not self.lasting:
                    with mock.patch.object(torch.cuda, "is_available", partial(_answer, False)):
                        torch.compiler.reset()  # on a card it would look for CUDA graphs, too
        return self.is_ready

    def _without_graphs(self, choices: dict[str, Any]) -> dict[str, Any]:
        """The choices without CUDA graphs, which need the card; notes say what is left out."""
        mode = choices.get("mode") or ""
        options = choices.get("options") or {}
        if "max-autotune" in mode or options.get("max_autotune"):
            self.notes.setdefault(NO_RACE)
        if mode not in WITH_GRAPHS and not options.get("triton.cudagraphs"):
            return choices
        self.notes.setdefault(CUDA_GRAPHS)
        if options:
            return {**choices, "options": {**options, "triton.cudagraphs": False}}
        return {**choices, "mode": WITH_GRAPHS[mode]}


Hooks = tuple[list[Any], list[Any]]
"""What watches a module before and after its forward."""


def _hooks_of(module: torch.nn.Module, everywhere: bool = False) -> Hooks:
    """The course's own hooks of this module, which compiled code does not call, or those of all modules."""
    before = [*module._forward_pre_hooks.values()]
    after = [*module._forward_hooks.values()]
    if everywhere:
        before += all_modules._global_forward_pre_hooks.values()
        after += all_modules._global_forward_hooks.values()
    own = [[one for one in hooks if isinstance(one, UnlessCompiling)] for hooks in (before, after)]
    return own[0], own[1]


def _carry_over(hooks: Hooks, compiled: Any) -> None:
    for hook in hooks[0]:
        compiled.register_forward_pre_hook(hook)
    for hook in hooks[1]:
        compiled.register_forward_hook(hook, always_call=True)


def _between(hooks: Hooks, module: torch.nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` between the hooks of `module`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for hook in hooks[0]:
            hook(module, args)
        try:
            return compiled(*args, **kwargs)
        finally:
            for hook in hooks[1]:
                hook(module, args, None)

    return call


@contextmanager
def compiling(card: Gpu, notes: dict[str, None], lasting: bool = False) -> Iterator[None]:
    """Inside, torch.compile compiles for `card` and executes on the simulated GPU; adds to `notes`.

    Enter it last, after all that replaces functions of torch: its own changes begin when torch.compile is
    called. Then torch forgets what it compiled before, as in a new process. If `lasting`, it does not, and
    what an earlier block compiled can be called at once.
    """
    with ExitStack() as stack:
        compiler = Compiler(card, notes, lasting, stack)
        stack.enter_context(mock.patch.object(torch, "compile", compiler.compile))
        stack.enter_context(compiler.until_ready).enter_context(_left_alone(notes))
        if lasting and _tried:
            compiler.ready()
        yield


@contextmanager
def _left_alone(notes: dict[str, None]) -> Iterator[None]:
    """Inside, Dynamo leaves alone what was compiled before the block, and then a note says so."""
    frames = sys.modules.get("torch._dynamo.convert_frame")  # it is loaded where anything was compiled
    with ExitStack() as stack:
        for name in ("any_torch_dispatch_mode_on_stack", "is_in_any_mode_without_ignore_compile_internals"):
            if hasattr(frames, name):
                stack.enter_context(mock.patch.object(frames, name, partial(_leave_alone, notes)))
        yield


def _leave_alone(notes: dict[str, None]) -> bool:
    notes.setdefault(EARLIER)
    return True


_tried = dict[Gpu, str]()
"""For cards for which this process has tried to compile, the reason why it cannot, or ""."""


def unavailable(card: Gpu) -> str:
    """The reason why this torch cannot compile for `card` here; "" where a small compiled step works."""
    if card not in _tried:
        try:
            with _disable_current_modes(), _prepared(card, {}), QuickFakeMode(**CHOICES):
                _try_a_step()
            _tried[card] = ""
        except Exception as error:  # of any kind: parts of torch that are not as expected fail in any way
            said = str(error).strip().splitlines() or [type(error).__name__]
            _tried[card] = f"torch {torch.__version__}: {said[0]}, tried was torch {TRIED}"
    return _tried[card]


def _try_a_step() -> None:
    """Raise RuntimeError unless forward and backward of a small function are compiled into kernels."""
    weight = torch.empty(64, 64, device="cuda", requires_grad=True)
    x = torch.empty(64, 64, device="cuda")
    before = Kernel.executed
    GENUINE(lambda: F.gelu(x @ weight).sum())().backward()
    if weight.grad is None or Kernel.executed < before + 2:
        raise RuntimeError("a small step executed no kernels of the compiler")


@contextmanager
def _prepared(card: Gpu, notes: dict[str, None]) -> Iterator[None]:
    """Inside, code compiles for `card`; in the end graph breaks are added to `notes`."""
    with ExitStack() as stack:
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        stack.enter_context(triton_there())
        with _disable_current_modes():  # none is to see what torch makes as it loads
            _load_cuda_graphs()
            changes = [*_of_dynamo(modes), *_of_inductor(card), *_of_generated_code()]
        for owner, name, replacement in changes:
            create = name in MAY_LACK
            stack.enter_context(mock.patch.object(owner, name, replacement, create=create))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER))
        stack.enter_context(mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder))
        stack.enter_context(_settings())
        _forget_the_card()
        stack.callback(_forget_the_card)
        reasons = import_module("torch._dynamo.utils").graph_break_reasons
        before = len(reasons)
        yield
        notes.update(dict.fromkeys(_graph_breaks(reasons[before:])))


def _load_cuda_graphs() -> None:
    """Import torch's module of CUDA graphs, which takes classes from C++ that a build for the CPU lacks."""
    with mock.patch.object(torch.backends.cuda, "is_built", lambda: torch.version.cuda is not None):
        import_module("torch._inductor.cudagraph_trees")


Change = tuple[Any, str, Any]
"""An owner, the name of one of its attributes, and what replaces that."""


def _of_dynamo(modes: list[TorchDispatchMode]) -> Iterator[Change]:
    """Changes for the part that traces Python. They go when torch compiles for a GPU that is not there."""
    # Dynamo leaves code alone while a dispatch mode watches, unless the mode says that it may be compiled
    for kind in {type(mode) for mode in modes}:
        yield kind, "ignore_compile_internals", classmethod(lambda _: True)
    # where a graph breaks Dynamo would trace modes, too; torch's own wrapper around them is slower
    for kind in {one for mode in modes for one in type(mode).__mro__ if one.__module__.startswith(PACKAGE)}:
        own = vars(kind).get("__torch_dispatch__")
        if own is not None and not kind._should_skip_dynamo():
            yield kind, "__torch_dispatch__", torch._disable_dynamo(own)
    # the choice of attention's kernel asks more than Dynamo can trace, so AOTAutograd executes it
    choose = F.scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        return choose(*args, **kwargs)

    yield F, "scaled_dot_product_attention", import_module("torch._dynamo").allow_in_graph(attend)
    # Dynamo asks for the current stream where there is an accelerator, and knows torch's own class only
    yield torch.accelerator, "is_available", lambda: False
    # while it traces it makes the states of a compiled optimizer, and then no mode makes tensors
    variable = import_module("torch._dynamo.variables.optimizer").OptimizerVariable
    yield variable, "call_method", partialmethod(_with_states, variable.call_method, modes)


def _with_states(
    variable: Any, call: Callable[..., Any], modes: list[TorchDispatchMode], tx: Any, name: str, *rest: Any
) -> Any:
    """`OptimizerVariable.call_method`, in which `modes` see the optimizer make its states."""
    optimizer = variable.value
    make = getattr(optimizer, name) if name == "_init_group" else None
    if make is None:
        return call(variable, tx, name, *rest)

    def made(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for mode in modes:
                _python_dispatch._push_mode(mode)
                stack.callback(_python_dispatch._pop_mode)
            return make(*args, **kwargs)

    with mock.patch.object(optimizer, name, made):
        return call(variable, tx, name, *rest)


def _of_inductor(card: Gpu) -> Iterator[Change]:
    """Changes for the part that plans buffers and writes code. They go with those of `_of_dynamo`."""
    known = properties_of(card)
    interface = import_module("torch._dynamo.device_interface").CudaInterface
    for owner in (interface, interface.Worker):  # it holds functions that torch.cuda had when it was loaded
        yield owner, "get_device_properties", staticmethod(lambda *_: known)
    # its advice is on speed, and a simulated GPU has none
    yield import_module("torch._inductor.compile_fx"), "_warn_tf32_disabled", partial(_answer, None)
    # it asks triton for its driver
    yield import_module("torch.utils._triton"), "triton_hash_with_backend", partial(_answer, "none")
    yield import_module("torch._dynamo.utils"), "triton", import_module("triton")
    # it notes which driver there is, for which it starts a process
    report = import_module("torch._dynamo.repro.after_aot")
    yield report, "_cuda_system_info_comment", partial(_answer, "")
    # kernels are compiled for the card, or by a compiler of C++
    kernels = import_module("torch._inductor.async_compile").AsyncCompile
    for name in ("triton", "cpp", "cpp_pybinding"):
        yield kernels, name, partial(_answer, Kernel())
    # it races kernels on the card
    race = import_module("torch._inductor.select_algorithm").AlgorithmSelectorCache
    yield race, "benchmark_in_current_process", _times
    # it weighs run times by the card's rates, which it asks of a driver
    rates = card.rates or UNKNOWN_RATES
    speeds = {"float32": rates.fp32 / TERA, "float16": rates.tensor / TERA, "bfloat16": rates.tensor / TERA}
    for asking in ("torch._inductor.utils", "torch._inductor.scheduler"):
        yield import_module(asking), "get_device_tflops", lambda dtype: speeds[str(dtype).split(".")[1]]
        yield import_module(asking), "get_gpu_dram_gbps", partial(_answer, rates.memory / GB)
    # it times a product with and without padding; on the H200 that was recorded, padding lost
    padding = import_module("torch._inductor.fx_passes.pad_mm")
    yield padding, "get_cached_should_pad", partial(_answer, False)
    # where attention is written out, Inductor may put torch's kernel, by the operator and not the function
    fuse = import_module("torch._inductor.fx_passes.fuse_attention")
    yield fuse, "_scaled_dot_product_attention", F.scaled_dot_product_attention


def _of_generated_code() -> Iterator[Change]:
    """Changes for what the generated code calls: C++ that no dispatch mode sees, and the card."""
    guards = torch._C._dynamo.guards
    for device in ("cuda", "cpu"):
        yield guards, f"_empty_strided_{device}", partial(_empty, device)
    yield guards, "_reinterpret_tensor", _reinterpreted
    yield guards, "copy_if_misaligned", _itself
    yield import_module("torch._inductor.utils"), "copy_misaligned_inputs", partial(_answer, ([], []))
    yield torch._C, "_cuda_getCurrentRawStream", partial(_answer, 0)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        yield torch.cuda, name, partial(_answer, 0)
    # a recomputed dropout, or attention, takes the random state of its forward
    yield torch.cuda, "default_generators", (CardGenerator(),)
    yield torch.ops.higher_order, "graphsafe_run_with_rng_state", _run


def _answer(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def _times(choices: Any, *_: Any, **__: Any) -> dict[Any, float]:
    """Times by which the first of the choices wins."""
    return {choice: float(place) for place, choice in enumerate(choices, start=1)}


def _empty(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _run(operator: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


class Kernel:
    """A generated kernel, which does nothing; counts how often kernels were executed in this process."""

    executed = 0

    def run(self, *_: Any, **__: Any) -> None:
        Kernel.executed += 1

    __call__ = run


class CardGenerator(torch.Generator):
    """The simulated GPU's generator of random numbers, whose state is always the same."""

    def __new__(cls) -> "CardGenerator":
        return super().__new__(cls, "cpu")  # pyrefly: ignore [bad-argument-count]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def clone_state(self) -> "CardGenerator":
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, _new_state: Any) -> "CardGenerator":
        return self


@contextmanager
def _settings() -> Iterator[None]:
    """Inside, Inductor keeps nothing on disk, starts no process, and computes nothing as it compiles.

    On a card, blocks that run the same code share what is compiled. Here each has hooks of its own, whose
    numbers Dynamo checks, so each is compiled; past a limit of 8 the others would run eagerly.
    """
    inductor = {
        "compile_threads": 1,
        "fx_graph_cache": False,
        "joint_graph_constant_folding": False,  # it computes constants on the card
        "max_autotune_gemm_backends": "ATEN",
        "max_autotune_conv_backends": "ATEN",
        "cpp.vec_isa_ok": False,  # else it compiles a small program to ask the processor
    }
    dynamo = {"recompile_limit": MOST_BLOCKS, "accumulated_recompile_limit": 8 * MOST_BLOCKS}
    with (
        import_module("torch._dynamo.config").patch(dynamo),
        import_module("torch._inductor.config").patch(inductor),
        import_module("torch._functorch.config").patch(enable_autograd_cache=False),
    ):
        yield


def _forget_the_card() -> None:
    """Clear what Inductor has remembered of a card, and of triton."""
    import_module("torch._inductor.runtime.hints").DeviceProperties.create.cache_clear()
    for module in ("torch._inductor.utils", "torch.utils._triton"):
        for kept in vars(import_module(module)).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


def _graph_breaks(reasons: list[Any]) -> Iterator[str]:
    """Sentences that count graph breaks, with the line and torch's reason for each."""
    found = dict[str, None]()
    for one in reasons:
        place = one.user_stack[-1] if one.user_stack else None
        line = described((place.filename, place.lineno or 0)) if place else "?"
        found[f"{line} ({one.reason.strip().splitlines()[0]})"] = None
    if found:
        word = "graph break" if len(found) == 1 else "graph breaks"
        yield f"{len(found)} {word} in compiled code: {', '.join(found)}"
