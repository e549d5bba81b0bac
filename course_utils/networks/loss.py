"""Cross-entropy: at once, or piece by piece, so that only one piece of the logits exists at a time."""

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def loss_of(logits: torch.Tensor, targets: torch.Tensor, upcast: bool = False) -> torch.Tensor:
    """Mean cross-entropy of `logits` (b, s, V) against `targets` (b, s).

    Logits are copied to fp32 first if `upcast`.
    """
    logits = logits.flatten(0, 1)
    return F.cross_entropy(logits.float() if upcast else logits, targets.flatten())


def chunked_loss(
    features: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    chunks: int,
    upcast: bool = False,
) -> torch.Tensor:
    """The mean cross-entropy of `head(features)`, the tokens cut into `chunks` equal pieces.

    Features are (b, s, h).

    The last piece may be smaller. Each is a checkpoint: its logits are made, used and dropped in forward, and
    made again in backward. So b·s·V/chunks logits exist at a time instead of b·s·V, for one more product with
    the head.
    """
    tokens = targets.numel()
    size = math.ceil(tokens / chunks)
    pieces = zip(features.flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
    losses = [
        checkpoint(_share, head, piece, wanted, tokens, upcast, use_reentrant=False)
        for piece, wanted in pieces
    ]
    return torch.stack(losses).sum()


def _share(
    head: Callable[[torch.Tensor], torch.Tensor],
    piece: torch.Tensor,
    wanted: torch.Tensor,
    tokens: int,
    upcast: bool,
) -> torch.Tensor:
    """The contribution of a piece to the mean.

    In fp16 the sum of a few thousand losses would already be infinite.
    """
    return F.cross_entropy(head(piece).float() if upcast else head(piece), wanted) * (wanted.numel() / tokens)
