"""What the checks of lesson 02 run: right answers, wrong ones that learners give, a training to try optimizers in."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils.estimating.states import BLOCK_8BIT, trainable
from course_utils.models import PRESETS

from ..shared.language_model import language_model, train_language_model
from .by_hand import kept_bytes, kept_tensors

# --------------------------------------------------------------------------------------- 02.1: what each one remembers

STATES = ("sgd", "momentum", "adam", "adafactor", "adam8bit")


def state_bytes_of(optimizer: str, rows: int, columns: int) -> int:
    """Bytes of the states of an fp32 matrix; the 8-bit Adam has an fp32 scale for each block of either moment."""
    elements = rows * columns
    return {
        "sgd": 0,
        "momentum": 4 * elements,
        "adam": 8 * elements,
        "adafactor": 4 * (rows + columns),
        "adam8bit": 2 * elements + 2 * 4 * (elements // BLOCK_8BIT),
    }[optimizer]


Formula = Callable[[int, int], float]

STATE_MISTAKES: Mapping[str, Mapping[str, Formula]] = {
    "sgd": {
        "that is the gradient. SGD uses it up and remembers nothing of it.": lambda r, c: 4 * r * c,
        "weight and gradient are not the optimizer's: only what it remembers counts.": lambda r, c: 8 * r * c,
    },
    "momentum": {
        "numbers, not bytes: each takes four.": lambda r, c: r * c,
        "two states? One running sum is all that momentum has.": lambda r, c: 8 * r * c,
        "in 16 bits? The states have the format of the weights, fp32 here.": lambda r, c: 2 * r * c,
        "the optimizer's own bytes alone: neither weights nor gradients.": lambda r, c: 12 * r * c,
    },
    "adam": {
        "half of it: either you counted one of its two states, or you stored both in 16 bits.": lambda r, c: 4 * r * c,
        "that also counts the weights, or a master copy: nobody keeps one in plain fp32.": lambda r, c: 12 * r * c,
        "that is the whole bill, weights and gradients included.": lambda r, c: 16 * r * c,
        "numbers, not bytes: each takes four.": lambda r, c: 2 * r * c,
    },
    "adafactor": {
        "a row *and* a column stand for the whole matrix: their product is never kept.": lambda r, c: 4 * r * c,
        "numbers, not bytes: each takes four.": lambda r, c: r + c,
        "a row alone, or a column alone, cannot tell one row from another.": lambda r, c: 4 * r,
        "a row alone, or a column alone, cannot tell one column from another.": lambda r, c: 4 * c,
        "it keeps v alone: there is no momentum in it, unless one asks.": lambda r, c: 8 * (r + c),
        "it keeps no momentum, unless one asks: a row and a column for v are all.": lambda r, c: 4 * (r * c + r + c),
    },
    "adam8bit": {
        "codes without their scales: how large was the block's largest number?": lambda r, c: 2 * r * c,
        "one moment only: Adam has two, also in 8 bits.": lambda r, c: r * c + 4 * (r * c // BLOCK_8BIT),
        "both moments have scales of their own.": lambda r, c: 2 * r * c + 4 * (r * c // BLOCK_8BIT),
        "a scale is an fp32 number: four bytes.": lambda r, c: 2 * r * c + 2 * (r * c // BLOCK_8BIT),
        "8 bits are one byte, not eight.": lambda r, c: 16 * r * c,
    },
}

# --------------------------------------------------------------------------------------------- 02.2: the best step size

RATE_CASES: tuple[tuple[float, ...], ...] = ((1.0, 25.0), (25.0, 1.0, 4.0), (0.5, 8.0, 300.0), (2.0,), (3.0, 3.0, 7.0))


def best_rate_of(curvatures: Sequence[float]) -> float:
    """Where the flattest and the steepest direction shrink alike."""
    return 2 / (min(curvatures) + max(curvatures))


RATE_MISTAKES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "That is the edge: the steepest direction jumps from side to side for ever and never shrinks.": lambda c: (
        2 / max(c)
    ),
    "At that rate the steepest direction is done in one step, and the flattest is slower than it has to be.": (
        lambda c: 1 / max(c)
    ),
    "That suits the flattest direction; along the steepest it diverges.": lambda c: 1 / min(c),
    "Only the two extremes matter: directions in between shrink faster than both.": lambda c: len(c) / sum(c),
    "Half of it. The mean of the extremes is their sum divided by two, so where does the two go?": (
        lambda c: 1 / (min(c) + max(c))
    ),
    "You took the first and the last curvature; the list is in no order.": lambda c: 2 / (c[0] + c[-1]),
}

# ------------------------------------------------------------------------------------------------ 02.3: Adam, in place

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[..., None]


def walk_with(step: Step, steps: int = 4) -> list[State]:
    """Weight, m and v after each of some steps from the same start, with gradients that change."""
    dice = torch.Generator().manual_seed(2)
    weight, m, v = torch.randn(5, 3, generator=dice), torch.zeros(5, 3), torch.zeros(5, 3)
    states = []
    for number in range(1, steps + 1):
        gradient = 0.01 * torch.randn(5, 3, generator=dice)
        with torch.no_grad():
            step(weight, gradient.clone(), m, v, number, 0.01, 0.9, 0.99, 1e-4)
        states.append((weight.clone(), m.clone(), v.clone()))
    return states


def last_state(states: Sequence[State]) -> State:
    """Weight, m and v after the last step."""
    return states[-1]


def one_adam_step(
    weight: torch.Tensor, gradient: Any, m: torch.Tensor, v: torch.Tensor, step: int,
    rate: float, beta1: float, beta2: float, epsilon: float, *, mistake: str = "",
) -> None:  # fmt: skip
    """The right update (Kingma and Ba 2015, algorithm 1) or, by name of the mistake, a wrong one."""
    new = gradient * gradient if mistake != "not squared" else gradient.abs()
    keep1, keep2 = (beta2, beta1) if mistake == "betas swapped" else (beta1, beta2)
    m.mul_(keep1).add_(gradient * (1.0 if mistake == "adds" else 1 - keep1))
    v.mul_(keep2).add_(new * (1 - keep2))
    count = step + {"counts from 2": 1}.get(mistake, 0)
    corrected = mistake not in ("no correction", "v alone")
    m_hat = m / (1 - keep1**count) if corrected else m
    v_hat = v / (1 - keep2**count) if mistake not in ("no correction", "m alone") else v
    root = (v_hat + epsilon).sqrt() if mistake == "epsilon inside" else v_hat.sqrt() + epsilon
    if mistake == "no root":
        root = v_hat + epsilon
    if mistake == "corrects the states":
        m.copy_(m_hat)
        v.copy_(v_hat)
    weight.add_(rate * m_hat / root, alpha=1.0 if mistake == "uphill" else -1.0)


def _mistaken(name: str) -> Step:
    return lambda *given: one_adam_step(*given, mistake=name)


STEP_MISTAKES: Mapping[str, Step] = {
    "Without bias correction: m and v began at zero, so the first steps have the wrong length.": _mistaken(
        "no correction"
    ),
    "You corrected m and not v: both began at zero.": _mistaken("m alone"),
    "You corrected v and not m: both began at zero.": _mistaken("v alone"),
    "ε stands outside of the root: √v̂ + ε.": _mistaken("epsilon inside"),
    "You divide by v̂; it is the mean of *squares*, so its root has the gradient's size.": _mistaken("no root"),
    "v is the mean of the gradient's squares, not of its absolute values.": _mistaken("not squared"),
    "β1 belongs to m and β2 to v: you have them the other way round.": _mistaken("betas swapped"),
    "m takes the whole gradient each time. That is momentum's sum; a running mean takes 1 − β1 of it.": _mistaken(
        "adds"
    ),
    "`step` is 1 in the first step: no need to add one.": _mistaken("counts from 2"),
    "You wrote m̂ and v̂ back into m and v: correct a copy, and leave the running means alone.": _mistaken(
        "corrects the states"
    ),
    "It walks uphill: subtract the update.": _mistaken("uphill"),
}

# ------------------------------------------------------------------------------------------- 02.4: what comes and goes


def transient_of(sizes: Sequence[int], how: str) -> int:
    """The most bytes alive at once beside weights, gradients and states; `sizes` are numbers of each parameter."""
    if how == "fused":
        return 0
    if how == "foreach":
        return 4 * sum(sizes)
    return max(4 * (before + 2 * size) for before, size in zip([0, *sizes], sizes, strict=False))


TRANSIENT_MISTAKES: Mapping[str, Mapping[str, Callable[[Sequence[int]], int]]] = {
    "fused": {
        "one kernel reads and writes everything in place: what would it need a tensor for?": lambda s: 4 * sum(s),
        "not even for one parameter: its kernel needs no tensor.": lambda s: 4 * max(s),
    },
    "foreach": {
        "it makes the roots of *all* parameters before it uses the first.": lambda s: 4 * max(s),
        "numbers, not bytes.": lambda s: sum(s),
        "one tensor for each parameter, not two.": lambda s: 8 * sum(s),
        "that is 16-bit; the roots have the format of the states.": lambda s: 2 * sum(s),
    },
    "loop": {
        "two of the largest, but what the parameter before has left behind is still there.": lambda s: 8 * max(s),
        "for one parameter at a time, there are two at once.": lambda s: 4 * max(s),
        "what one parameter needs is let go before long: it never adds up over all.": lambda s: 8 * sum(s),
        "one parameter after the other: not all of them at once.": lambda s: 4 * sum(s),
        "three of the largest would be right if the one before it were as large.": lambda s: 12 * max(s),
        "numbers, not bytes.": lambda s: transient_of(s, "loop") // 4,
    },
}


def shape_cases() -> list[list[int]]:
    """Sizes of parameters, in numbers: made-up ones where the order matters, and those of GPT-2."""
    return [[100, 300, 200], [400, 390, 10], [10, 10, 500], [256], gpt2_shapes()]


@cache
def _gpt2_sizes() -> tuple[int, ...]:
    trained = trainable(PRESETS["gpt2"], 0, ())
    shapes = chain(trained.before.values(), *([trained.block.values()] * trained.layers), trained.after.values())
    return tuple(math.prod(shape) for shape in shapes)


def gpt2_shapes() -> list[int]:
    """How many numbers each of GPT-2's parameters has, in the order of the step."""
    return list(_gpt2_sizes())


