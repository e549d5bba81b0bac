"""The peak of FSDP2's rank 0: one rank's step, with shards for states, and the buffers around each part of it."""

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from course_utils.breakdown import MemoryBreakdown
from course_utils.models import Shapes, TransformerConfig
from course_utils.run import OPTIMIZERS, Optimizer, Precision, TrainingRun
from course_utils.units import round_up

from ..sharding import Hooks, fsdp_hooks, rank_0_states, shard_shape
from ..states import Trainable, trainable
from ..workspaces import workspace_bytes
from .program import Reading, named
from .update import clip_walk, scaler_walk, step_on
from .walk import Totals, Walk, highest, highest_and_net, plus


def fsdp_moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """Bytes by kind at the highest point of each part of a step of rank 0, in their order, by name.

    Raises ValueError for a run that FSDP2 is not covered for, for a model of one block, and where one checkpoint stands
    for several blocks, each of which is then gathered once more.
    """
    _check(run)
    reading, found = Reading(_alone(run)), dict[str, MemoryBreakdown]()
    now = _standing(run, gradients=run.accumulates)
    for part in _parts(reading, fsdp_hooks(run), held=3 if run.precision.loss_scaling else 2):
        if part.phase == "loss":
            found.setdefault("end of forward", MemoryBreakdown(dict(now), "forward", "end of forward"))
        if part.phase == "backward":
            found.setdefault("after loss", MemoryBreakdown(dict(now), "loss", "after loss"))
        highest_here, whole = highest_and_net(part.walk)
        top = plus(now, highest_here)
        if part.times == 1 and (part.name not in found or sum(top.values()) > found[part.name].total):
            found[part.name] = MemoryBreakdown(top, part.phase, part.name)
        for kind, size in whole.items():
            now[kind] = now.get(kind, 0) + part.times * size
    return found | _after_backward(run)


def _check(run: TrainingRun) -> None:
    if run.zero_stage < 2:
        raise ValueError(f"zero_stage={run.zero_stage} is not FSDP2's: it shards parameters, so choose 2 or 3")
    if run.model.layers < 2:
        raise ValueError(f"{run.model.name} has one block: FSDP2's peak is estimated from 2 blocks on")
    if run.blocks_per_checkpoint > 1:
        raise ValueError(
            f"FSDP2's peak is not estimated with recompute={run.recompute!r}, whose checkpoints stand for "
            f"{run.blocks_per_checkpoint} blocks: measure it, or choose 'full'"
        )


def _alone(run: TrainingRun) -> TrainingRun:
    """One rank whose every micro-batch is like rank 0's: gradients are new each time, and no masters are apart."""
    precision = "bf16-master" if run.precision.name == "bf16-master-fp32grad" else run.precision
    return run.replace(world_size=1, zero_stage=0, accumulation_steps=1, set_to_none=True, precision=precision)


class Part(NamedTuple):
    """A stretch of the step between two of FSDP2's hooks, which is looked at if it comes once, or passed over."""

    phase: str
    name: str
    walk: Walk
    times: int


def _parts(reading: Reading, hooks: Hooks, held: int) -> Iterator[Part]:
    """The step's parts in order, each with what FSDP2 does before and after it.

    The last reduction is autograd's final callback: the loss, its gradient and, where losses are scaled, the scaled one
    are still there. `held` is how many these are: the last that goes on the tape.
    """
    stretches = list(_stretches(reading))
    backward = [number for number, stretch in enumerate(stretches) if stretch.is_block and stretch.phase == "backward"]
    forward = [number for number, stretch in enumerate(stretches) if stretch.is_block and stretch.phase == "forward"]
    around: dict[int, tuple[Walk, Walk]] = dict.fromkeys(forward, (hooks.before_block, hooks.after_block))
    around |= dict.fromkeys(backward, (hooks.before_block_backward, hooks.after_block_backward))
    around[forward[0]] = (hooks.before_first_block, hooks.after_block)
    around[backward[0]] = (hooks.before_last_block_backward, hooks.after_last_block_backward)
    around[backward[-1]] = (hooks.before_first_block_backward, hooks.after_block_backward)
    others = {
        ("forward", "stem"): (hooks.before_stem, []),
        ("forward", "head"): ([], hooks.after_head),
        ("backward", "head"): (hooks.before_head_backward, []),
    }
    last_group = reading.last_group
    for number, stretch in enumerate(stretches):
        before, after = around.get(number) or others.get((stretch.phase, stretch.where), ([], []))
        phase, name = named((stretch.phase, stretch.where), last_group)
        walk = [*before, *stretch.walk, *after]
        if number == len(stretches) - 1:
            walk[-held:] = [*hooks.after_backward, *walk[-held:]]
        yield Part(phase, name, walk, stretch.times)


