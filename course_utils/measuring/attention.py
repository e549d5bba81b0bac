"""`scaled_dot_product_attention` on a simulated GPU: the kernel that is named, or the one that torch chooses.

On fake tensors torch takes plain mathematics, where a GPU has one kernel. Torch's rule is in
`cuda/sdp_utils.cpp` (`select_sdp_backend` and the three functions `can_use_…_attention`, with the checks of
`sdp_utils_cpp.h`). What it does before and after a kernel is in `attention.cpp`. All are below
aten/src/ATen/native/transformers. The rule is written anew here as torch 2.11 to 2.13 have it, for dense
tensors and NVIDIA cards.

To be removed when torch's own choice works for fake CUDA tensors without a GPU.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..estimating.workspaces import installed_torch
from .cuda_answers import CARD
from .patching import on_this_thread

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
NUMBERS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Kernels by torch's numbers of them, torch.nn.attention.SDPBackend; it has a fifth, for other devices."""
FIRST_FLASH = [1, 2, 0, 3]
FIRST_CUDNN = [3, 1, 2, 0]
"""Torch's two orders; it tries one kernel after the other (`priority_order` in sdp_utils.cpp)."""
ROWS_OF_CUDNN = 65535
"""The most sequences of a batch, and the most heads, that cuDNN takes from torch 2.13 on."""
CUDNN_OF_TORCH = 92000
"""The cuDNN that torch 2.12 and 2.13 bring, 9.20; torch 2.11 brings 9.19, to which the same rules apply."""


class Call(NamedTuple):
    """The arguments of one attention; q, k and v are (batch, heads, tokens, head size)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @property
    def needs_gradient(self) -> bool:
        """True if a kernel keeps the logsumexp (`should_compute_logsumexp` in attention.cpp)."""
        return torch.is_grad_enabled() and any(one.requires_grad for one in (self.q, self.k, self.v))


class Card(NamedTuple):
    """A card as torch's rule sees it: its compute capability, and the releases of torch and cuDNN."""

    capability: tuple[int, int]
    torch: tuple[int, int]
    cudnn: int


@contextlib.contextmanager
def attending(attention: str, capability: tuple[int, int] = CARD.capability) -> Iterator[None]:
    """Inside, this thread's `scaled_dot_product_attention` is the kernel `attention`.

    With "auto" it is the one that torch chooses on a card of this compute capability. It is patched as a
    function, not by a TorchFunctionMode, which is off during backward: recomputation would differ.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    with contextlib.ExitStack() as stack:
        attend = partial(named_attention, attention)
        if attention == "auto":
            card = Card(capability, installed_torch(), cudnn_version())
            stack.enter_context(order_of(card))
            attend = partial(attention_as_torch_chooses, original, card)
        stack.enter_context(on_this_thread(torch.nn.functional, "scaled_dot_product_attention", attend))
        yield


@cache
def cudnn_version() -> int:
    """The version of cuDNN, 92000 for 9.20: this torch's own, or where it has none, of torch's CUDA build."""
    return torch.backends.cudnn.version() or CUDNN_OF_TORCH


@contextlib.contextmanager
def order_of(card: Card) -> Iterator[None]:
    """Inside, torch's order of kernels is that of this card, unless a program has already set another.

    Torch sets it once per process, when it first sees the card. The order can be asked and set, as
    `sdpa_kernel(…, set_priority=True)` does, so what a program sets inside counts.
    """
    before = torch._C._get_sdp_priority_order()
    if before[: len(NUMBERS)] not in (FIRST_FLASH, FIRST_CUDNN):
        yield
        return
    of_card = FIRST_CUDNN if prefers_cudnn(card) else FIRST_FLASH
    torch._C._set_sdp_priority_order([*of_card, *before[len(NUMBERS) :]])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def prefers_cudnn(card: Card) -> bool:
    """True on Hopper and the data center's Blackwell (`check_prefer_cudnn_attention` in sdp_utils.cpp)."""
    put_back = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return card.cudnn > 91500 and card.capability[0] in (9, 10) and not put_back


