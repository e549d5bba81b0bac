"""Saving and loading of simulated tensors, for `torch.save`, `pickle` and what uses them.

Shape, dtype, device and shared storages come back, and those values that are known.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.serialization import safe_globals
from torch.utils._pytree import tree_map_only

from .steps import known_values


class SavedStorage:
    """A storage without its values. Tensors that share one are saved with the same object."""

    size = 0


_loading: list[tuple[Any, Any]] = []  # the mode and map_location of each `torch.load`


def save(original: Callable[..., None], thing: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` through Python's `open`, which is replaced while a script is watched."""
    if not isinstance(file, (str, os.PathLike)):
        return original(thing, file, *args, **kwargs)
    with Path(file).open("wb") as opened:
        return original(thing, opened, *args, **kwargs)


def load(original: Callable[..., Any], file: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load` with real values on the host; what is asked for on the GPU goes to the simulated one."""
    if isinstance(file, (str, os.PathLike)):
        with Path(file).open("rb") as opened:
            file = opened.name  # torch may map it into memory, by its name
    with unset_fake_temporarily() as mode, safe_globals([rebuilt, SavedStorage]):
        _loading.append((mode, map_location))
        try:
            found = original(file, map_location="cpu", **kwargs)
        finally:
            _loading.pop()
    if not isinstance(map_location, (str, torch.device)):
        return found
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(map_location), found)


def reduced(tensor: FakeTensor, _: Any = None) -> tuple[Any, ...]:
    """`__reduce_ex__` of a simulated tensor."""
    storage = tensor.untyped_storage()
    saved = vars(storage).setdefault("saved", SavedStorage())
    saved.size = storage.nbytes()
    place = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    weight = isinstance(tensor, torch.nn.Parameter)
    return rebuilt, (
        saved,
        place,
        tensor.dtype,
        str(tensor.device),
        tensor.requires_grad,
        weight,
        known_values(tensor),
    )


def rebuilt(
    saved: SavedStorage,
    place: tuple[tuple[int, ...], tuple[int, ...], int],
    dtype: torch.dtype,
    device: str,
    requires_grad: bool,
    weight: bool,
    known: torch.Tensor | None,
) -> torch.Tensor:
    """The simulated tensor that `reduced` described, on the device where `torch.load` wants it."""
    mode, map_location = _loading[-1] if _loading else (None, None)
    with mode or nullcontext(), torch.no_grad():
        whole = vars(saved).get("whole")
        if whole is None:
            whole = torch.empty_strided(*place[:2], dtype=dtype, device=_destination(device, map_location))
            whole.untyped_storage().resize_(saved.size)
            vars(saved)["whole"] = whole
        made = whole.view(dtype).as_strided(*place)
        if weight:
            made = torch.nn.Parameter(made)
        made.requires_grad_(requires_grad)
    if known is not None:
        made.known = known  # pyrefly: ignore [missing-attribute]
    return made


def copied(tensor: FakeTensor) -> torch.Tensor:
    """`copy.copy` of a simulated tensor: another tensor of the same storage."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _destination(device: str, map_location: Any) -> Any:
    """The device for a tensor that was saved from `device`, by the rules of `torch.load`."""
    if map_location is None:
        return device
    if isinstance(map_location, dict):
        return map_location.get(device, device)
    return map_location if isinstance(map_location, (str, torch.device)) else "cpu"
