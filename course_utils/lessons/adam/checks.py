"""Checks of the exercises of lesson 02, "Adam": each names the misconception, never the answer."""

from collections.abc import Sequence
from typing import Any

import torch

from course_utils.interactive.feedback import (
    CheckFailed,
    NotSolved,
    alike,
    by_name,
    call,
    call_for_effect,
    exercise,
    expect,
    fail,
    seeded_sizes,
    unit_slip,
)

from .by_hand import kept_tensors
from .labs import (
    RATE_CASES,
    RATE_MISTAKES,
    STATE_MISTAKES,
    STATES,
    STEP_MISTAKES,
    TRANSIENT_MISTAKES,
    Trial,
    best_rate_of,
    gpt2_shapes,
    last_state,
    one_adam_step,
    shape_cases,
    state_bytes_of,
    transient_of,
    trial,
    walk_with,
)

__all__ = ["adam_step", "best_rate", "frugal", "gpt2_shapes", "lean_adam", "state_bytes", "step_transient", "trial"]

# -------------------------------------------------------------------------------------------------- 02.1: state_bytes


@exercise("02.1", "Five optimizers, from nothing to two numbers a parameter, for a matrix of any shape.")
def state_bytes(answer: Any) -> None:
    """`answer(optimizer, rows, columns)` is the bytes of an fp32 matrix's optimizer states."""
    shapes = [(512, 1024), *((256 * count, 768) for count in seeded_sizes(3, 2, 200))]
    for optimizer in STATES:
        got = [float(call(answer, optimizer=optimizer, rows=rows, columns=columns)) for rows, columns in shapes]
        wanted = [float(state_bytes_of(optimizer, *shape)) for shape in shapes]
        if alike(got, wanted, 1e-9):
            continue
        for message, mistaken in STATE_MISTAKES.get(optimizer, {}).items():
            expect(not alike(got, [float(mistaken(*shape)) for shape in shapes], 1e-9), f"{optimizer}: {message}")
        slip = unit_slip(got[0], wanted[0])
        expect(not slip, f"{optimizer}: {slip}")
        rows, columns = next(shape for shape, one, right in zip(shapes, got, wanted, strict=True) if one != right)
        fail(f"{optimizer} is off for a matrix of {rows} × {columns} fp32 numbers.")


# ---------------------------------------------------------------------------------------------------- 02.2: best_rate


@exercise("02.2", "The best step size for any curvatures, and your walks get there in no more steps than ours.")
def best_rate(answer: Any) -> None:
    """`answer(curvatures)` is the learning rate at which gradient descent shrinks its worst direction the most."""
    got = [float(call(answer, curvatures=list(case))) for case in RATE_CASES]
    wanted = [best_rate_of(case) for case in RATE_CASES]
    expect(all(rate > 0 for rate in got), "A learning rate of 0 or less goes nowhere, or uphill.")
    if alike(got, wanted, 1e-3):
        return
    for message, mistaken in RATE_MISTAKES.items():
        expect(not alike(got, [mistaken(case) for case in RATE_CASES], 1e-3), message)
    for rate, case in zip(got, RATE_CASES, strict=True):
        expect(rate < 2 / max(case), "With your rate the steepest direction grows: each step multiplies it by 1 − η·c.")
    fail("Your walks arrive, but later than they could: in one direction the factor |1 − η·c| is larger than needed.")


# ---------------------------------------------------------------------------------------------------- 02.3: adam_step


@exercise("02.3", "Your Adam walks with PyTorch's, step by step, weights and both states.")
def adam_step(answer: Any) -> None:
    """`answer(weight, gradient, m, v, step, rate, beta1, beta2, epsilon)` updates weight, m and v in place."""
    got = walk_with(lambda *given: _step(answer, *given))
    start = last_state(walk_with(lambda *_: None))
    now = last_state(got)
    for name, before, after in zip(("weight", "m", "v"), start, now, strict=True):
        expect(after.isfinite().all(), f"{name} holds numbers that are not finite: what do you divide by?")
        expect(
            not torch.equal(before, after),
            f"{name} has not changed. `{name} = …` makes a new tensor; to change the one that was handed over use "
            "methods that end in _, such as mul_ and add_.",
        )
    right = walk_with(one_adam_step)
    if _same(got, right):
        return
    for message, mistaken in STEP_MISTAKES.items():
        expect(not _same(got, walk_with(mistaken)), message)
    _expect_parts(got, right)