def named_attention(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the one kernel "flash", "efficient" or "cudnn".

    Raises ValueError for grouped queries in the efficient kernel.
    """
    if torch.is_autocast_enabled("cuda"):  # the whole is on autocast's 16-bit list, its parts are not
        q, k, v = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (q, k, v))
    needs_gradient = torch.is_grad_enabled() and q.requires_grad
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    masked = (q, k, v, attn_mask, needs_gradient, dropout_p, is_causal)
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(*masked, False, scale=scale)[0]
    if enable_gqa:
        raise ValueError("the efficient kernel takes no grouped queries: repeat keys and values first")
    return aten._scaled_dot_product_efficient_attention(*masked, scale=scale)[0]


def attention_as_torch_chooses(
    original: Callable[..., torch.Tensor],
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the kernel that torch chooses on this card.

    `original` is torch's own function. It serves what is not on the GPU, and raises torch's own errors for
    arguments that do not fit together. RuntimeError in torch's words where no kernel is left.
    """
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    call = _after_autocast(Call(*given, scale, enable_gqa))
    if query.device.type != "cuda" or query.is_nested or not _fits_together(call):
        return original(*given, scale=scale, enable_gqa=enable_gqa)
    return RUN[chosen(call, card)](call, card)


def _after_autocast(call: Call) -> Call:
    """The call with its tensors in autocast's format: attention is on its list of 16 bits, masks included."""
    if not torch.is_autocast_enabled("cuda"):
        return call
    dtype = torch.get_autocast_dtype("cuda")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        wanted = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if wanted and tensor.device.type == "cuda" else tensor

    mask = None if call.mask is None else cast(call.mask)
    return call._replace(q=cast(call.q), k=cast(call.k), v=cast(call.v), mask=mask)


def _fits_together(call: Call) -> bool:
    """False if torch refuses the call before it chooses (`validate_sdpa_input` in attention.cpp)."""
    q, k, v = call.q, call.k, call.v
    one_kind = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    has_tokens = min(q.dim(), k.dim(), v.dim()) >= 2
    mask_fits = call.mask is None or call.mask.dtype in (torch.bool, torch.float32, q.dtype)
    return one_kind and has_tokens and mask_fits


def chosen(call: Call, card: Card) -> str:
    """The kernel that torch chooses: "math", "flash", "efficient" or "cudnn".

    The first in torch's present order that can run (`select_sdp_backend` in sdp_utils.cpp). Raises
    RuntimeError in torch's words where none can, with the reasons.
    """
    refusals = {name: partial(refuse, call, card) for name, refuse in REFUSALS.items()}
    switched_on = [_math_enabled(), _flash_enabled(), _efficient_enabled(), _cudnn_enabled()]
    if not any(switched_on):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    reasons: dict[str, str] = {}
    for number in torch._C._get_sdp_priority_order():
        if number not in NUMBERS:
            continue
        name = NUMBERS[number]
        reasons[name] = next(refusals[name](), "")
        if not reasons[name]:
            return name
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise RuntimeError(f"No available kernel. Aborting execution. ({told})")


_math_enabled = torch.backends.cuda.math_sdp_enabled
_flash_enabled = torch.backends.cuda.flash_sdp_enabled
_efficient_enabled = torch.backends.cuda.mem_efficient_sdp_enabled
_cudnn_enabled = torch.backends.cuda.cudnn_sdp_enabled
OFF = "it is switched off"


def _no_math(_: Call, __: Card) -> Iterator[str]:
    if not _math_enabled():
        yield OFF


def _no_flash(call: Call, card: Card) -> Iterator[str]:
    """The reasons why flash cannot run, in torch's order (`can_use_flash_attention`)."""
    q, k, v = call.q, call.k, call.v
    if not _flash_enabled():
        yield OFF
    if not q.dim() == k.dim() == v.dim() == 4:
        yield "it takes tensors of four dimensions"
    if call.mask is not None:
        yield "it takes no mask"
    if not q.size(-1) == k.size(-1) == v.size(-1) <= 256:
        yield "all heads have to be of one size, of up to 256"
    if not (8, 0) <= card.capability <= (12, 1):
        yield "it needs compute capability 8.0 to 12.1"
    if call.needs_gradient and _small_shared_memory(card) and not _flash_trains_there(call):
        yield f"on this card it trains no heads of {q.size(-1)}"
    if call.causal and q.size(-2) != k.size(-2):
        yield "is_causal needs as many keys as queries"
    if q.dtype not in HALF:
        yield "it takes 16 bits only"
    if not _heads_fit(call):
        yield "batches or heads do not fit"
    yield from _no_fused(call, one_is_contiguous=True)


def _small_shared_memory(card: Card) -> bool:
    return (8, 6) <= card.capability <= (8, 9) or (12, 0) <= card.capability <= (12, 1)


def _flash_trains_there(call: Call) -> bool:
    size = call.q.size(-1)
    return size <= 192 or (size > 224 and call.dropout == 0)


def _no_efficient(call: Call, card: Card) -> Iterator[str]:
    """The reasons why the memory-efficient kernel cannot run (`can_use_mem_efficient_attention`)."""
    q, k, v = call.q, call.k, call.v
    if not _efficient_enabled():
        yield OFF
    if not (5, 0) <= card.capability <= (12, 1):
        yield "it needs compute capability 5.0 to 12.1"
    if not q.dim() == k.dim() == v.dim() == 4:
        yield "it takes tensors of four dimensions"
    multiple = _multiple_of_head_size(q.dtype, card)
    sizes = q.size(-1), v.size(-1)
    if q.size(-1) != k.size(-1) or not all(size > 0 and size % multiple == 0 for size in sizes):
        yield f"head sizes have to be multiples of {multiple}"
    odd_start = any(one.storage_offset() % multiple and one.numel() for one in (q, k, v))
    # pytorch's pull request 184258
    if card.torch >= (2, 13) and card.capability >= (8, 0) and odd_start:
        yield f"tensors have to begin at multiples of {multiple} in their storages"
    yield from _no_fused(call, one_is_contiguous=False)
    if not _heads_fit(call, may_group=False):
        yield "batches or heads do not fit, or queries are grouped"
    of_card = HALF if card.capability >= (8, 0) else HALF[:1]
    if q.dtype not in (torch.float32, *of_card):
        yield f"it takes no {q.dtype} on this card"


def _multiple_of_head_size(dtype: torch.dtype, card: Card) -> int:
    """The efficient kernel's: 16 bytes on tensor cores (`minimum_gemm_alignment` in sdp_utils.cpp)."""
    bits = 16 if dtype in HALF else 32
    has_tensor_cores = card.capability >= (8, 0) or (card.capability >= (7, 0) and bits == 16)
    return 128 // bits if has_tensor_cores else 1


def _no_cudnn(call: Call, card: Card) -> Iterator[str]:
    """The reasons why cuDNN cannot run (`can_use_cudnn_attention`)."""
    q, k, v = call.q, call.k, call.v
    if card.cudnn < 90000 or (call.dropout > 0 and 91100 < card.cudnn < 91400):
        yield f"cuDNN {card.cudnn} has no such kernel"
    if not _cudnn_enabled():
        yield OFF
    if not q.dim() == k.dim() == v.dim() == 4:
        yield "it takes tensors of four dimensions"
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if torch.are_deterministic_algorithms_enabled() and not only_warns:
        yield "it is not deterministic"
    if q.dtype not in (HALF if card.capability >= (8, 0) else HALF[:1]):
        yield "it takes 16 bits only"
    if call.mask is not None and not _mask_fits_cudnn(call, call.mask):
        yield "the mask needs a gradient, or has another shape"
    if not (8, 0) <= card.capability <= (12, 1):
        yield "it needs compute capability 8.0 to 12.1"
    # pytorch's pull request 174245
    if card.torch >= (2, 12) and not (call.dropout * 16).is_integer():
        yield "a dropout has to be a multiple of 1/16"
    yield from _no_fused(call, one_is_contiguous=True)
    if not _heads_fit(call, kv_differ=True):
        yield "batches or heads do not fit"
    # pytorch's pull request 180718
    if card.torch >= (2, 13) and max(q.shape[:2]) > ROWS_OF_CUDNN:
        yield f"batch and heads are at most {ROWS_OF_CUDNN}"
    limit = _head_size_of_cudnn(q.size(-1), v.size(-1), card)
    if max(q.size(-1), v.size(-1)) > limit or q.size(-1) % 8 or v.size(-1) % 8:
        yield f"head sizes have to be multiples of 8, of up to {limit}"
    if k.size(-2) == 1 or (q.size(-2) == 1 and call.dropout > 0):
        yield "there is only one key, or with dropout one query"


def _head_size_of_cudnn(size: int, size_of_v: int, card: Card) -> int:
    """The largest head size (`check_cudnn_tensor_shapes`)."""
    if card.capability == (9, 0) and card.cudnn >= 91000:
        return 256
    deepseek = card.capability[0] == 10 and card.cudnn >= 91100 and (size, size_of_v) == (192, 128)
    return 192 if deepseek else 128


def _mask_fits_cudnn(call: Call, mask: torch.Tensor) -> bool:
    """True for a mask of two or four dimensions without a gradient (`check_attn_mask_shape`)."""
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    batch, heads, tokens, _ = call.q.shape
    whole = (batch, heads, tokens, call.k.size(2))[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, whole, strict=True))


