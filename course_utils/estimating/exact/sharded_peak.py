"""FSDP2's rank 0: the moments of one rank's step with the buffers around each part, and its update."""

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ...breakdown import MemoryBreakdown
from ...models import Shapes, TransformerConfig
from ...run import OPTIMIZERS, Optimizer, Precision, TrainingRun
from ..sharding import Hooks, fsdp_hooks, shard_shape
from ..states import Trainable, trainable
from .program import Reading, named
from .tape import END, Place
from .update import clip_walk, scaler_walk, step_on
from .walk import Totals, Walk, highest, highest_and_net, plus


def fsdp_moments(run: TrainingRun, start: Totals) -> dict[str, MemoryBreakdown]:
    """Bytes by kind at the highest point of each part of rank 0's step, in their order, by name.

    Parts are those of forward and backward.

    `start` is there when the step begins. Raises ValueError for a run that FSDP2 is not covered for, for a
    model of one block, and where one checkpoint covers several blocks, which FSDP2 then gathers once more
    each.
    """
    _check(run)
    reading = Reading(_alone(run))
    found = dict[str, MemoryBreakdown]()
    now = dict(start)
    for stretch in _with_hooks(reading, fsdp_hooks(run)):
        phase, name = named(stretch.phase, stretch.place, reading.last_group)
        if phase == "loss":
            found.setdefault("end of forward", MemoryBreakdown(dict(now), "forward", "end of forward"))
        if phase == "backward":
            found.setdefault("after loss", MemoryBreakdown(dict(now), "loss", "after loss"))
        highest_here, whole = highest_and_net(stretch.walk)
        top = plus(now, highest_here)
        if stretch.times == 1 and (name not in found or sum(top.values()) > found[name].total):
            found[name] = MemoryBreakdown(top, phase, name)
        for kind, size in whole.items():
            now[kind] = now.get(kind, 0) + stretch.times * size
    return found


def _check(run: TrainingRun) -> None:
    if run.model.layers < 2:
        raise ValueError(f"{run.model.name} has one block: FSDP2's peak is estimated from 2 blocks on")
    if run.blocks_per_checkpoint > 1:
        raise ValueError(
            f"FSDP2's peak is not estimated with recompute={run.recompute!r}, "
            f"whose checkpoints stand for {run.blocks_per_checkpoint} blocks: measure it, or choose 'full'"
        )


def _alone(run: TrainingRun) -> TrainingRun:
    """One rank whose every micro-batch is like rank 0's.

    Gradients are new each time, and no masters are apart.
    """
    precision = "bf16-master" if run.precision.name == "bf16-master-fp32grad" else run.precision
    return run.replace(
        world_size=1, zero_stage=0, accumulation_steps=1, set_to_none=True, precision=precision
    )


class Stretch(NamedTuple):
    """Pieces of the tape that belong together, looked at if they come once.

    With recomputation, these are a block's forward and then its backward.
    """

    phase: str
    place: Place
    walk: Walk
    times: int


def _with_hooks(reading: Reading, hooks: Hooks) -> Iterator[Stretch]:
    """The step's stretches in order, each with what FSDP2 does before and after it.

    The last reduction is autograd's final callback: the loss, its gradient and, where losses are scaled, the
    scaled one are still there.
    """
    stretches = list(_stretches(reading))
    parts = dict[tuple[str, str], list[int]]()
    for number, stretch in enumerate(stretches):
        parts.setdefault((stretch.phase, stretch.place.part), []).append(number)
    forward = parts["forward", "block"]
    backward = parts["backward", "block"]
    before = dict.fromkeys(forward, hooks.before_block) | dict.fromkeys(backward, hooks.before_block_backward)
    before[forward[0]] = hooks.before_first_block
    before[backward[-1]] = hooks.before_first_block_backward
    before |= dict.fromkeys(parts["forward", "stem"], hooks.before_stem)
    before |= dict.fromkeys(parts["backward", "head"], hooks.before_head_backward)
    before |= dict.fromkeys(parts["backward", "end"], hooks.after_backward)
    after = dict.fromkeys(forward, hooks.after_block) | dict.fromkeys(backward, hooks.after_block_backward)
    after[backward[0]] = hooks.after_last_block_backward
    after |= dict.fromkeys(parts["forward", "head"], hooks.after_head)
    for number, stretch in enumerate(stretches):
        yield stretch._replace(walk=[*before.get(number, []), *stretch.walk, *after.get(number, [])])


def _stretches(reading: Reading) -> Iterator[Stretch]:
    """The tape's pieces in order; those of one block's backward, whose numbers ascend, as one."""
    stretch = Stretch("", END, [], 1)
    last = -1
    for visit, piece, times in zip(reading.program.visits, reading.pieces, reading.times, strict=True):
        phase = "backward" if piece.phase == "recompute" else piece.phase
        here = (phase, piece.place, times)
        if last >= visit.piece or (stretch.phase, stretch.place, stretch.times) != here:
            if stretch.phase:
                yield stretch
            stretch = Stretch(phase, piece.place, [], times)
        events = reading.program.events[piece.events]
        last = visit.piece
        stretch.walk.extend(zip(events.kinds, map(reading.signed.__getitem__, events.changes), strict=True))
    yield stretch


def fsdp_updates(run: TrainingRun) -> dict[str, Totals]:
    """Bytes by kind that clipping and the optimizer's step add at their highest points.

    Clipping is there if gradients are clipped.
    """
    clips = run.clip_grad_norm is not None
    return _update_tops(run.model, run.world_size, run.precision, run.optimizer, run.set_to_none, clips)


@lru_cache(maxsize=256)
def _update_tops(
    model: TransformerConfig,
    ranks: int,
    precision: Precision,
    optimizer: Optimizer,
    set_to_none: bool,
    clips: bool,
) -> dict[str, Totals]:
    stored = precision.master or precision.weight
    shards = _shards(model, ranks)
    sharded = dataclasses.replace(precision, weight=stored, gradient=stored, master=0)
    tops = {}
    if clips:
        unscaled = scaler_walk(sharded, OPTIMIZERS["sgd"], clips=False)
        tops["clipping"] = highest([*unscaled, *clip_walk(shards.tensors, stored)])
    tops["optimizer step"] = step_on(sharded, optimizer, shards, set_to_none, clips)
    return tops


def _shards(model: TransformerConfig, ranks: int) -> Trainable:
    """Rank 0's parts of the parameters, as the optimizer steps them."""
    whole = trainable(model, 0, ())

    def cut(shapes: Shapes) -> Shapes:
        return {name: shard_shape(shape, ranks) for name, shape in shapes.items()}

    return Trainable(cut(whole.before), cut(whole.block), whole.layers, cut(whole.after))
