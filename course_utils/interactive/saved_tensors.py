"""The tensors that autograd keeps for backward, storage by storage: `saved_by` asks torch's own hooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import check_known

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Saved:
    """One storage that autograd keeps for backward: which operation keeps it, its shape, dtype and bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SHORT = {long: short for short, long in DTYPES.items()}


def saved_by(
    operation: Callable[..., Any],
    *inputs: "Sequence[int] | torch.Tensor",
    dtype: str = "fp32",
    device: str = "cpu",
) -> list[Saved]:
    """Run `operation` (a module or a function) and list each storage that autograd keeps for backward, once.

    `inputs` are tensors, or shapes of random tensors of `dtype` that need gradients; a module runs with its
    weights in `dtype`, which are left out. `device` is "cpu", or "gpu" for a simulated one, whose kernels may
    keep other things (statistics in fp32). Raises ValueError for an unknown dtype or device;
    SimulationUnavailable where no GPU can be simulated.
    """
    check_known("dtype", dtype, DTYPES)
    check_known("device", device, ("cpu", "gpu"))
    if device == "cpu":
        return _saved_now(operation, inputs, dtype, device)
    from ..measuring.simulated import simulated_gpu

    with simulated_gpu("flash" if dtype in ("fp16", "bf16") else "efficient"):
        return _saved_now(operation, inputs, dtype, device)


def _saved_now(
    operation: Callable[..., Any], inputs: "Sequence[Sequence[int] | torch.Tensor]", dtype: str, device: str
) -> list[Saved]:
    import torch

    tensors = tuple(_tensor(item, dtype, device) for item in inputs)
    kept: dict[int, torch.Tensor] = {}  # by storage, in order

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(_storage(tensor), tensor)
        return tensor.detach()  # an operation that keeps its own result would keep itself alive

    module = operation if isinstance(operation, torch.nn.Module) else torch.nn.Module()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weights = {name: _moved(tensor, dtype, device) for name, tensor in state.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if module is operation:
            result = torch.func.functional_call(module, weights, tensors)
        else:
            result = operation(*tensors)
    own = set(map(_storage, weights.values()))
    labels = _labels(result)
    return [_described(tensor, labels.get(key, "saved")) for key, tensor in kept.items() if key not in own]


def _described(tensor: "torch.Tensor", name: str) -> Saved:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Saved(name, tuple(tensor.shape), SHORT.get(dtype, dtype), tensor.untyped_storage().nbytes())


def _tensor(item: "Sequence[int] | torch.Tensor", dtype: str, device: str) -> "torch.Tensor":
    import torch

    if isinstance(item, torch.Tensor):
        return _moved(item, None, device)
    shape = tuple(item)
    kind = getattr(torch, DTYPES[dtype])
    if device == "gpu":
        return torch.empty(shape, dtype=kind, device="cuda", requires_grad=True)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind).requires_grad_()


def _moved(tensor: "torch.Tensor", dtype: str | None, device: str) -> "torch.Tensor":
    """`tensor` in `dtype` (its own for None, or if it holds no fractions), on the CPU or a simulated GPU."""
    import torch

    kind = getattr(torch, DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor.dtype
    if device == "gpu":
        return torch.empty(tensor.shape, dtype=kind, device="cuda", requires_grad=tensor.requires_grad)
    return tensor if tensor.dtype == kind else tensor.detach().to(kind).requires_grad_(tensor.requires_grad)


def _storage(tensor: "torch.Tensor") -> int:
    return tensor.untyped_storage()._cdata


def _labels(result: Any) -> dict[int, str]:
    """A name for each storage kept: the operation whose backward uses it first, and what it is there."""
    labels: dict[int, str] = {}
    outputs = result if isinstance(result, tuple | list) else [result]
    waiting: list[Any] = [getattr(output, "grad_fn", None) for output in outputs]
    seen = {None}
    # The graph's nodes, last operation first, as backward meets them. A node's `_saved_…` are its tensors.
    while waiting:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        operation = node.name().rstrip("0123456789").removesuffix("Backward")
        for attribute in sorted(name for name in dir(node) if name.startswith("_saved_")):
            tensor = getattr(node, attribute)
            if hasattr(tensor, "untyped_storage"):
                labels.setdefault(_storage(tensor), f"{operation}: {attribute.removeprefix('_saved_')}")
    return labels
