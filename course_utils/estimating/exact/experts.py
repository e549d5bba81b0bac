"""A mixture of experts as `networks/experts.py` runs it: a router, and E MLPs that each take an equal share of tokens.

Every expert computes b·s·k/E (token, choice) pairs: `e` of them in the first experts where that is no whole number,
`f` in the rest. K stands for k, the number of experts that a token visits.
"""

from .layers import MLP, Linear, call
from .operations import Step, cast, dropout, view
from .tape import Gradient, Saving, Tensor


class Experts:
    """The router's weights and the experts'."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.router = Linear(step, "router", "h", "E", bias=False)
        count, larger = step.structure.experts, step.structure.larger_experts
        self.experts = [MLP(step, expert=True) for _ in range(count)]
        self.shares = ["e" if number < larger else "f" for number in range(count)]

    def __call__(self, x: Tensor) -> Tensor:
        step, tape = self.step, self.step.tape
        tokens = view(step, x)
        weights, choices = self.route(tokens)
        order = argsort(step)
        y = tape.tensor(step.wide, "sb·h")
        for expert, share in zip(self.experts, self.shares, strict=True):
            token = tape.tensor("8", share)
            y = added_at(step, y, token, self.share(expert, tokens, token, weights, order, share))
        del choices  # held so far, though nobody asks for it any more
        return dropout(step, y, "mlp output")

    def share(self, expert: MLP, tokens: Tensor, token: Tensor, weights: Tensor, order: Tensor, share: str) -> Tensor:
        """What one expert adds: its tokens through its MLP, each times its weight."""
        step = self.step
        given = call(expert, picked(step, tokens, token, f"{share}·h", "tokens of an expert"))
        return weighted(step, given, picked(step, weights, order, share, "weights of an expert"))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of a token's choices, and these: softmax over all experts, the k largest over their sum."""
        step = self.step
        is_narrow = step.structure.narrow
        chances = probabilities(step, typed(step, call(self.router, tokens), "4", is_narrow or step.structure.autocast))
        largest, choices = largest_of(step, chances)
        weights = shares_of(step, largest, total(step, largest))
        return view(step, typed(step, weights, step.wide, is_narrow)), choices


def typed(step: Step, x: Tensor, element: str, changes: bool) -> Tensor:
    """`x.to(dtype)`: a copy if the type `changes`; else x itself, under the type's letter."""
    return cast(step, x, element) if changes else Tensor(element, x.shape, x.storage, x.node)


def probabilities(step: Step, x: Tensor) -> Tensor:
    """Softmax, which keeps its output."""
    tape, back = step.tape, x.size
    out = tape.tensor("4", x.shape)
    saved = [Saving(out, "router", "probabilities", "softmax's own backward")]
    tape.apply(out, [x], saved, lambda _: [tape.gradient(back)])
    return out


def largest_of(step: Step, x: Tensor) -> tuple[Tensor, Tensor]:
    """The k largest and which they are: that is kept, for a gradient that is zero elsewhere."""
    tape, back = step.tape, x.size
    out, which = tape.tensor("4", "sb·K"), tape.tensor("8", "sb·K")
    tape.apply(out, [x], [Saving(which, "router", "choices", "where gradients go")], lambda _: [tape.gradient(back)])
    return out, which


def total(step: Step, x: Tensor) -> Tensor:
    """Their sum for each token; its gradient is seen by each."""
    out = step.tape.tensor("4", "sb")
    step.tape.apply(out, [x], [], lambda came: [came[0].again(view=True)])
    return out


def shares_of(step: Step, x: Tensor, by: Tensor) -> Tensor:
    """x over its sum: the gradient of each needs both."""
    tape = step.tape
    out = tape.tensor("4", x.shape)
    saved = [
        Saving(x, "router", "largest", "gradient of their sum"),
        Saving(by, "router", "sum", "gradient of the largest"),
    ]

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        quotients = [tape.make(f"4·{x_shape}") for _ in range(3)]  # x/by, that over by, and minus the gradient
        for_by = tape.gradient(f"4·{x_shape}")
        del quotients
        for_by.becomes = "4·sb"
        return [tape.gradient(f"4·{x_shape}"), for_by]

    x_shape = x.shape
    tape.apply(out, [x, by], saved, backward)
    return out


def argsort(step: Step) -> Tensor:
    """The order of all pairs by expert; sorting makes the sorted too."""
    ordered, order = step.tape.tensor("8", "sb·K"), step.tape.tensor("8", "sb·K")
    del ordered
    return order


def picked(step: Step, x: Tensor, where: Tensor, shape: str, name: str) -> Tensor:
    """Rows of x: its gradient is as large as x, zero where nothing was picked."""
    tape, back = step.tape, x.size
    out = tape.tensor(x.element, shape)
    saved = [Saving(where, name, "which", "where gradients go")]
    tape.apply(out, [x], saved, lambda _: [tape.gradient(back)])
    return out


def weighted(step: Step, x: Tensor, weights: Tensor) -> Tensor:
    """Each row of x times its weight, in the wider type."""
    tape = step.tape
    out = tape.tensor(weights.element, x.shape)
    full, narrow = out.size, "" if x.element == weights.element else x.size
    saved = [
        Saving(x, "experts", "output", "gradient of its weight"),
        Saving(weights, "experts", "weights", "gradient of the output"),
    ]
    weights_size = weights.size

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        for_x, for_weights = tape.gradient(full), tape.gradient(full)
        for_x.becomes, for_weights.becomes = narrow, weights_size
        return [for_x, for_weights]

    tape.apply(out, [x, weights], saved, backward)
    return out


def added_at(step: Step, y: Tensor, where: Tensor, rows: Tensor) -> Tensor:
    """`y.index_add_`: y is the same storage; it keeps what it adds, for a second derivative that nobody asks for."""
    tape, back = step.tape, rows.size
    out = Tensor(y.element, y.shape, y.storage)
    saved = [
        Saving(where, "experts", "tokens", "where gradients are"),
        Saving(rows, "experts", "weighted output", "kept by torch"),
    ]
    tape.apply(out, [y, rows], saved, lambda came: [came[0].again(), tape.gradient(back)])
    return out
