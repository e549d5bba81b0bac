"""Single operations and small modules, run as benchmark scripts run them."""

from typing import Any

import torch
from torch.nn import functional as F

from ...estimating.workspaces import Workspaces
from ...measurement import Measurement
from .running import measured


class Leaf(torch.nn.Module):
    """Tensors that require a gradient, by name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))


def cross_entropy(workspaces: Workspaces, V: int, tokens: int) -> Measurement:
    """Cross-entropy of fp32 logits (tokens, V), whose gradient is added to the one of the iteration before."""
    model = Leaf(logits=torch.empty(tokens, V, device="meta"))

    def step(model: Any, targets: torch.Tensor) -> None:
        loss = F.cross_entropy(model.logits, targets)
        loss.backward()

    return measured(step, model, batch=torch.zeros(tokens, dtype=torch.int64))
