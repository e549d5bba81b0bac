"""What comes and goes within the optimizer step."""

from math import prod

from ..models import block_shapes, outer_shapes
from ..run import TrainingRun
from .states import tensors_bytes
from .walk import Totals, Walk, free, highest, make


def optimizer_step(run: TrainingRun) -> Totals:
    """What the step adds to weights, gradients and states where it needs most.

    foreach makes one fp32 tensor for each parameter, 4N bytes; the for-loop makes two for one parameter at a time;
    fused makes none; momentum works in place. Master weights take their gradients in fp32: one at a time, or all at
    once.
    """
    if run.precision.master:
        return _master_step(run)
    foreach = run.optimizer.implementation == "foreach" and run.optimizer.algorithm not in ("sgd", "momentum")
    walk = _loop_step(run) if run.optimizer.implementation == "loop" else []
    return highest([*_unscale(run), *walk, *([make(tensors_bytes(run.model, 4))] if foreach else [])])


def _unscale(run: TrainingRun) -> Walk:
    """A loss scaler's numbers, a block each: its reciprocal takes three for a moment; whether a gradient overflowed
    stays.
    """
    return [*[make(4)] * 4, *[free(4)] * 3] if run.precision.loss_scaling else []


def _loop_step(run: TrainingRun) -> Walk:
    """Adam's denominator takes two tensors to compute; the one before is let go when the next is there."""
    walk: Walk = []
    before = 0
    for shape in _stepped_shapes(run):
        size = 4 * prod(shape)
        walk += [make(size), make(size), free(size), free(before)]
        before = size
    return walk


def _master_step(run: TrainingRun) -> Totals:
    """Walk over the parameters: gradient to fp32, the 16-bit one freed, the update's own tensors, the fp32 gradient
    freed.
    """
    full, half = tensors_bytes(run.model, 4), tensors_bytes(run.model, 2)
    scratch = (
        0
        if run.optimizer.algorithm in ("sgd", "momentum")
        else {"foreach": 1, "loop": 2, "fused": 0}[run.optimizer.implementation]
    )
    if run.optimizer.forced and run.optimizer.implementation == "foreach":
        return {"gradients": -half, "temporaries": full + scratch * full}
    walk: Walk = []
    for shape in _stepped_shapes(run):
        size = prod(shape)
        walk += [make(4 * size), free(2 * size, "gradients")]
        walk += [make(4 * size)] * scratch + [free(4 * size)] * (scratch + 1)
    return highest(walk)


def _stepped_shapes(run: TrainingRun) -> list[tuple[int, ...]]:
    """Parameters in the order of the step; one block stands for all, as the first of equals is where the most is
    left.
    """
    outer = outer_shapes(run.model)
    first = [shape for name, shape in outer.items() if name.startswith(("embedding", "positions"))]
    last = [shape for name, shape in outer.items() if not name.startswith(("embedding", "positions"))]
    return [*first, *block_shapes(run.model).values(), *last]
