"""Memory that CUDA's kernels take besides their results: copies of arguments, scratch, cuBLAS's workspaces.

No tensor of the step shows it. `tracker` asks here for each operator in `SPECIAL`: those, and one whose
random states a simulated kernel puts in the wrong place.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from ..estimating.workspaces import Workspaces
from ..gpus import Gpu
from ..units import round_up
from .convolutions import CONVOLUTIONS
from .reductions import partial_sums

aten = torch.ops.aten

ON_THE_HOST = {aten._scaled_dot_product_efficient_attention.default: (2, 3)}
"""Results (random states) that are on the host on every GPU, though a simulated kernel says otherwise."""

CONTIGUOUS_GRADIENT = (
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten._log_softmax_backward_data.default,
    aten.embedding_dense_backward.default,
)
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default


def _not_contiguous(args: Any) -> bool:
    return not args[0].is_contiguous()


def _not_by_token(args: Any) -> bool:
    """True if it does not lie by batch, token and head (transformers/cuda/attention_backward.cu)."""
    return not args[0].transpose(1, 2).is_contiguous()


def _not_row_by_row(args: Any) -> bool:
    """True if the numbers of a head do not follow one another (`run_cudnn_SDP_bprop` in cudnn/MHA.cpp)."""
    return args[0].stride(-1) != 1


LIES_OTHERWISE: dict[Any, Callable[[Any], bool]] = {
    **dict.fromkeys(CONTIGUOUS_GRADIENT, _not_contiguous),
    **dict.fromkeys((FLASH_BACKWARD, EFFICIENT_BACKWARD), _not_by_token),
    CUDNN_BACKWARD: _not_row_by_row,
}
"""CUDA kernels that first copy the gradient, their first argument, if it lies otherwise; and when it does."""

WITH_BIAS = frozenset({aten.addmm.default, aten.addmm.out})
"""Products to which cuBLASLt adds the bias of a linear layer; `out` is what compiled code calls."""

ADDING = WITH_BIAS | {aten.baddbmm.default, aten.baddbmm.out}
"""Products whose first argument is added."""

BATCHED = frozenset({aten.bmm.default, aten.bmm.out, aten.baddbmm.default, aten.baddbmm.out})
"""Products that may take one matrix for a whole batch: cuBLAS takes a stride of 0 from one to the next."""

NOT_EXPANDED = WITH_BIAS | BATCHED | {aten.mm.default, aten.mm.out}
"""CUDA kernels that first copy what was expanded, as a sum's gradient is; dimensions may have any order."""

SUMS = frozenset({aten.sum.dim_IntList, aten.mean.dim})
"""Operators that add along dimensions, in a kernel of cuda/Reduce.cuh."""

WITH_CUBLAS = NOT_EXPANDED | {aten.mv.default, aten.dot.default}
"""Operators for which torch gives cuBLAS a workspace, the first time on each thread."""

Scratch = list[tuple[tuple[int, ...], torch.dtype]]
Taken = list[tuple[int, tuple[int, ...], torch.dtype]]
"""Memory that a kernel takes: bytes, and the shape and format in which to show them."""


def _softmax_scratch(gradient: torch.Tensor, output: torch.Tensor, *_: Any) -> Scratch:
    """The product of both, with which backward begins (`softmax_backward_cuda_out` in cuda/SoftMax.cu)."""
    return [(tuple(output.shape), torch.promote_types(gradient.dtype, output.dtype))]


def _group_norm_scratch(
    x: Any, weight: Any, bias: Any, batch: int, C: int, size: int, groups: int, _: Any
) -> Scratch:
    """A factor and a summand per channel, and for 16 bits moments in 32 (`GroupNormKernelImplInternal`)."""
    exact = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    has_factors = weight is not None or bias is not None
    scratch: Scratch = []
    if has_factors and size != 1:
        scratch += [((batch, C), exact)] * 2
    if exact != x.dtype:
        scratch += [((batch, groups), exact)] * 2
    return scratch


def _group_norm_backward_scratch(
    _: Any, x: Any, mean: Any, rstd: Any, weight: Any, batch: int, C: int, size: int, groups: int, wanted: Any
) -> Scratch:
    """Sums per channel, and factors per channel and group (`GroupNormBackwardKernelImplInternal`)."""
    exact = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    wants_gradient_of_x = wanted[0]
    scratch: Scratch = []
    if size != 1:
        scratch += [((batch, C), exact)] * 2
        if wants_gradient_of_x and weight is not None:
            scratch.append(((batch, C), exact))
    if wants_gradient_of_x:
        scratch += [((batch, groups), exact)] * 2
    return scratch


def _safe_softmax_scratch(scores: torch.Tensor, dim: int, *_: Any) -> Scratch:
    """Two masks, of scores that are −inf and of rows full of them, and a zero (attention.cpp).

    The function there is `_safe_softmax`.
    """
    rows = list(scores.shape)
    rows[dim] = 1
    return [(tuple(scores.shape), torch.bool), (tuple(rows), torch.bool), ((), scores.dtype)]