def _no_fused(call: Call, one_is_contiguous: bool) -> Iterator[str]:
    """The reasons that hold for each of the fused kernels.

    That is, no token at all, or a last dimension whose numbers do not follow one another.
    `one_is_contiguous` if that does not matter for heads of one number.
    """
    if call.q.size(-2) == 0 or call.k.size(-2) == 0:
        yield "there are no tokens"
    follow = all(tensor.stride(-1) == 1 for tensor in (call.q, call.k, call.v))
    follow = follow or (one_is_contiguous and call.q.size(-1) == 1)
    if not follow or (call.mask is not None and call.mask.stride(-1) != 1):
        yield "the last dimension has to have stride 1"


def _heads_fit(call: Call, may_group: bool = True, kv_differ: bool = False) -> bool:
    """True if all have one batch and as many heads, or groups of them where the call says so.

    `kv_differ` if keys may have other groups than values (`check_batch_size_and_num_heads_dense`).
    """
    q, k, v = call.q, call.k, call.v
    if not q.size(0) == k.size(0) == v.size(0):
        return False
    heads, of_k, of_v = q.size(-3), k.size(-3), v.size(-3)
    if not (call.grouped and may_group):
        return heads == of_k == of_v
    return (kv_differ or of_k == of_v) and heads % of_k == 0 and heads % of_v == 0


