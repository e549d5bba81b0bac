"""torch's FakeTensorMode, which finds what it has worked out before in less time: half of a simulated step was that."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN = (int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode whose cache has shorter keys. Inherits because torch takes the key from a method of the mode.

    torch remembers what each operator gives for the shapes it was given. Its key for a tensor has 17 entries, each
    found by name; here it has those that a dense tensor can differ in. To be removed when torch's own is as quick.
    """

    def _prep_args_for_hash(  # type: ignore[override] (torch's releases differ in what comes last)
        self, result: list[object], args: Any, state: Any, *rest: Any
    ) -> None:
        """Add to `result` what stands for `args` in the key; torch itself sees to anything unusual."""
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


def _of(tensor: FakeTensor) -> tuple[object, ...]:
    """All that a dense tensor without symbolic sizes can differ in."""
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_quantized, tensor.is_conj(),
        tensor.is_neg(), tensor.is_inference(),
    )  # fmt: skip