# ----------------------------------------------------------------------------- 02.5 and 02.6: an optimizer in training


@dataclass(frozen=True)
class Trial:
    """What a short training with somebody's optimizer showed.

    `kept` counts the bytes that survive from one step to the next: those that the optimizer holds, and `hidden` ones,
    which its last step reads from anywhere else (an attribute of a weight, a global, a closure). `held_before` are the
    bytes held halfway through. `formats` are the formats of everything kept, `final` is the mean of the last losses.
    """

    optimizer: Any
    parameters: int
    kept: int
    hidden: int
    held_before: int
    formats: frozenset[torch.dtype]
    weights: list[torch.Tensor]
    moved: bool
    final: float

    @property
    def held(self) -> int:
        """Bytes in the optimizer's own attributes, lists and dictionaries at the end."""
        return self.kept - self.hidden

    @property
    def diverged(self) -> bool:
        """Whether a weight or the loss is no finite number."""
        return not (math.isfinite(self.final) and all(bool(weight.isfinite().all()) for weight in self.weights))


def trial(make: Callable[..., Any], steps: int = 4, louder: float = 1.0, rate: float = 3e-3) -> Trial:
    """Train a small character model with what `make(parameters, rate)` or `make(parameters)` returns.

    `louder` multiplies every gradient, as a loss that much larger would.
    """
    model, before = language_model(1, 32), []
    start = [weight.detach().clone() for weight in model.parameters()]
    made: list[_Watched] = []

    def making(tensors: Sequence[torch.nn.Parameter]) -> Any:
        made.append(_Watched(_made(make, list(tensors), rate), tensors))
        return made[0]

    def watch(step: int, network: torch.nn.Module) -> None:
        if step == steps // 2 + 1:
            before.append(kept_bytes(made[0].optimizer))
        made[0].watches = step == steps
        for weight in network.parameters():
            if weight.grad is not None:
                weight.grad.mul_(louder)

    trained = train_language_model(making, steps=steps, model=model, watch=watch)
    weights = [weight.detach().clone() for weight in model.parameters()]
    moved = any(not torch.equal(one, other) for one, other in zip(start, weights, strict=True))
    count = sum(weight.numel() for weight in weights)
    optimizer, elsewhere = made[0].optimizer, made[0].elsewhere.values()
    hidden = sum(state.nbytes for state in elsewhere)
    kept = kept_bytes(optimizer) + hidden
    formats = frozenset([*(tensor.dtype for tensor in kept_tensors(optimizer)), *(state.dtype for state in elsewhere)])
    return Trial(optimizer, count, kept, hidden, before[0], formats, weights, moved, trained.final)


