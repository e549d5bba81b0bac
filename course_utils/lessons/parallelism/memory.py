"""Parameters of one stage of a pipeline, and the activations that it keeps under 1F1B."""

from functools import lru_cache
from math import prod

from ...estimating.formula import block_bytes, head_bytes, input_bytes, loss_bytes, stem_bytes
from ...models import Shapes, TransformerConfig, parameter_shapes
from ...run import TrainingRun
from ..pipelines.schedules import most_kept


def blocks_of(layers: int, stages: int, stage: int) -> range:
    """The blocks of one stage: as many as of any other, or one more in the first stages.

    Raises ValueError for more stages than blocks, and for a stage that there is none of.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} blocks cannot be cut into {stages} stages")
    if stage not in range(stages):
        raise ValueError(f"stage {stage}: they count from 0 to {stages - 1}")
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    count = each + 1 if stage < more else each
    return range(first, first + count)


def stage_shapes(model: TransformerConfig, stages: int, stage: int) -> Shapes:
    """A stage's parameters by name and shape; a tied head is in the first and last, as in Megatron-LM."""
    blocks = blocks_of(model.layers, stages, stage)
    last = stages - 1
    owners = {"embedding": {0, last} if model.tied else {0}, "positions": {0}}

    def mine(place: str, layer: str) -> bool:
        if place == "blocks":
            return int(layer) in blocks
        return stage in owners.get(place, {last})

    return {name: shape for name, shape in parameter_shapes(model).items() if mine(*name.split(".")[:2])}


@lru_cache(maxsize=1024)
def parameters_of(model: TransformerConfig, stages: int, stage: int) -> int:
    return sum(map(prod, stage_shapes(model, stages, stage).values()))


@lru_cache(maxsize=4096)
def kept_activations(run: TrainingRun, stages: int, micro_batches: int, stage: int) -> int:
    """Bytes that forward keeps for backward on one stage, when it keeps the most micro-batches under 1F1B.

    With whole blocks recomputed, K of them from one checkpoint ("full": 1), one stretch has all of its
    activations at a time, on the last stage after the loss and head have freed theirs. Raises ValueError for
    another kind of recomputation, and for sizes that cannot be.
    """
    if not run.blocks_per_checkpoint and run.recompute != "none":
        raise ValueError(
            f"recompute={run.recompute!r}: a stage is counted with 'none' or 'full', or 'every-K' blocks"
        )
    blocks = len(blocks_of(run.model.layers, stages, stage))
    of_block = block_bytes(run)
    own = blocks * of_block
    again = 0
    if run.blocks_per_checkpoint:
        checkpoint = input_bytes(run)
        together = min(run.blocks_per_checkpoint, blocks)
        own = -(-blocks // together) * checkpoint
        again = together * of_block - checkpoint
    stem = stem_bytes(run) if stage == 0 else 0
    end = head_bytes(run) + loss_bytes(run) if stage == stages - 1 else 0
    # The stretch that backward computes again comes after the loss and the head have freed theirs.
    return most_kept("1F1B", stages, micro_batches, stage) * (own + stem + end) + max(0, again - end)
