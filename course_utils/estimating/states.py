"""Bytes that persist between steps: weights, gradients, optimizer states; each tensor rounded up to 512."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ..models import Shapes, TransformerConfig, block_shapes, outer_shapes
from ..run import OPTIMIZERS, PRECISIONS, Optimizer, Precision, TrainingRun
from ..units import BLOCK, round_up

BLOCK_8BIT = 256
"""Elements that share a scale in the 8-bit Adam, as in bitsandbytes; Dettmers et al. 2022 took 2,048."""

SMALL_8BIT = 4096
"""Parameters with fewer elements keep fp32 moments, as in bitsandbytes (`min_8bit_size`)."""

PIECE_8BIT = 2**24
"""Elements that the course's 8-bit Adam updates at once."""

CODEBOOKS_8BIT = (1024, 1020, 1024, 1020)
"""Bytes of its tables: for each moment 256 fp32 numbers and the 255 borders between them."""

PAIRS_4BIT = 2 * 256 * 2
"""Bytes of the table of the two 16-bit values behind each byte of a 4-bit weight; one for all matrices."""


class Trainable(NamedTuple):
    """The parameters that are trained, by name and shape, in the order of the network.

    Those of one block stand for those of all `layers`.
    """

    before: Shapes
    block: Shapes
    layers: int
    after: Shapes

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return len(self.before) + self.layers * len(self.block) + len(self.after)

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return self.bytes(1, multiple=1)

    def bytes(self, element: int, multiple: int = BLOCK) -> int:
        """Bytes of one tensor for each at `element` bytes an element, each rounded up."""
        outer = map(prod, (self.before | self.after).values())
        block = map(prod, self.block.values())
        outside = sum([-(-element * size // multiple) * multiple for size in outer])
        return outside + self.layers * sum([-(-element * size // multiple) * multiple for size in block])


@lru_cache(maxsize=256)
def trainable(model: TransformerConfig, rank: int, targets: tuple[str, ...]) -> Trainable:
    """The parameters that a run trains: all at rank 0, else LoRA's two factors of each target matrix.

    W becomes W + B·A with A (r, n_in) and B (n_out, r) (Hu et al. 2022, section 4.1). Blocks' names begin
    with "blocks.".
    """
    block = block_shapes(model)
    if rank:
        matrices: Shapes = {}
        for name, shape in block.items():
            if name.split(".")[-2] in targets and len(shape) == 2:
                matrices[name] = shape
        factors = {f"blocks.{name}": shape for name, shape in _factors(matrices, rank).items()}
        return Trainable({}, factors, model.layers, {})
    outer = outer_shapes(model)
    before = {name: shape for name, shape in outer.items() if name.startswith(("embedding", "positions"))}
    after = {name: shape for name, shape in outer.items() if name not in before}
    in_blocks = {f"blocks.{name}": shape for name, shape in block.items()}
    return Trainable(before, in_blocks, model.layers, after)


def _factors(matrices: Shapes, rank: int) -> Shapes:
    shapes: Shapes = {}
    for name, (n_out, n_in) in matrices.items():
        layer = name.removesuffix(".weight")
        shapes |= {f"{layer}.A": (rank, n_in), f"{layer}.B": (n_out, rank)}
    return shapes


@lru_cache(maxsize=1024)
def tensors_bytes(model: TransformerConfig, element: int) -> int:
    """Bytes of a tensor per parameter tensor at `element` bytes an element, each rounded up to 512."""
    return trainable(model, 0, ()).bytes(element)


# Weights and gradients


def parameter_bytes(run: TrainingRun) -> int:
    """Bytes of the weights that forward and backward use.

    4N in fp32 and under autocast, 2N with master weights. With LoRA, its factors and what is frozen.
    """
    return _parameter_bytes(run.model, run.precision.weight, run.lora_rank, run.lora_targets, run.frozen_bits)


@lru_cache(maxsize=1024)
def _parameter_bytes(
    model: TransformerConfig, element: int, rank: int, targets: tuple[str, ...], bits: int | None
) -> int:
    everything = tensors_bytes(model, element if bits is None else 2)
    if not rank:
        return everything
    saved = 0
    if bits:
        matrices = [shape for shape in block_shapes(model).values() if len(shape) == 2]
        saved = sum(round_up(2 * prod(shape)) - frozen_matrix_bytes(shape, bits) for shape in matrices)
    table = round_up(PAIRS_4BIT) if bits == 4 else 0
    return everything - model.layers * saved + table + trainable(model, rank, targets).bytes(element)


def frozen_matrix_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of a frozen matrix, in so many bits an element.

    In 16 bits it has nothing else; in 8 an fp32 scale a row; in 4 an fp32 scale for 64 elements, of which the
    last may be filled up: QLoRA's 4-bit storage before its scales are quantized again (Dettmers et al. 2023,
    section 3).
    """
    elements = prod(shape)
    if bits == 16:
        return round_up(2 * elements)
    if bits == 8:
        return round_up(elements) + round_up(4 * shape[0])
    blocks = -(-elements // 64)
    return round_up(32 * blocks) + round_up(4 * blocks)


def gradient_bytes(run: TrainingRun) -> int:
    """Bytes of all gradients: one element a trained parameter.

    It is in the type of the weights, or an fp32 main gradient.
    """
    return _trainable_bytes(run.model, run.lora_rank, run.lora_targets, run.precision.gradient)


@lru_cache(maxsize=1024)
def _trainable_bytes(model: TransformerConfig, rank: int, targets: tuple[str, ...], element: int) -> int:
    return trainable(model, rank, targets).bytes(element)


# Optimizer states


def optimizer_state_bytes(run: TrainingRun) -> int:
    """Bytes of the optimizer's states: 8N for Adam's two moments in fp32 (Kingma and Ba 2015, algorithm 1).

    Master weights add 4N: ZeRO's K = 12 (Rajbhandari et al. 2020, section 3.1). A loss scaler keeps two
    numbers on the GPU, a block of 512 bytes each.
    """
    return _state_bytes(run.model, run.lora_rank, run.lora_targets, run.precision.name, run.optimizer.name)


@lru_cache(maxsize=1024)
def _state_bytes(
    model: TransformerConfig, rank: int, targets: tuple[str, ...], precision_name: str, optimizer_name: str
) -> int:
    precision, optimizer = PRECISIONS[precision_name], OPTIMIZERS[optimizer_name]
    return trained_states(precision, optimizer, trainable(model, rank, targets))


def trained_states(precision: Precision, optimizer: Optimizer, trained: Trainable) -> int:
    """Bytes that the optimizer keeps for all that is trained."""
    block = tensors_states(precision, optimizer, trained.block)
    return states_of(precision, optimizer, trained.before | trained.after) + trained.layers * block


def states_of(precision: Precision, optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes that the optimizer keeps for parameters of these names and shapes, with what is there once."""
    return tensors_states(precision, optimizer, shapes) + kept_once(precision, optimizer)


def kept_once(precision: Precision, optimizer: Optimizer) -> int:
    """Bytes of the tables of the 8-bit Adam, and of a loss scaler's two numbers."""
    once = 0
    if optimizer.algorithm == "adam8bit":
        once += sum(map(round_up, CODEBOOKS_8BIT))
    if precision.loss_scaling:
        once += 2 * BLOCK
    return once


def tensors_states(precision: Precision, optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes that the optimizer keeps for these parameters alone, each tensor rounded up."""
    kept = [state_sizes(precision, optimizer, name, shape) for name, shape in shapes.items()]
    return sum([-(-size // BLOCK) * BLOCK for sizes in kept for size in sizes])


def state_sizes(
    precision: Precision, optimizer: Optimizer, name: str, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Bytes of each tensor that the optimizer keeps of one parameter, before rounding.

    The master weight comes first.

    Momentum and Lion (Chen et al. 2023) keep one number a parameter; Adam two, and when fused its step
    counter on the GPU; Adafactor a row and a column of a matrix (Shazeer and Stern 2018); Muon one for the
    blocks' matrices, and Adam's two for the rest (Jordan et al. 2024); the 8-bit Adam two bytes, and a scale
    for each block of either moment.
    """
    elements = prod(shape)
    first = (precision.first_moment or precision.state) * elements
    second = precision.state * elements
    master = (precision.master * elements,) if precision.master else ()
    match optimizer.algorithm:
        case "sgd":
            return master
        case "momentum" | "lion":
            return (*master, first)
        case "adafactor":
            return (*master, *_factored(shape, precision.state))
        case "muon" if is_hidden_matrix(name, shape):
            return (*master, first)
        case "adam8bit":
            return (*master, *_in_8_bits(elements))
    if optimizer.implementation == "fused":
        step_counter = 4
        return (*master, first, second, step_counter)
    return (*master, first, second)


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for the parameters that Muon steps: matrices of the blocks."""
    return name.startswith("blocks.") and len(shape) == 2


def _factored(shape: tuple[int, ...], element: int) -> tuple[int, ...]:
    if len(shape) == 1:
        return (element * shape[0],)
    rows = prod(shape[:-1])
    columns = prod(shape[:-2]) * shape[-1]
    return (element * rows, element * columns)


def _in_8_bits(elements: int) -> tuple[int, ...]:
    if elements < SMALL_8BIT:
        return (4 * elements, 4 * elements)
    blocks = -(-elements // BLOCK_8BIT)
    codes = BLOCK_8BIT * blocks
    scales = 4 * blocks
    return (codes, scales, codes, scales)
