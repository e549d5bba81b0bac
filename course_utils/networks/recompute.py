"""Recomputation in backward, with the first forward's dropout, and activations kept in host memory."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..run import blocks_per_checkpoint

aten = torch.ops.aten

KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
"""Operators whose results "selective" keeps, needed in backward or not: nearly all of a block's arithmetic.
"""

SMALLEST_TO_OFFLOAD = 2**20
"""Bytes. Below this a copy is all latency: norms' statistics, logsumexp, the state of random numbers stay."""


def run_blocks(
    blocks: Iterable[nn.Module], x: torch.Tensor, shared: tuple[Any, ...], recompute: str
) -> torch.Tensor:
    """The output of all blocks, keeping for backward what `recompute` says.

    Each is called as `block(x, *shared)`.
    """
    if recompute == "offload":
        matrices = {
            tuple(weight.shape) for block in blocks for weight in block.parameters() if weight.dim() == 2
        }
        with Offloading(_resident(blocks, shared), matrices):
            return _in_turn(blocks, x, *shared)
    if recompute == "selective":
        keep_products = partial(create_selective_checkpoint_contexts, KEPT)
        for block in blocks:
            x = checkpoint(block, x, *shared, use_reentrant=False, context_fn=keep_products)
        return x
    blocks = list(blocks)
    size = blocks_per_checkpoint(recompute, len(blocks))
    if not size:
        return _in_turn(blocks, x, *shared)
    for first in range(0, len(blocks), size):
        x = checkpoint(_in_turn, blocks[first : first + size], x, *shared, use_reentrant=False)
    return x


def attention_core(core: Callable[..., torch.Tensor], recompute: str, *arguments: Any) -> torch.Tensor:
    """`core(*arguments)`; with "selective-attention" only q, k, v are kept.

    Korthikanti et al. 2022, section 5.
    """
    if recompute == "selective-attention":
        return checkpoint(core, *arguments, use_reentrant=False)
    return core(*arguments)


def _in_turn(blocks: Iterable[nn.Module], x: torch.Tensor, *shared: Any) -> torch.Tensor:
    for block in blocks:
        x = block(x, *shared)
    return x


class Offloading(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd saves is copied to host memory, and back when backward asks for it.

    The copies are of whole storages, and a storage that is saved several times travels to the host once: q, k
    and v of one matrix product, say. Gradients are the same to the bit. These stay on the device: `resident`
    storages, the weights and what all blocks share; autocast's 16-bit copies of weights, known as transposed
    matrices of one of `weight_shapes`, which it holds until forward has ended; and storages smaller than
    SMALLEST_TO_OFFLOAD.
    """

    def __init__(self, resident: set[int], weight_shapes: set[tuple[int, ...]]) -> None:
        super().__init__(self._pack, _unpack)
        self.resident = resident
        self.weight_shapes = weight_shapes
        self.travelled: dict[int, tuple[HostCopy, ref[torch.UntypedStorage]]] = {}

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | Traveller":
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.resident or storage.nbytes() < SMALLEST_TO_OFFLOAD or self._is_weight_copy(tensor):
            return tensor
        if key not in self.travelled:
            # Forgotten when it is freed, as the next storage at this address is another.
            forget = ref(storage, partial(self._forget, key))
            self.travelled[key] = HostCopy(tensor), forget
        return Traveller(self.travelled[key][0], tensor)

    def _forget(self, key: int, _: object) -> None:
        del self.travelled[key]

    def _is_weight_copy(self, tensor: torch.Tensor) -> bool:
        transposed = tensor.dim() == 2 and tensor.stride() == (1, tensor.size(0))
        return transposed and tuple(tensor.shape[::-1]) in self.weight_shapes


def _unpack(kept: "torch.Tensor | Traveller") -> torch.Tensor:
    if not isinstance(kept, Traveller):
        return kept
    with torch.enable_grad():  # by which the tracker knows activations that are back in backward
        return kept.tensor()


class HostCopy:
    """A storage's bytes in host memory, and its copy back on the device for as long as anybody uses that."""

    def __init__(self, tensor: torch.Tensor) -> None:
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        # Pinned pages let a GPU copy without waiting for the host; a simulated one has nothing to copy.
        pinned = whole.is_cuda and not isinstance(whole, FakeTensor)
        self.host = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=pinned)
        self.host.copy_(whole, non_blocking=pinned)
        self.device = whole.device
        self.pinned = pinned
        self.back: ref[torch.UntypedStorage] | None = None

    def on_device(self) -> torch.Tensor:
        """The whole storage on its device again: a new copy, or one that another tensor still uses."""
        there = self.back() if self.back is not None else None
        if there is not None:
            return _tensor_on(there, torch.empty(0, dtype=self.host.dtype, device=self.device))
        whole = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        whole.copy_(self.host, non_blocking=self.pinned)
        self.back = ref(whole.untyped_storage())
        return whole


class Traveller:
    """One saved tensor whose storage is in host memory."""

    def __init__(self, copy: HostCopy, tensor: torch.Tensor) -> None:
        self.copy = copy
        self.dtype = tensor.dtype
        self.layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved, on its device."""
        return self.copy.on_device().view(self.dtype).as_strided(*self.layout)


def _tensor_on(storage: torch.UntypedStorage, empty: torch.Tensor) -> torch.Tensor:
    """`empty` made a view of a whole storage, which torch's cache of fake operators would keep for ever."""
    with disable_fake_tensor_cache(empty.fake_mode) if isinstance(empty, FakeTensor) else nullcontext():
        return empty.set_(storage)


def _resident(blocks: Iterable[nn.Module], shared: tuple[Any, ...]) -> set[int]:
    weights = [tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())]
    tensors = [*weights, *(thing for thing in tree_leaves(shared) if isinstance(thing, torch.Tensor))]
    return {tensor.untyped_storage()._cdata for tensor in tensors}
