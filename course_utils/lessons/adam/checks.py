"""Checks of the exercises of lesson 02, "Adam": each names the misconception, never the answer."""

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils.estimating.states import BLOCK_8BIT
from course_utils.interactive.feedback import (
    CheckFailed,
    Mistakes,
    NotSolved,
    alike,
    by_name,
    call,
    call_for_effect,
    exercise,
    expect,
    fail,
    recognized,
    seeded_sizes,
    unit_slip,
)
from course_utils.models import PRESETS, parameter_shapes

from ..shared.language_model import language_model, train_language_model
from .by_hand import kept_bytes, kept_tensors

# -------------------------------------------------------------------------------------------------- 02.1: state_bytes

STATE_BYTES: Mapping[str, Callable[[int, int], int]] = {
    "sgd": lambda r, c: 0,
    "momentum": lambda r, c: 4 * r * c,
    "adam": lambda r, c: 8 * r * c,
    "adafactor": lambda r, c: 4 * (r + c),
    "adam8bit": lambda r, c: 2 * r * c + 2 * 4 * (r * c // BLOCK_8BIT),
}
"""Bytes of the states of an fp32 matrix; the 8-bit Adam has an fp32 scale for each block of either moment."""

STATE_MISTAKES: Mapping[str, Mistakes] = {
    "sgd": {"that is the gradient. SGD uses it up and remembers nothing of it.": lambda r, c: 4 * r * c},
    "momentum": {
        "numbers, not bytes: each takes four.": lambda r, c: r * c,
        "two states? One running sum is all that momentum has.": lambda r, c: 8 * r * c,
    },
    "adam": {
        "half of it: either you counted one of its two states, or you stored both in 16 bits.": lambda r, c: 4 * r * c,
        "that also counts the weights, or a master copy: nobody keeps one in plain fp32.": lambda r, c: 12 * r * c,
        "that is the whole bill, weights and gradients included.": lambda r, c: 16 * r * c,
    },
    "adafactor": {
        "a row *and* a column stand for the whole matrix: their product is never kept.": lambda r, c: 4 * r * c,
        "numbers, not bytes: each takes four.": lambda r, c: r + c,
        "a row alone cannot tell one row from another.": lambda r, c: 4 * c,
        "it keeps no momentum, unless one asks: a row and a column for v are all.": lambda r, c: 4 * (r * c + r + c),
    },
    "adam8bit": {
        "codes without their scales: how large was the block's largest number?": lambda r, c: 2 * r * c,
        "both moments have scales of their own.": lambda r, c: 2 * r * c + 4 * (r * c // BLOCK_8BIT),
    },
}


@exercise("02.1", "Five optimizers, from nothing to two numbers a parameter, for a matrix of any shape.")
def state_bytes(answer: Any) -> None:
    """`answer(optimizer, rows, columns)` is the bytes of an fp32 matrix's optimizer states."""
    shapes = [(512, 1024), *((256 * count, 768) for count in seeded_sizes(3, 2, 200))]
    for optimizer, right in STATE_BYTES.items():
        got = [float(call(answer, optimizer=optimizer, rows=rows, columns=columns)) for rows, columns in shapes]
        _expect_bytes(optimizer, got, shapes, right, STATE_MISTAKES[optimizer])


def _expect_bytes(
    name: str, got: Sequence[float], cases: Sequence[Sequence[Any]], right: Callable[..., int], mistakes: Mistakes
) -> None:
    named = {f"{name}: {message}": mistaken for message, mistaken in mistakes.items()}
    if not recognized(got, cases, right, named, same=partial(alike, tolerance=1e-9)):
        off = next(case for case, one in zip(cases, got, strict=True) if one != right(*case))
        slip = unit_slip(got[0], right(*cases[0]))
        fail(f"{name}: {slip}" if slip else f"{name} is off for {', '.join(map(reprlib.repr, off))}.")


# ---------------------------------------------------------------------------------------------------- 02.2: best_rate

RATE_CASES: tuple[tuple[float, ...], ...] = ((1.0, 25.0), (25.0, 1.0, 4.0), (0.5, 8.0, 300.0), (2.0,), (3.0, 3.0, 7.0))

RATE_MISTAKES: Mistakes = {
    "That is the edge: the steepest direction jumps from side to side and never shrinks.": lambda *c: 2 / max(c),
    "Now the steepest direction is done in one step, the flattest slower than it has to be.": lambda *c: 1 / max(c),
    "That suits the flattest direction; along the steepest it diverges.": lambda *c: 1 / min(c),
    "Only the two extremes matter: directions in between shrink faster than both.": lambda *c: len(c) / sum(c),
    "You took the first and the last curvature; the list is in no order.": lambda *c: 2 / (c[0] + c[-1]),
}


@exercise("02.2", "The best step size for any curvatures, and your walks get there in no more steps than ours.")
def best_rate(answer: Any) -> None:
    """`answer(curvatures)` is the learning rate at which gradient descent shrinks its worst direction the most."""
    got = [float(call(answer, curvatures=list(case))) for case in RATE_CASES]
    expect(all(rate > 0 for rate in got), "A learning rate of 0 or less goes nowhere, or uphill.")
    grows = any(rate >= 2 / max(case) for rate, case in zip(got, RATE_CASES, strict=True))
    steep = "With your rate the steepest direction grows: each step multiplies it by 1 − η·c."
    late = "Your walks arrive, but later than they could: in one direction the factor |1 − η·c| is larger than needed."
    otherwise, close = steep if grows else late, partial(alike, tolerance=1e-3)
    recognized(got, RATE_CASES, lambda *c: 2 / (min(c) + max(c)), RATE_MISTAKES, otherwise, close)


# ---------------------------------------------------------------------------------------------------- 02.3: adam_step

GIVEN = ("weight", "gradient", "m", "v", "step", "rate", "beta1", "beta2", "epsilon")


def _adam(
    weight: torch.Tensor, gradient: Any, m: torch.Tensor, v: torch.Tensor, step: int,
    rate: float, beta1: float, beta2: float, epsilon: float, *, mistake: str = "",
) -> None:  # fmt: skip
    """Do the right update (Kingma and Ba 2015, algorithm 1) or, by name of the mistake, a wrong one."""
    if mistake == "betas swapped":
        beta1, beta2 = beta2, beta1
    m.mul_(beta1).add_(gradient, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    number = step + 1 if mistake == "counts from 2" else step
    m_hat = m if mistake in ("no correction", "v alone") else m / (1 - beta1**number)
    v_hat = v if mistake in ("no correction", "m alone") else v / (1 - beta2**number)
    root = (v_hat + epsilon).sqrt() if mistake == "epsilon inside" else v_hat.sqrt() + epsilon
    if mistake == "corrects the states":
        m.copy_(m_hat)
        v.copy_(v_hat)
    weight.sub_(rate * m_hat / (v_hat + epsilon if mistake == "no root" else root))


STEP_MISTAKES: Mapping[str, str] = {
    "Without bias correction: m and v began at zero, so the first steps have the wrong length.": "no correction",
    "You corrected m and not v: both began at zero.": "m alone",
    "You corrected v and not m: both began at zero.": "v alone",
    "ε stands outside of the root: √v̂ + ε.": "epsilon inside",
    "You divide by v̂; it is the mean of *squares*, so its root has the gradient's size.": "no root",
    "β1 belongs to m and β2 to v: you have them the other way round.": "betas swapped",
    "`step` is 1 in the first step: no need to add one.": "counts from 2",
    "You wrote m̂ and v̂ back into m and v: correct a copy, and leave the running means alone.": "corrects the states",
}


@exercise("02.3", "Your Adam walks with PyTorch's, step by step, weights and both states.")
def adam_step(answer: Any) -> None:
    """`answer(weight, gradient, m, v, step, rate, beta1, beta2, epsilon)` updates weight, m and v in place."""
    got, right = _walk(lambda *given: call_for_effect(answer, **by_name(GIVEN, given))), _walk(_adam)
    start = _walk(lambda *_: None)[-1]
    for name, before, after in zip(("weight", "m", "v"), start, got[-1], strict=True):
        expect(after.isfinite().all(), f"{name} holds numbers that are not finite: what do you divide by?")
        place = f"{name} has not changed. `{name} = …` makes a new tensor: use methods that end in _, such as mul_."
        expect(not torch.equal(before, after), place)
    if _close(got, right):
        return
    for message, mistake in STEP_MISTAKES.items():
        expect(not _close(got, _walk(partial(_adam, mistake=mistake))), message)
    for index, name in ((1, "m"), (2, "v")):
        mean = f"{name} is off: a running mean keeps β of itself and takes 1 − β of what is new."
        expect(_close(got[:, index], right[:, index]), mean)
    fail("m and v are right, the weight is not: what in the update depends on the number of the step?")


def _walk(step: Callable[..., Any]) -> torch.Tensor:
    """Weight, m and v, each (5, 3), after each of four steps from the same start: (4, 3, 5, 3)."""
    dice = torch.Generator().manual_seed(2)
    weight, m, v = torch.randn(5, 3, generator=dice), torch.zeros(5, 3), torch.zeros(5, 3)
    states = []
    for number in range(1, 5):
        gradient = 0.01 * torch.randn(5, 3, generator=dice)
        with torch.no_grad():
            step(weight, gradient, m, v, number, 0.01, 0.9, 0.99, 1e-4)
        states.append(torch.stack([weight, m, v]))
    return torch.stack(states)


_close = partial(torch.allclose, rtol=1e-4, atol=1e-7)

# ----------------------------------------------------------------------------------------------- 02.4: step_transient


def _loop(sizes: Sequence[int]) -> int:
    return 4 * max(before + 2 * size for before, size in pairwise([0, *sizes]))


TRANSIENTS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "fused": lambda s: 0,
    "foreach": lambda s: 4 * sum(s),
    "loop": _loop,
}
"""The most bytes alive at once next to weights, gradients and states, by the number of elements of each parameter."""

TRANSIENT_MISTAKES: Mapping[str, Mistakes] = {
    "fused": {"one kernel reads and writes everything in place: it needs no tensor.": lambda s: 4 * sum(s)},
    "foreach": {
        "it makes the roots of *all* parameters before it uses the first.": lambda s: 4 * max(s),
        "one tensor for each parameter, not two.": lambda s: 8 * sum(s),
    },
    "loop": {
        "two of the largest, but what the parameter before has left behind is still there.": lambda s: 8 * max(s),
        "for one parameter at a time, there are two at once.": lambda s: 4 * max(s),
        "one parameter after the other: not all of them at once.": lambda s: 4 * sum(s),
    },
}


@exercise("02.4", "What comes and goes in the step, three ways, for any list of parameters.")
def step_transient(answer: Any) -> None:
    """`answer(sizes, how)` is the most bytes alive at once next to weights, gradients and states."""
    cases = [([100, 300, 200],), ([400, 390, 10],), ([10, 10, 500],), ([256],), (gpt2_shapes(),)]
    for how, right in TRANSIENTS.items():
        got = [float(call(answer, sizes=list(sizes), how=how)) for (sizes,) in cases]
        _expect_bytes(how, got, cases, right, TRANSIENT_MISTAKES[how])


def gpt2_shapes() -> list[int]:
    """Return how many numbers each of GPT-2's parameters has."""
    return [math.prod(shape) for shape in parameter_shapes(PRESETS["gpt2"]).values()]


# ----------------------------------------------------------------------------- 02.5 and 02.6: an optimizer in training


class Trial(NamedTuple):
    """The result of a short training with somebody's optimizer.

    `kept` counts the bytes that survive from one step to the next: those that the optimizer holds, and `hidden` ones,
    which its last step reads from anywhere else. What it holds `grows` if it is more at the end than halfway through.
    `formats` are those of everything kept, `final` is the last loss.
    """

    optimizer: Any
    parameters: int
    kept: int
    hidden: int
    grows: bool
    formats: set[torch.dtype]
    weights: Sequence[torch.Tensor]
    final: float

    @property
    def diverged(self) -> bool:
        """True if a weight or the loss is no finite number."""
        return not (math.isfinite(self.final) and all(weight.isfinite().all() for weight in self.weights))


def trial(make: Callable[..., Any], steps: int = 4, louder: float = 1.0) -> Trial:
    """Train a small character model with what `make(parameters, rate)` or `make(parameters)` returns.

    `louder` multiplies every gradient, as a loss that much larger would.
    """
    model = language_model(1, 32)
    weights = list(model.parameters())
    optimizer = make(weights, 3e-3) if "rate" in inspect.signature(make).parameters else make(weights)
    expect(hasattr(optimizer, "step"), "What you hand over makes nothing that has a `step()`: hand over the class.")
    held, reads = list[int](), _Reads()
    with ExitStack() as last_step:

        def before_step(number: int, _: object) -> None:
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            for gradient in gradients:
                gradient.mul_(louder)
            held.append(kept_bytes(optimizer))
            if number == steps:
                reads.known = {_place(tensor) for tensor in (*weights, *gradients, *kept_tensors(optimizer))}
                last_step.enter_context(reads)

        final = train_language_model(lambda _: optimizer, steps=steps, model=model, watch=before_step).final
    kept, hidden = kept_bytes(optimizer), sum(size for size, _ in reads.found.values())
    formats = {tensor.dtype for tensor in kept_tensors(optimizer)} | {dtype for _, dtype in reads.found.values()}
    parameters, grows = sum(weight.numel() for weight in weights), 0 < held[steps // 2] < kept
    return Trial(optimizer, parameters, kept + hidden, hidden, grows, formats, weights, final)


class _Reads(TorchDispatchMode):
    """Notes bytes and format of each storage that was there before the step and has no `known` place."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.found: dict[int, tuple[int, torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            size, place = tensor.untyped_storage().nbytes(), _place(tensor)
            if size and place not in self.known:
                self.found.setdefault(place, (size, tensor.dtype))
        made = func(*args, **(kwargs or {}))
        self.known |= {_place(tensor) for tensor in _tensors(made)} - self.found.keys()
        return made


def _tensors(thing: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(thing) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tried(answer: Any, **how: Any) -> Trial:
    expect(callable(answer), "Hand over the class itself: its name, without parentheses.")
    try:
        got = trial(answer, **how)
    except (NotSolved, CheckFailed):
        raise
    except Exception as error:  # whatever a learner's code raises becomes one line
        raise CheckFailed(f"In training, your optimizer raised {type(error).__name__}: {error}") from error
    moved = any(not torch.equal(*pair) for pair in zip(got.weights, language_model(1, 32).parameters(), strict=True))
    expect(moved, "The weights do not move: change them in place, as weight.sub_(…) does, under torch.no_grad().")
    return got


def _expect_clean(got: Trial) -> None:
    expect(not got.diverged, "The weights are not finite any more: what do you divide by?")
    graphs = any(tensor.grad_fn is not None for tensor in kept_tensors(got.optimizer))
    expect(not graphs, "A state has a graph behind it, which keeps more alive each step: put step under no_grad.")
    expect(not got.grows, "What it keeps grows from step to step: is something appended to a list?")


# ----------------------------------------------------------------------------------------------------- 02.5: lean_adam

LEAN_BYTES = {
    4: "One number per parameter is too few: Adam needs m and v from one step to the next.",
    12: "Three numbers per parameter: which of them can be computed again from the others, when it is needed?",
    16: "Still four numbers per parameter. Ask of each: does the *next* step read it?",
}


@exercise("02.5", "Two states per parameter and not one more, and the weights are those of plain Adam.")
def lean_adam(answer: Any) -> None:
    """`answer(parameters, rate)` makes a plain Adam with a `step()` and 8 bytes per parameter."""
    got, right = _tried(answer, steps=4), trial(lambda weights, rate: torch.optim.Adam(weights, rate, foreach=False))
    _expect_clean(got)
    per = got.kept / got.parameters
    coarse = per <= 7.5 and any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in got.formats)
    expect(not coarse, f"{per:.1f} bytes per parameter: you store moments in 16 bits. bf16 is too coarse for v.")
    for bytes_each, message in LEAN_BYTES.items():
        expect(abs(per - bytes_each) > 0.5, message)
    expect(abs(per - 8) < 0.5, f"It keeps {per:.1f} bytes per parameter from step to step: which tensors are they?")
    decayed = trial(lambda weights, rate: torch.optim.AdamW(weights, rate, foreach=False))
    shrinking = _distance(got, decayed) < 0.1 * _distance(got, right)
    expect(not shrinking, "The memory is right. But your weights shrink: that is AdamW. Adam has no weight decay.")
    other = "The memory is right, but the weights are not Adam's. What counts the steps, and how often?"
    expect(_weights_close(got, right), other)


def _distance(one: Trial, other: Trial) -> float:
    return sum((a - b).double().square().sum().item() for a, b in zip(one.weights, other.weights, strict=True))


def _weights_close(one: Trial, other: Trial) -> bool:
    return all(torch.allclose(a, b, rtol=1e-3, atol=2e-5) for a, b in zip(one.weights, other.weights, strict=True))


# -------------------------------------------------------------------------------------------------------- 02.6: frugal

MOST_BYTES, BEST_LOSS = 4.5, 2.7


@exercise("02.6", "It learns, whatever the size of the loss, in little more than half of Adam's bytes at most.")
def frugal(answer: Any) -> None:
    """`answer(parameters)` makes an optimizer of one's own design: few bytes, any size of the loss, and it learns."""
    got = _tried(answer, steps=60)
    _expect_clean(got)
    per, hidden = got.kept / got.parameters, got.hidden / got.parameters
    outside = f" {hidden:.2f} are on the weights, in a global or in a closure: memory all the same."
    many = f"It keeps {per:.2f} bytes per parameter, and the limit is {MOST_BYTES}.{outside if hidden > 0.1 else ''}"
    expect(per <= MOST_BYTES, many)
    loud = _tried(answer, steps=60, louder=1024.0)
    follows = "With a loss 1,024 times as large it trains otherwise: your step follows the size of the gradient."
    expect(not loud.diverged and abs(loud.final - got.final) < 0.15, follows)
    poor = f"After 60 steps the loss is {got.final:.2f}, not {BEST_LOSS}: is the rate too small, or far too large?"
    expect(got.final <= BEST_LOSS, poor)
    print(f"{per:.2f} bytes per parameter")
