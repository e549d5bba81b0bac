"""The workspaces that cuDNN takes for convolutions: its heuristics choose them, and nothing computes them.

So a simulation leaves them out, and says how much a GPU was seen to take for such layers.
"""

from typing import Any

import torch

FORWARD = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default
CONVOLUTIONS = frozenset({FORWARD, BACKWARD})

SEEN = {
    "float32, contiguous": (1.10, 1.42),
    "float32 without TF32, contiguous": (0.00, 2.26),
    "float16, contiguous": (1.06, 1.28),
    "float16, channels last": (0.22, 0.43),
    "bfloat16, channels last": (0.43, 0.48),
}
"""Workspaces of 59 convolutions on an H200, torch 2.11 and cuDNN 9.19: the largest of forward and backward.

As a part of the bytes of input, weight and output, rounded up (convolution_workspace.jsonl in
tests/gpu/recorded).
"""


class Workspaces:
    """The largest workspaces that a GPU was seen to take for convolutions such as those noted here."""

    def __init__(self) -> None:
        self.seen: dict[str, int | None] = {}

    def note(self, operator: Any, args: Any, results: Any) -> None:
        """Note one convolution, forward or backward; of a kind that no GPU was asked about, None."""
        backward = operator is BACKWARD
        output, x, weight = args[:3] if backward else (results, *args[:2])
        kind = f"{_format(x)}, {'channels last' if _channels_last(x, weight) else 'contiguous'}"
        if kind not in SEEN or x.dim() > 4:
            self.seen[kind if x.dim() <= 4 else f"{kind}, of three dimensions"] = None
            return
        most = int(SEEN[kind][backward] * (x.nbytes + weight.nbytes + output.nbytes))
        self.seen[kind] = max(most, self.seen.get(kind) or 0)


def _format(x: torch.Tensor) -> str:
    name = str(x.dtype).removeprefix("torch.")
    return f"{name} without TF32" if name == "float32" and not torch.backends.cudnn.allow_tf32 else name


def _channels_last(*tensors: torch.Tensor) -> bool:
    """True if one of them lies so (`cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h)."""
    pictures = [one for one in tensors if one.dim() == 4 and not one.is_contiguous()]
    return any(one.is_contiguous(memory_format=torch.channels_last) for one in pictures)
