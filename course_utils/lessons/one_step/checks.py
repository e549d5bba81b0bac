"""Checks of lesson 01, "Where did the memory go?": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import eq
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ... import TrainingRun, estimate, gpu, measure
from ...interactive.feedback import Mistakes, alike, call, divisors, entries, exercise, expect, recognized
from ...interactive.saved_tensors import saved_by
from ...units import BLOCK, round_up
from ..shared.judging import Alive, alive_during, same, seeded

# --------------------------------------------------------------------------------------------------
# 01.1: peak

# a tensor's name, its bytes, the events of its birth and its death (None: it stays)
Life = tuple[str, int, int, int | None]
STEP: list[Life] = [  # a small made-up step, to count by hand
    ("logits", 50, 3, 4), ("activation 1", 30, 1, 6), ("weights", 40, 0, None), ("gradient 1", 20, 6, None),
    ("scratch of layer 1", 60, 1, 2), ("gradient of the logits", 50, 4, 5), ("input", 10, 0, None),
    ("activation 2", 30, 2, 5), ("gradient 2", 20, 5, None),
]  # fmt: skip
# its largest tensor is born after the last death, as Adam's states are
LATE: list[Life] = [("weights", 10, 0, None), ("activation", 5, 1, 2), ("states", 100, 3, None)]


@cache
def real_step() -> tuple[tuple[Life, ...], int]:
    """Return every tensor of two steps of a tiny GPT on the CPU, and the most bytes allocated at once."""
    measured = measure(TrainingRun("tiny-gpt", 2, 32, "fp32", attention="eager"), source="cpu")
    lives = tuple((item.operation, item.bytes, item.born, item.died) for item in measured.allocations)
    return lives, max(measured.timeline.totals())


def _peak(lives: Sequence[Life], late: int = 0, never: float = math.inf) -> int:
    """The right answer. A mistaken one lets tensors die `late`, or those with None at the event `never`."""
    known = [(size, born, never if died is None else died + late) for _, size, born, died in lives]
    # The sum rises only where a tensor is born, so the peak is at one of these events.
    return max(sum(size for size, born, died in known if born <= event < died) for _, event, _ in known)


PEAK_MISTAKES: Mistakes = {
    "You added up everything that ever lived.": lambda lives: sum(size for _, size, _, _ in lives),
    "You count a tensor at the event of its death. It is free there.": partial(_peak, late=1),
    "Tensors with None are missing from your sum. They stay to the end.": partial(_peak, never=-1),
    "You treat None as the last event. Such a tensor is alive after it, too.": (
        lambda lives: _peak(lives, never=max(died for *_, died in lives if died is not None))
    ),
}
COMPARES = "You compare an event with None. A tensor with None never dies: handle it before you compare."


@exercise("01.1", "The largest sum of what is alive at once, in made-up steps and in a real one.")
def peak(answer: Any) -> None:
    """`answer(tensors)` is the most bytes alive at once.

    Tensors are (name, bytes, born, died); `died` may be None.
    """
    cases = [STEP, LATE, list(real_step()[0])]
    answers = [call(answer, hints={"NoneType": COMPARES}, tensors=list(case)) for case in cases]
    otherwise = (
        "Draw each life as a bar, in any order, and add up what is alive at each event. Names may repeat."
    )
    recognized(answers, [(case,) for case in cases], _peak, PEAK_MISTAKES, otherwise, eq)


# --------------------------------------------------------------------------------------------------
# 01.2: weigh
KINDS = ("weights", "master_weights", "gradients", "states")


def _tied_and_frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    model(torch.ones(8, 16)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return model, optimizer


def _buffers_and_masters() -> tuple[nn.Module, torch.optim.Optimizer]:
    weights, gradients = (torch.ones(1000, dtype=torch.bfloat16)[:900].split(300) for _ in range(2))
    model = nn.ParameterList(weights)
    masters = [weight.detach().float() for weight in model]
    for weight, master, gradient in zip(model, masters, gradients, strict=True):
        weight.grad, master.grad = gradient, gradient.float()
    optimizer = torch.optim.AdamW([{"params": masters[:1]}, {"params": masters[1:]}])
    optimizer.step()
    optimizer.state[masters[0]]["calls"] = 1  # not every state is a tensor
    return model, optimizer


def _no_step_yet() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(16, 16)
    return model, torch.optim.AdamW([weight.detach().float() for weight in model.parameters()])


BUFFER = "All parameters are slices of one buffer here. The whole buffer is alive, and it counts once."
# of each run, the bytes of each of KINDS, and what is said if they are off; AdamW's `step` takes 4 bytes
WEIGHED = {
    _tied_and_frozen: (
        (4 * (256 + 4 * 16), "Some weights are frozen here, two layers share one. Buffers are not weights."),
        (0, "There is no master copy here: this optimizer updates the model's own weights."),
        (4 * (256 + 2 * 16), "The gradients are off: each parameter that took part in backward has one."),
        (8 * (256 + 2 * 16) + 3 * 4, "Do you count AdamW's `step`? It is a tensor too, with one number."),
    ),
    _buffers_and_masters: (
        (2 * 1000, BUFFER),
        (4 * 900, "This optimizer updates fp32 copies of the weights, in two groups. Where are they?"),
        (2 * 1000 + 4 * 900, f"{BUFFER} And the fp32 copies have gradients of their own."),
        (8 * 900 + 3 * 4, "Which keys has `optimizer.state`? They need not be the model's parameters."),
    ),
    _no_step_yet: (
        (4 * (256 + 16), "All of `model.parameters()` are weights, before the first step as well."),
        (0, "`.float()` of an fp32 weight makes no copy: it has the weight's own storage."),
        (0, "Before the first backward there are no gradients. Where do yours come from?"),
        (0, "Before the first step there are no states. Where do yours come from?"),
    ),
}
WEIGH_HINTS = {
    "'NoneType' object has no attribute": "Not every parameter has a gradient: its `.grad` may be None.",
    "'int' object has no attribute": "Not every state is a tensor: ask `torch.is_tensor`.",
}


@exercise("01.2", "Every byte that a model and its optimizer hold, counted once, in three runs.")
def weigh(answer: Any) -> None:
    """`answer(model, optimizer)` is a dictionary: bytes of weights, master_weights, gradients and states."""
    for run, kinds in WEIGHED.items():
        model, optimizer = run()
        asked = partial(call, answer, hints=WEIGH_HINTS, model=model, optimizer=optimizer, returns=Mapping)
        got, again = (entries(asked(), KINDS) for _ in range(2))
        expect(got == again, "Your function changes what it should only read.")
        numbers = "You count numbers, not bytes: how many bytes does each take?"
        for kind, (wanted, message) in zip(KINDS, kinds, strict=True):
            expect(4 * got[kind] != wanted or not wanted, numbers)
            expect(got[kind] == wanted, message)


# --------------------------------------------------------------------------------------------------
# 01.3: largest_micro_batch

# the run that has to fit: everything but its batch
FIT_RUN = TrainingRun("gpt2-xl", seq_len=1024, precision="bf16-master", attention="flash", recompute="full")
FIT_CASES = (
    ("V100-32GB", 32), ("V100-32GB", 40), ("V100-32GB", 37), ("A100-40GB", 44), ("A100-80GB", 150),
    ("RTX3090-24GB", 32), ("T4-16GB", 32),
)  # fmt: skip


def _largest(card: str, batch: int, memory: int | None = None, accumulate: bool = True) -> int:
    """The right answer. A mistaken one has other `memory`, or does not `accumulate` gradients."""
    limit = gpu(card).room if memory is None else memory
    runs = [FIT_RUN.replace(micro_batch=b, global_batch=batch if accumulate else b) for b in divisors(batch)]
    return max((run.micro_batch for run in runs if estimate(run).total <= limit), default=0)


FIT_MISTAKES: Mistakes = {
    "You estimated one micro-batch on its own. From the second one on, earlier gradients take memory too.": (
        partial(_largest, accumulate=False)
    ),
    "You took `gpu(card).memory`, what the driver lists. How much of it does a program get?": (
        lambda card, batch: _largest(card, batch, gpu(card).memory)
    ),
    "You returned the whole batch, whether it fits or not: compare its peak with `gpu(card).room`.": (
        lambda card, batch: batch
    ),
}
NOTHING_FITS = "Your function fails when nothing fits. Think of a card that is too small, and return 0."
FIT_HINTS = {
    **dict.fromkeys(("is empty", "empty sequence", "list index out of range"), NOTHING_FITS),
    "is not a multiple of": "You try a micro-batch that does not divide the batch. Skip those.",
}


@exercise(
    "01.3",
    "The largest micro-batch that fits, on cards from 16 to 80 GB, with the gradients of earlier ones.",
)
def largest_micro_batch(answer: Any) -> None:
    """`answer(card, global_batch)` is FIT_RUN's largest micro-batch that divides the batch and fits, or 0."""
    answers = [call(answer, hints=FIT_HINTS, returns=int, card=c, global_batch=b) for c, b in FIT_CASES]
    otherwise = "Yours fit, but on at least one card a larger micro-batch fits too."
    for (card, batch), got in zip(FIT_CASES, answers, strict=True):
        divides = f"Your micro-batch for {card} does not divide the batch of {batch}."
        expect(got in (0, *divisors(batch)), divides)
        if got > _largest(card, batch):
            otherwise = f"On {card} your micro-batch for {batch} needs more than a program gets."
    recognized(answers, FIT_CASES, _largest, FIT_MISTAKES, otherwise, eq)


