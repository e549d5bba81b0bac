"""What a network computes again in backward instead of keeping it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def run_blocks(blocks: Iterable[nn.Module], x: torch.Tensor, shared: tuple[Any, ...], recompute: str) -> torch.Tensor:
    """The output of all blocks, each called as `block(x, *shared)`; "full" keeps only their inputs for backward."""
    for block in blocks:
        x = checkpoint(block, x, *shared, use_reentrant=False) if recompute == "full" else block(x, *shared)
    return x
