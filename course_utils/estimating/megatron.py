"""Tensor and sequence parallelism as Megatron-LM cuts a transformer, in closed forms only: nothing here is measured.

t ranks share each block: the matrices that fan out (q, k, v, gate, up) are cut along their outputs, those that gather
(out, down) along their inputs, embedding and head along the vocabulary. What a rank needs whole it keeps whole: norms,
positions, routers, and the biases that are added once, after the all-reduce (Shoeybi et al. 2019, section 3).
"""

from math import prod

from ..models import TransformerConfig, parameter_shapes
from ..run import TrainingRun

CUT_OUTPUTS = ("qkv", "q", "k", "v", "gate", "up", "embedding", "head")
CUT_INPUTS = ("out", "down")


def parameters_per_rank(model: TransformerConfig, ranks: int) -> int:
    """N of one of `ranks` tensor-parallel ranks: most is divided by them, what is replicated is not.

    The vocabulary is padded until the ranks divide it. Raises ValueError where the ranks do not divide the heads, the
    heads of keys and values, or the width of the MLP.
    """
    _check_degree(model, ranks)
    return sum(prod(rank_shape(name, shape, ranks)) for name, shape in parameter_shapes(model).items())


def replicated_parameters(model: TransformerConfig) -> int:
    """How many parameters every tensor-parallel rank keeps whole."""
    whole = {name: shape for name, shape in parameter_shapes(model).items() if rank_shape(name, shape, 2) == shape}
    return sum(prod(shape) for shape in whole.values())


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
    """Bytes that one block keeps on each of t ranks, in 16-bit with eager attention, as Korthikanti et al. 2022 count.

    Table 2, with sections 4.1 and 4.2 for the derivations: s·b·h·(34 + 5as/h) on one rank; s·b·h·(10 + 24/t + 5as/(ht))
    with tensor parallelism, as the norms, their dropout and the inputs of the two halves are on every rank; s·b·h/t ·
    (34 + 5as/h) with sequence parallelism, which cuts these too. Selective recomputation of attention's core drops the
    term with 5as/h (section 5); full recomputation keeps the block's input alone, 2·s·b·h on each rank. A sum of
    elements that t does not divide is rounded up. Raises ValueError for another kind of recomputation.
    """
    s, b, h, a, t = run.seq_len, run.micro_batch, run.model.hidden, run.model.heads, run.tensor_parallel
    if run.recompute == "full":
        return 2 * s * b * h
    if run.recompute not in ("none", "selective-attention"):
        raise ValueError(
            f"the paper covers recompute 'none', 'selective-attention' (its \"selective\") and 'full', "
            f"not {run.recompute!r}"
        )
    core = 5 * a * s * s * b if run.recompute == "none" else 0
    whole = 0 if run.sequence_parallel else 10 * s * b * h
    return whole + -(-(34 * s * b * h - whole + core) // t)


def activation_bytes(run: TrainingRun) -> int:
    """The same for all L blocks: s·b·h·L/t · (34 + 5as/h) with sequence parallelism, 34·s·b·h·L/t if selective too.

    What is outside the blocks is left out, as in the paper's total. Raises like `block_activation_bytes`.
    """
    return run.model.layers * block_activation_bytes(run)


def communication_elements(run: TrainingRun) -> int:
    """Elements of activations that are all-reduced for one micro-batch, forward and backward: 4·s·b·h a block.

    Two all-reduces forward and two backward, f and g (Shoeybi et al. 2019, figure 4). Sequence parallelism cuts each
    into an all-gather and a reduce-scatter, which send as much (Korthikanti et al. 2022, section 4.2.2); 0 on one rank.
    """
    if run.tensor_parallel == 1:
        return 0
    return 4 * run.seq_len * run.micro_batch * run.model.hidden * run.model.layers
