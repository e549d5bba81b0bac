"""torch's FakeTensorMode, with a quicker cache: looking up what was known took half of a simulated step."""

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from .shapes import RULES

ASK_DEVICE = torch.ops.prim.device.default
"""Half of all that a simulated step asks: autograd and optimizers look at devices all the time."""

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
LIFT = torch.ops.aten.lift_fresh.default
"""torch.tensor() ends in it. Optimizers make each parameter's step counter with it."""

META = torch.device("meta")

aten = torch.ops.aten
VIEWS = frozenset({aten.view.default, aten.detach.default, aten.t.default, aten.transpose.int})
"""Half of a step's operators. Making such a view again is quicker than looking it up in the cache."""

profiler = torch.ops.profiler
NAMED_REGIONS = frozenset(
    {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
)
"""With these an optimizer names its step for torch's profiler. They take no tensors."""

PLAIN = (int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode whose cache has shorter keys.

    It inherits because torch takes the key from a method of the mode. Torch's key for a tensor has 17
    entries; here it has those that a dense tensor can differ in. What Adam asks once for each parameter is
    answered in short. To be removed when torch's own is as quick.
    """

    def __init__(self, **choices: Any) -> None:
        super().__init__(**choices)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps torch.compile out takes as long as the cache

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASK_DEVICE:
            return device_of(args[0])
        if func is READ_NUMBER and args[0].constant is not None:
            with no_dispatch():
                return args[0].constant.item()
        if func is LIFT and type(args[0]) is torch.Tensor and args[0].dim() == 0:
            return self._constant(args[0])
        if func in VIEWS and not kwargs and self._is_plain(args[0]):
            with fake_tensor.in_kernel_invocation_manager(self):
                view = func(*args)
            return self._faked(view, args[0].fake_device)
        if func in NAMED_REGIONS:
            return func(*args, **(kwargs or {}))
        if func in RULES:
            with fake_tensor.in_kernel_invocation_manager(self):
                shapes = RULES[func](*args, **(kwargs or {}))
            device = args[0].fake_device
            return tree_map_only(torch.Tensor, lambda one: self._faked(one, device), shapes)
        return self.dispatch(func, types, args, kwargs or {})

    def _constant(self, number: torch.Tensor) -> FakeTensor:
        """A fake tensor that remembers its one number, made without torch's description of the real one."""
        with fake_tensor.in_kernel_invocation_manager(self):
            empty = torch.empty((), dtype=number.dtype, device=META)
        made = self._faked(empty, number.device)
        with no_dispatch():
            made.constant = number.clone()
        self.fake_tensor_converter.add_constant_storage_mapping(made)
        return made

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        found = super()._dispatch_impl(func, types, args, kwargs)
        return tuple(found) if isinstance(found, list) else found  # the cache takes tuples, and no lists

    # pyrefly: ignore [bad-override]: up to torch 2.13 the operator stands before its arguments
    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, *rest: Any) -> Any:
        known = entry.metadata
        args = rest[-1]
        dense = known is not None and known.layout is torch.strided
        if not dense or known.is_conj or known.is_neg or self.shape_env:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, *rest)
        with fake_tensor.in_kernel_invocation_manager(self):
            empty = torch.empty_strided(
                known.shape, known.stride, dtype=known.dtype, device=META, requires_grad=known.requires_grad
            )
            if entry.view_idx is not None:
                storage = args[entry.view_idx].untyped_storage()
                empty.set_(storage, known.storage_offset, known.shape, known.stride)
        return self._faked(empty, known.device)

    def _faked(self, empty: torch.Tensor, device: torch.device) -> FakeTensor:
        """FakeTensor(self, empty, device), with the attributes of the first one made for this device."""
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self, empty, device)))
        made = torch.Tensor._make_subclass(
            FakeTensor, empty, empty.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made

    def _prep_args_for_hash(  # pyrefly: ignore [bad-override]  # torch's releases differ in what comes last
        self, result: list[object], args: Any, state: Any, *rest: Any
    ) -> None:
        """Add the part of the key for `args` to `result`; torch itself sees to anything unusual."""
        if not isinstance(args, (list, tuple)):
            super()._prep_args_for_hash(result, args, state, *rest)
            return
        result.append((type(args), len(args)))
        for item in args:
            if type(item) in PLAIN:
                result += (type(item), item)  # 1 and 1.0 are equal, and give other dtypes
            elif isinstance(item, (list, tuple)):
                self._prep_args_for_hash(result, item, state, *rest)
            elif self._is_plain(item):
                result.append(_of(item))
            else:
                super()._prep_args_for_hash(result, iter((item,)), state, *rest)

    def _is_plain(self, item: Any) -> bool:
        dense = type(item) is FakeTensor and item.fake_mode is self and item.layout is torch.strided
        return dense and item.constant is None and self.shape_env is None


def device_of(tensor: FakeTensor) -> torch.device:
    """A fake tensor's device; to torch's own kernels that is "meta"."""
    return META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def _of(tensor: FakeTensor) -> tuple[object, ...]:
    """All that a dense tensor without symbolic sizes can differ in."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )
