"""Checks of the exercises of lesson 01, "Where did the memory go?": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from course_utils.estimating.published import zero_state_bytes
from course_utils.gpus import gpu
from course_utils.interactive.feedback import (
    CheckFailed,
    call,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
    seeded_sizes,
    unit_slip,
)
from course_utils.interactive.saved import saved_by
from course_utils.models import PRESETS

from .labs import (
    FIT_CASES,
    FIT_MISTAKES,
    FIT_RUN,
    PEAK_MISTAKES,
    STEP,
    TRAIN_MISTAKES,
    Suspect,
    anonymous,
    handed,
    largest_fitting,
    memory_while_training,
    parameters_after,
    peak_bytes,
    peak_cases,
    peak_of,
    real_step,
    small_training,
    suspects,
    train_right,
    watch,
)

__all__ = [
    "FIT_RUN",
    "STEP",
    "anonymous",
    "largest_micro_batch",
    "memory_while_training",
    "peak",
    "read_timeline",
    "real_step",
    "small_training",
    "states",
    "train",
    "weight_gradient",
]

# ------------------------------------------------------------------------------------------------------- 01.1: states

STATES = ("weights", "gradients", "master_weights", "momentum", "variance")

Condition = Callable[[Mapping[str, float]], bool]

STATE_MISTAKES: tuple[tuple[Condition, str], ...] = (
    (
        lambda per: per["weights"] == 4 and per["master_weights"] == 0,
        "That is plain fp32 Adam. Its total happens to be the same, but nothing in it is 16-bit: which two of the five "
        "are, and what is the fp32 copy for?",
    ),
    (
        lambda per: per["master_weights"] == 0,
        "A copy is missing: small updates vanish in 16-bit weights, so the optimizer adds them to a copy of its own.",
    ),
    (
        lambda per: per["master_weights"] == 2,
        "Your master weights are 16-bit. They exist because 16 bits are too coarse to add small updates to.",
    ),
    (lambda per: per["weights"] == 4, "Forward and backward multiply 16-bit weights here: count those, not fp32 ones."),
    (lambda per: per["gradients"] == 0, "No gradients? They are complete at the end of backward, one a parameter."),
    (lambda per: per["gradients"] == 4, "ZeRO keeps each gradient in the format of the weight that it belongs to."),
    (
        lambda per: per["momentum"] + per["variance"] == 4,
        "Half of what Adam keeps. Either you count one of its two states, or you store both in 16-bit; it keeps "
        "two, in "
        "the optimizer's own precision.",
    ),
    (
        lambda per: per["momentum"] == 8 or per["variance"] == 8,
        "Eight bytes for one of Adam's states: that is the two of them together. They are listed one by one here.",
    ),
)


@exercise("01.1", "Five tensors a parameter, each in its own precision, and it holds for any N.")
def states(answer: Any) -> None:
    """`answer(N)` is a dictionary: bytes of the five things that mixed-precision Adam keeps for N parameters."""
    size = 1_000
    got = _states_of(answer, size)
    wanted = dict(zip(STATES, zero_state_bytes(size).values(), strict=True))
    slip = unit_slip(sum(got.values()), sum(wanted.values()))
    expect(not slip, f"The total is {slip}")
    per_parameter = {name: round(value / size, 6) for name, value in got.items()}
    _name_the_mistake(STATE_MISTAKES, per_parameter)
    for count in [size, *seeded_sizes(3), PRESETS["gpt2-xl"].parameters]:
        got, wanted = _states_of(answer, count), zero_state_bytes(count).values()
        for name, right in zip(STATES, wanted, strict=True):
            expect(
                math.isclose(got[name], right, rel_tol=1e-9), f"{name} is off for N={count:_}: bytes times N, no more."
            )


def _states_of(answer: Any, count: int) -> dict[str, float]:
    got = call(answer, N=count, returns=Mapping)
    missing = [name for name in STATES if name not in got]
    expect(not missing, f"Your dictionary has no {' and no '.join(map(repr, missing))}: give each of the five a line.")
    extra = [str(name) for name in got if name not in STATES]
    expect(not extra, f"{', '.join(extra)}: not one of the five. Activations and totals are counted elsewhere.")
    return {name: of_kind(got[name], Real, f"{name} is") for name in STATES}


def _name_the_mistake(mistakes: Iterable[tuple[Condition, str]], found: Mapping[str, float]) -> None:
    for condition, message in mistakes:
        expect(not condition(found), message)


# ---------------------------------------------------------------------------------------------- 01.2: weight_gradient

SHAPES = ((3, 4, 5, 2), (1, 6, 2, 7), (2, 3, 4, 4))
"""Batch, sequence, inputs and outputs of a linear layer."""

SHAPE_ERROR = (
    "Your function multiplies the two element by element. Each weight joins one input to one output, so every input "
    "meets every output: that is a matrix product."
)


@exercise("01.2", "The same as autograd's, from x and dL/dy alone. That x is what forward had to keep.")
def weight_gradient(answer: Any) -> None:
    """`answer(x, dy)` is dL/dW of y = x·Wᵀ for x of shape (b, s, inputs) and dL/dy of shape (b, s, outputs)."""
    for shape in SHAPES:
        x, dy, wanted = _linear_case(*shape)
        hints = {"at non-singleton dimension 2": SHAPE_ERROR}
        got = _call_with_hints(answer, hints, x=x, dy=dy, returns=torch.Tensor).detach()
        _expect_weights_shape(got, x, dy, wanted)
        _expect_weights_gradient(got, x, dy, wanted)


def _linear_case(b: int, s: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x and dL/dy, and autograd's dL/dW."""
    dice = torch.Generator().manual_seed(b + s)
    x, dy = torch.randn(b, s, inputs, generator=dice), torch.randn(b, s, outputs, generator=dice)
    weight = torch.zeros(outputs, inputs, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.nn.functional.linear(x, weight), weight, dy)
    return x, dy, wanted