class Stretch(NamedTuple):
    """Pieces of the tape that belong together: with recomputation, a block's forward and then its backward."""

    phase: str
    where: Any
    walk: Walk
    times: int

    @property
    def is_block(self) -> bool:
        return isinstance(self.where, tuple) and self.where[0] == "block"


def _stretches(reading: Reading) -> Iterator[Stretch]:
    """The tape's pieces in order; those of one block's backward, whose numbers ascend, as one."""
    program, walk, last = reading.program, Walk(), (-1, ("", ""), 1)
    for visit, times in zip(program.visits, reading.times, strict=True):
        phase, where = program.pieces[visit.piece].place
        phase = "backward" if phase == "recompute" else phase
        goes_on = last[0] < visit.piece and last[1:] == ((phase, where), times)
        if not goes_on and last[0] >= 0:
            yield Stretch(*last[1], walk, last[2])
            walk = Walk()
        events = program.events[program.pieces[visit.piece].events]
        sizes = map(reading.signed.__getitem__, events.changes)
        walk += zip(events.kinds, sizes, strict=True)
        last = (visit.piece, (phase, where), times)
    yield Stretch(*last[1], walk, last[2])


def _standing(run: TrainingRun, gradients: bool) -> Totals:
    states = rank_0_states(run)
    states["inputs"] = 2 * round_up(8 * run.seq_len * run.micro_batch)  # token ids and targets, int64
    states["workspaces"] = workspace_bytes(run)
    return states | ({} if gradients else {"gradients": 0})


def _after_backward(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """Clipping, the optimizer's step on the shards, and what is left when the step has ended."""
    full, clips = _standing(run, gradients=True), run.clip_grad_norm is not None
    tops = _update_tops(run.model, run.world_size, run.precision, run.optimizer, run.set_to_none, clips)
    phases = {"clipping": "clip", "optimizer step": "optimizer"}
    found = {name: MemoryBreakdown(plus(full, top), phases[name], name) for name, top in tops.items()}
    left = _standing(run, gradients=not run.set_to_none)
    return found | {"end of step": MemoryBreakdown(left, "zero_grad", "end of step")}


@lru_cache(maxsize=256)
def _update_tops(
    model: TransformerConfig, ranks: int, precision: Precision, optimizer: Optimizer, set_to_none: bool, clips: bool
) -> dict[str, Totals]:
    """What clipping, if gradients are clipped, and the optimizer's step add to what stands, where they need most."""
    stored, shards = precision.master or precision.weight, _shards(model, ranks)
    sharded = dataclasses.replace(precision, weight=stored, gradient=stored, master=0)
    unscaled = scaler_walk(sharded, OPTIMIZERS["sgd"], clips=False)
    clipping = {"clipping": highest([*unscaled, *clip_walk(shards.tensors, stored)])} if clips else {}
    return clipping | {"optimizer step": step_on(sharded, optimizer, shards, set_to_none, clips)}


def _shards(model: TransformerConfig, ranks: int) -> Trainable:
    """Rank 0's parts of the parameters, as the optimizer steps them."""
    whole = trainable(model, 0, ())

    def cut(shapes: Shapes) -> Shapes:
        return {name: shard_shape(shape, ranks) for name, shape in shapes.items()}

    return Trainable(cut(whole.before), cut(whole.block), whole.layers, cut(whole.after))
