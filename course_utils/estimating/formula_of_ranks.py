"""The closed form of what one of several ranks keeps and sends: buckets, ZeRO, FSDP2, Megatron.

D ranks share the data. ZeRO-1 shares out optimizer states by whole tensors (torch's ZeroRedundancyOptimizer);
FSDP2 cuts each parameter along its rows, which are stages 2 and 3 of Rajbhandari et al. 2020. T ranks share
each block (Shoeybi et al. 2019).
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from ..models import Shapes, block_shapes, outer_shapes
from ..run import Precision, TrainingRun
from .megatron import rank_shape
from .sharding import bucket_sizes, shard_shape, zero_1_shares
from .states import Trainable, parameter_bytes, trainable, trained_states

Bytes = dict[str, int]


# States


def rank_0_states(run: TrainingRun) -> Bytes:
    """Weights, gradients and optimizer states of rank 0, (w + g + K)·N, when all gradients are there.

    K is master weights and moments. Rajbhandari et al. 2020 (ZeRO), sections 3.1 and 5: stages 1, 2 and 3
    divide K, then g, then w by D. FSDP2 shards all three in stages 2 and 3, and its shards are the master
    weights.
    """
    trained = local(run)
    p = stored(run)
    if run.lora_rank:
        shared_by = run.world_size if run.zero_stage >= 2 else 1
        parameters = parameter_bytes(run) // shared_by // run.tensor_parallel
    else:
        parameters = trained.bytes(p.weight)
    gradients = sum(bucket_sizes(run)) if run.bucket_view and not run.lora_rank else trained.bytes(p.gradient)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer_states": trained_states(p, run.optimizer, stepped(run)),
    }


def stored(run: TrainingRun) -> Precision:
    """The precision of what persists: FSDP2's shards are themselves the master weights."""
    p = run.precision
    if run.zero_stage < 2:
        return p
    element = p.master or p.weight
    return replace(p, weight=element, gradient=element, master=0)


def local(run: TrainingRun) -> Trainable:
    """The parameters that are trained, as rank 0 has them: cut by tensor parallelism, and by FSDP2."""
    whole = trainable(run.model, run.lora_rank, run.lora_targets)
    ranks = run.world_size if run.zero_stage >= 2 else 1
    if run.tensor_parallel == ranks == 1:
        return whole

    def cut(shapes: Shapes) -> Shapes:
        parts = {name: rank_shape(name, shape, run.tensor_parallel) for name, shape in shapes.items()}
        return {name: shard_shape(shape, ranks) for name, shape in parts.items()}

    return Trainable(cut(whole.before), cut(whole.block), whole.layers, cut(whole.after))


def stepped(run: TrainingRun) -> Trainable:
    """The parameters that rank 0's optimizer steps: with ZeRO-1 its share of whole tensors."""
    mine = local(run)
    if run.zero_stage != 1:
        return mine
    blocks = {f"{name}.{layer}": shape for layer in range(mine.layers) for name, shape in mine.block.items()}
    share = zero_1_shares(mine.before | blocks | mine.after, run.world_size)[0]
    return Trainable(dict(share), {}, 0, {})


# DistributedDataParallel


def buckets(run: TrainingRun, gradients: int) -> int:
    """Bytes of the buckets in which gradients are sent: as much again, unless they are views of them."""
    return gradients if run.world_size > 1 and run.zero_stage < 2 and not run.bucket_view else 0


def old_buckets(run: TrainingRun) -> int:
    """Bytes of the first step's bucket, which is there next to those made anew as step 2 begins.

    Gradients that are views of it, and that `zero_grad` does not set to None, are then copied into the new
    ones (torch's `Reducer::initialize_bucket_views`). Without such gradients, the old bucket goes before.
    """
    if run.set_to_none or not run.bucket_view:
        return 0
    return sum(bucket_sizes(run, rebuilt=False))


# FSDP2


class Group(NamedTuple):
    """Parameters that FSDP2 gathers and reduces together, in bytes: a block, or all outside the blocks.

    `whole` parameters, the flat buffer in which all ranks' shards `arrived`, whole `gradients`, their flat
    copy that is `summed`, and rank 0's `share` of the sum. `most` of the whole gradients and the share is
    there at once with the copy: the gradients go one after another, the last when its share has come.
    """

    whole: int = 0
    arrived: int = 0
    gradients: int = 0
    summed: int = 0
    share: int = 0
    most: int = 0


class Buffers(NamedTuple):
    """Bytes that FSDP2 holds besides shards around the parts of a step; nothing for other runs.

    With stage 3 a block's parameters go after use and are gathered anew for backward. In forward a block's
    flat buffer stays until the next one's parameters are copied out of theirs; in backward the next block is
    on its way already, and the sum of the one before stays (Zhao et al. 2023, section 3.3).
    """

    outer: Group = Group()
    block: Group = Group()
    layers: int = 1
    stage: int = 0

    @property
    def in_stem(self) -> int:
        """Bytes at the first block's gathering, with the buffer of what is outside the blocks."""
        return self.outer.whole + self.outer.arrived + self.block.whole + self.block.arrived

    @property
    def in_forward(self) -> int:
        """Bytes at the last block's gathering in forward."""
        blocks = 1 if self.stage == 3 else self.layers
        return self.outer.whole + blocks * self.block.whole + 2 * self.block.arrived

    @property
    def at_head(self) -> int:
        """Bytes at the loss: what is outside the blocks is whole all the time."""
        return self.outer.whole + (self.layers * self.block.whole if self.stage == 2 else 0)

    @property
    def at_head_backward(self) -> int:
        """Bytes in backward of the head: the last block is on its way."""
        return self.at_head + self._next(self.layers)

    def in_block(self, index: int) -> int:
        """Bytes in backward of a block, counted from the first."""
        blocks = 1 if self.stage == 3 else index + 1
        summed = self.block.summed if index < self.layers - 1 else 0
        return self.outer.whole + blocks * self.block.whole + self._next(index) + summed

    def at_sum(self, index: int) -> int:
        """Bytes when a block's whole gradients are copied to be summed: its parameters have gone."""
        blocks = 0 if self.stage == 3 else index
        return self.outer.whole + blocks * self.block.whole + self._next(index) + self.block.summed

    def _next(self, index: int) -> int:
        return self.block.arrived if self.stage == 3 and index else 0


def buffers(run: TrainingRun) -> Buffers:
    """FSDP2's buffers of `run`."""
    if run.zero_stage < 2:
        return Buffers()
    outer, block = outer_shapes(run.model), block_shapes(run.model)
    trained = (factors(run), {}) if run.lora_rank else (block, outer)
    groups = (group(run, outer, trained[1]), group(run, block | trained[0], trained[0]))
    return Buffers(*groups, run.model.layers, run.zero_stage)


def group(run: TrainingRun, shapes: Shapes, trained: Shapes) -> Group:
    """The buffers for parameters of these shapes, each padded to D pieces of as many rows."""
    D, w = run.world_size, run.precision.weight
    m = stored(run).weight
    padded = sum(D * prod(shard_shape(shape, D)) for shape in shapes.values())
    summed = sum(D * prod(shard_shape(shape, D)) for shape in trained.values())
    gradients = [w * prod(shape) for shape in trained.values()]
    share = m * summed // D
    most = max(sum(gradients), share + gradients[-1]) if gradients else 0
    return Group(w * padded, w * padded, sum(gradients), m * summed, share, most)


def factors(run: TrainingRun) -> Shapes:
    """LoRA's factors of one block: A and B of each matrix that it adapts."""
    return trainable(run.model, run.lora_rank, run.lora_targets).block if run.lora_rank else {}
