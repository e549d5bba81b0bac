"""The loss, as `networks/loss.py` computes it: at once, or piece by piece."""

from .layers import Linear
from .operations import Step, cast, keeps_output, new_gradients, same_gradient, scaled, split, view
from .recomputation import checkpoint
from .tape import LOSS, Place, Saving, Tensor, operation


@operation
def cross_entropy(step: Step, logits: Tensor) -> Tensor:
    """Log-softmax in the logits' type.

    Autocast copies it to fp32 for the loss itself unless it is that already.
    """
    output = keeps_output(step, logits, "log-softmax", "output", "gradient of the logits")
    likelihoods = step.tape.hold(output)
    if step.structure.autocast and not step.structure.upcast_logits:
        likelihoods = cast(step, likelihoods, "4")
    return negative_likelihood(step, likelihoods)


def as_read(step: Step, logits: Tensor) -> Tensor:
    """The logits as the loss reads them: copied to fp32 where the run says so."""
    return cast(step, logits, "4") if step.structure.upcast_logits else logits


@operation
def negative_likelihood(step: Step, likelihoods: Tensor) -> Tensor:
    """The mean over the tokens; saves what it read and the number of tokens."""
    out = step.tape.tensor("4", "1")
    count = step.tape.tensor("4", "1")
    saving = [
        Saving(likelihoods, "loss", "log-softmax", "gradient of the loss"),
        Saving(count, "loss", "weight of all tokens", "mean"),
    ]
    return new_gradients(step, out, [likelihoods], saving)


@operation
def scaled_up(step: Step, loss: Tensor) -> Tensor:
    """The loss times the fp32 scale of a loss scaler; a 16-bit loss gets its gradient back in 16 bits."""
    in_fp32 = step.structure.autocast or step.structure.upcast_logits
    tape = step.tape
    becomes = "" if in_fp32 else "c·1"
    out = tape.tensor("4", "1")
    tape.apply(out, [loss], lambda _: [tape.gradient("4·1", becomes=becomes)])
    return out


@operation
def mean_loss(step: Step, head: Linear, out: Tensor) -> Tensor:
    """The loss of the logits; in pieces, of what the head reads."""
    if step.structure.chunks == 1:
        return cross_entropy(step, as_read(step, view(step, out)))
    tape = step.tape
    shapes = ["t·h"] * (step.structure.chunks - 1) + ["u·h"]
    losses = []
    for position, piece in enumerate(split(step, view(step, out), shapes)):
        tape.enter(Place("piece", position))
        losses.append(checkpoint(step, share_of_loss, step, head, piece))
    tape.enter(LOSS)
    return summed(step, stacked(step, losses))


@operation
def share_of_loss(step: Step, head: Linear, piece: Tensor) -> Tensor:
    """The part of a piece of the tokens in the mean over all."""
    return scaled(step, cross_entropy(step, as_read(step, head(piece))))


@operation
def stacked(step: Step, numbers: list[Tensor]) -> Tensor:
    """The pieces' losses in one tensor; their gradients are views of its."""
    return same_gradient(step, step.tape.tensor("4", "pieces"), numbers, view=True)


@operation
def summed(step: Step, x: Tensor) -> Tensor:
    """Their sum; its gradient is seen by all of them."""
    return same_gradient(step, step.tape.tensor("4", "1"), [x], view=True)