def _step(answer: Any, *given: Any) -> None:
    """One step of the learner's walk."""
    names = ("weight", "gradient", "m", "v", "step", "rate", "beta1", "beta2", "epsilon")
    call_for_effect(answer, **by_name(names, given))


Walk = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _same(one: Walk, other: Walk) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for x, y in pairs for a, b in zip(x, y, strict=True))


def _expect_parts(got: Walk, right: Walk) -> None:
    for index, name in ((1, "m"), (2, "v")):
        close = all(torch.allclose(x[index], y[index], rtol=1e-4, atol=1e-7) for x, y in zip(got, right, strict=True))
        expect(close, f"{name} is off: a running mean keeps β of itself and takes 1 − β of what is new.")
    first = torch.allclose(got[0][0], right[0][0], rtol=1e-4, atol=1e-7)
    expect(first, "m and v are right, the weight is off from the first step on.")
    fail("The first step is right, later ones are not: what in the update depends on the number of the step?")


# ----------------------------------------------------------------------------------------------- 02.4: step_transient


@exercise("02.4", "What comes and goes in the step, three ways, for any list of parameters.")
def step_transient(answer: Any) -> None:
    """`answer(sizes, how)` is the most bytes alive at once beside weights, gradients and states."""
    cases = shape_cases()
    for how in ("fused", "foreach", "loop"):
        got = [float(call(answer, sizes=list(sizes), how=how)) for sizes in cases]
        wanted = [float(transient_of(sizes, how)) for sizes in cases]
        if alike(got, wanted, 1e-9):
            continue
        for message, mistaken in TRANSIENT_MISTAKES[how].items():
            expect(not alike(got, [float(mistaken(sizes)) for sizes in cases], 1e-9), f"{how}: {message}")
        off = next(sizes for sizes, one, right in zip(cases, got, wanted, strict=True) if one != right)
        whose = f"parameters of {off} numbers" if len(off) < 9 else "GPT-2's parameters"
        fail(f"{how} is off for {whose}: count what is alive, event by event.")


# ----------------------------------------------------------------------------------------------------- 02.5: lean_adam

LEAN_BYTES = {
    4: "One number per parameter is too few: Adam needs m and v from one step to the next.",
    12: "Three numbers per parameter: which of them can be computed again from the others, when it is needed?",
    16: "Still four numbers per parameter. Ask of each: does the *next* step read it?",
}


@exercise("02.5", "Two states per parameter and not one more, and the weights are those of plain Adam.")
def lean_adam(answer: Any) -> None:
    """`answer(parameters, rate)` makes a plain Adam with a `step()` and 8 bytes per parameter."""
    right, got = trial(one_by_hand, steps=4), _tried(answer, steps=4)
    _expect_clean(got)
    per = got.kept / got.parameters
    expect(
        per > 7.5 or not _has_16_bits(got),
        f"{per:.1f} bytes per parameter: you store moments in 16 bits. Here each takes 4 bytes, as in PyTorch: v moves "
        "by a thousandth of its distance in a step, and bf16 is too coarse for that.",
    )
    for bytes_each, message in LEAN_BYTES.items():
        expect(abs(per - bytes_each) > 0.5, message)
    expect(per < 8.5, f"It keeps {per:.1f} bytes per parameter after four steps. Which tensors does it hold on to?")
    expect(
        per > 7.5, f"It keeps {per:.1f} bytes per parameter from step to step. Where are m and v of every parameter?"
    )
    decayed = trial(one_that_decays, steps=4)
    expect(
        _distance(got, decayed) >= 0.1 * _distance(got, right),
        "The memory is right. But your weights shrink on their own: that is AdamW. Plain Adam has no weight decay.",
    )
    if _weights_close(got, right):
        again = _tried(answer, steps=4)
        expect(_weights_close(again, right), "Right once. A second training ends elsewhere: what is left of the first?")
        return
    expect(
        not _weights_close(got, trial(one_that_counts_parameters, steps=4)),
        "The memory is right. The weights are not: they are those of the colleague's. What counts the steps, and how "
        "often is it told?",
    )
    fail("The memory is right, but the weights are not Adam's after four steps.")


