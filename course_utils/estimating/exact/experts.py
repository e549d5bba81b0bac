"""A mixture of experts as `networks/experts.py` runs it: a router, and E MLPs that share tokens equally.

Every expert computes b·s·k/E (token, choice) pairs: `e` of them in the first experts where that is no whole
number, `f` in the rest. K stands for k, the number of experts that a token visits.
"""

from .layers import MLP, Linear
from .operations import Module, Step, cast, dropout, new_gradients, same_gradient, softmax, view
from .tape import Gradient, Saving, Tensor, operation


class Experts(Module):
    """The router and the experts."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.router = Linear(step, "router", "h", "E", bias=False)
        count, larger = step.structure.experts, step.structure.larger_experts
        self.experts = [MLP(step, expert=True) for _ in range(count)]
        self.shares = ["e" if number < larger else "f" for number in range(count)]

    @operation
    def __call__(self, x: Tensor) -> Tensor:
        step, tape = self.step, self.tape
        tokens = tape.hold(view(step, x))
        weights, _ = map(tape.hold, self.route(tokens))
        order = tape.hold(argsort(step))
        y = tape.tensor(step.wide, "sb·h")
        token = None
        for expert, share in zip(self.experts, self.shares, strict=True):
            before = token
            token = tape.hold(tape.tensor("8", share))
            if before:
                tape.drop(before)
            given = expert(picked(step, tokens, token, f"{share}·h", "tokens of an expert"))
            rows = weighted(step, given, picked(step, weights, order, share, "weights of an expert"))
            y = added_at(step, y, token, rows)
        return dropout(step, y, "mlp output")

    @operation
    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of a token's choices, and these.

        Softmax over all experts, the k largest over their sum.
        """
        step, hold, narrow = self.step, self.tape.hold, self.structure.narrow
        fp32 = typed(step, self.router(tokens), "4", narrow or self.structure.autocast)
        chances = hold(softmax(step, fp32, "router", "probabilities"))
        largest, choices = map(hold, largest_of(step, chances))
        weights = hold(shares_of(step, largest, total(step, largest)))
        self.tape.drop(largest)
        return view(step, typed(step, weights, step.wide, narrow)), choices


@operation
def typed(step: Step, x: Tensor, element: str, changes: bool) -> Tensor:
    """`x.to(dtype)`: a copy if the type `changes`; else x itself, under the type's symbol."""
    if changes:
        return cast(step, x, element)
    same = step.tape.view(x)
    same.element = element
    same.edge = x.edge
    return same


@operation
def largest_of(step: Step, x: Tensor) -> tuple[Tensor, Tensor]:
    """The k largest, and which they are. That is saved, for a gradient that is zero elsewhere."""
    out = step.tape.tensor("4", "sb·K")
    which = step.tape.tensor("8", "sb·K")
    saving = Saving(which, "router", "choices", "where gradients go")
    return new_gradients(step, out, [x], [saving]), which


@operation
def total(step: Step, x: Tensor) -> Tensor:
    """Their sum for each token; its gradient is seen by each."""
    return same_gradient(step, step.tape.tensor("4", "sb"), [x], view=True)


@operation
def shares_of(step: Step, x: Tensor, by: Tensor) -> Tensor:
    """x over its sum: the gradient of each needs both."""
    tape = step.tape
    size = x.size
    saving = [
        Saving(x, "router", "largest", "gradient of their sum"),
        Saving(by, "router", "sum", "gradient of the largest"),
    ]

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        quotients = [tape.make(size) for _ in range(3)]  # x/by, that over by, and minus the gradient
        for_by = tape.gradient(size, becomes="4·sb")
        for quotient in quotients:
            quotient.release()
        return [tape.gradient(size), for_by]

    out = tape.tensor("4", x.shape)
    tape.apply(out, [x, by], backward, saving)
    return out


@operation
def argsort(step: Step) -> Tensor:
    """The order of all pairs by expert; sorting makes the sorted pairs too."""
    _ = step.tape.tensor("8", "sb·K")
    order = step.tape.tensor("8", "sb·K")
    return order


@operation
def picked(step: Step, x: Tensor, where: Tensor, shape: str, name: str) -> Tensor:
    """Rows of x: its gradient is as large as x, zero where nothing was picked."""
    saving = [Saving(where, name, "which", "where gradients go")]
    return new_gradients(step, step.tape.tensor(x.element, shape), [x], saving)


@operation
def weighted(step: Step, x: Tensor, weights: Tensor) -> Tensor:
    """Each row of x times its weight, in the wider type."""
    tape = step.tape
    out = tape.tensor(weights.element, x.shape)
    size = out.size
    x_becomes = "" if x.element == weights.element else x.size
    weights_become = weights.size
    saving = [
        Saving(x, "experts", "output", "gradient of its weight"),
        Saving(weights, "experts", "weights", "gradient of the output"),
    ]

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        for_x = tape.gradient(size, becomes=x_becomes)
        for_weights = tape.gradient(size, becomes=weights_become)
        return [for_x, for_weights]

    tape.apply(out, [x, weights], backward, saving)
    return out


@operation
def added_at(step: Step, y: Tensor, where: Tensor, rows: Tensor) -> Tensor:
    """`y.index_add_`: y is the same storage.

    It saves what it adds, for a second derivative that nobody asks for.
    """
    tape = step.tape
    size = rows.size
    out = tape.view(y)
    saving = [
        Saving(where, "experts", "tokens", "where gradients are"),
        Saving(rows, "experts", "weighted output", "kept by torch"),
    ]
    tape.apply(out, [y, rows], lambda came: [came[0].again(), tape.gradient(size)], saving)
    return out
