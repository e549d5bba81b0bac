"""Lesson 12, first half: a small language model that has learned one text, taught another, all of it or by LoRA."""

import copy
from functools import cache
from typing import NamedTuple

import torch

from course_utils.estimating.states import trainable
from course_utils.models import TransformerConfig
from course_utils.networks import Transformer
from course_utils.networks.lora import LoraLinear, add_lora, merge

from ..shared.language_model import CORPUS, corpus, mean_loss, train_language_model

FULL_RATE, FACTOR_RATE = 3e-3, 1e-2
"""Learning rates of all weights and of LoRA's factors, each near its best on this task (lesson 12 tries others).

Adam's first step moves each number by the rate η, but B·A, with B zero, by about η·√(r/n_in): A's are of size 1/√n_in.
"""


@cache
def sonnets() -> str:
    """Five of Shakespeare's (18, 29, 73, 116, 130; 1609, public domain), in the characters of the first text."""
    text = CORPUS.with_name("sonnets.txt").read_text(encoding="utf-8").lower()
    return " ".join(text.translate(str.maketrans({";": ".", "?": ".", "!": ".", "-": " ", "'": "", "j": "i"})).split())


@cache
def _pretrained() -> Transformer:
    return train_language_model(steps=300).model  # to a loss of less than half of the first one


def pretrained() -> Transformer:
    """A copy of the character model that has learned the course's own text; trained once, in a few seconds."""
    return copy.deepcopy(_pretrained())


def with_lora(model: Transformer, rank: int) -> Transformer:
    """A frozen copy of `model` with factors of `rank` at each matrix of its blocks."""
    adapted = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        add_lora(adapted, rank, ("qkv", "out", "up", "down"), torch.float32)
    return adapted


class FineTuning(NamedTuple):
    """A fine-tuned model, how many numbers were trained at which rate, its losses on the new and the old text."""

    model: Transformer
    trained: int
    rate: float
    new: float
    old: float


def fine_tune(
    rank: int = 0, steps: int = 100, model: Transformer | None = None, rate: float | None = None
) -> FineTuning:
    """Teach the pretrained model (or `model`) the sonnets: all of its weights, or LoRA's factors of `rank` alone."""
    model = model or pretrained()
    learner = with_lora(model, rank) if rank else model
    rate = rate or (FACTOR_RATE if rank else FULL_RATE)
    train_language_model(model=learner, steps=steps, rate=rate, text=sonnets())
    trained = sum(weight.numel() for weight in learner.parameters() if weight.requires_grad)
    return FineTuning(learner, trained, rate, mean_loss(learner, sonnets()), mean_loss(learner, corpus()))


def merged(model: Transformer) -> Transformer:
    """A copy of `model` with each LoRA layer replaced by one plain linear layer of the same effect."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, LoraLinear):
                linear = torch.nn.Linear(layer.base.in_features, layer.base.out_features)
                linear.load_state_dict({"weight": merge(layer), "bias": layer.base.bias})
                setattr(parent, name, linear)
    return plain


def adapter_parameters(model: TransformerConfig, rank: int, targets: tuple[str, ...]) -> int:
    """Numbers in LoRA's factors: r·(n_in + n_out) for each matrix of `targets` in each block."""
    return trainable(model, rank, targets).parameters