def one_by_hand(parameters: Sequence[torch.Tensor], rate: float) -> Any:
    """An Adam that is right."""
    return torch.optim.Adam(parameters, lr=rate, foreach=False)


def one_that_decays(parameters: Sequence[torch.Tensor], rate: float) -> Any:
    """AdamW with torch's weight decay, where plain Adam is asked for."""
    return torch.optim.AdamW(parameters, lr=rate, foreach=False)


def one_that_counts_parameters(parameters: Sequence[torch.Tensor], rate: float) -> Any:
    """The colleague's mistake in arithmetic: one step is counted for each parameter."""
    return _CountsParameters(parameters, rate)


class _CountsParameters:
    def __init__(self, parameters: Sequence[torch.Tensor], rate: float) -> None:
        self.parameters, self.rate, self.steps = list(parameters), rate, 0
        self.m = [torch.zeros_like(weight) for weight in self.parameters]
        self.v = [torch.zeros_like(weight) for weight in self.parameters]

    def step(self) -> None:
        for weight, m, v in zip(self.parameters, self.m, self.v, strict=True):
            self.steps += 1
            one_adam_step(weight.data, weight.grad, m, v, self.steps, self.rate, 0.9, 0.999, 1e-8)


def _tried(answer: Any, **how: Any) -> Trial:
    """Train with the learner's optimizer; whatever goes wrong in it becomes one line."""
    expect(callable(answer), "Hand over the class itself: its name, without parentheses.")
    try:
        return trial(answer, **how)
    except (NotSolved, CheckFailed):
        raise
    except AttributeError as error:
        if "'step'" in str(error):
            raise CheckFailed("What you hand over makes nothing that has a `step()`: hand over the class.") from error
        raise CheckFailed(f"In training, your optimizer raised AttributeError: {error}") from error
    except Exception as error:  # whatever a learner's code raises is turned into words
        raise CheckFailed(f"In training, your optimizer raised {type(error).__name__}: {error}") from error


def _expect_clean(got: Trial) -> None:
    expect(got.moved, "The weights do not move: change them in place, as weight.sub_(…) does, under torch.no_grad().")
    expect(not got.diverged, "The weights are not finite any more: what do you divide by?")
    graphs = any(tensor.grad_fn is not None for tensor in kept_tensors(got.optimizer))
    expect(not graphs, "A state has a graph behind it, which keeps more alive each step: put step under no_grad.")
    expect(
        got.held <= got.held_before or not got.held_before,
        "What it keeps grows from step to step: is something appended to a list?",
    )


def _has_16_bits(got: Trial) -> bool:
    return any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in got.formats)


def _distance(one: Trial, other: Trial) -> float:
    """How far the weights of two trainings are apart, all of them together."""
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
    expect(
        per <= MOST_BYTES or hidden < 0.1,
        f"A step of it reads {hidden:.2f} bytes per parameter that outlive the step outside of the optimizer: on the "
        "weights, in a global or in a closure. They are memory all the same. With them it keeps "
        f"{per:.2f}, and the limit is {MOST_BYTES}.",
    )
    expect(
        per <= MOST_BYTES,
        f"It keeps {per:.2f} bytes per parameter, and the limit is {MOST_BYTES}. Two fp32 numbers are too many: keep "
        "one, or keep less precise ones, or share them among a row and a column.",
    )
    loud = _tried(answer, steps=60, louder=1024.0)
    expect(
        not loud.diverged and abs(loud.final - got.final) < 0.15,
        "With a loss 1,024 times as large it trains otherwise: the length of your step follows the size of the "
        "gradient. What does Adam divide by?",
    )
    expect(
        got.final <= BEST_LOSS,
        f"After 60 steps the loss is {got.final:.2f}, and it should be at most {BEST_LOSS}: is the rate too small, or "
        "so large that it jumps about? Try a few.",
    )
    print(f"{per:.2f} bytes per parameter")
