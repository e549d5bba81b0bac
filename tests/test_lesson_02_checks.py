"""Checks of lesson 02: right answers of every style pass, and each planted wrong answer gets its hint."""

from typing import Any

import torch
from checking import Answers, JudgedAnswers, nothing

# --------------------------------------------------------------------------------------------------
# 02.1: adam_in_pieces


def one_adam_step(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float) -> None:
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    weight.sub_(rate * m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


def lean_update(w: Any, m: Any, v: Any, step: int, rate: float) -> None:
    root = (v / (1 - 0.999**step)).sqrt_().add_(1e-8)
    w.addcdiv_(m, root, value=-rate / (1 - 0.9**step))


def in_pieces(
    update: Any = lean_update,
    new_m: Any = lambda m, g: m.mul_(0.9).add_(g, alpha=0.1),
    whole: bool = False,
    cut: Any = lambda tensor, size: tensor.flatten().split(size),
) -> Any:
    """An answer whose functions do not outlive their tensors."""

    def step(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
        size = weight.numel() if whole else size
        for w, g, mean, square in zip(
            *(cut(tensor, size) for tensor in (weight, gradient, m, v)), strict=True
        ):
            new_m(mean, g)
            square.mul_(0.999).addcmul_(g, g, value=0.001)
            update(w, mean, square, step, rate)

    return step


def by_index(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    """With slices, and one buffer for all pieces."""
    buffer = torch.empty(size)
    flat = [tensor.view(-1) for tensor in (weight, gradient, m, v)]
    for first in range(0, weight.numel(), size):
        w, g, mean, square = (tensor[first : first + size] for tensor in flat)
        mean.lerp_(g, 0.1)
        root = torch.mul(g, g, out=buffer[: len(g)])
        square.lerp_(root, 0.001)
        torch.sqrt(square, out=root).div_((1 - 0.999**step) ** 0.5).add_(1e-8)
        w.addcdiv_(mean, root, value=-rate / (1 - 0.9**step))


def without_del(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    for w, g, mean, square in zip(
        *(tensor.view(-1).split(size) for tensor in (weight, gradient, m, v)), strict=True
    ):
        mean.lerp_(g, 0.1)
        square.mul_(0.999).addcmul_(g, g, value=0.001)
        root = (square / (1 - 0.999**step)).sqrt_().add_(1e-8)
        w.addcdiv_(mean, root, value=-rate / (1 - 0.9**step))


def of_whole_pieces(tensor: Any, size: int) -> Any:
    return [tensor.flatten()[n * size : (n + 1) * size] for n in range(max(1, tensor.numel() // size))]


def updating(direction: Any) -> Any:
    """The answer with another update, by m, v and the number of the step."""
    return in_pieces(lambda w, m, v, step, rate: w.sub_(rate * direction(m, v, step)))


def corrected_in_place(w: Any, m: Any, v: Any, step: int, rate: float) -> None:
    w.addcdiv_(m.div_(1 - 0.9**step), (v / (1 - 0.999**step)).sqrt_().add_(1e-8), value=-rate)


def keeps_every_piece(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    roots = [(square / (1 - 0.999**step)).sqrt_().add_(1e-8) for square in v.view(-1).split(size)]
    for w, mean, root in zip(weight.view(-1).split(size), m.view(-1).split(size), roots, strict=True):
        w.addcdiv_(mean, root, value=-rate / (1 - 0.9**step))


def in_the_gradient(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    """With no new number at all: the gradient's memory is taken for the root."""
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    weight.addcdiv_(
        m, gradient.copy_(v).div_(1 - 0.999**step).sqrt_().add_(1e-8), value=-rate / (1 - 0.9**step)
    )


def decayed(weight: Any, rate: float, **given: Any) -> None:
    weight.mul_(1 - 0.01 * rate)
    in_pieces()(weight=weight, rate=rate, **given)


def weight_first(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    weight.sub_(rate * m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    m.lerp_(gradient, 0.1)
    v.lerp_(gradient.square(), 0.001)


ADAM_IN_PIECES = Answers(
    right=[in_pieces(), by_index, lambda **given: in_pieces()(**given) or True],
    wrong=[
        (lambda size, **given: one_adam_step(**given), "as many new numbers as the weight has"),
        (keeps_every_piece, "Do you keep pieces in a list?"),
        (in_pieces(cut=lambda tensor, size: tensor.split(size)), "Do you cut the flat tensor"),
        (
            updating(lambda m, v, t: m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)),
            "more than one new tensor",
        ),
        (without_del, "still hold the last one"),
        (in_pieces(cut=of_whole_pieces), "You leave out the last piece"),
        (in_pieces(cut=lambda tensor, size: tensor.clone().flatten().split(size)), "m has not changed"),
        (in_pieces(new_m=lambda m, g: 0.9 * m + 0.1 * g), "`m = …` makes a new tensor"),
        (in_pieces(lambda w, m, v, step, rate: w - rate * m), "weight has not changed"),
        (in_pieces(new_m=lambda m, g: m.add_(g, alpha=0.1)), "m is off: it keeps β of itself"),
        (in_pieces(corrected_in_place), "is not corrected in place"),
        (updating(lambda m, v, t: m / (v.sqrt() + 1e-8)), "You correct neither m nor v"),
        (updating(lambda m, v, t: m / (1 - 0.9**t) / (v.sqrt() + 1e-8)), "You correct m but not v"),
        (updating(lambda m, v, t: m / ((v / (1 - 0.999**t)).sqrt() + 1e-8)), "You correct v but not m"),
        (
            updating(lambda m, v, t: m / (1 - 0.9**t) / (v / (1 - 0.999**t) + 1e-8).sqrt()),
            "Your ε is inside the root",
        ),
        (updating(lambda m, v, t: m / (1 - 0.9**t) / (v / (1 - 0.999**t)).sqrt()), "Your ε is missing"),
        (lambda rate, **given: in_pieces()(rate=-rate, **given), "goes up the slope"),
        (lambda rate, **given: in_pieces()(rate=1e-3, **given), "1e-3 whatever `rate` is"),
        (decayed, "that is AdamW's decay"),
        (
            updating(lambda m, v, t: m / (1 - 0.9**t) * (1 - 0.999**t) ** 0.5 / (v.sqrt() + 1e-8)),
            "before you correct v",
        ),
        (weight_first, "Update m and v before the weight"),
        (lambda rate, **given: in_pieces()(rate=2 * rate, **given), "m and v are right, the weight is not"),
        (in_the_gradient, "You change the gradient"),
        (lambda step, **given: in_pieces()(step=1, **given), "You always correct as in step 1"),
        (lambda step, **given: in_pieces()(step=0, **given), "raised ZeroDivisionError"),
        (updating(lambda m, v, t: m / torch.zeros(())), "what do you divide by?"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 02.2: lean_adam


class Design:
    """RMSProp, and the base of other designs."""

    rate = 3e-3

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.steps = 0
        self.state = [self.new(weight) for weight in self.parameters]

    def new(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for weight, state in zip(self.parameters, self.state, strict=True):
            self.one(weight, weight.grad, state)

    def one(self, weight: torch.Tensor, g: Any, state: torch.Tensor) -> None:
        state.mul_(0.99).addcmul_(g, g, value=0.01)
        weight.sub_(self.rate * g / ((state / (1 - 0.99**self.steps)).sqrt() + 1e-12))


class Own(Design):
    """An Adam to be made wrong in many ways: `keeps` names what is stored next to m and v."""

    keeps: tuple[str, ...] = ()
    dtype = torch.float32
    faster = 1

    def __init__(self, parameters: Any, rate: float = 1e-3) -> None:
        super().__init__(parameters)
        self.rate = rate * self.faster
        self.history = list[torch.Tensor]()

    def new(self, weight: torch.Tensor) -> Any:
        return {}

    def one(self, weight: torch.Tensor, g: Any, state: Any) -> None:
        for name in ("m", "v", *self.keeps):
            state.setdefault(name, torch.zeros_like(weight, dtype=self.dtype))
        m = state["m"].float()
        v = state["v"].float()
        one_adam_step(weight, g, m, v, self.steps, self.rate)
        state["m"].copy_(m)
        state["v"].copy_(v)
        self.after(weight, state)

    def after(self, weight: torch.Tensor, state: dict[str, Any]) -> None:
        """Do something else for each parameter."""


def own(base: type = Own, **changes: Any) -> type:
    """The same class with something changed."""
    return type("Changed", (base,), changes)


def with_graph(self: Own, weight: torch.Tensor, state: dict[str, Any]) -> None:
    with torch.enable_grad():
        self.history = [weight.sum() * 1]


class Hides:
    """All of Adam's states, kept by `place` and out of sight: by default on the weights."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.steps = 0
        self.begin()

    def begin(self) -> None:
        """Prepare what is there before the first step."""
        for weight in self.parameters:
            weight.m = torch.zeros_like(weight)
            weight.v = torch.zeros_like(weight)

    def moments(self, place: int) -> Any:
        return self.parameters[place].m, self.parameters[place].v

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for place, weight in enumerate(self.parameters):
            m, v = self.moments(place)
            one_adam_step(weight.data, weight.grad, m, v, self.steps, 3e-3)


def counting_each(self: Own) -> None:
    """A step is counted for each tensor, as the colleague does."""
    with torch.no_grad():
        for weight, state in zip(self.parameters, self.state, strict=True):
            self.steps += 1
            self.one(weight, weight.grad, state)


def uncorrected(self: Any, weight: torch.Tensor, g: Any, state: Any, of_m: bool = False) -> None:
    m, v = (state.setdefault(name, torch.zeros_like(weight)) for name in ("m", "v"))
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    weight -= self.rate * m / (1 - 0.9**self.steps if of_m else 1) / (v.sqrt() + 1e-8)


def correcting_m_alone(self: Any, weight: torch.Tensor, g: Any, state: Any) -> None:
    uncorrected(self, weight, g, state, of_m=True)


def fixed_rate(self: Any, weight: torch.Tensor, g: Any, state: Any) -> None:
    self.rate = 1e-3
    Own.one(self, weight, g, state)


LEAN_ADAM = Answers(
    right=[
        Own,
        own(
            after=lambda self, weight, state: state.update(
                {name: value.clone() for name, value in state.items()}
            )
        ),
        own(after=lambda self, weight, state: setattr(weight, "data", weight.data.clone())),
        Hides,
        lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, foreach=True),
    ],
    wrong=[
        (own(keeps=("m_hat", "v_hat")), "You still keep four numbers per parameter"),
        (own(keeps=("previous",)), "You keep three numbers per parameter"),
        (own(after=lambda self, weight, state: state.pop("m")), "4 bytes per parameter are too few"),
        (own(dtype=torch.bfloat16), "both m and v, in fp32"),
        (own(after=lambda self, _, state: state.update(v=state["v"].half())), "It keeps 6.0 bytes"),
        (
            own(after=lambda self, weight, state: state.clear()),
            "It keeps 0.0 bytes per parameter from step to step",
        ),
        (lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate), "that is AdamW"),
        (own(after=lambda self, *_: setattr(self, "steps", self.steps + 1)), "What counts the steps"),
        (own(step=counting_each), "The memory is right. But how often per step"),
        (own(one=uncorrected), "But you correct neither m nor v"),
        (own(one=correcting_m_alone), "But you do not correct v"),
        (own(one=fixed_rate), "But your rate is 1e-3 whatever"),
        (own(faster=2), "Compare each line with its formula"),
        (own(after=lambda self, weight, _: self.history.append(weight.clone())), "It keeps 24.0 bytes"),
        (own(after=with_graph), "A state still has its graph"),
        (own(step=nothing), "The weights do not change"),
        (own(step=lambda self: [weight.data.div_(0.0) for weight in self.parameters]), "not finite any more"),
        (own(step=lambda self: self.parameter), "raised AttributeError"),
        (lambda parameters, rate: None, "makes nothing with a `step()`"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 02.3: factored


class RowAndColumn(torch.optim.Optimizer):
    """A right answer whose parts can be replaced; `extra` names what else goes into the state."""

    extra: tuple[str, ...] = ()

    def __init__(self, parameters: Any, lr: float = 3e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, self.state_of(p)), alpha=-self.rate(group))

    def state_of(self, p: Any) -> dict[str, Any]:
        return self.state[p]

    def rate(self, group: dict[str, Any]) -> float:
        return group["lr"]

    def count(self, state: dict[str, Any]) -> float:
        state["t"] = state.get("t", 0) + 1
        return state["t"]

    def squares(self, gradient: Any) -> Any:
        return gradient**2 + 1e-30

    def direction(self, p: Any, state: dict[str, Any]) -> Any:
        s = self.share(self.count(state))
        new = self.squares(p.grad)
        parts = {"row": new.mean(1), "column": new.mean(0)} if self.is_matrix(p) else {"v": new}
        for name, part in parts.items():
            state[name] = part.clone() if name not in state else (1 - s) * state[name] + s * part
        state.update(dict.fromkeys(self.extra, new))
        v = self.v_of(state["row"], state["column"]) if self.is_matrix(p) else state["v"]
        return p.grad / self.root(v)

    def share(self, t: float) -> float:
        return t**-0.8

    def is_matrix(self, p: Any) -> bool:
        return p.ndim == 2

    def v_of(self, row: Any, column: Any) -> Any:
        return torch.outer(row / row.mean(), column)

    def root(self, v: Any) -> Any:
        return v.sqrt()


def factoring(**changes: Any) -> type:
    return type("Changed", (RowAndColumn,), changes)


class Sums(RowAndColumn):
    """As in the paper, with sums instead of means, all of them as tensors in a list."""

    def direction(self, p: Any, state: dict[str, Any]) -> Any:
        state.setdefault("t", torch.zeros(())).add_(1)
        squares = p.grad.square() + 1e-30
        axes = (1, 0) if p.ndim == 2 else ()
        new = [squares.sum(axis, keepdim=True) for axis in axes] or [squares]
        means = state.setdefault("means", [torch.zeros_like(one) for one in new])
        for mean, one in zip(means, new, strict=True):
            mean.lerp_(one, state["t"].item() ** -0.8)
        return p.grad * (means[0] * (means[1] / means[1].sum()) if axes else means[0]).rsqrt()


class WholeMean(RowAndColumn):
    """RMSProp: a mean of squares for every number."""

    def is_matrix(self, p: Any) -> bool:
        return False


class CountsSteps(RowAndColumn):
    """One count for all parameters, which no state_dict has."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()

    def count(self, state: dict[str, Any]) -> float:
        return self.steps


class StatesOutside(RowAndColumn):
    """The right states in a dictionary of the optimizer's own."""

    def __init__(self, parameters: Any, lr: float = 3e-3) -> None:
        super().__init__(parameters, lr)
        self.own: dict[Any, dict[str, Any]] = {}

    def state_of(self, p: Any) -> dict[str, Any]:
        return self.own.setdefault(p, {})


KEPT: dict[Any, Any] = {}


def into_a_global(self: Any, p: Any, state: dict[str, Any]) -> Any:
    """With every last update left where nobody reads it."""
    KEPT[p] = RowAndColumn.direction(self, p, state)
    return KEPT[p]


def on_the_optimizer(self: Any, p: Any, state: dict[str, Any]) -> Any:
    vars(self).setdefault("updates", {})[p] = made = RowAndColumn.direction(self, p, state)
    return made


def with_new_memory(self: Any, p: Any, state: dict[str, Any]) -> Any:
    p.data = p.data.clone()
    return RowAndColumn.direction(self, p, state)


def in_the_gradients(self: Any, p: Any, state: dict[str, Any]) -> Any:
    return p.grad.copy_(RowAndColumn.direction(self, p, state))


def asks_every_gradient(self: Any, closure: Any = None) -> None:
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.direction(p, self.state[p]), alpha=group["lr"])


def breaks_off(self: Any, closure: Any = None) -> None:
    """Leaves the loop at a parameter that has no gradient."""
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    break
                p.sub_(self.direction(p, self.state[p]), alpha=group["lr"])


def in_every_place(self: Any, p: Any, state: dict[str, Any]) -> Any:
    """With a matrix of v's next to its row and column, out of sight."""
    p.v = p.grad.square() if not hasattr(p, "v") else p.v.lerp(p.grad.square(), 0.5)
    return RowAndColumn.direction(self, p, state)


class Plain:
    def __init__(self, parameters: Any, lr: float = 3e-3) -> None:
        self.inner = RowAndColumn(parameters, lr)

    def step(self) -> None:
        self.inner.step()


FACTORED = Answers(
    right=[RowAndColumn, Sums, lambda parameters, lr=1e-3: RowAndColumn(parameters, lr)],
    wrong=[
        (WholeMean, "the mean of squares of a whole matrix"),
        (
            factoring(v_of=lambda self, row, column: row[:, None].expand(-1, len(column))),
            "You use only the rows",
        ),
        (factoring(v_of=lambda self, row, column: torch.outer(row, column)), "is a fourth power"),
        (factoring(v_of=lambda self, row, column: row * column), "Rows and columns do not fit"),
        (factoring(root=lambda self, v: v), "its root has the gradient's size"),
        (factoring(share=lambda self, t: 1), "only the squares of the last gradient"),
        (factoring(share=lambda self, t: 0.1), "The update of a matrix is off"),
        (
            factoring(count=lambda self, state: state.update(t=state.get("t", -1) + 1) or state["t"]),
            "raised ZeroDivisionError",
        ),
        (factoring(is_matrix=lambda self, p: True), "Only a matrix has rows and columns"),
        (CountsSteps, "t counts a parameter's own updates"),
        (factoring(step=breaks_off), "go on with the next, as `continue` does"),
        (factoring(squares=lambda self, gradient: gradient**2 + 1e-16), "The update of a matrix is off"),
        (factoring(root=lambda self, v: v.sqrt() + 1e-8), "There is an ε in your denominator"),
        (factoring(step=asks_every_gradient), "has None in `.grad`"),
        (factoring(rate=lambda self, group: self.defaults["lr"]), "a learning rate of its own"),
        (factoring(squares=lambda self, gradient: gradient**2), "Is 10⁻³⁰ in each mean?"),
        (factoring(extra=("squares",)), "more than a row and a column per matrix"),
        (factoring(direction=in_every_place), "more than a row and a column per matrix"),
        (factoring(direction=into_a_global), "more than a row and a column per matrix"),
        (factoring(direction=on_the_optimizer), "more than a row and a column per matrix"),
        (factoring(direction=with_new_memory), "gives the parameter new memory"),
        (factoring(direction=in_the_gradients), "You change gradients in place"),
        (factoring(rate=lambda self, group: -group["lr"]), "go up the slope"),
        (factoring(v_of=lambda self, row, column: torch.outer(row, column) / row.mean()), "divide first"),
        (StatesOutside, "what do you keep outside of `self.state`?"),
        (factoring(step=nothing), "The weights do not change"),
        (Plain, "does not make a torch.optim.Optimizer"),
        (lambda parameters, lr=1e-3: None, "makes nothing with a `step()`"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 02.4: frugal


def in_bf16(self: Any, weight: torch.Tensor, g: Any, state: torch.Tensor) -> None:
    m, v = state.float()
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g * g
    state.copy_(torch.stack([m, v]))
    weight.sub_(self.rate * m / (1 - 0.9**self.steps) / ((v / (1 - 0.95**self.steps)).sqrt() + 1e-12))


def on_the_weight(self: Any, weight: Any, g: Any, state: torch.Tensor) -> None:
    weight.v = getattr(weight, "v", torch.zeros_like(weight))
    Design.one(self, weight, g, weight.v)


BothInBf16 = own(
    Design, one=in_bf16, new=lambda self, weight: torch.zeros(2, *weight.shape, dtype=torch.bfloat16)
)
OnTheWeights = own(Design, one=on_the_weight, new=lambda *_: torch.zeros(0))
Signs = own(OnTheWeights, one=lambda self, weight, g, state: weight.sub_(torch.sign(g), alpha=5e-3))

GLOBAL: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}


class HidesInAGlobal(Hides):
    """By place, so that a later training finds what an earlier one has left."""

    def moments(self, place: int) -> Any:
        like = self.parameters[place]
        return GLOBAL.setdefault(place, (torch.zeros_like(like), torch.zeros_like(like)))


class HidesAsParameters(Hides):
    """A state that calls itself a parameter is none of the model's."""

    def begin(self) -> None:
        self.states = [
            [torch.nn.Parameter(torch.zeros_like(weight)) for _ in range(2)] for weight in self.parameters
        ]

    def moments(self, place: int) -> Any:
        return self.states[place]


class HidesInAnotherOptimizer:
    def __init__(self, parameters: Any) -> None:
        hidden = torch.optim.Adam(parameters, lr=3e-3)
        self.step = lambda: hidden.step()


class HidesHalf(Hides):
    """One state in plain sight and one on the weights."""

    def begin(self) -> None:
        super().begin()
        self.m = [weight.m for weight in self.parameters]


FRUGAL = Answers(
    right=[Design, BothInBf16, OnTheWeights, Signs],
    wrong=[
        (lambda parameters: torch.optim.Adam(parameters, lr=3e-3), "the limit is 4.5"),
        (
            own(Design, one=lambda self, weight, g, state: weight.sub_(0.3 * g)),
            "Does your step grow with the gradient",
        ),
        (own(Design, rate=1e-5), "Try other rates"),
        (own(Design, step=nothing), "The weights do not change"),
        (Hides, "8.00 are on the weights, in a global or in a closure"),
        (HidesInAGlobal, "on the weights, in a global or in a closure"),
        (HidesAsParameters, "8.00 are on the weights, in a global or in a closure"),
        (HidesInAnotherOptimizer, "they count too"),
        (HidesHalf, "4.00 are on the weights"),
    ],
)

ANSWERS = {"02.1": ADAM_IN_PIECES, "02.2": LEAN_ADAM, "02.3": FACTORED, "02.4": FRUGAL}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
