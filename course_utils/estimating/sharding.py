"""One rank of many: what it keeps of the states, what it sends, and the buffers that sharding needs.

ZeRO's stages in its own formulas (Rajbhandari et al. 2020), then what torch really allocates:
DistributedDataParallel's buckets, ZeroRedundancyOptimizer's shares, and FSDP2's shards and the buffers that
come and go around each block.
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

from ..models import TransformerConfig, block_shapes, outer_shapes, parameter_shapes
from ..run import Optimizer, Precision, TrainingRun
from ..units import MiB, round_up
from .exact.walk import Totals, Walk, free, make
from .states import gradient_bytes, optimizer_state_bytes, parameter_bytes, states_of, tensors_states

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


# What rank 0 of a run keeps


def rank_0_states(run: TrainingRun) -> Totals:
    """Bytes of parameters, gradients and optimizer states of rank 0 of `run`.

    They are there between backward and the optimizer step.

    Each tensor is rounded up to 512. Stage 0 is one rank's; stage 1 shares out whole tensors; stages 2 and 3
    are FSDP2, which keeps no whole parameter between steps, whatever the stage: they differ within the step.
    Buckets and gathered parameters are not states: see `ddp_communication` and `fsdp_hooks`. Raises
    ValueError for a run that torch cannot shard like this (see `check_fsdp`).
    """
    if run.zero_stage < 2:
        if run.zero_stage:
            states = _zero_1_optimizer_bytes(run.model, run.world_size, run.precision, run.optimizer)
        else:
            states = optimizer_state_bytes(run)
        gradients = sum(bucket_sizes(run)) if run.bucket_view else gradient_bytes(run)
        return {"parameters": parameter_bytes(run), "gradients": gradients, "optimizer_states": states}
    outer, block = fsdp_groups(run)[:2]
    layers = run.model.layers
    return {
        "parameters": outer.parameter_bytes + layers * block.parameter_bytes,
        "gradients": outer.gradient_bytes + layers * block.gradient_bytes,
        "optimizer_states": _fsdp_optimizer_bytes(run.model, run.world_size, run.precision, run.optimizer),
    }


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


def ddp_communication(run: TrainingRun) -> int:
    """Bytes of communication buckets besides the gradients: as much again as these, in every step.

    With `bucket_view` the gradients are views of the buckets, and nothing is there twice.
    """
    return 0 if run.bucket_view else sum(bucket_sizes(run))


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


@lru_cache(maxsize=256)
def _zero_1_optimizer_bytes(
    model: TransformerConfig, ranks: int, precision: Precision, optimizer: Optimizer
) -> int:
    return states_of(precision, optimizer, zero_1_shares(parameter_shapes(model), ranks)[0])


# FSDP2

FSDP_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lion")


def check_fsdp(run: TrainingRun) -> None:
    """Raise ValueError, naming what works, for a run that is not covered as FSDP2."""
    if run.precision.name == "fp8":
        raise ValueError("FSDP2 is not covered in fp8: choose another precision, such as 'bf16-master'")
    if run.optimizer.algorithm not in FSDP_OPTIMIZERS:
        raise ValueError(
            f"FSDP2 is covered with optimizers that step each number alone, {', '.join(FSDP_OPTIMIZERS)}, "
            f"not with {run.optimizer.name}, which looks at whole tensors or at blocks of them"
        )
    if run.tensor_parallel > 1 or run.lora_rank:
        raise ValueError(
            "FSDP2 is covered without LoRA and tensor parallelism: set lora_rank=0, tensor_parallel=1"
        )


@dataclass(frozen=True)
class Gathered:
    """Parameters that FSDP2 gathers and reduces together, in bytes on rank 0.

    They are a block, or all outside the blocks.

    Each parameter of so many `elements` is cut along its first dimension into D pieces of as many rows, the
    last ones padded: `shards` are the elements of rank 0's pieces, so D times as many are gathered. Bytes an
    element: `stored` in a shard, `gathered_as` where computing, `gradient` as backward makes it, `reduced_as`
    in the sum of gradients.
    """

    elements: tuple[int, ...]
    shards: tuple[int, ...]
    ranks: int
    stored: int
    gathered_as: int
    reduced_as: int
    gradient: int

    @cached_property
    def parameter_bytes(self) -> int:
        """The shards, a tensor for each parameter."""
        return sum(round_up(self.stored * shard) for shard in self.shards)

    @cached_property
    def gradient_bytes(self) -> int:
        """The gradients' shards: views of the one tensor that the reduce-scatter wrote, or of its copy."""
        return round_up(self.stored * sum(self.shards))

    @cached_property
    def gather_input(self) -> int:
        """Rank 0's flat contribution in another number format than its shards'.

        Without one it goes straight into the output.
        """
        if self.gathered_as == self.stored:
            return 0
        return round_up(self.gathered_as * sum(self.shards))

    @cached_property
    def gather_output(self) -> int:
        """The flat buffer that all ranks' pieces arrive in."""
        return round_up(self.gathered_as * self.ranks * sum(self.shards))

    @cached_property
    def unsharded(self) -> int:
        """The parameters as the block computes with them, each a tensor copied out of the buffer."""
        return sum(self.whole(self.gathered_as))

    def whole(self, element: int) -> list[int]:
        """A tensor for each parameter, padded, at `element` bytes an element."""
        return [round_up(element * self.ranks * shard) for shard in self.shards]

    @cached_property
    def reduce_input(self) -> int:
        """The flat buffer that the whole gradients are copied into, padded, in the format of the sum."""
        return round_up(self.reduced_as * self.ranks * sum(self.shards))

    @cached_property
    def reduce_output(self) -> int:
        """Rank 0's share of the summed gradients. Where formats agree this becomes the gradients' shards."""
        return round_up(self.reduced_as * sum(self.shards))


