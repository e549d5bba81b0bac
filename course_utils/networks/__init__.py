"""The course's own transformers in plain torch.nn: the models that every measurement runs."""

import torch

from ..models import TransformerConfig
from .transformer import Transformer


def build_network(model: TransformerConfig, attention: str, recompute: str = "none") -> Transformer:
    """A network of `model`'s sizes in training mode, on torch's current default device and dtype."""
    return Transformer(model, attention, recompute).train()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of `logits` (b, s, V) against `targets` (b, s)."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


__all__ = ["Transformer", "build_network", "loss_of"]
