"""Memory that CUDA's sums take: partial sums of the blocks of threads that share an output.

A sum over the rows of a gradient, as each layer with a bias takes in backward, may need more than the
gradient itself. The rule is `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh of torch 2.11 and 2.13.
"""

from collections.abc import Sequence
from math import prod

import torch

from ..gpus import Gpu

RESIDENT_THREADS = {
    (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048,
    (10, 3): 2048, (12, 0): 1536,
}  # fmt: skip
"""Threads of a multiprocessor by compute capability (CUDA C++ Programming Guide, technical specifications).
"""

MOST_THREADS = 512  # of a block (`MAX_NUM_THREADS`)
WARP = 32
VECTOR = 4  # outputs that a thread may have at once
VALUES = (16, 256)  # that a thread adds, at least and at most

Dimension = tuple[int, int]
"""The size and the stride of a dimension, in elements."""


def partial_sums(summed: torch.Tensor, dims: Sequence[int] | None, card: Gpu) -> list[int]:
    """Bytes that a sum or mean over `dims` takes while it runs: partial sums, and a counter for each block.

    Nothing where a block has its outputs for itself, for integers and fp64, and on a card whose
    multiprocessors are not known. Tensors of 2 GiB and more are summed in pieces, which this leaves out.
    """
    resident = RESIDENT_THREADS.get(card.capability, 0)
    is_counted = summed.is_floating_point() and summed.element_size() <= 4 and summed.nbytes < 2**31
    if not card.processors * resident or not is_counted or summed.numel() == 0:
        return []
    added, kept = _dimensions(summed, dims)
    inputs = prod(size for size, _ in added)
    outputs = prod(size for size, _ in kept)
    along_rows = not kept or (bool(added) and added[0][1] < kept[0][1])
    vector = 1
    if along_rows:
        width, height = inputs, outputs
        if inputs >= 128 and len(added) == 1 and added[0][1] == 1:
            width //= 16 // summed.element_size()  # a thread loads 16 bytes at once
    else:
        if kept[0][1] == 1:
            others = [stride for _, stride in added + kept[1:]]
            vector = _common_vector([int(summed.storage_offset()), kept[0][0], *others])
        width, height = outputs // vector, inputs
    wide, high = _block(width, height, MOST_THREADS // vector)
    step_input, step_output = (wide, 1) if along_rows else (1, wide)
    least, most = VALUES
    if _up(inputs, step_input) < min(high * least, most):
        return []
    values = _up(inputs, step_input * high)
    grid = _up(outputs // vector, step_output)
    wanted = card.processors * (resident // (wide * high))
    if values < most or grid > wanted:
        return []
    blocks = max(min(_up(wanted, grid), _up(values, least)), _up(values, most))
    if blocks == 1:
        return []
    each = 1 if along_rows else wide * vector
    return [4 * outputs * blocks * each, 4 * grid]


def _dimensions(summed: torch.Tensor, dims: Sequence[int] | None) -> tuple[list[Dimension], list[Dimension]]:
    """Dimensions that are added and that are kept, the innermost first, joined where one continues another.

    As `TensorIterator` does it: those added by the input's strides, those kept by the result's.
    """
    chosen = {dim % max(1, summed.dim()) for dim in dims} if dims else set(range(summed.dim()))
    every = [(size, summed.stride(dim), dim in chosen) for dim, size in enumerate(summed.shape) if size > 1]
    added = sorted(((size, stride) for size, stride, is_added in every if is_added), key=lambda one: one[1])
    kept = [(size, stride) for size, stride, is_added in reversed(every) if not is_added]
    return _joined(added), _joined(kept)


def _joined(dimensions: list[Dimension]) -> list[Dimension]:
    found: list[Dimension] = []
    for size, stride in dimensions:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found


def _common_vector(numbers: list[int]) -> int:
    """The largest power of two up to `VECTOR` that divides all (`get_output_vec_size`)."""
    vector = VECTOR
    while any(number % vector for number in numbers):
        vector //= 2
    return vector


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Width and height of a block of at most that many threads (`set_block_dimension`)."""
    widest, highest = (_power_of_two(min(one, threads)) for one in (width, height))
    high = min(highest, threads // min(widest, WARP))
    return min(widest, threads // high), high


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above `number`."""
    return 1 << max(0, number.bit_length() - 1)


def _up(number: int, step: int) -> int:
    """`number` / `step`, rounded up."""
    return -(-number // step)
