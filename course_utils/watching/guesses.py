"""Values of tensors on a simulated GPU: those that the host knows, and placeholders for all others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from ..measuring.phases import PLACEHOLDER

CHECK = torch.ops.aten._is_all_true.default
"""With it torch.distributions, and torch itself, test arguments. Those of a script that works pass."""


def known_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's values on the host, None if nobody knows them."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value = vars(tensor).get("known")
    if value is not None and (value.numel() == 0 or value.untyped_storage().nbytes()):
        return value
    return None


def known_on(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A new tensor on the device of a simulated one, whose values are known."""
    assert isinstance(like, FakeTensor)
    made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=like.fake_device)
    made.known = values  # pyrefly: ignore [missing-attribute]
    return made


def guess(
    func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor], made: Sequence[FakeTensor]
) -> None:
    """Note what a test of unknown values finds if each value is the placeholder: one truth for all elements.

    What is made of a test has a guess, too, as far as it follows: the sum of tests that all fail is 0.
    """
    is_test = any(one.dtype == torch.bool for one in made)
    if not is_test and not any("guess" in vars(one) for one in given):
        return
    if func is CHECK:
        found: Any = True
    elif torch.Tag.pointwise in func.tags:
        args, kwargs = tree_map_only(torch.Tensor, _stand_in, (args, kwargs))
        with no_dispatch():
            found = func(*args, **kwargs).item()
    else:  # a view, a copy, a reduction: of equal elements it has the same
        found = guessed(given[0]) if given else PLACEHOLDER
    for one in made:
        if one.dtype == torch.bool or not found:
            one.guess = found  # pyrefly: ignore [missing-attribute]


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype  # the host lacks kernels in 16 bits
    with no_dispatch():
        return torch.tensor(guessed(tensor), dtype=dtype)


def guessed(tensor: torch.Tensor) -> Any:
    """The number that stands for each element of a tensor; of known values the first."""
    value = known_values(tensor)
    if value is None or value.numel() == 0:
        return vars(tensor).get("guess", PLACEHOLDER)
    with no_dispatch():
        return value.flatten()[0].item()
