"""Tensor and sequence parallelism as Megatron-LM cuts a transformer: closed forms, nothing measured.

`rank_states` answers for a run.

t ranks share each block: the matrices that fan out (q, k, v, gate, up) are cut along their outputs, those
that gather (out, down) along their inputs, embedding and head along the vocabulary. What a rank needs whole
it keeps whole: norms, positions, routers, and the biases that are added once, after the all-reduce (Shoeybi
et al. 2019, section 3).
"""

from math import prod

from ..breakdown import MemoryBreakdown
from ..models import Shapes, TransformerConfig, parameter_shapes
from ..run import TrainingRun
from ..units import round_up
from .published import korthikanti_parallel_block_bytes
from .states import states_of

CUT_OUTPUTS = ("qkv", "q", "k", "v", "gate", "up", "embedding", "head")
CUT_INPUTS = ("out", "down")


def rank_states(run: TrainingRun) -> MemoryBreakdown:
    """Bytes that one of `run.tensor_parallel` ranks keeps: weights, gradients, optimizer states, and
    activations.

    The states are those of `rank_shapes`, each tensor rounded up to 512, in the run's precision, with its
    optimizer. The activations are the blocks' alone, as `activation_bytes` has them; where it covers no such
    run they are left out, and the label says why. Raises ValueError for LoRA, for data-parallel ranks
    besides, and for ranks that do not divide the model.
    """
    if run.lora_rank or run.world_size > 1:
        raise ValueError(
            "tensor parallelism is covered without LoRA, on one replica: set lora_rank=0, world_size=1"
        )
    shapes = rank_shapes(run.model, run.tensor_parallel)
    precision = run.precision
    parts = {
        "parameters": sum(round_up(precision.weight * prod(shape)) for shape in shapes.values()),
        "gradients": sum(round_up(precision.gradient * prod(shape)) for shape in shapes.values()),
        "optimizer_states": states_of(precision, run.optimizer, shapes),
    }
    whose = f"one of {run.tensor_parallel} tensor-parallel ranks"
    try:
        parts["activations"] = activation_bytes(run)
    except ValueError as refusal:
        # An answer without activations is still one, and its label says what it lacks.
        return MemoryBreakdown(parts, label=f"{whose}, without activations: {refusal}")
    return MemoryBreakdown(parts, label=f"{whose}, with its blocks' activations")


def rank_shapes(model: TransformerConfig, ranks: int) -> Shapes:
    """The shapes of one rank's parts of the parameters, by name; what is replicated is whole.

    The vocabulary is padded until the ranks divide it. Raises ValueError where the ranks do not divide the
    heads, the heads of keys and values, or the width of the MLP.
    """
    _check_degree(model, ranks)
    return {name: rank_shape(name, shape, ranks) for name, shape in parameter_shapes(model).items()}


def rank_shape(name: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The shape of one rank's part of a parameter, rounded up where it does not come out even."""
    layer, kind = name.split(".")[-2:]
    if layer in CUT_OUTPUTS:
        return (-(-shape[0] // ranks), *shape[1:])
    if layer in CUT_INPUTS and kind == "weight":
        return (*shape[:-1], -(-shape[-1] // ranks))
    return shape


def _check_degree(model: TransformerConfig, ranks: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"{ranks!r} tensor-parallel ranks: a whole number of at least 1")
    sizes = {"heads": model.heads, "key and value heads": model.kv_heads, "an MLP of": model.ffn}
    for what, size in sizes.items():
        if size % ranks:
            raise ValueError(f"{ranks} tensor-parallel ranks do not divide {size} {what.removesuffix(' of')}")


def block_activation_bytes(run: TrainingRun) -> int:
    """Bytes that one block keeps on each of t ranks, where the published formula is right.

    It is `published.korthikanti_parallel_block_bytes`.

    Korthikanti et al. 2022, table 2, counts 16-bit activations of a GPT with eager attention. Raises
    ValueError, naming it, for what that does not cover: fp32, LoRA, a fused kernel (whose scores are not
    kept) unless attention or all is recomputed, an MLP that is gated or not 4h wide, grouped queries, no
    dropout, and other kinds of recomputation.
    """
    model = run.model
    lacks_scores = run.attention != "eager" and run.recompute == "none"
    uncovered = {
        f"the {run.attention} kernel, which keeps no scores: choose 'eager'": lacks_scores,
        "a gated MLP": model.mlp == "swiglu",
        f"an MLP of {model.ffn}, which is not 4 · {model.hidden}": model.ffn != 4 * model.hidden,
        "grouped queries": model.kv_heads != model.heads,
        "a model without dropout, whose masks it counts": not model.dropout,
    }
    for what, holds in uncovered.items():
        if holds and run.recompute != "full":
            raise ValueError(f"Korthikanti et al.'s table 2 does not cover {what}")
    return korthikanti_parallel_block_bytes(run)


def activation_bytes(run: TrainingRun) -> int:
    """The same for all L blocks: s·b·h·L/t · (34 + 5as/h) with sequence parallelism.

    If selective too, 34·s·b·h·L/t.

    What is outside the blocks is left out, as in the paper's total. Raises like `block_activation_bytes`.
    """
    return run.model.layers * block_activation_bytes(run)