def _efficient_scratch(q: torch.Tensor, k: Any, v: torch.Tensor, *_: Any) -> Scratch:
    """The output in fp32, for 16 bits and heads of more than 128: it does not fit into registers.

    `kNeedsOutputAccumulatorBuffer` in transformers/cuda/mem_eff_attention/kernel_forward.h.
    """
    if q.element_size() != 2 or max(q.size(-1), v.size(-1)) <= 128:
        return []
    return [((*q.shape[:-1], v.size(-1)), torch.float32)]


def _ctc_backward_scratch(*args: Any) -> Scratch:
    """Return as many numbers as forward kept, its seventh argument here (`log_beta` in cuda/LossCTC.cu)."""
    return [(tuple(args[6].shape), args[6].dtype)]


SCRATCH: dict[Any, Callable[..., Scratch]] = {
    aten._safe_softmax.default: _safe_softmax_scratch,
    aten._scaled_dot_product_efficient_attention.default: _efficient_scratch,
    aten._softmax_backward_data.default: _softmax_scratch,
    aten.native_group_norm.default: _group_norm_scratch,
    aten.native_group_norm_backward.default: _group_norm_backward_scratch,
    aten._ctc_loss_backward.default: _ctc_backward_scratch,
    aten.logsumexp.default: lambda x, *_: [(tuple(x.shape), x.dtype)],  # x less its maxima (ReduceOps.cpp)
}
"""What CUDA kernels take while they run, by their arguments; paths are in torch's aten/src/ATen/native."""


def taken_before(func: Any, args: Any, workspaces: Workspaces | None) -> Taken:
    """Copies and scratch that an operator's kernel takes before it begins, and frees when it is done."""
    copied: list[torch.Tensor] = []
    if func in LIES_OTHERWISE and LIES_OTHERWISE[func](args):
        copied = [args[0]]
    elif func in NOT_EXPANDED:
        # prepare_batch_matrix_for_cublas in ATen/native/cuda/Blas.cpp
        first = 1 if func in BATCHED else 0
        factors = args[1:3] if func in ADDING else args[:2]  # what is added goes into the result first
        copied = [one for one in factors if isinstance(one, torch.Tensor) and _is_expanded(one, first)]
    taken: Taken = []
    if copied:  # rarely; this spares most operators the comprehension, which is a call
        taken = [(one.nbytes, tuple(one.shape), one.dtype) for one in copied]
    if func in SCRATCH:
        taken += [(prod(shape) * dtype.itemsize, shape, dtype) for shape, dtype in SCRATCH[func](*args)]
    if func in WITH_BIAS and workspaces and workspaces.lt_each:
        taken.append((workspaces.lt_each, (workspaces.lt_each,), torch.uint8))
    return taken


Own = list[tuple[int, bool]]
"""Bytes that a kernel takes after its results, in their order; True if it keeps them until it is done.

Others it gives back when it has taken the next that it keeps.
"""


