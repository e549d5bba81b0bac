"""A lower bound of a step's time, term by term: to rank configurations by the time that their saving costs.

Every term is work divided by a peak rate of the card's data sheet, and the terms are added as if nothing
overlapped: no promise of a time, but the same yardstick for every choice. What is counted is said in each
function; launches of kernels, norms' arithmetic and waiting are not.
"""

from functools import lru_cache
from math import prod

from ..gpus import Gpu
from ..models import TransformerConfig, block_shapes
from ..run import TrainingRun
from .formula import activation_bytes
from .sharding import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from .states import gradient_bytes, optimizer_state_bytes, parameter_bytes, tensors_bytes

ADAM_PASSES = {"fused": 7, "foreach": 20, "loop": 20}
"""Numbers read and written for each parameter by a step of torch's AdamW in fp32.

Fused: it reads the weight, the gradient and both moments, and writes all but the gradient. Operator by
operator (`_multi_tensor_adamw`): decay 2, lerp of the first moment 3, scaling the second 2, addcmul 3, root
2, bias 2, epsilon 2, addcdiv 4.
"""


def step_seconds(run: TrainingRun, card: Gpu) -> dict[str, float]:
    """Seconds that one optimizer step of `run` takes on one of its ranks at the data sheet's rates, by cause.

    Raises ValueError for a card of which no rates are known.
    """
    if card.rates is None:
        raise ValueError(f"no rates are known of {card.name}: take a card of the catalog, course_utils.GPUS")
    rates, passes = card.rates, run.accumulation_steps
    offloaded = _plain(run, "none") if run.recompute == "offload" else 0  # to the host's memory, and back
    if run.precision.compute == 2:
        speed = rates.tensor
    elif run.precision.tf32:
        speed = rates.tf32
    else:
        speed = rates.fp32
    return {
        "model": passes * model_flops(run) / speed,
        "recomputation": passes * (recomputed_flops(run) + chunked_loss_flops(run)) / speed,
        "activations": passes * _activation_traffic(run) / rates.memory,
        "weights": passes * _weight_traffic(run) / rates.memory,
        "optimizer": _optimizer_traffic(run) / rates.memory,
        "offload": passes * 2 * offloaded / rates.host,
        "communication": communicated(run) / rates.link,
    }


def lost_seconds(run: TrainingRun, card: Gpu) -> float:
    """Seconds of a step beyond what the model's own FLOPs take at the card's best rate for 16 bits."""
    seconds = step_seconds(run, card)
    assert card.rates is not None  # or step_seconds would have refused
    return sum(seconds.values()) - run.accumulation_steps * model_flops(run) / card.rates.tensor


def model_flops(run: TrainingRun) -> int:
    """FLOPs of one micro-batch, forward and backward: of matrix products alone.

    Attention counts as if it were not causal.

    Two for each weight and token in forward, and four in backward; with frozen weights (LoRA) backward takes
    only those for its input. For a GPT this is Korthikanti et al. 2022, eq. 7; LoRA's factors are left out.
    """
    head = run.model.hidden * run.model.vocab
    matrices = run.model.layers * _block_matrices(run.model) + head
    forward = matrices * 2 * run.micro_batch * run.seq_len
    return forward * (2 if run.lora_rank else 3) + 3 * _core_flops(run)


def recomputed_flops(run: TrainingRun) -> int:
    """FLOPs of one micro-batch's recomputation: the blocks' forward, or the core of attention's alone.

    "selective" recomputes no matrix product and "offload" nothing: 0.
    """
    if run.recompute == "selective-attention":
        return _core_flops(run)
    if not run.blocks_per_checkpoint:
        return 0
    matrices = run.model.layers * _block_matrices(run.model)
    return matrices * 2 * run.micro_batch * run.seq_len + _core_flops(run)


def chunked_loss_flops(run: TrainingRun) -> int:
    """FLOPs that a loss in chunks adds to one micro-batch: the head once more, 2·s·b·h·V; else 0."""
    if run.loss_chunks == 1:
        return 0
    return 2 * run.seq_len * run.micro_batch * run.model.hidden * run.model.vocab


def communicated(run: TrainingRun) -> int:
    """Bytes that one rank sends in a step: `data_parallel_bytes` of its weights and gradients.

    FSDP2 (stages 2 and 3) sums gradients in the format of its shards: in fp32 where these are the master
    weights.
    """
    whole = alone(run)
    summed = run.precision.master or run.precision.weight
    gradients = tensors_bytes(run.model, summed) if run.zero_stage > 1 else gradient_bytes(whole)
    return data_parallel_bytes(
        parameter_bytes(whole), gradients, run.world_size, run.zero_stage, run.accumulation_steps
    )


