"""Checks of lesson 03, "Mixed precision": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from operator import eq
from types import SimpleNamespace
from typing import Any

import torch

from ...interactive.feedback import Mistakes, call, exercise, expect, of_kind, recognized
from ..shared.judging import alive_during, same, seeded
from .number_formats import NumberFormat

# --------------------------------------------------------------------------------------------------
# 03.1: limits
WIDTHS = ((5, 10), (8, 7), (8, 23), (5, 2), (3, 4), (6, 9))  # exponent and mantissa bits
LIMITS: Mapping[str, tuple[Callable[[NumberFormat], float], str, Mistakes]] = {
    "epsilon": (
        lambda f: f.epsilon,
        "It depends only on the mantissa's bits: take 1 and change the last of them.",
        {
            "Half of epsilon: that is the largest rounding error near 1, not the next number.": (
                lambda f: f.epsilon / 2
            )
        },
    ),
    "largest number": (
        lambda f: f.largest,
        "Take the largest exponent, all mantissa bits 1. Is the bias right?",
        {
            "You return the smallest normal number. The order is epsilon, largest, smallest.": (
                lambda f: f.smallest_normal
            ),
            "Your bias is 127. That is the bias of 8 exponent bits.": lambda f: (2 - f.epsilon) * 2.0**127,
            "Your largest number is the first power of two *beyond* the largest.": (
                lambda f: 2.0 ** (f.bias + 1)
            ),
            "Your largest number has a mantissa of zeros. What makes it larger?": lambda f: 2.0**f.bias,
            "Your largest number is twice too large. "
            "Did you use the exponent set aside for infinity, or another bias?": lambda f: 2 * f.largest,
        },
    ),
    "smallest normal number": (
        lambda f: f.smallest_normal,
        "What is the smallest exponent that is not set aside?",
        {
            "You return the smallest *subnormal* number. Normal ones have at least E = 1.": (
                lambda f: f.smallest
            ),
            "Your smallest normal number has E = 0, which is for subnormal numbers.": (
                lambda f: f.smallest_normal / 2
            ),
        },
    ),
}


@exercise(
    "03.1", "Range from the exponent's bits, precision from the mantissa's: you need not remember any format."
)
def limits(answer: Any) -> None:
    """`answer(e, m)` is epsilon, the largest finite and the smallest normal number of e and m bits."""
    got = [call(answer, e=e, m=m, returns=(tuple, list)) for e, m in WIDTHS]
    for one in got:
        expect(len(one) == 3, f"You return {len(one)} values, where 3 are needed: {', '.join(LIMITS)}.")
    forms = [(NumberFormat("asked", e, m, 4),) for e, m in WIDTHS]
    for place, (name, (right, off, mistakes)) in enumerate(LIMITS.items()):
        values = [of_kind(one[place], Real, f"Your {name} is") for one in got]
        triples = zip(values, forms, WIDTHS, strict=True)
        e, m = next((widths for value, form, widths in triples if value != right(*form)), WIDTHS[0])
        recognized(values, forms, right, mistakes, f"Your {name} is off for e = {e}, m = {m}. {off}", eq)


# --------------------------------------------------------------------------------------------------
# 03.2: round_at_random
@exercise("03.2", "Always one of the two neighbors, and right on average, below zero too.")
def round_at_random(answer: Any) -> None:
    """`answer(values, step, u)` rounds to multiples of step, up or down by u, without bias."""
    dice = torch.Generator().manual_seed(0)
    for value, step in ((0.3, 1.0), (1.001, 2.0**-7), (-0.7, 0.5), (0.9, 0.25)):
        values = torch.full((40_000,), value)
        u = torch.rand(40_000, generator=dice)
        got, again = (call(answer, values=values, step=step, u=u, returns=torch.Tensor) for _ in range(2))
        _expect_no_bias(got, value, step)
        own = "The same u gives other results: u is all the randomness that you may use."
        expect(torch.equal(got, again), own)
        other = call(answer, values=values, step=step, u=1 - u, returns=torch.Tensor)
        unused = "Another u gives the same result: all randomness must come from u."
        expect(not torch.equal(got, other), unused)
    exact = torch.tensor([2.0, -3.0, 0.0])
    u = torch.tensor([0.0, 0.999, 0.5])
    got = call(answer, values=exact, step=0.5, u=u, returns=torch.Tensor)
    expect(got.tolist() == exact.tolist(), "A multiple of `step` has to stay as it is, also where u is 0.")


def _expect_no_bias(got: torch.Tensor, value: float, step: float) -> None:
    counted = step < 0.1 and bool(((got - value / step).abs() <= 1).all())
    expect(not counted, "Your results count steps. Return the multiples themselves: multiply at the end.")
    whole = bool((got / step - (got / step).round()).abs().max() < 1e-4)
    expect(whole, "Not all of your results are multiples of `step`. Divide by it first, multiply by it last.")
    side = "below" if value < 0 else "above"
    fraction = value / step % 1
    up = (got > value).float().mean().item()
    both = 0 < up < 1
    truncated = "All results below zero are the same. Truncation goes up there: what is the multiple below?"
    expect(both or value > 0, truncated)
    expect(both, f"All results {side} zero are the same, so nothing is stochastic. Where does u come in?")
    # of 40,000 draws, 0.02 is at least eight standard deviations
    coin = (
        "You round like a fair coin, which is right only half-way. How often up, close to the lower multiple?"
    )
    expect(abs(up - 0.5) > 0.02 or abs(fraction - 0.5) < 0.05, coin)
    turned = abs(up - (1 - fraction)) < 0.02 < abs(up - fraction)
    expect(not turned, "Reversed: the closer a value is to the multiple above, the more often it goes there.")
    off = f"On average your results are off {side} zero: with what probability up?"
    expect(abs(up - fraction) < 0.02, off)


# --------------------------------------------------------------------------------------------------
# 03.3: exact_step

# shapes of weights
MANY = [(256,)] * 24
UNLIKE = [(3, 7), (1,), (2, 1, 3)]
BITS = (0x7F800000, -0x800000, -(2**31), 1, 0x3F7FFFFF, 0x4048F5C3, -0x7FFF8000, -0x40000001, 0x3F808000)
EXTREMES = torch.tensor(BITS, dtype=torch.int32).view(torch.float32)  # infinite, −0, subnormal, with a carry
WATCHED = {
    "leaf Variable that requires grad": "You copy into a weight while autograd watches: use torch.no_grad()."
}
JOIN_MISTAKES: Mistakes = {  # of the bits handed over and by how much their upper halves are off
    "You convert a weight to an integer and lose its fraction. Read its bits with `view`.": (
        lambda bits, off: not bool((bits & 0xFFFF).any()) and bool((off.abs() > 1).all())
    ),
    "You hand over the weight without its rest, so what the last step saved is lost.": (
        lambda bits, off: not bool((bits & 0xFFFF).any())
    ),
    "Where a rest is negative, the upper half is wrong. Which bits does int32 add to a negative int16?": (
        lambda bits, off: bool(((off == -1) | (bits >> 16 == -1)).all())
    ),
    "Some weights were rounded up, but not their rests. "
    "Cut masters off, or let these rests be negative.": lambda bits, off: bool((off == 1).all()),
}


@exercise("03.3", "Bit by bit the masters of fp32, in 4 bytes per parameter, one at a time.")
def exact_step(answer: Any) -> None:
    """`answer(weights, rests, update)` updates fp32 masters that are kept as bf16 weights and int16 rests."""
    for rate in (1e-2, 1e-5):
        _expect_exact(answer, MANY, partial(_descended, rate=rate))
    _expect_exact(answer, UNLIKE, lambda master, _: EXTREMES.repeat(3)[: master.numel()].view(master.shape))


def _descended(master: torch.Tensor, gradient: torch.Tensor, rate: float) -> torch.Tensor:
    return master - rate * gradient.float()


def _expect_exact(answer: Any, shapes: Sequence[tuple[int, ...]], new: Callable[..., torch.Tensor]) -> None:
    """Raise CheckFailed unless four steps with `new(master, gradient)` are those of fp32, bit by bit."""
    with seeded():
        weights = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
        gradients = [[torch.randn(shape).bfloat16() for shape in shapes] for _ in range(4)]
    rests = [torch.zeros(shape, dtype=torch.int16) for shape in shapes]
    masters = [weight.detach().float() for weight in weights]
    todo: list[Any] = []
    update = _judging_update(todo, new)
    for drawn in gradients:
        todo += zip(masters, drawn, strict=True)
        own = [gradient.clone() for gradient in drawn]
        for weight, gradient in zip(weights, own, strict=True):
            weight.grad = gradient
        old = [weight.detach().clone() for weight in weights]
        lists = ([*weights], [*rests])
        before = [tensor.data_ptr() for tensor in (*weights, *rests)]
        known = [*weights, *rests, *masters, *drawn, *own]
        asked = partial(call, answer, *lists, update, returns=object | None, may_change=(0, 1), hints=WATCHED)
        seen = alive_during(lambda: asked() is None, known)  # noqa: B023
        expect(not todo, "`update` is not called once for every weight.")
        moved = "A weight or a rest is a new tensor: write into the memory that it has."
        expect([tensor.data_ptr() for one in lists for tensor in one] == before, moved)
        for weight, was, right in zip(weights, old, masters, strict=True):
            _expect_upper_half(weight, was, right)
        lost = "All rests are still 0 after a step: what bf16 cannot hold is lost."
        expect(any(rest.any() for rest in rests), lost)
        left = "Something is left after the step. Keep only weights and rests."
        expect(seen.end == 0, left)
        one_by_one = (
            "Several masters exist at once. Put one together, use it, store it, and only then begin the next."
        )
        # 12 fp32 tensors of one weight's size: half as many as there are weights
        expect(seen.peak <= 12 * 4 * 256, one_by_one)


def _judging_update(todo: list[Any], new: Callable[..., torch.Tensor]) -> Callable[[Any, Any], None]:
    """The `update` that learners are given, which takes masters and gradients in turn from `todo`.

    It raises CheckFailed for other ones, and with what a wrong master betrays; then it steps by `new`.
    """

    def update(master: Any, gradient: Any) -> None:
        right, own = todo.pop(0) if todo else (torch.empty(0), torch.empty(0))
        mine = isinstance(gradient, torch.Tensor) and torch.equal(gradient.float(), own.float())
        other = (
            "`update` gets another gradient than the weight's own. Call it once for each weight, in order."
        )
        expect(mine, other)
        fp32 = isinstance(master, torch.Tensor) and master.dtype == torch.float32
        expect(
            fp32 and master.shape == right.shape,
            "`update` adds in fp32. Hand it a float32 tensor of the weight's shape; yours is something else.",
        )
        # as bits, which tell −0 from 0 and find NaN equal to itself
        bits, wanted = (
            one.detach().contiguous().view(torch.int32).flatten().long() for one in (master, right)
        )
        bits, wanted = bits[bits != wanted], wanted[bits != wanted]
        for message, made in JOIN_MISTAKES.items():
            expect(not len(bits) or not made(bits, (bits >> 16) - (wanted >> 16)), message)
        differs = "A master differs from fp32's: compare its bits with those of the weight and the rest."
        expect(not len(bits), differs)
        right.copy_(new(right, own))
        master.detach().copy_(right)

    return update


def _expect_upper_half(weight: torch.Tensor, was: torch.Tensor, master: torch.Tensor) -> None:
    """Raise CheckFailed unless `weight`, before the step `was`, is the upper half of its new master."""
    upper, at_first = (one.detach().view(torch.int16) for one in (weight, was))
    bits = master.view(torch.int32)
    cut = bits.long() >> 16
    rounded = (bits.long() + 0x8000) >> 16  # right, too: its rest may be negative
    near = bool(((upper == cut) | (upper == rounded)).all())
    only_named = "A weight has not changed: `weight = …` is only a name. Write into the memory that it has."
    expect(near or not torch.equal(upper, at_first), only_named)
    number = bits.numel() > 1 and torch.equal(weight.detach(), cut.bfloat16())
    expect(not number, "A weight holds its bits as a number. Write them through a view, as bits.")
    expect(near, "A weight is not its new master's upper half. Do you read the bits after `update`?")


# --------------------------------------------------------------------------------------------------
# 03.4: good_step
SCALE = 2.0**12
NEAR = partial(math.isclose, rel_tol=1e-3)
SITUATIONS: Mapping[str, tuple[Any, ...]] = {  # size of the gradients; place and factor of a single odd one
    "small": (0.03,), "tiny": (2.0**-27,), "large": (1.5,), "infinite": (100.0,),
    "first_infinite": (0.03, 0, 1e4), "last_infinite": (0.03, 3, 1e4), "partly_NaN": (0.03, 2, math.nan),
}  # fmt: skip


def _stepped(one: SimpleNamespace) -> bool:
    return bool(one.taken or one.masters.any())


# conditions on the learner's steps and the right ones; the first that holds is said
STEP_MISTAKES: Mistakes = {
    "The masters do not move: who calls `optimizer.step()`?": lambda got, right: not got.small.masters.any(),
    "The masters move too far: gradients are still scaled when the optimizer, or the clipping, sees them.": (
        lambda got, right: got.small.norm > 2 * right.small.norm
    ),
    "You clip scaled gradients: their norm looks 4,096 times as large, so small ones are clipped too. "
    "Divide first.": (
        lambda got, right: got.small.norm < right.small.norm / 2 and NEAR(got.small.norm, got.large.norm)
    ),
    "Gradients are divided, but were they ever multiplied?": (
        lambda got, right: got.small.norm < right.small.norm / 100
    ),
    "Tiny gradients get lost in fp16: upcast before you divide by the scale.": (
        lambda got, right: not NEAR(got.tiny.norm, right.tiny.norm) and NEAR(got.small.norm, right.small.norm)
    ),
    "Large gradients are not clipped: norm 1 at most.": (
        lambda got, right: got.large.norm > 1.01 * right.large.norm
    ),
    "A step with infinite gradients changes the masters: check first.": (
        lambda got, right: got.infinite.masters.any()
    ),
    "Gradients were infinite, but your function says that it took a step.": (
        lambda got, right: got.infinite.taken
    ),
    "You step although one gradient is infinite: check every number of every weight.": (
        lambda got, right: _stepped(got.first_infinite) or _stepped(got.last_infinite)
    ),
    "You step although a gradient is NaN. A gradient can be worse than infinite.": (
        lambda got, right: _stepped(got.partly_NaN)
    ),
    "The masters move, the fp16 weights do not. The next forward reads the weights.": (
        lambda got, right: not got.small.weights.any()
    ),
    "Gradients are left behind. Both weights and masters have some: clear them all.": (
        lambda got, right: any(one.left for one in vars(got).values())
    ),
    "Gradients of zeros are left behind. How many bytes does a zero take?": (
        lambda got, right: any(one.zeros for one in vars(got).values())
    ),
}


STEPS = "The check takes seven steps. The first one loads torch's optimizers, which can take ten seconds."


@exercise(
    "03.4",
    "Small gradients survive, large ones are clipped, infinite ones change nothing, nothing is left over.",
    first=STEPS,
)
def good_step(answer: Any) -> None:
    """`answer(weights, masters, optimizer, loss, scale)` takes one step in fp16, or none, and says which."""
    theirs = partial(call, answer, returns=bool, may_change=("weights", "masters"), hints=WATCHED)
    got = _left_in_all(theirs)
    right = _left_in_all(_right_step)
    for message, holds in STEP_MISTAKES.items():
        expect(not holds(got, right), message)
    for name, one in vars(right).items():
        what = name.replace("_", " ")
        mine = vars(got)[name]
        off = f"Not yet: look at a step with {what} gradients. What moves, what do you return, what is left?"
        steps = (
            "Your function says that it took no step, but the optimizer has stepped. "
            "Zeros are gradients, too."
        )
        expect(mine.steps == one.steps or mine.taken != one.taken, steps)
        copied = "The weights are no longer fp16: copy the masters' numbers into them."
        expect(mine.dtype == one.dtype, copied)
        moved = same([mine.masters], [one.masters], 1e-5) and same([mine.weights], [one.weights], 1e-3)
        expect(mine.taken == one.taken and moved, off)


def _left_in_all(step: Callable[..., bool]) -> SimpleNamespace:
    return SimpleNamespace(**{name: _left(step, *how) for name, how in SITUATIONS.items()})


def _left(step: Callable[..., bool], size: float, place: int = 0, factor: float = 1.0) -> SimpleNamespace:
    """The state after a step of two fp16 weights of two numbers, with true gradients `size` · (1, 2, 3, 4).

    The gradient at `place` is `factor` times as large.
    """
    weights: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2)]
    masters: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(masters, lr=0.5)
    slopes = torch.tensor([1.0, 2.0, 3.0, 4.0])
    steps = list[int]()
    slopes[place] *= factor
    loss = (torch.cat(weights).float() * slopes).sum() * size
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    taken = step(weights=weights, masters=masters, optimizer=optimizer, loss=loss, scale=SCALE)
    moved, copied = (torch.cat(tensors).detach().float() for tensors in (masters, weights))
    gradients = [one.grad for one in (*weights, *masters) if one.grad is not None]
    left = any(bool(one.any()) for one in gradients)
    norm = moved.norm().item()
    dtype = weights[0].dtype
    return SimpleNamespace(
        masters=moved,
        weights=copied,
        taken=taken,
        left=left,
        zeros=bool(gradients),
        norm=norm,
        steps=steps,
        dtype=dtype,
    )


def _right_step(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    (loss * scale).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad.float() / scale
        weight.grad = None
    taken = bool(torch.nn.utils.clip_grad_norm_(masters, 1.0).isfinite())
    if taken:
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)
    optimizer.zero_grad()
    return taken
