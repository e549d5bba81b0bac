"""Results of operators that run on a GPU, and whose shapes torch's fake tensors do not know.

Each rule is called with tensors that have shapes and no values, and goes when torch has one of its own. Paths
are in torch's aten/src/ATen/native.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

aten = torch.ops.aten

Lengths = torch.Tensor | Sequence[int]


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    _: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups of rows. torch's rule demands bf16, a GPU multiplies others one group at a time.

    The latter is `_grouped_mm_fallback` in GroupedMMUtils.h.
    """
    return _create_grouped_mm_output_tensor(a, b, offsets, out_dtype)


def _cudnn_takes_ctc(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: Lengths, outputs: Lengths, blank: int
) -> bool:
    """True where cuDNN computes the CTC loss (`_use_cudnn_ctc_loss` in cudnn/LossCTC.cpp)."""
    as_tensors = isinstance(inputs, torch.Tensor)
    formats = [targets.dtype] + ([inputs.dtype, outputs.dtype] if as_tensors else [])  # pyrefly: ignore
    if log_probs.dtype != torch.float32 or any(one != torch.int32 for one in formats):
        return False
    if blank != 0 or targets.dim() != 1 or log_probs.dim() != 3 or not targets.is_contiguous():
        return False
    if not as_tensors and targets.device.type != "cpu":
        return False
    heard, said = _numbers(inputs), _numbers(outputs)
    full = as_tensors or all(length == log_probs.size(0) for length in heard)
    return full and all(one < 256 and one <= most for one, most in zip(said, heard, strict=True))


def _cudnn_ctc_loss(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and the gradient, which cuDNN computes at once. Its workspace no source shows."""
    return log_probs.new_empty(log_probs.size(1)), _contiguous_like(log_probs)


def _ctc_loss(log_probs: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and a number for each frame and state: shapes follow from the lengths, which are numbers."""
    return aten._ctc_loss.default(log_probs, *rest)


def _ctc_loss_backward(_: torch.Tensor, log_probs: torch.Tensor, *__: Any) -> torch.Tensor:
    return _contiguous_like(log_probs)


def _contiguous_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _numbers(lengths: Lengths) -> list[int]:
    """The numbers on which a choice depends. Raises DataDependentOutputException if nobody knows them."""
    if not isinstance(lengths, torch.Tensor):
        return list(lengths)
    known = vars(lengths).get("known")
    if known is None:
        raise DataDependentOutputException(aten._use_cudnn_ctc_loss.Tensor)
    return known.tolist()


RULES: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._use_cudnn_ctc_loss.default: _cudnn_takes_ctc,
    aten._use_cudnn_ctc_loss.Tensor: _cudnn_takes_ctc,
    aten._use_miopen_ctc_loss.default: lambda *_: False,  # of AMD's library
    aten._use_miopen_ctc_loss.Tensor: lambda *_: False,
    aten._cudnn_ctc_loss.default: _cudnn_ctc_loss,
    aten._cudnn_ctc_loss.Tensor: _cudnn_ctc_loss,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
}
"""Rules by operator; `QuickFakeMode` asks them before torch's."""
