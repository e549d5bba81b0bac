"""The peak is the largest of a few moments of the step. Each is stated here; the largest wins and says which it was."""

from ..breakdown import MemoryBreakdown
from ..run import TrainingRun
from ..units import BLOCK, round_up
from . import transients
from .activations import activation_bytes, letters, logits_bytes, loss_saved, sum_bytes
from .states import (
    block_bias_copy_bytes,
    gradient_bytes,
    head_copy_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    weight_copy_bytes,
)

Totals = dict[str, int]


def estimate(run: TrainingRun) -> MemoryBreakdown:
    """Bytes by kind at the peak of a step (the second or a later one), from formulas alone.

    `phase` names the phase that owns the peak, `label` the moment within it. Raises ValueError for more than one rank,
    whose communication this does not count.
    """
    return max(moments(run).values(), key=lambda moment: moment.total)


def moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """The moments of a step at which memory may peak, in their order, by name. Raises like `estimate`.

    What comes and goes within a block's forward is not among them: backward needs more of a block, unless the
    vocabulary has a few hundred tokens and attention is eager (then up to 2 % are missing, of toy models alone).
    """
    if not isinstance(run, TrainingRun):
        raise TypeError(f"an estimate is of a TrainingRun, not of {run!r}: write estimate(TrainingRun(...))")
    if run.world_size > 1:
        raise ValueError(
            "estimates cover one rank so far: set world_size=1; each rank of plain data parallelism needs as much, "
            "and its communication buckets"
        )
    forward = _end_of_forward(run)
    loss = _loss(run, forward)
    after_loss = _after_loss(run, loss)
    stages = {
        "end of forward": ("forward", forward),
        "loss": ("loss", loss),
        "after loss": ("loss", after_loss),
        **{name: ("backward", parts) for name, parts in _backward(run, after_loss).items()},
        "optimizer step": ("optimizer", _plus(_standing(run, gradients=True), transients.optimizer_step(run))),
        "end of step": ("zero_grad", _standing(run, gradients=False)),
    }
    return {name: MemoryBreakdown(parts, phase, name) for name, (phase, parts) in stages.items()}


def _standing(run: TrainingRun, gradients: bool) -> Totals:
    """What is there between the passes."""
    w = letters(run)
    return {
        "parameters": parameter_bytes(run),
        "optimizer_states": optimizer_state_bytes(run),
        "inputs": 2 * round_up(8 * w.sb),  # token ids and targets, int64
        "gradients": gradient_bytes(run) if gradients else 0,
    }


def _end_of_forward(run: TrainingRun) -> Totals:
    """Activations are complete, the logits are there, autocast still holds its copy of every weight and bias."""
    biases = run.model.layers * block_bias_copy_bytes(run)
    parts = {
        "weight_copies": weight_copy_bytes(run) + biases,
        "activations": activation_bytes(run),
        "temporaries": logits_bytes(run),
    }
    return _plus(_standing(run, gradients=run.accumulation_steps > 1), parts)


def _loss(run: TrainingRun, forward: Totals) -> Totals:
    """The loss is computed, before and after its division by the number of micro-batches; the logits are still held."""
    return _plus(forward, {"activations": sum_bytes(loss_saved(run)), "temporaries": BLOCK})


def _after_loss(run: TrainingRun, loss: Totals) -> Totals:
    """The logits are gone, and so are autocast's copies that backward will not read."""
    kept = weight_copy_bytes(run) if run.recompute == "none" else head_copy_bytes(run)
    return loss | {"temporaries": 0, "weight_copies": kept}


def _backward(run: TrainingRun, start: Totals) -> dict[str, Totals]:
    """The loss and the head, then the blocks from the last to the first, then the embedding.

    What one block adds and frees is the same for each, so between the last and the first memory runs along a straight
    line, and its ends are all that need to be looked at.
    """
    loss, head, block = transients.loss_backward(run), transients.head_backward(run), transients.block_backward(run)
    at_head = _plus(start, transients.net(loss))
    at_last = _plus(at_head, transients.net(head))
    step, within = transients.net(block), transients.highest(block)
    at_first = _plus(at_last, {kind: size * (run.model.layers - 1) for kind, size in step.items()})
    at_embedding = _plus(at_first, step)
    return {
        "loss's backward": _plus(start, transients.highest(loss)),
        "head's backward": _plus(at_head, transients.highest(head)),
        "last block's backward": _plus(at_last, within),
        "first block's backward": _plus(at_first, within),
        "embedding's backward": _plus(at_embedding, transients.highest(transients.embedding_backward(run))),
    }


def _plus(first: Totals, second: Totals) -> Totals:
    return {kind: first.get(kind, 0) + second.get(kind, 0) for kind in {**first, **second}}
