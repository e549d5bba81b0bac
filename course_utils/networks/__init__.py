"""The course's own transformers in plain torch.nn: the models that every measurement runs."""

import torch

from ..models import TransformerConfig
from .gpt import GPT
from .llama import Llama


def build_network(model: TransformerConfig, attention: str, recompute: str = "none") -> GPT | Llama:
    """A network of `model`'s sizes in training mode, on torch's current default device and dtype."""
    network = {"gpt2": GPT, "llama": Llama}[model.family]
    return network(model, attention, recompute).train()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of `logits` (b, s, V) against `targets` (b, s)."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


__all__ = ["GPT", "Llama", "build_network", "loss_of"]