def fsdp_groups(run: TrainingRun) -> tuple[Gathered, ...]:
    """Groups that FSDP2 gathers: the parameters outside the blocks, then each block.

    Raises like `check_fsdp`.
    """
    check_fsdp(run)
    outer, block = _groups(run.model, run.world_size, run.precision)
    return (outer, *[block] * run.model.layers)


@lru_cache(maxsize=256)
def _groups(model: TransformerConfig, ranks: int, precision: Precision) -> tuple[Gathered, Gathered]:
    """The parameters outside the blocks, and one block."""
    outer = _gathered(precision, ranks, outer_shapes(model))
    block = _gathered(precision, ranks, block_shapes(model))
    return outer, block


def _gathered(precision: Precision, ranks: int, shapes: Mapping[str, Shape]) -> Gathered:
    stored = precision.master or precision.weight  # the shard is the master weight
    compute = precision.weight  # under autocast what is gathered is fp32; its 16-bit copies are autocast's
    elements = tuple(prod(shape) for shape in shapes.values())
    shards = tuple(prod(shard_shape(shape, ranks)) for shape in shapes.values())
    return Gathered(elements, shards, ranks, stored, compute, stored, precision.weight)


def shard_shape(shape: Shape, ranks: int) -> Shape:
    """Rank 0's piece of a parameter: ⌈rows / D⌉ of its rows, as many as any rank has."""
    _check_ranks(ranks)
    return (-(-shape[0] // ranks), *shape[1:])


@lru_cache(maxsize=256)
def _fsdp_optimizer_bytes(
    model: TransformerConfig, ranks: int, precision: Precision, optimizer: Optimizer
) -> int:
    """Bytes of the optimizer's states of rank 0's shards.

    The fp32 shards are themselves the master weights.
    """
    precision = dataclasses.replace(precision, master=0)
    outer = {name: shard_shape(shape, ranks) for name, shape in outer_shapes(model).items()}
    block = {name: shard_shape(shape, ranks) for name, shape in block_shapes(model).items()}
    return states_of(precision, optimizer, outer) + model.layers * tensors_states(precision, optimizer, block)


COMMUNICATION = "communication"


class Hooks(NamedTuple):
    """Allocations and frees of FSDP2 around the parts of a network, in their order through one micro-batch.

    Of blocks, those after the first, or before the last, are alike. Whole gradients appear within backward,
    as the layers' own; what frees them is here.
    """

    before_stem: Walk
    before_first_block: Walk
    before_block: Walk
    after_block: Walk
    after_head: Walk
    before_head_backward: Walk
    before_block_backward: Walk
    before_first_block_backward: Walk
    after_last_block_backward: Walk
    after_block_backward: Walk
    after_backward: Walk


def fsdp_hooks(run: TrainingRun) -> Hooks:
    """FSDP2's allocations around each part of a network of at least two blocks. Raises like `check_fsdp`.

    Forward: a group's flat buffer stays until the next group's parameters have been copied out, so that
    copying overlaps with gathering; for a moment two flat buffers and the parameters are there. Backward: it
    goes at once, but the next block's parameters are gathered already. The whole gradients' flat copy stays
    until the next block's backward is done or, at the end, until the last is reduced. Stage 2 gathers once,
    before forward, and frees after backward.
    """
    outer, block = fsdp_groups(run)[:2]
    return _hooks(outer, block, run.zero_stage == 3, not run.accumulates)


@lru_cache(maxsize=256)
def _hooks(outer: Gathered, block: Gathered, stage_3: bool, first: bool) -> Hooks:
    gathered = gather(block) if stage_3 else []
    appear = [*unshard(block), free(block.gather_output, COMMUNICATION)] if stage_3 else []
    reduced = reduce_scatter(block, first)
    done = [free(block.reduce_input, COMMUNICATION)]
    last_reduced = [*reduce_scatter(outer, first), free(outer.reduce_input, COMMUNICATION)]
    return Hooks(
        before_stem=[*gather(outer), *unshard(outer)],
        before_first_block=[*gather(block), *unshard(block), free(outer.gather_output, COMMUNICATION)],
        before_block=[*gather(block), *unshard(block), free(block.gather_output, COMMUNICATION)],
        after_block=reshard(block) if stage_3 else [],
        after_head=[free(block.gather_output, COMMUNICATION)],
        before_head_backward=gathered,
        before_block_backward=[*appear, *gathered],
        before_first_block_backward=appear,
        after_last_block_backward=[*reshard(block), *reduced],
        after_block_backward=[*reshard(block), *done, *reduced],
        after_backward=[*reshard(outer), *done, *last_reduced],
    )


def gather(group: Gathered) -> Walk:
    """All ranks' shards arrive in one flat buffer.

    In another format than the shards', rank 0's are copied first.
    """
    if not group.gather_input:
        return [make(group.gather_output, COMMUNICATION)]
    sent = group.gather_input
    return [make(sent, COMMUNICATION), make(group.gather_output, COMMUNICATION), free(sent, COMMUNICATION)]


def unshard(group: Gathered) -> Walk:
    """Each parameter is copied out of the flat buffer into a tensor of its own."""
    return [make(size, COMMUNICATION) for size in group.whole(group.gathered_as)]


def reshard(group: Gathered) -> Walk:
    """The whole parameters go; rank 0's shards never went."""
    return [free(size, COMMUNICATION) for size in group.whole(group.gathered_as)]


def reduce_scatter(group: Gathered, first: bool) -> Walk:
    """The whole gradients are copied into one flat buffer, and go; rank 0's share of the sum arrives.

    The buffer stays.

    The last gradient goes when all is done. The `first` share becomes the gradients' shards; a later one is
    added to them, and goes.
    """
    share = make(group.reduce_output, "gradients" if first else COMMUNICATION)
    *freed, last = [free(group.gradient * elements, "gradients") for elements in group.elements]
    added = [] if first else [free(group.reduce_output, COMMUNICATION)]
    return [make(group.reduce_input, COMMUNICATION), *freed, share, last, *added]
