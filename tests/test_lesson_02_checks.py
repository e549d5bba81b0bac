"""The checks of lesson 02: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers, nothing

# -------------------------------------------------------------------------------------------------- 02.1: state_bytes

RIGHT: dict[str, Callable[[int, int], float]] = {
    "sgd": lambda r, c: 0,
    "momentum": lambda r, c: 4 * r * c,
    "adam": lambda r, c: 4 * r * c + 4 * r * c,
    "adafactor": lambda r, c: 4 * r + 4 * c,
    "adam8bit": lambda r, c: 2 * (r * c + 4 * (r * c // 256)),
}


def states(**formulas: Any) -> Any:
    """The right answer, with other formulas for some optimizers."""
    return lambda optimizer, rows, columns: (RIGHT | formulas)[optimizer](rows, columns)


STATE_BYTES = Answers(
    right=[
        states(),
        states(adafactor=lambda r, c: (r + c) * 4.0, adam8bit=lambda r, c: 2.03125 * r * c),
        lambda **given: numpy.float64(states()(**given)),
    ],
    wrong=[
        (states(sgd=lambda r, c: 4 * r * c), "sgd: that is the gradient"),
        (states(sgd=lambda r, c: 17), "sgd is off"),
        (states(momentum=lambda r, c: r * c), "momentum: numbers, not bytes"),
        (states(momentum=lambda r, c: 8 * r * c), "momentum: two states?"),
        (states(adam=lambda r, c: 4 * r * c), "adam: half of it"),
        (states(adam=lambda r, c: 12 * r * c), "adam: that also counts the weights"),
        (states(adam=lambda r, c: 16 * r * c), "adam: that is the whole bill"),
        (states(adam=lambda r, c: 8 * r * r), "adam is off for 512, 1024"),
        (states(adam=lambda r, c: 64 * r * c), "adam: 8 times too much: bits"),
        (states(adafactor=lambda r, c: 4 * r * c), "their product is never kept"),
        (states(adafactor=lambda r, c: r + c), "adafactor: numbers, not bytes"),
        (states(adafactor=lambda r, c: 4 * c), "cannot tell one row from another"),
        (states(adafactor=lambda r, c: 4 * (r * c + r + c)), "adafactor: it keeps no momentum"),
        (states(adam8bit=lambda r, c: 2 * r * c), "adam8bit: codes without their scales"),
        (states(adam8bit=lambda r, c: 2 * r * c + 4 * (r * c // 256)), "adam8bit: both moments have scales"),
        (lambda optimizer, rows, columns: states()(optimizer, 512, 1024), "momentum is off for 25"),
    ],
)

# ---------------------------------------------------------------------------------------------------- 02.2: best_rate


BEST_RATE = Answers(
    right=[
        lambda curvatures: 2 / (min(curvatures) + max(curvatures)),
        lambda curvatures: 1 / torch.tensor([min(curvatures), max(curvatures)]).mean(),
        lambda curvatures: 2 / (numpy.sort(curvatures)[0] + numpy.sort(curvatures)[-1]),
    ],
    wrong=[
        (lambda curvatures: 2 / max(curvatures), "That is the edge"),
        (lambda curvatures: 1 / max(curvatures), "the steepest direction is done in one step"),
        (lambda curvatures: 1 / min(curvatures), "suits the flattest direction"),
        (lambda curvatures: 1 / numpy.mean(curvatures), "Only the two extremes matter"),
        (lambda curvatures: 2 / (curvatures[0] + curvatures[-1]), "You took the first and the last curvature"),
        (lambda curvatures: -2 / (min(curvatures) + max(curvatures)), "uphill"),
        (lambda curvatures: 2 / 26, "the steepest direction grows"),
        (lambda curvatures: 1.4 / (min(curvatures) + max(curvatures)), "later than they could"),
    ],
)

# ---------------------------------------------------------------------------------------------------- 02.3: adam_step


def adam(
    new_m: Any = lambda m, g, b1: b1 * m + (1 - b1) * g, update: Any = lambda m, v, e: m / (v.sqrt() + e),
    corrects: str = "mv", keeps: str = "",
) -> Any:  # fmt: skip
    """Adam of five lines, to replace one; what `keeps` says is not changed in place, or changed once too often."""

    def step(weight: Any, gradient: Any, m: Any, v: Any, step: Any, rate: Any, beta1: Any, beta2: Any, epsilon: Any
    ) -> None:  # fmt: skip
        one, other = new_m(m, gradient, beta1), beta2 * v + (1 - beta2) * gradient * gradient
        if keeps != "m":
            m.copy_(one)
        v.copy_(other)
        mean = one / (1 - beta1**step) if "m" in corrects else one
        square = other / (1 - beta2**step) if "v" in corrects else other
        if keeps == "corrected":
            m.copy_(mean)
            v.copy_(square)
        if keeps != "weight":
            weight.sub_(rate * update(mean, square, epsilon))

    return step


one_adam_step = adam()


def in_torchs_order(weight: Any, gradient: Any, m: Any, v: Any, step: Any, rate: Any, beta1: Any, beta2: Any,
                    epsilon: Any) -> None:  # fmt: skip
    m.lerp_(gradient, 1 - beta1)
    v[:] = beta2 * v + (1 - beta2) * gradient.square()
    root = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(epsilon)
    weight.addcdiv_(m, root, value=-rate / (1 - beta1**step))


ADAM_STEP = Answers(
    right=[adam(), in_torchs_order, lambda **given: one_adam_step(**given) or True],
    wrong=[
        (adam(corrects=""), "Without bias correction"),
        (adam(corrects="m"), "You corrected m and not v"),
        (adam(corrects="v"), "You corrected v and not m"),
        (adam(update=lambda m, v, e: m / (v + e).sqrt()), "ε stands outside of the root"),
        (adam(update=lambda m, v, e: m / (v + e)), "You divide by v̂"),
        (lambda **one: one_adam_step(**one | {"beta1": one["beta2"], "beta2": one["beta1"]}), "the other way round"),
        (lambda **one: one_adam_step(**one | {"step": one["step"] + 1}), "no need to add one"),
        (adam(keeps="corrected"), "You wrote m̂ and v̂ back into m and v"),
        (adam(keeps="weight"), "weight has not changed"),
        (adam(keeps="m"), "m has not changed"),
        (adam(new_m=lambda m, g, b1: m + (1 - b1) * g), "m is off: a running mean keeps β of itself"),
        (adam(update=lambda m, v, e: m / (v.sqrt() + e) / 2), "the weight is not"),
        (lambda **one: one_adam_step(**one | {"step": 1}), "depends on the number of the step?"),
        (lambda **one: one_adam_step(**one | {"step": 0}), "what do you divide by?"),
    ],
)

# ----------------------------------------------------------------------------------------------- 02.4: step_transient


def event_by_event(sizes: list[int]) -> int:
    now = most = before = 0
    for size in sizes:
        now += 2 * size
        most = max(most, now)
        now -= size + before
        before = size
    return 4 * most


def ways(**formulas: Any) -> Any:
    """The right answer, with other formulas for some ways."""
    right = {"fused": lambda s: 0, "foreach": lambda s: 4 * sum(s), "loop": event_by_event}
    return lambda sizes, how: (right | formulas)[how](sizes)


STEP_TRANSIENT = Answers(
    right=[
        ways(),
        ways(loop=lambda s: 4 * max(a + 2 * b for a, b in zip([0, *s], s, strict=False))),
        lambda sizes, how: float(ways()(sizes, how)),
    ],
    wrong=[
        (ways(fused=lambda s: 4 * sum(s)), "fused: one kernel reads and writes everything in place"),
        (ways(foreach=lambda s: 4 * max(s)), "of *all* parameters before it uses the first"),
        (ways(foreach=lambda s: 8 * sum(s)), "foreach: one tensor for each parameter, not two"),
        (ways(loop=lambda s: 8 * max(s)), "what the parameter before has left behind"),
        (ways(loop=lambda s: 4 * max(s)), "there are two at once"),
        (ways(loop=lambda s: 4 * sum(s)), "not all of them at once"),
        (ways(loop=lambda s: 4 * max(2 * a + b for a, b in zip(s, [*s[1:], 0], strict=True))), "loop is off"),
        (ways(loop=lambda s: event_by_event([100, 300, 200])), "off for [400, 390, 10]"),
        (ways(loop=lambda s: event_by_event(s[:3]) + (len(s) > 3)), "loop is off for [38597376, 786432, 768"),
    ],
)

# ----------------------------------------------------------------------------------------------------- 02.5: lean_adam


class Design:
    """RMSProp, and the base of other designs."""

    rate = 3e-3

    def __init__(self, parameters: Any) -> None:
        self.parameters, self.steps = list(parameters), 0
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
        self.rate, self.history = rate * self.faster, list[torch.Tensor]()

    def new(self, weight: torch.Tensor) -> Any:
        return {}

    def one(self, weight: torch.Tensor, g: Any, state: Any) -> None:
        for name in ("m", "v", *self.keeps):
            state.setdefault(name, torch.zeros_like(weight, dtype=self.dtype))
        m, v = state["m"].float(), state["v"].float()
        one_adam_step(weight, g, m, v, self.steps, self.rate, 0.9, 0.999, 1e-8)
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
        self.parameters, self.steps = list(parameters), 0
        self.begin()

    def begin(self) -> None:
        """Prepare what is there before the first step."""
        for weight in self.parameters:
            weight.m, weight.v = torch.zeros_like(weight), torch.zeros_like(weight)

    def moments(self, place: int) -> Any:
        return self.parameters[place].m, self.parameters[place].v

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for place, weight in enumerate(self.parameters):
            m, v = self.moments(place)
            one_adam_step(weight.data, weight.grad, m, v, self.steps, 3e-3, 0.9, 0.999, 1e-8)


LEAN_ADAM = Answers(
    right=[
        Own,
        own(after=lambda self, weight, state: state.update({name: value.clone() for name, value in state.items()})),
        Hides,
        lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, foreach=True),
    ],
    wrong=[
        (own(keeps=("m_hat", "v_hat")), "Still four numbers per parameter"),
        (own(keeps=("previous",)), "Three numbers per parameter"),
        (own(after=lambda self, weight, state: state.pop("m")), "One number per parameter is too few"),
        (own(dtype=torch.bfloat16), "4.0 bytes per parameter: you store moments in"),
        (own(after=lambda self, _, state: state.update(v=state["v"].half())), "6.0 bytes per parameter: you store"),
        (own(after=lambda self, weight, state: state.clear()), "It keeps 0.0 bytes per parameter from step to step"),
        (lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate), "that is AdamW"),
        (own(after=lambda self, *_: setattr(self, "steps", self.steps + 1)), "What counts the steps"),
        (own(faster=2), "the weights are not Adam's. What counts"),
        (own(after=lambda self, *_: self.history.append(torch.ones(9))), "grows from step to step"),
        (own(after=with_graph), "has a graph behind it"),
        (own(step=nothing), "The weights do not move"),
        (own(step=lambda self: [weight.data.div_(0.0) for weight in self.parameters]), "not finite any more"),
        (own(step=lambda self: self.parameter), "raised AttributeError"),
        (lambda parameters, rate: None, "nothing that has a `step()`"),
    ],
)

# -------------------------------------------------------------------------------------------------------- 02.6: frugal


def in_bf16(self: Any, weight: torch.Tensor, g: Any, state: torch.Tensor) -> None:
    m, v = state.float()
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    state.copy_(torch.stack([m, v]))
    weight.sub_(self.rate * m / (1 - 0.9**self.steps) / ((v / (1 - 0.95**self.steps)).sqrt() + 1e-12))


def on_the_weight(self: Any, weight: Any, g: Any, state: torch.Tensor) -> None:
    weight.v = getattr(weight, "v", torch.zeros_like(weight))
    Design.one(self, weight, g, weight.v)


BothInBf16 = own(Design, one=in_bf16, new=lambda self, weight: torch.zeros(2, *weight.shape, dtype=torch.bfloat16))
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
        self.states = [[torch.nn.Parameter(torch.zeros_like(weight)) for _ in range(2)] for weight in self.parameters]

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
        (own(Design, one=lambda self, weight, g, state: weight.sub_(0.3 * g)), "follows the size of the gradient"),
        (own(Design, rate=1e-5), "is the rate too small"),
        (own(Design, step=nothing), "The weights do not move"),
        (Hides, "8.00 are on the weights, in a global or in a closure"),
        (HidesInAGlobal, "on the weights, in a global or in a closure"),
        (HidesInAGlobal, "memory all the same"),  # found again in a second try
        (HidesAsParameters, "8.00 are on the weights, in a global or in a closure"),
        (HidesInAnotherOptimizer, "memory all the same"),
        (HidesHalf, "4.00 are on the weights"),
    ],
)

ANSWERS = {f"02.{n}": one for n, one in enumerate(
    (STATE_BYTES, BEST_RATE, ADAM_STEP, STEP_TRANSIENT, LEAN_ADAM, FRUGAL), 1
)}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