def data_parallel_bytes(weights: int, gradients: int, ranks: int, stage: int, micro_batches: int) -> int:
    """Bytes that one of `ranks` sends in a step, for so many bytes of weights and of gradients.

    Whole gradients are all-reduced once a step (no_sync). Sharded ones (stages 2 and 3) are reduced in each
    micro-batch: no rank has room to add up whole ones. Stage 3 gathers the weights twice a micro-batch, for
    forward and for backward, stage 2 once a step (in FSDP2 with `set_reshard_after_backward(False)` until the
    last micro-batch, else once a micro-batch). With one micro-batch that is 2Ψ, and 3Ψ for stage 3
    (Rajbhandari et al. 2020, section 7).
    """
    if stage < 2:
        return all_reduce_bytes(gradients, ranks)
    gathers = 2 * micro_batches if stage == 3 else 1
    return gathers * all_gather_bytes(weights, ranks) + micro_batches * reduce_scatter_bytes(gradients, ranks)


@lru_cache(maxsize=256)
def _block_matrices(model: TransformerConfig) -> int:
    """Weights of one block's matrices that a token meets: of the experts only the active ones."""
    everything = sum(prod(shape) for shape in block_shapes(model).values() if len(shape) >= 2)
    idle = (model.parameters - model.active_parameters) // model.layers
    return everything - idle


def _core_flops(run: TrainingRun) -> int:
    """FLOPs of attention's core in one forward pass: q·kᵀ and weights·v, 2·b·s²·a·d each, in every block."""
    return 4 * run.model.layers * run.micro_batch * run.seq_len**2 * run.model.heads * run.model.head_size


def _activation_traffic(run: TrainingRun) -> int:
    """Bytes of activations written in forward, read in backward, and written again if recomputed."""
    whole = _plain(run, "none")
    again = 0
    if run.recompute not in ("none", "offload"):
        again = max(0, whole - _plain(run, run.recompute))
    return 2 * whole + again


def _plain(run: TrainingRun, recompute: str) -> int:
    """Bytes of activations at the end of a micro-batch's forward on one rank, with this recomputation."""
    return _activations(run.model, run.micro_batch, run.seq_len, run.precision.name, run.attention, recompute)


@lru_cache(maxsize=4096)
def _activations(
    model: TransformerConfig, b: int, s: int, precision: str, attention: str, recompute: str
) -> int:
    return activation_bytes(TrainingRun(model, b, s, precision, attention=attention, recompute=recompute))


def _weight_traffic(run: TrainingRun) -> int:
    """Bytes of weights and gradients moved for one micro-batch.

    Weights are read in forward and in backward, and copied for autocast or out of fewer bits; gradients are
    written or added to.
    """
    weights = parameter_bytes(alone(run))
    gradients = gradient_bytes(alone(run))
    copies = 0
    if run.precision.autocast and not run.lora_rank:  # fp32 weights are read, 16-bit copies written
        copies += weights + weights // 2
    if run.frozen_bits in (4, 8):  # each pass writes the matrix in 16 bits, and reads it
        copies += 2 * (2 + 2) * run.model.layers * _block_matrices(run.model)
    return 2 * weights + copies + (3 if run.accumulates else 1) * gradients


def _optimizer_traffic(run: TrainingRun) -> int:
    """Bytes that the optimizer's step reads and writes on one rank, once a step.

    Adam and AdamW by torch's operators (`ADAM_PASSES`), others as if each read and wrote weights and states
    once.
    """
    whole = alone(run)
    states = optimizer_state_bytes(whole)
    gradients = gradient_bytes(whole)
    trained = gradients if run.lora_rank else parameter_bytes(whole)
    moved = 2 * (trained + states) + gradients
    if run.optimizer.algorithm in ("adam", "adamw"):
        moved = moved * ADAM_PASSES[run.optimizer.implementation] // ADAM_PASSES["fused"]
    return moved // (run.world_size if run.zero_stage else 1)


def alone(run: TrainingRun) -> TrainingRun:
    """The same micro-batches on one rank that shards nothing."""
    if run.world_size == 1:
        return run
    return run.replace(world_size=1, zero_stage=0, bucket_view=False)
