"""One rank of many: ZeRO's own formulas, what collectives send, and how torch shares out tensors.

ZeRO's stages by their paper (Rajbhandari et al. 2020); then DistributedDataParallel's buckets,
ZeroRedundancyOptimizer's shares, and the rows of FSDP2's shards. What a rank keeps of all this is in
`formula_of_ranks.py`.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from math import prod

from ..models import TransformerConfig, parameter_shapes
from ..run import TrainingRun
from ..units import MiB, round_up

Shape = tuple[int, ...]

FIRST_BUCKET = 1 * MiB
BUCKET = 25 * MiB
"""DistributedDataParallel's caps: the first bucket is small, so that communication starts early; then 25 MiB.
"""


# ZeRO in its own formulas


def zero_bytes(parameters: int, ranks: int, stage: int, optimizer_bytes: int = 12) -> int:
    """Bytes of states that each of `ranks` keeps.

    Ψ = `parameters` in 16-bit, their gradients, and K = `optimizer_bytes`.

    (2+2+K)Ψ without sharding; stage 1 shards the optimizer's states, 4Ψ + KΨ/D; stage 2 the gradients too,
    2Ψ + (2+K)Ψ/D; stage 3 all, (4+K)Ψ/D (Rajbhandari et al. 2020, sections 5.1 to 5.3 and figure 1). A share
    that does not come out even is rounded up. Raises ValueError for a stage that is not 0, 1, 2 or 3, or for
    no rank at all.
    """
    _check_ranks(ranks)
    sharded = _of_stage(stage, (0, optimizer_bytes, 2 + optimizer_bytes, 4 + optimizer_bytes))
    whole = 4 + optimizer_bytes - sharded
    return whole * parameters + -(-sharded * parameters // ranks)


def zero_communication_elements(parameters: int, stage: int) -> int:
    """Elements that each rank sends in a step: 2Ψ without sharding and for stages 1 and 2, 3Ψ for stage 3.

    An all-reduce is a reduce-scatter and an all-gather of Ψ each; stage 3 gathers the parameters twice, for
    forward and for backward (Rajbhandari et al. 2020, section 7). The factor (D−1)/D of a ring is left out,
    as the paper does. Raises ValueError for a stage that is not 0, 1, 2 or 3.
    """
    return _of_stage(stage, (2, 2, 2, 3)) * parameters


def reduce_scatter_bytes(size: int, ranks: int) -> int:
    """Bytes that each rank sends to get one share of the sum of `size` bytes: (D−1)/D · size.

    In a ring, in D−1 steps of one share, rounded up (Patarasuk and Yuan 2009). Raises ValueError for no rank
    at all.
    """
    _check_ranks(ranks)
    return (ranks - 1) * -(-size // ranks)


def all_gather_bytes(size: int, ranks: int) -> int:
    """Bytes that each rank sends so that all have all of `size` bytes: (D−1)/D · size.

    Before, each had one share.

    Raises like `reduce_scatter_bytes`.
    """
    return reduce_scatter_bytes(size, ranks)


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that each rank sends so that each ends with the sum: 2(D−1)/D · size.

    That is a reduce-scatter and an all-gather.

    Raises like `reduce_scatter_bytes`.
    """
    return reduce_scatter_bytes(size, ranks) + all_gather_bytes(size, ranks)


def _of_stage(stage: int, values: Sequence[int]) -> int:
    if isinstance(stage, bool) or stage not in range(4):
        raise ValueError(f"ZeRO's stage is {stage!r}: 0 (nothing is sharded), 1, 2 or 3")
    return values[stage]


def _check_ranks(ranks: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"there are {ranks!r} ranks: a whole number of at least 1")


# DistributedDataParallel and ZeRO-1


def ddp_buckets(tensors: Iterable[int], caps: Sequence[int] = (FIRST_BUCKET, BUCKET)) -> list[int]:
    """Bytes of each bucket that the reducer makes of gradients of these many bytes, in their order.

    A bucket is closed by the gradient that brings it to its cap, so it may be larger (torch's
    compute_bucket_assignment_by_size); the last cap holds for all further buckets.
    """
    buckets = []
    filled = 0
    for size in tensors:
        filled += size
        if filled >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(filled)
            filled = 0
    if filled:
        buckets.append(filled)
    return buckets


def bucket_sizes(run: TrainingRun, rebuilt: bool = True) -> list[int]:
    """Bytes of each of DistributedDataParallel's buckets for `run`, each rounded up to 512.

    In the first step there is one bucket for all; then they are `rebuilt` in the order in which gradients
    came, which is the reverse of the network's but for a tied embedding, whose gradient is complete last
    either way.
    """
    return list(_bucket_sizes(run.model, run.precision.gradient, rebuilt))


@lru_cache(maxsize=256)
def _bucket_sizes(model: TransformerConfig, element: int, rebuilt: bool) -> tuple[int, ...]:
    sizes = [element * prod(shape) for shape in reversed(parameter_shapes(model).values())]
    caps = (FIRST_BUCKET, BUCKET) if rebuilt else (sys.maxsize,)
    return tuple(round_up(size) for size in ddp_buckets(sizes, caps))


def zero_1_shares(shapes: Mapping[str, Shape], ranks: int) -> Sequence[Mapping[str, Shape]]:
    """Parameters that each rank's optimizer steps: the largest first, each to the rank that has least so far.

    torch's ZeroRedundancyOptimizer shares out whole tensors, so the shares are not even.
    """
    _check_ranks(ranks)
    shares: list[dict[str, Shape]] = [{} for _ in range(ranks)]
    filled = [(0, rank) for rank in range(ranks)]  # the rank with least comes first, of equals the lowest
    heapify(filled)
    for name, shape in sorted(shapes.items(), key=lambda item: -prod(item[1])):
        elements, rank = filled[0]
        shares[rank][name] = shape
        heapreplace(filled, (elements + prod(shape), rank))
    return shares


# FSDP2

FSDP_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lion")


def lacking_in_fsdp(run: TrainingRun) -> str:
    """The reason that `run` is not trained with FSDP2 here, with what would be; or ""."""
    if run.precision.name == "fp8":
        return "FSDP2 is not covered in fp8: choose another precision, such as 'bf16-master'"
    if run.optimizer.algorithm not in FSDP_OPTIMIZERS:
        return (
            f"FSDP2 is covered with optimizers that step each number alone, {', '.join(FSDP_OPTIMIZERS)}, "
            f"not with {run.optimizer.name}, which looks at whole tensors or at blocks of them"
        )
    if run.tensor_parallel > 1 or run.lora_rank:
        return "FSDP2 is covered without LoRA and tensor parallelism: set lora_rank=0, tensor_parallel=1"
    return ""


def shard_shape(shape: Shape, ranks: int) -> Shape:
    """Rank 0's piece of a parameter: ⌈rows / D⌉ of its rows, as many as any rank has."""
    _check_ranks(ranks)
    return (-(-shape[0] // ranks), *shape[1:])
