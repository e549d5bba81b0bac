"""The course's own transformers in plain torch.nn: the models that every measurement runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..models import TransformerConfig
from ..run import TrainingRun
from .frozen import freeze
from .lora import add_lora
from .loss import chunked_loss, loss_of
from .transformer import Transformer


def build_network(model: TransformerConfig, attention: str, recompute: str = "none") -> Transformer:
    """A network of `model`'s sizes in training mode, on torch's current default device and dtype."""
    return Transformer(model, attention, recompute).train()


def network_for(run: TrainingRun) -> Transformer:
    """The network that `run` trains, on torch's default device, in the number formats of its precision.

    With LoRA its weights are frozen, in `frozen_bits` where that is given: then it is built in 16 bits from
    the start, so that a large model needs no more than that. LoRA's factors are of the precision's own type.
    """
    precision = run.precision
    own = getattr(torch, precision.dtype)
    low = getattr(torch, precision.autocast or precision.dtype)
    with default_dtype(low if run.frozen_bits else own):
        network = build_network(run.model, run.attention, run.recompute)
    if run.frozen_bits:
        freeze(network, run.frozen_bits, low)
    if run.lora_rank:
        add_lora(network, run.lora_rank, run.lora_targets, own)
    return network


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new floating-point tensors are of `dtype` unless they say otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


__all__ = ["Transformer", "build_network", "chunked_loss", "default_dtype", "loss_of", "network_for"]
