"""Lesson 12, second half: numbers rounded to few bits, given as the values that the codes represent; and models."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from course_utils.estimating.states import BLOCK_8BIT, SMALL_8BIT
from course_utils.measuring.optimizers import Adam8bit, Codebook, Codebooks, make_codebooks
from course_utils.networks import Transformer

from ..shared.language_model import mean_loss

TINY = torch.finfo(torch.float32).tiny


def absmax(values: torch.Tensor, bits: int, group: int | None = None) -> torch.Tensor:
    """`values` rounded to whole multiples of a scale that maps the largest magnitude to 2^(bits−1) − 1.

    `group` neighbors share a scale; None means all of them. Raises ValueError for a group that does not divide them.
    """
    rows = grouped(values, group)
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(TINY) / (2 ** (bits - 1) - 1)
    return ((rows / scale).round() * scale).view(values.shape)


def zero_point(values: torch.Tensor, bits: int, group: int | None = None) -> torch.Tensor:
    """`values` rounded to one of 2^bits evenly spaced ones from the smallest to the largest, 0 among them.

    x ≈ (code − z)·scale with z a code: the zero point (Jacob et al. 2018, eq. 1). The range is widened to hold 0.
    """
    rows = grouped(values, group)
    low = rows.amin(dim=1, keepdim=True).clamp_max(0)
    high = rows.amax(dim=1, keepdim=True).clamp_min(0)
    scale = (high - low).clamp_min(TINY) / (2**bits - 1)
    zero = (-low / scale).round()
    codes = (rows / scale + zero).round().clamp(0, 2**bits - 1)
    return ((codes - zero) * scale).view(values.shape)


def nearest(values: torch.Tensor, code: Sequence[float], group: int | None = None) -> torch.Tensor:
    """Each value as the nearest number of `code` (rising, from −1 to 1), times its group's largest magnitude."""
    rows, levels = grouped(values, group), torch.tensor(code, dtype=values.dtype)
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(TINY)
    return (levels[torch.bucketize(rows / scale, (levels[1:] + levels[:-1]) / 2)] * scale).view(values.shape)


def clusters(values: torch.Tensor, count: int) -> torch.Tensor:
    """Each value as the nearest of `count` centroids, which 40 rounds of Lloyd's algorithm (1982) fit to these values.

    It starts at evenly spaced quantiles; a centroid without values stays where it is.
    """
    flat = values.flatten()
    centers = torch.quantile(flat, (torch.arange(count) + 0.5) / count)
    for _ in range(40):
        owner = torch.bucketize(flat, (centers[1:] + centers[:-1]) / 2)
        sums = torch.zeros(count).index_add(0, owner, flat)
        sizes = torch.bincount(owner, minlength=count)
        centers = torch.where(sizes > 0, sums / sizes.clamp_min(1), centers)
    return centers[torch.bucketize(flat, (centers[1:] + centers[:-1]) / 2)].view(values.shape)


def grouped(values: torch.Tensor, group: int | None) -> torch.Tensor:
    """`values` as rows of `group` neighbors, or as one row. Raises ValueError where they cannot be cut evenly."""
    if group is not None and (group < 1 or values.numel() % group):
        raise ValueError(f"{values.numel()} numbers cannot be cut into groups of {group}")
    return values.reshape(1 if group is None else -1, values.numel() if group is None else group)


def bits_per_number(bits: float, group: int) -> float:
    """Average bits of a stored number: its code, and its share of the group's fp32 scale."""
    return bits + 32 / group


def relative_error(values: torch.Tensor, rounded: torch.Tensor) -> float:
    """Root mean square of the error, in parts of the root mean square of the values."""
    return ((rounded - values).norm() / values.norm()).item()


def uniform_error(values: torch.Tensor, bits: int) -> float:
    """Relative error to expect of `absmax` with one scale: Δ/√12 for steps of Δ, where errors are spread evenly."""
    step = values.abs().max() / (2 ** (bits - 1) - 1)
    return (step / math.sqrt(12) / values.square().mean().sqrt()).item()


def block_matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """The matrices of the blocks, by name; no embeddings, norms and biases."""
    weights = model.named_parameters()
    return {name: one.detach() for name, one in weights if one.dim() == 2 and name.startswith("blocks.")}


def with_rounded_blocks(model: Transformer, rounding: Callable[[torch.Tensor], torch.Tensor]) -> Transformer:
    """A copy of `model` with `rounding` applied to each matrix of its blocks."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for weight in block_matrices(rounded).values():
            weight.copy_(rounding(weight))
    return rounded


def linear_layers(model: Transformer) -> dict[str, nn.Linear]:
    """The blocks' linear layers by name."""
    return {name: layer for name, layer in model.blocks.named_modules() if isinstance(layer, nn.Linear)}


def calibrate(model: Transformer, text: str) -> dict[str, float]:
    """The largest magnitude of each linear layer's input while the model reads `text`: nothing is trained."""
    layers = linear_layers(model)
    largest = dict.fromkeys(layers, 0.0)

    def note(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        largest[name] = max(largest[name], inputs[0].abs().max().item())

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers.items()]
    mean_loss(model, text)
    for hook in hooks:
        hook.remove()
    return largest


def with_rounded_inputs(model: Transformer, largest: dict[str, float], bits: int) -> Transformer:
    """A copy whose linear layers round their inputs to `bits`, by scales fixed before; what is larger is cut off."""
    limit, rounded = 2 ** (bits - 1) - 1, copy.deepcopy(model)

    def round_input(scale: float, _: nn.Module, inputs: Any) -> tuple[torch.Tensor]:
        return ((inputs[0] / scale).round().clamp(-limit, limit) * scale,)

    for name, layer in linear_layers(rounded).items():
        layer.register_forward_pre_hook(partial(round_input, largest[name] / limit))
    return rounded


def zeros_in_second_moment(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Fractions of Adam's second moments that 8 bits round to zero: with even codes from 0 to 1, and with dynamic ones.

    Blocks of 256 as in the 8-bit Adam, without numbers that are zero already and parameters too small to be quantized.
    """
    moments = (state["exp_avg_sq"].flatten() for state in optimizer.state.values())
    blocks = torch.cat([nn.functional.pad(moment, (0, -moment.numel() % BLOCK_8BIT)).view(-1, BLOCK_8BIT)
                        for moment in moments if moment.numel() >= SMALL_8BIT])  # fmt: skip
    scaled = blocks / blocks.amax(dim=1, keepdim=True).clamp_min(TINY)
    codebook = make_codebooks("cpu").unsigned
    dynamic = codebook.values[torch.bucketize(scaled, codebook.borders)]
    even, dynamic = ((codes == 0)[blocks > 0].float().mean().item() for codes in ((scaled * 255).round(), dynamic))
    return even, dynamic


def even_adam(weights: Sequence[nn.Parameter]) -> Adam8bit:
    """The 8-bit Adam with evenly spaced values in place of those by powers of ten: from −1 to 1, and from 0 to 1."""
    codes = (torch.arange(-127, 128) / 127, torch.arange(256) / 255)
    return Adam8bit(weights, 3e-3, codebooks=Codebooks(*(Codebook(one, (one[1:] + one[:-1]) / 2) for one in codes)))