class _Watched:
    """Somebody's optimizer as the training uses it.

    A step taken while `watches` is set notes what it remembers `elsewhere` than in the optimizer's own attributes.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.optimizer, self.parameters, self.watches = optimizer, parameters, False
        self.elsewhere: dict[int, Remembered] = {}

    def step(self) -> None:
        """Take the step."""
        if not self.watches:
            self.optimizer.step()
            return
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        with _Reads([*self.parameters, *gradients, *kept_tensors(self.optimizer)]) as reads:
            self.optimizer.step()
        self.elsewhere = reads.found


@dataclass(frozen=True)
class Remembered:
    """A storage that was there before the step: its bytes, and the format of its numbers."""

    nbytes: int
    dtype: torch.dtype


class _Reads(TorchDispatchMode):
    """Notes each storage that an operation uses, unless it was made here or belongs to one of the `known` tensors.

    What is found was there before the step: it is remembered, wherever it is kept.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.known = {_place(tensor) for tensor in known}
        self.found: dict[int, Remembered] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            size, place = tensor.untyped_storage().nbytes(), _place(tensor)
            if size and place not in self.known:
                self.found.setdefault(place, Remembered(size, tensor.dtype))
        made = func(*args, **(kwargs or {}))
        self.known |= {_place(tensor) for tensor in _tensors(made)} - self.found.keys()
        return made


def _tensors(thing: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(thing) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _made(make: Callable[..., Any], tensors: list[Any], rate: float) -> Any:
    """The optimizer, told the rate where its maker asks for one."""
    wants = list(inspect.signature(make).parameters)
    return make(tensors, rate) if "rate" in wants else make(tensors)
