"""A block's forward as torch runs it: its operations, their tensors, and which of these backward needs.

Nothing here is a formula. A dispatch mode sees each operation below autograd, and torch's own hooks say what
autograd saves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...interactive.saved_tensors import SHORT

NAMES = {
    "addmm": "linear layer",
    "mm": "linear layer",
    "bmm": "matrix product",
    "native_layer_norm": "LayerNorm",
    "_fused_rms_norm": "RMSNorm",
    "native_dropout": "dropout",
    "_softmax": "softmax",
    "_scaled_dot_product_flash_attention": "flash attention",
    "_scaled_dot_product_efficient_attention": "efficient attention",
    "_scaled_dot_product_cudnn_attention": "cuDNN attention",
    "gelu": "GELU",
    "silu": "SiLU",
    "add": "addition",
    "sub": "subtraction",
    "mul": "product",
    "div": "division",
    "pow": "power",
    "clone": "copy",
}
"""Names of torch's operators as the course says them; others keep torch's own."""


@dataclass(frozen=True)
class Made:
    """A tensor that an operation makes: its format, its bytes, and whether autograd keeps it for backward."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kept: bool = False


@dataclass(frozen=True)
class Operation:
    """An operation of a forward: its module, the tensors it makes, the operations whose tensors it reads."""

    name: str
    module: str
    makes: Sequence[Made]
    reads: Sequence[int]


@dataclass(frozen=True)
class Trace:
    """A block's operations in the order of forward; the first one stands for the block's input."""

    operations: Sequence[Operation]
    numbers: int
    """Numbers in the input, s·b·h."""

    @property
    def kept(self) -> int:
        """Bytes that autograd keeps for backward, weights and their copies left out."""
        return sum(one.bytes for step in self.operations for one in step.makes if one.kept)


def trace(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Trace:
    """Run block(x) once, and follow each tensor from the operation that makes it to those that read it.

    Weights, what is made of weights alone (autocast's 16-bit copies), and constants are left out. A storage
    counts once: views are not tensors of their own.
    """
    state = [*block.parameters(), *block.buffers()] if isinstance(block, torch.nn.Module) else []
    follower = _Follower(x, state)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(_storage(tensor), tensor.detach())
        return tensor.detach()  # the tensor itself would make a cycle with the graph, which is never freed

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with _names_running(block) as follower.running, hooks, follower:
        block(x)
    return Trace(follower.operations(set(kept)), x.numel())


@dataclass
class _Step:
    name: str
    module: str
    made: list[torch.Tensor]
    reads: list[int] = field(default_factory=list)


class _Follower(TorchDispatchMode):
    """Sees each operator; holds all tensors, so that a storage's number stays its own."""

    def __init__(self, x: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.running: list[str] = []
        self.steps = [_Step("input x", "", [x])]
        self.makers = {_storage(x): 0}
        self.others = {_storage(tensor) for tensor in state}  # weights, and what is made of them
        self.held: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        read = list(dict.fromkeys(map(_storage, given)))
        made = []
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in read:
                made.append(leaf)
        self.held += made
        reads = [self.makers[key] for key in read if key in self.makers]
        if not reads:
            self.others |= set(map(_storage, made))
        elif made:
            name = func.overloadpacket.__name__
            spelled = NAMES.get(name, name.strip("_"))
            if name == "_to_copy":
                spelled = f"to {short(made[0].dtype)}"
            self.makers |= {_storage(tensor): len(self.steps) for tensor in made}
            running = self.running[-1] if self.running else ""
            self.steps.append(_Step(spelled, running, made, sorted(set(reads))))
        return out

    def operations(self, kept: set[int]) -> list[Operation]:
        return [
            Operation(step.name, step.module, [_described(one, kept) for one in step.made], step.reads)
            for step in self.steps
        ]


def _described(tensor: torch.Tensor, kept: set[int]) -> Made:
    made = Made(tuple(tensor.shape), short(tensor.dtype), tensor.untyped_storage().nbytes())
    return replace(made, kept=_storage(tensor) in kept)


def short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _names_running(block: Any) -> Iterator[list[str]]:
    """A list with the names of the modules whose forward is running, the innermost last."""
    running: list[str] = []
    handles = []
    named = block.named_modules() if isinstance(block, torch.nn.Module) else []

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    for name, module in named:
        handles.append(module.register_forward_pre_hook(partial(enter, name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()