def flash_scratch(_: Any, q: torch.Tensor, k: torch.Tensor, *__: Any) -> Own:
    """Bytes that the backward of flash attention takes for itself.

    For q (b, a, s, d): a number in fp32 for each row and the gradient of q in fp32, both with s in whole
    tiles of 128 and d in whole ones of 32, or of 64 beyond 128; where keys and values are shared by groups,
    their gradients for every head (mha_bwd in torch's
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    b, a, s, d = q.shape
    rows = 4 * b * a * round_up(s, 128)
    expanded = [b * a * k.shape[2] * d * k.element_size()] * 2 if k.shape[1] != a else []
    sizes = [rows, rows * round_up(d, 32 if d <= 128 else 64), *expanded]
    return [(size, True) for size in sizes]


def efficient_scratch(
    _: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, __: Any, out: torch.Tensor, *___: Any
) -> Own:
    """Bytes that the backward of memory-efficient attention takes, in blocks of i queries and j keys.

    A number in fp32 for each row, which for fp32 comes from a product of the size of the output; then one
    workspace, which has the gradient of q in fp32, and for 16 bits and heads of more than 128 those of k and
    v (`_efficient_attention_backward` in torch's transformers/cuda/attention_backward.cu, `workspace_size` in
    mem_eff_attention/kernel_backward.h, blocks by mem_eff_attention/kernels/generate_kernels.py for compute
    capability 8.0 and 9.0; cards with less shared memory take smaller ones).
    """
    b, a, s, d = q.shape
    keys, widest = k.size(2), max(d, v.size(3))
    half = q.element_size() == 2
    i = 64 if widest <= 64 else 128
    j = 128 if half and 64 < widest <= 128 else 64
    rows = 4 * b * a * s
    per_head = _blocks(s, i) * _blocks(d, j) * (i * j + 4)  # with a lock and a counter for each block
    if half and widest > 128:
        splits = _splits_of_keys(b * a, keys, j)
        per_head += splits * j * (round_up(d, i) + round_up(v.size(3), i))
    workspace = 4 * b * a * round_up(per_head, 4)
    if half:
        return [(rows, True), (workspace, True)]
    return [(4 * out.numel(), False), (rows, False), (rows, True), (workspace, True)]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _splits_of_keys(heads: int, keys: int, block: int) -> int:
    """The number of parts of the keys; each has gradients of k and v of its own, to be added up."""
    only_one = torch.are_deterministic_algorithms_enabled()
    if (only_one and not torch.is_deterministic_algorithms_warn_only_enabled()) or (
        heads >= 256 and keys <= 2 * block
    ):
        return 1
    return max(1, min(_blocks(keys, block), 200 // heads))


def cudnn_scratch(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any) -> Own:
    """The workspace of cuDNN's backward: the gradient of q and a number for each row, in fp32.

    Where keys and values are shared by groups, their gradients for every head, too
    (`CompositeSDPABackwardNode` in cudnn-frontend's scaled_dot_product_flash_attention.h). What cuDNN's plan
    takes besides, up to 512 bytes in all recordings, no source shows.
    """
    b, a, s, d = q.shape
    size = 4 * b * a * s * (d + 1)
    size += sum(b * a * one.size(2) * one.size(3) * one.element_size() for one in (k, v) if one.size(1) != a)
    return [(size, True)]


ROWS_PER_THREAD = 10  # of a sum of an embedding's gradients (`NROWS_PER_THREAD`)
FEW_TOKENS = 3072  # up to here they are added without sorting


def embedding_scratch(gradient: torch.Tensor, tokens: torch.Tensor, rows: int, padding: int, _: bool) -> Own:
    """Bytes that an embedding's backward takes to add the gradients of equal tokens.

    Tokens in order and where each was; where each run of equal ones begins, and how many parts it has; a sum
    in fp32 for as many parts as there could be (`embedding_dense_backward_cuda` in cuda/Embedding.cu and
    `embedding_backward_cuda_kernel` in cuda/EmbeddingBackwardKernel.cu). The sort's own is left out.
    """
    count = tokens.numel()
    if count <= FEW_TOKENS and padding < 0:
        return []
    runs = min(count, rows)
    parts = count // ROWS_PER_THREAD + runs
    in_order = [tokens.nbytes] * 2
    begins = [size * tokens.element_size() for size in (count, runs, runs, parts)]
    return [(size, True) for size in (*in_order, *begins, 4 * parts * gradient.size(-1))]


OWN_SCRATCH: dict[Any, Callable[..., Own]] = {
    FLASH_BACKWARD: flash_scratch,
    EFFICIENT_BACKWARD: efficient_scratch,
    CUDNN_BACKWARD: cudnn_scratch,
}
"""What the backwards of attention take after their results, by their arguments."""

WITH_OWN_SCRATCH = frozenset({*OWN_SCRATCH, *SUMS, aten.embedding_dense_backward.default})
"""Operators that `own_scratch` knows."""


PRODUCTS = frozenset({aten.mm.default, aten.bmm.default})
"""Operators to whose result `linear` and attention add a bias or a mask: in place, unless a mode watches."""


class Special(NamedTuple):
    """An operator and what it does besides: one field for each thing that the tracker asks."""

    product: bool
    own_scratch: bool
    convolution: bool
    cublas: bool


SPECIAL = {
    func: Special(func in PRODUCTS, func in WITH_OWN_SCRATCH, func in CONVOLUTIONS, func in WITH_CUBLAS)
    for func in (
        *LIES_OTHERWISE, *NOT_EXPANDED, *WITH_CUBLAS, *ON_THE_HOST, CUDNN, *SCRATCH, *WITH_OWN_SCRATCH,
        *CONVOLUTIONS,
    )
}  # fmt: skip
"""For most operators one look is enough. Each look asks torch for the operator's hash, which is a call."""


def own_scratch(func: Any, args: Any, card: Gpu | None) -> Own:
    """Memory that an operator's kernel takes after its results.

    Without a card sums and embeddings are left out, as cuBLAS's workspaces are: the closed form has neither.
    """
    if func in OWN_SCRATCH:
        return OWN_SCRATCH[func](*args)
    if card is not None and func in SUMS:
        return [(size, True) for size in partial_sums(args[0], args[1], card)]
    if card is not None and func is aten.embedding_dense_backward.default:
        return embedding_scratch(*args)
    return []


def not_on_the_gpu(func: Any, args: Any) -> tuple[int, ...]:
    """Results that a simulated kernel makes, and a GPU's does not make there."""
    if func is CUDNN and not args[4]:  # compute_logsumexp
        return (1,)
    return ON_THE_HOST.get(func, ())


def _is_expanded(tensor: torch.Tensor, first: int) -> bool:
    """True if a tensor of two dimensions or more repeats itself along one of them from the `first` on."""
    along = zip(tensor.stride()[first:], tensor.shape[first:], strict=True)
    return tensor.dim() > 1 and any(stride == 0 and size > 1 for stride, size in along)