# --------------------------------------------------------------------------------------------------
# 01.4: train
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def small_training(batches: int, rows: int = 64) -> tuple[nn.Sequential, Batches, torch.optim.Optimizer]:
    """Return a small network, `batches` batches of (inputs, classes), and SGD: always the same."""
    with seeded(5):
        layers = (nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
        model = nn.Sequential(*layers)
        data = [(torch.randn(rows, 32), torch.randint(64, (rows,))) for _ in range(batches)]
    return model, data, torch.optim.SGD(model.parameters(), lr=0.5)


def memory_while_training(train: Callable[..., object], batches: int) -> list[int]:
    """Return the bytes allocated as each forward pass of `train` begins, and at the end.

    `train(model, batches, optimizer)` is called once.
    """
    there, seen = _watched(train, batches)
    return [there + more for more in (*seen.begins, seen.end)]


def _watched(train: Callable[..., object], batches: int, rows: int = 64) -> tuple[int, Alive]:
    """The bytes of weights and batches, and what is alive in addition while `train` runs; a GPU's blocks."""
    model, data, optimizer = small_training(batches, rows)
    known = [*model.parameters(), *(tensor for pair in data for tensor in pair)]
    there = sum(round_up(tensor.nbytes) for tensor in known)
    return there, alive_during(lambda: train(model, data, optimizer), known, model, BLOCK)


def _train(model: nn.Module, batches: Batches, optimizer: Any, parts: int = 0) -> float:
    """The right answer. A mistaken one divides each loss by another number of `parts`."""
    total = 0.0
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets) / (parts or len(batches))
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


