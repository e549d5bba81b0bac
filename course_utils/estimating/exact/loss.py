"""The loss, as `networks/loss.py` computes it: at once, or piece by piece."""

from .layers import Linear, call
from .operations import Step, cast, negative, split, view
from .recomputation import checkpoint
from .tape import Gradient, Saving, Tensor


def cross_entropy(step: Step, logits: Tensor) -> Tensor:
    """Log-softmax in the logits' type, which autocast copies to fp32 for the loss itself."""
    tape, size = step.tape, logits.size
    likelihoods = tape.tensor(logits.element, logits.shape)
    saved = [Saving(likelihoods, "log-softmax", "output", "gradient of the logits")]
    tape.apply(likelihoods, [logits], saved, lambda _: [tape.gradient(size)])
    read = cast(step, likelihoods, "4") if step.structure.autocast else likelihoods
    return negative_likelihood(step, read)


def negative_likelihood(step: Step, likelihoods: Tensor) -> Tensor:
    """The mean over the tokens; keeps what it read and the number of tokens."""
    tape, back = step.tape, likelihoods.size
    out, count = tape.tensor("4", "1"), tape.tensor("4", "1")
    saved = [
        Saving(likelihoods, "loss", "log-softmax", "gradient of the loss"),
        Saving(count, "loss", "weight of all tokens", "mean"),
    ]
    tape.apply(out, [likelihoods], saved, lambda _: [tape.gradient(back)])
    return out


def scaled(step: Step, x: Tensor) -> Tensor:
    """A number times or divided by another."""
    return negative(step, x)


def scaled_up(step: Step, loss: Tensor) -> Tensor:
    """The loss times the fp32 scale of a loss scaler; a 16-bit loss gets its gradient back in 16 bits."""
    tape = step.tape
    out = tape.tensor("4", "1")
    becomes = "" if step.structure.autocast else "c·1"
    tape.apply(out, [loss], [], lambda _: [Gradient(tape.make("4·1"), "4·1", becomes=becomes)])
    return out


def mean_loss(step: Step, head: Linear, out: Tensor) -> Tensor:
    """The loss of the logits; in pieces, of what the head reads."""
    if step.structure.chunks == 1:
        return cross_entropy(step, view(step, out))
    tape, number = step.tape, step.structure.chunks
    pieces = split(step, view(step, out), ["t·h"] * (number - 1) + ["u·h"])
    losses = []
    for position, piece in enumerate(pieces):
        tape.enter(("piece", position, 0))
        losses.append(checkpoint(step, share_of_loss, step, head, piece))
    tape.enter("loss")
    return summed(step, stacked(step, losses))


def share_of_loss(step: Step, head: Linear, piece: Tensor) -> Tensor:
    """What a piece of the tokens adds to the mean over all."""
    return scaled(step, cross_entropy(step, call(head, piece)))


def stacked(step: Step, numbers: list[Tensor]) -> Tensor:
    """The pieces' losses in one tensor; their gradients are views of its."""
    out = step.tape.tensor("4", "pieces")
    count = len(numbers)
    step.tape.apply(out, numbers, [], lambda came: [came[0].again(view=True) for _ in range(count)])
    return out


def summed(step: Step, x: Tensor) -> Tensor:
    """Their sum; its gradient is seen by all of them."""
    out = step.tape.tensor("4", "1")
    step.tape.apply(out, [x], [], lambda came: [came[0].again(view=True)])
    return out