REFUSALS = {"math": _no_math, "flash": _no_flash, "efficient": _no_efficient, "cudnn": _no_cudnn}


def _run_flash(call: Call, _: Card) -> torch.Tensor:
    """Flash takes head sizes in multiples of 8, so torch pads them (`pad_last_dim` in attention.cpp)."""
    size = call.q.size(-1)
    scale = size**-0.5 if call.scale is None else call.scale
    q, k, v = (pad(tensor, (0, -size % 8)) if size % 8 else tensor for tensor in (call.q, call.k, call.v))
    out = aten._scaled_dot_product_flash_attention(q, k, v, call.dropout, call.causal, False, scale=scale)[0]
    return out[..., :size] if size % 8 else out


def _run_efficient(call: Call, card: Card) -> torch.Tensor:
    mask = _added(call)
    if mask is not None:
        mask = _aligned(mask).expand(*call.q.shape[:3], call.k.size(2))
    _check_efficient(call, mask, card)
    given = (call.q, call.k, call.v, mask, call.needs_gradient, call.dropout, call.causal)
    return aten._scaled_dot_product_efficient_attention(*given, scale=call.scale)[0]


def _run_cudnn(call: Call, _: Card) -> torch.Tensor:
    given = (call.q, call.k, call.v, _added(call), call.needs_gradient, call.dropout, call.causal)
    return aten._scaled_dot_product_cudnn_attention(*given, False, scale=call.scale)[0]


def _run_math(call: Call, _: Card) -> torch.Tensor:
    """Torch's own decomposition; the function itself would look for a card first in a CUDA build of torch."""
    decompose = aten._scaled_dot_product_attention_math.default.decompose
    given = (call.q, call.k, call.v, _added(call), call.dropout, call.causal)
    return decompose(*given, scale=call.scale, enable_gqa=call.grouped)[0]


RUN = {"math": _run_math, "flash": _run_flash, "efficient": _run_efficient, "cudnn": _run_cudnn}


def _added(call: Call) -> torch.Tensor | None:
    """The mask as kernels add it: a boolean one becomes 0 and −inf (`convert_boolean_attn_mask`)."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    hidden = torch.scalar_tensor(float("-inf"), dtype=call.q.dtype, device=call.mask.device)
    return torch.where(call.mask, 0.0, hidden)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask, or a copy with room in each row, as the efficient kernel reads eight numbers at a time.

    `preprocess_mask` and `pad_bias` in attention.cpp.
    """
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.size(-1)
    return pad(mask, (0, 8 - keys % 8))[..., :keys]


def _check_efficient(call: Call, mask: torch.Tensor | None, card: Card) -> None:
    """Raise RuntimeError, in torch's words, for what the efficient kernel refuses when it has been chosen.

    It reads 16 bytes at a time, so a row may begin at multiples of them only. From compute capability 8.0 on
    torch has no other kernel (generate_kernels.py). It looks at the strides between heads
    (`_efficient_attention_forward` in cuda/attention.cu), the kernel at those between tokens
    (`check_supported` in kernel_forward.h; it and generate_kernels.py are in cuda/mem_eff_attention).
    """
    if mask is not None and mask.dtype != call.q.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")
    if card.capability < (8, 0):
        return
    tensors = {"query": call.q, "key": call.k, "value": call.v}
    step = 16 // call.q.element_size()
    if any(tensor.stride(1) % step for tensor in tensors.values()):
        raise RuntimeError("cutlassF: no kernel found to launch!")
    for name, tensor in tensors.items():
        if tensor.stride(2) % step:
            raise RuntimeError(f"{name} is not correctly aligned (strideM)")