TRAIN_MISTAKES: Mistakes = {  # each tried on whole losses and on parts of them
    "The parameters have not changed. Is there an `optimizer.step()`, and a `backward()` before it?": (
        lambda *_, **__: None
    ),
    "The parameters moved too far. Gradients add up to a sum: divide each loss before its `backward()`.": (
        lambda *given, parts: _train(*given, parts=1)
    ),
    "You step after every batch. Take one step on the mean of all.": (
        lambda model, batches, optimizer, parts: [
            _train(model, [batch], optimizer, parts) for batch in batches
        ]
    ),
    "The step saw only the last batch's gradients. Do you set gradients to zero in between?": (
        lambda model, batches, optimizer, parts: _train(model, batches[-1:], optimizer, parts)
    ),
}
LOSS_MISTAKES: Mistakes = {
    "You return the last batch's loss. Return the mean of all.": lambda losses: losses[-1],
    "You return the sum of the losses. Return their mean.": sum,
}
TRAIN_HINTS = {
    "does not require grad": "Nothing is left to differentiate: call `backward()` before you detach a loss.",
    "through the graph a second time": "You use a batch's graph twice: call `backward()` once, on its loss.",
}


@exercise("01.4", "One batch's activations at a time, the same step up to rounding, and the right mean loss.")
def train(answer: Any) -> None:
    """`answer(model, batches, optimizer)` takes one step on the batches' mean loss and returns that loss."""
    model, batches, optimizer = small_training(4)
    losses = [cross_entropy(model(inputs), targets).item() for inputs, targets in batches]
    mean = call(answer, hints=TRAIN_HINTS, model=model, batches=batches, optimizer=optimizer)
    _expect_no_leak(answer)
    _expect_parameters(answer)
    otherwise = "The parameters are right, but your loss is not the mean of the batches' losses."
    close = partial(alike, tolerance=1e-4)
    recognized([mean], [(losses,)], lambda each: sum(each) / len(each), LOSS_MISTAKES, otherwise, close)


def _expect_no_leak(answer: Callable[..., object]) -> None:
    """Compare small batches with large ones: what waits for the next batch must not grow with their size."""
    (_, small), (_, large) = (_watched(answer, 6, rows) for rows in (64, 128))
    graph = "You return a tensor with its graph, which your caller keeps alive. `.item()` makes it a number."
    expect(not getattr(small.result, "requires_grad", False), graph)
    joined = "All batches go forward as one, so all activations are alive at once. Take one batch at a time."
    expect(len(small.begins) >= 6, joined)
    model, ((inputs, _),), _ = small_training(1)
    waiting = (max(large.begins) - max(small.begins)) / sum(item.bytes for item in saved_by(model, inputs))
    leak = "The leak is still there: activations add up batch by batch. What holds a loss with its graph?"
    expect(waiting < 1.5, leak)
    # A loop's names may hold the last outputs until the next ones are there: that is about 0.1.
    some = (
        "Something of earlier batches still waits. Do you keep outputs in a list, or a graph after backward?"
    )
    expect(waiting < 0.2, some)


def _after(train: Callable[..., object], calls: int = 1) -> list[torch.Tensor]:
    model, batches, optimizer = small_training(4)
    for _ in range(calls):
        train(model, batches, optimizer)
    return list(model.parameters())


def _expect_parameters(answer: Callable[..., object]) -> None:
    got = _after(answer)
    for message, mistaken in TRAIN_MISTAKES.items():
        like_this = any(same(got, _after(partial(mistaken, parts=parts))) for parts in (1, 4))
        expect(not like_this, message)
    otherwise = "The parameters are not those after one step on the mean loss. What else changes them?"
    expect(same(got, _after(_train)), otherwise)
    again = "The first call is right, the second is not: it starts with gradients of the first."
    expect(same(_after(answer, calls=2), _after(_train, calls=2)), again)
