"""The course's own transformers in plain torch.nn: the models that every measurement runs."""

from ..models import TransformerConfig
from .loss import chunked_loss, loss_of
from .transformer import Transformer


def build_network(model: TransformerConfig, attention: str, recompute: str = "none") -> Transformer:
    """A network of `model`'s sizes in training mode, on torch's current default device and dtype."""
    return Transformer(model, attention, recompute).train()


__all__ = ["Transformer", "build_network", "chunked_loss", "loss_of"]
