"""What stays from step to step: weights, gradients, optimizer states; each tensor rounded up as the allocator does."""

from functools import lru_cache
from math import prod

from ..models import TransformerConfig, block_shapes, outer_shapes
from ..run import TrainingRun
from ..units import BLOCK, round_up


@lru_cache(maxsize=1024)
def tensors_bytes(model: TransformerConfig, element: int) -> int:
    """Bytes of one tensor per parameter tensor of `model` at `element` bytes an element, each rounded up to 512."""
    return model.layers * block_bytes(model, element) + sum(
        round_up(element * prod(shape)) for shape in outer_shapes(model).values()
    )


@lru_cache(maxsize=1024)
def block_bytes(model: TransformerConfig, element: int) -> int:
    """The same for the parameters of one block."""
    return sum(round_up(element * prod(shape)) for shape in block_shapes(model).values())


@lru_cache(maxsize=1024)
def tensor_count(model: TransformerConfig) -> int:
    """How many parameter tensors `model` has."""
    return model.layers * len(block_shapes(model)) + len(outer_shapes(model))


def parameter_bytes(run: TrainingRun) -> int:
    """Bytes of the weights that forward and backward use: 4N in fp32 and under autocast, 2N with master weights."""
    return tensors_bytes(run.model, run.precision.weight)


def gradient_bytes(run: TrainingRun) -> int:
    """Bytes of all gradients: one element a parameter, in the type of the weights."""
    return tensors_bytes(run.model, run.precision.gradient)


def optimizer_state_bytes(run: TrainingRun) -> int:
    """Bytes of the optimizer's states: 8N for Adam's two moments in fp32 (Kingma and Ba 2015, algorithm 1), 4N for
    momentum.

    Master weights add 4N: ZeRO's K = 12 (Rajbhandari et al. 2020, section 3.1). A fused step keeps its step counters
    on the GPU, one block of 512 bytes a tensor; a loss scaler keeps two.
    """
    copies = {"sgd": 0, "momentum": 1}.get(run.optimizer.algorithm, 2) + (1 if run.precision.master else 0)
    counters = BLOCK * tensor_count(run.model) if run.optimizer.implementation == "fused" else 0
    return copies * tensors_bytes(run.model, 4) + counters + (2 * BLOCK if run.precision.loss_scaling else 0)


def weight_copy_bytes(run: TrainingRun) -> int:
    """Bytes of the 16-bit copies that autocast keeps of the matrices and biases of every linear layer; else 0."""
    return run.model.layers * block_copy_bytes(run) + head_copy_bytes(run)


def block_copy_bytes(run: TrainingRun) -> int:
    """Autocast's copies of one block's weight matrices, which backward needs; 0 without autocast."""
    if not run.precision.autocast:
        return 0
    return sum(round_up(2 * prod(shape)) for shape in block_shapes(run.model).values() if len(shape) == 2)


def block_bias_copy_bytes(run: TrainingRun) -> int:
    """Autocast's copies of one block's biases of linear layers: backward does not need them, so they die with
    autocast.
    """
    if not run.precision.autocast:
        return 0
    biases = (s for name, s in block_shapes(run.model).items() if name.endswith("bias") and "norm" not in name)
    return sum(round_up(2 * prod(shape)) for shape in biases)


def head_copy_bytes(run: TrainingRun) -> int:
    """Autocast's copy of the output head, V·h elements; 0 without autocast."""
    return round_up(2 * run.model.vocab * run.model.hidden) if run.precision.autocast else 0