def _expect_weights_shape(got: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, wanted: torch.Tensor) -> None:
    b, s, inputs = x.shape
    outputs = dy.size(-1)
    by_shape: dict[tuple[int, ...], str] = {
        (
            inputs,
            outputs,
        ): "The shape is turned round: W has a row for each output, as in y = x·Wᵀ. So has its gradient.",
        (b, outputs, inputs): "One gradient for each sequence. They share one W, so their gradients add up.",
        (b, s, outputs, inputs): "One gradient for each token. They share one W, so their gradients add up.",
        (b, s, inputs): "That has the shape of x: is it dL/dx? The question is dL/dW.",
        (b, inputs, outputs): "One gradient for each sequence, turned round too. They share one W: add them up.",
    }
    shape = tuple(got.shape)
    if shape != tuple(wanted.shape):
        fail(
            by_shape.get(
                shape, f"Your gradient has the shape {shape}. A gradient has the shape of what it belongs to: W."
            )
        )


def _expect_weights_gradient(got: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, wanted: torch.Tensor) -> None:
    b, s = x.shape[:2]
    first = torch.einsum("so,si->oi", dy[0], x[0])
    last = torch.einsum("bo,bi->oi", dy[:, -1], x[:, -1])
    mean = "A mean over {}. If the loss is a mean, dL/dy has that factor in it already: add up, don't average."
    mistakes = [
        (wanted / (b * s), mean.format("all tokens")),
        (wanted / b, mean.format("the sequences")),
        (wanted / s, mean.format("the positions")),
        (first, "Only the first sequence of the batch is in it. Every token used W, so every token has a say."),
        (last, "Only the last token of each sequence is in it. Every token used W, so every token has a say."),
        (-wanted, "The sign is turned round: this is the gradient, not the step that goes against it."),
    ]
    if wanted.size(0) == wanted.size(1):
        mistakes.append(
            (wanted.T, "Turned round: with as many inputs as outputs the shape cannot tell you, the values do.")
        )
    if _close(got, wanted):
        return
    for wrong, message in mistakes:
        expect(not _close(got, wrong), message)
    fail("The shape is right, the values are not those of autograd. Compare one entry by hand: outputs o, inputs i.")


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(got.to(wanted.dtype), wanted, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- 01.3: peak

NONE_COMPARED = (
    "Your function compares an event with None. A tensor whose `died` is None never dies: decide about it before you "
    "compare."
)


@exercise("01.3", "The largest sum of what is alive at once, in made-up steps and in one that really ran.")
def peak(answer: Any) -> None:
    """`answer(tensors)` is the most bytes alive at once; tensors are (name, bytes, born, died), `died` may be None."""
    cases = peak_cases()
    hints = {"NoneType": NONE_COMPARED}
    answers = [_call_with_hints(answer, hints, tensors=list(case)) for case in cases]
    _recognize(answers, [(case,) for case in cases], peak_of, PEAK_MISTAKES)
    for case, got in zip(cases, answers, strict=True):
        expect(got == peak_of(case), f"Not right yet for a list of {len(case)} tensors: draw each one's life as a bar.")


# ------------------------------------------------------------------------------------------ 01.4: largest_micro_batch

NOTHING_FITS = "Your function stumbles where nothing fits at all: think of a card that is too small, and return 0."


@exercise("01.4", "The largest micro-batch that fits, on cards from 16 to 80 GB, its companions' gradients included.")
def largest_micro_batch(answer: Any) -> None:
    """`answer(card, global_batch)` is the largest micro-batch of FIT_RUN that divides the batch and fits; 0 if none."""
    hints = {"is empty": NOTHING_FITS, "empty sequence": NOTHING_FITS, "list index out of range": NOTHING_FITS}
    answers = [_call_with_hints(answer, hints, card=card, global_batch=batch) for card, batch in FIT_CASES]
    for (card, batch), got in zip(FIT_CASES, answers, strict=True):
        expect(got == int(got) and got >= 0, f"A micro-batch is a whole number of sequences, for {card} too.")
        whole = not got or batch % int(got) == 0
        expect(
            whole, f"Your micro-batch for {card} does not divide the batch of {batch}: the last one would be smaller."
        )
    _recognize(answers, FIT_CASES, largest_fitting, FIT_MISTAKES)
    for (card, batch), got in zip(FIT_CASES, answers, strict=True):
        _expect_largest(card, batch, int(got))


def _expect_largest(card: str, batch: int, got: int) -> None:
    nothing = got and not largest_fitting(card, batch)
    expect(not nothing, f"On {card} not even one sequence fits, with a batch of {batch}: return 0 there.")
    too_large = got and peak_bytes(got, batch) > gpu(card).memory
    expect(
        not too_large, f"On {card}, with a batch of {batch}, your micro-batch does not fit: compare bytes with bytes."
    )
    expect(
        got >= largest_fitting(card, batch), f"On {card}, with a batch of {batch}, a larger micro-batch fits as well."
    )


# -------------------------------------------------------------------------------------------------------- 01.5: train

TRAIN_HINTS = {
    "does not require grad": (
        "There is nothing left to differentiate: what you call backward() on has lost its graph. Let each "
        "batch's loss go "
        "backward before you turn it into a plain number."
    ),
    "through the graph a second time": (
        "You send a batch's graph backward twice: your running total carries the graphs of all batches before. "
        "Send each "
        "batch's own loss backward, and add up plain numbers."
    ),
}


@exercise("01.5", "One batch's activations at a time, the same step to rounding, and the right mean loss.")
def train(answer: Any) -> None:
    """`answer(model, batches, optimizer)` takes one step on the mean loss of all batches and returns that mean."""
    got = _train_result(answer)
    _expect_no_leak(answer)
    _expect_parameters(answer)
    _expect_mean_loss(got)


def _train_result(answer: Any) -> float:
    """What the learner's function returns, as a plain number."""
    model, batches, optimizer = small_training(4)
    kinds = (Real, torch.Tensor)
    got = _call_with_hints(answer, TRAIN_HINTS, model=model, batches=batches, optimizer=optimizer, returns=kinds)
    if isinstance(got, torch.Tensor):
        expect(
            not got.requires_grad,
            "You return a tensor with its graph behind it: whoever keeps it keeps all that. `.item()` makes it "
            "a number.",
        )
        expect(got.numel() == 1, "You return several losses. Their mean, one number, was asked for.")
    return float(got)


def _expect_no_leak(answer: Callable[..., object]) -> None:
    model, batches, _ = small_training(1)
    one_batch = sum(item.bytes for item in saved_by(model, batches[0][0]))
    few, many, right = watch(answer, 2), watch(answer, 6), watch(train_right, 6)
    growth = (many.peak - few.peak) / 4
    begins, wanted = (max(watched.moments[1:-1], default=0) for watched in (many, right))
    expect(
        len(many.moments) > 2 or growth < one_batch / 2,
        "All batches go forward as one. Then all their activations are alive at once, too: take them one by one.",
    )
    expect(
        growth < one_batch / 2,
        "Each batch adds its activations to those of all before: the leak is still there. Who holds on to a "
        "loss that has "
        "its graph behind it? Adding to it, or storing it, keeps the graph; `del` of another name does not free it.",
    )
    expect(growth < one_batch / 50, "Something small still grows with each batch: do you collect outputs in a list?")
    expect(
        begins - wanted < one_batch / 4,
        "Nothing grows any more, but two batches' activations are alive at once. Who still holds the graph of "
        "the batch "
        "before? Backward frees it, unless it is told to retain it.",
    )


def _expect_parameters(answer: Callable[..., object]) -> None:
    got, wanted = parameters_after(answer), parameters_after(train_right)
    if not _close(got, wanted):
        for other, message in TRAIN_MISTAKES:
            expect(not _close(got, parameters_after(other)), message)
        fail("The parameters differ from those after one step on the mean loss of all batches. What else changes them?")
    expect(
        _close(parameters_after(answer, calls=2), parameters_after(train_right, calls=2)),
        "The first call is right, the second is not: it starts with gradients that the first one left behind.",
    )


def _expect_mean_loss(got: float) -> None:
    model, batches, _ = small_training(4)
    losses = [torch.nn.functional.cross_entropy(model(inputs), targets).item() for inputs, targets in batches]
    mean = sum(losses) / len(losses)
    mistakes = [
        (losses[-1], "You return the last batch's loss. The mean of all was asked for."),
        (losses[-1] / len(losses), "You return the last batch's part of the loss. The mean of all was asked for."),
        (sum(losses), "You return the sum of the losses. Their mean was asked for."),
        (
            mean / len(losses),
            "The mean that you return is divided twice: the losses that you add up are parts already.",
        ),
    ]
    if not math.isclose(got, mean, rel_tol=1e-4):
        for wrong, message in mistakes:
            expect(not math.isclose(got, wrong, rel_tol=1e-4), message)
        fail("The parameters are right, the loss that you return is not the mean of the batches' losses.")


# ------------------------------------------------------------------------------------------------ 01.6: read_timeline

ASKED = ("micro_batch", "precision", "recompute")


@exercise("01.6", "Batch, precision and recomputation of every hidden run, read off its memory alone.")
def read_timeline(answer: Any) -> None:
    """`answer(measurement, seq_len)` is a dictionary: micro_batch, precision, recompute, as a TrainingRun has them."""
    hidden = suspects()
    answers = [_reading(answer, suspect) for suspect in hidden]
    expect(
        any(other != answers[0] for other in answers),
        "You give the same answer whatever the measurement says. The hidden runs differ.",
    )
    _expect_micro_batches([reading["micro_batch"] for reading in answers], hidden)
    for reading, suspect in zip(answers, hidden, strict=True):
        _expect_precision(str(reading["precision"]), suspect.run.precision.name)
    _expect_recompute([str(reading["recompute"]) for reading in answers], hidden)


def _reading(answer: Any, suspect: Suspect) -> dict[str, Any]:
    """The learner's dictionary for one hidden run, True and False spelled as "full" and "none"."""
    hints = {
        "index out of range": "The list of tensors has been taken out of these measurements: use their timeline "
        "and their moments."
    }
    given = {"measurement": handed(suspect.measurement), "seq_len": suspect.run.seq_len}
    got = _call_with_hints(answer, hints, **given, returns=Mapping)
    entries(got, ASKED, object)
    of_kind(got["micro_batch"], Real, "micro_batch is")
    of_kind(got["precision"], str, "precision is")
    choice = got["recompute"]
    spelled = ("full" if choice else "none") if isinstance(choice, bool) else of_kind(choice, str, "recompute is")
    expect(spelled in ("full", "none"), "recompute is 'full' or 'none', as in a TrainingRun.")
    return {**got, "recompute": spelled}


def _expect_micro_batches(got: Sequence[float], hidden: Sequence[Suspect]) -> None:
    right = [suspect.run.micro_batch for suspect in hidden]
    tokens = [suspect.run.micro_batch * suspect.run.seq_len for suspect in hidden]
    mistakes = [
        (tokens, "Those are tokens, s·b. How many sequences is that?"),
        ([2 * size for size in right], "Twice too many: are the token ids all that there is among the inputs?"),
        (
            [size / 2 for size in right],
            "Half of it: how many bytes does one token id take, and how many tensors are there?",
        ),
        ([8 * size for size in right], "Eight times too many: how many bytes does one token id take?"),
        ([16 * size for size in right], "Sixteen times too many: you took bytes for tokens, and two tensors for one."),
        ([16 * count for count in tokens], "Those are the bytes of the inputs. How many sequences is that?"),
    ]
    if list(got) == right:
        return
    for wrong, message in mistakes:
        expect(list(got) != wrong, message)
    fail(
        "The micro-batch is off. Which kind of memory depends on s and b alone, whatever the model and its "
        "precision are?"
    )


def _expect_precision(got: str, right: str) -> None:
    if got == right:
        return
    known = ("fp32", "amp-bf16", "bf16-master")
    expect(got in known, f"The precisions to choose from are {', '.join(known)}; you say {got!r}.")
    expect(
        "bf16-master" in (got, right),
        "You take autocast for fp32, or the reverse. Weights, gradients and states are alike in both: which kind of "
        "memory exists under only one of them, and at which moment?",
    )
    fail("The precision is off: how many times as large as the parameters are the optimizer's states, and why?")


def _expect_recompute(got: Sequence[str], hidden: Sequence[Suspect]) -> None:
    right = [suspect.run.recompute for suspect in hidden]
    if list(got) == right:
        return
    opposite = ["none" if choice == "full" else "full" for choice in right]
    expect(list(got) != opposite, "Turned round: you say 'full' exactly where nothing is recomputed.")
    peaks = {
        choice: [suspect.measurement.peak for suspect, said in zip(hidden, got, strict=True) if said == choice]
        for choice in ("none", "full")
    }
    if not peaks["none"] or not peaks["full"]:
        fail(
            "You say the same about recomputation in every run. In some of them activations come back during backward."
        )
    judged = max(peaks["full"]) < min(peaks["none"])
    expect(
        not judged, "You seem to judge by the height of the peak. A small batch is low, too; look at backward instead."
    )
    fail("Recomputation is off: what do the activations do during backward when a block's forward runs a second time?")


# ------------------------------------------------------------------------------------------------------ shared by some


def _call_with_hints(answer: Any, hints: Mapping[str, str], **arguments: Any) -> Any:
    """`call`, with telling errors explained: `hints` maps a part of an error's text to what to say instead."""
    try:
        return call(answer, **arguments)
    except CheckFailed as problem:
        for part, message in hints.items():
            if part in str(problem) and problem.__cause__ is not None:
                raise CheckFailed(message) from problem
        raise


def _recognize(
    answers: Sequence[Any],
    cases: Sequence[tuple[Any, ...]],
    right: Callable[..., Any],
    mistakes: Mapping[str, Callable[..., Any]],
) -> None:
    """Raise CheckFailed with the message of the mistake that gives these very answers, unless they are all right."""
    if list(answers) == [right(*case) for case in cases]:
        return
    for message, mistaken in mistakes.items():
        expect(list(answers) != [mistaken(*case) for case in cases], message)
