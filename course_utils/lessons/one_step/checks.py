"""Checks of lesson 01, "Where did the memory go?": each names the misconception, never the answer."""

import math
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from operator import eq
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ... import TrainingRun, estimate, gpu, measure
from ...interactive.feedback import (
    Mistakes,
    alike,
    call,
    divisors,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
    recognized,
)
from ...interactive.saved_tensors import saved_by
from ...measuring.tracker import Tracker
from ...units import GB
from ..shared.judging import same, seeded

# --------------------------------------------------------------------------------------------------
# 01.1: peak

# a tensor's name, its bytes, the events of its birth and its death (None: it stays)
Life = tuple[str, int, int, int | None]
STEP: list[Life] = [  # a small made-up step, to count by hand
    ("logits", 50, 3, 4), ("activation 1", 30, 1, 6), ("weights", 40, 0, None), ("gradient 1", 20, 6, None),
    ("scratch of layer 1", 60, 1, 2), ("gradient of the logits", 50, 4, 5), ("input", 10, 0, None),
    ("activation 2", 30, 2, 5), ("gradient 2", 20, 5, None),
]  # fmt: skip


def _is_alive(born: float, event: float, died: float) -> bool:
    return born <= event < died


def peak_of(lives: Sequence[Life], alive: Callable[..., bool] = _is_alive) -> int:
    """Return the most bytes of tensors that are `alive` together at an event at which some tensor is born."""
    known = [(size, born, math.inf if died is None else died) for _, size, born, died in lives]
    # The sum rises only where a tensor is born, so the peak is at one of these events.
    return max(sum(size for size, born, died in known if alive(born, event, died)) for _, event, _ in known)


def _born_before_last_death(lives: Sequence[Life]) -> list[Life]:
    last = max(died for *_, died in lives if died)
    return [life for life in lives if life[2] < last]


# its largest tensor is born after the last death, as Adam's states are
LATE: list[Life] = [("weights", 10, 0, None), ("activation", 5, 1, 2), ("states", 100, 3, None)]
PEAK_MISTAKES: Mistakes = {
    "You added up everything that ever lived.": lambda lives: sum(life[1] for life in lives),
    "This is the largest single tensor. What else is alive?": lambda lives: max(life[1] for life in lives),
    "This is what is left after the last event.": (
        lambda lives: sum(life[1] for life in lives if life[3] is None)
    ),
    "You count a tensor at the event of its death. Its bytes are already free there.": partial(
        peak_of, alive=lambda born, event, died: born <= event <= died
    ),
    "You do not count a tensor at the event of its birth. It takes memory there already.": partial(
        peak_of, alive=lambda born, event, died: born < event < died
    ),
    "You treat None as the last event. "
    "A tensor that never dies is also alive after it, when others may be born.": (
        lambda lives: peak_of(_born_before_last_death(lives))
    ),
    "Tensors whose `died` is None are missing from your sum. They stay to the end, so count them.": partial(
        peak_of, alive=lambda born, event, died: born <= event < died < math.inf
    ),
}


@exercise("01.1", "The largest sum of what is alive at once, in made-up steps and in a real one.")
def peak(answer: Any) -> None:
    """`answer(tensors)` is the most bytes alive at once.

    Tensors are (name, bytes, born, died); `died` may be None.
    """
    none = (
        "Your function compares an event with None. "
        "A tensor with None never dies: handle it before you compare."
    )
    dice = random.Random(1)
    random_steps = [[_random_life(dice, number) for number in range(14)] for _ in range(3)]
    cases = [STEP, *random_steps, LATE, list(real_step()[0])]
    answers = [call(answer, hints={"NoneType": none}, tensors=list(case)) for case in cases]
    otherwise = (
        "Not right yet: draw each tensor's life as a bar, and add up what is alive at each event. "
        "The list is in no order, and names may repeat."
    )
    recognized(answers, [(case,) for case in cases], peak_of, PEAK_MISTAKES, otherwise, eq)


def _random_life(dice: random.Random, number: int) -> Life:
    born = dice.randrange(0, 12)
    died = None if dice.random() < 0.2 else born + dice.randint(1, 5)
    return f"tensor {number}", dice.randint(1, 100), born, died


@cache
def real_step() -> tuple[tuple[Life, ...], int]:
    """Return every tensor of two steps of a tiny GPT on the CPU, and the most bytes allocated at once."""
    measured = measure(TrainingRun("tiny-gpt", 2, 32, "fp32", attention="eager"), source="cpu")
    lives = tuple((item.operation, item.bytes, item.born, item.died) for item in measured.allocations)
    return lives, max(measured.timeline.totals())


# --------------------------------------------------------------------------------------------------
# 01.2: weigh
KINDS = ("weights", "master_weights", "gradients", "states")
WEIGH_HINTS = {
    "'NoneType' object has no attribute": "Not every parameter has a gradient: its `.grad` may be None.",
    "'int' object has no attribute": (
        "Not everything in an optimizer's state is a tensor: ask `torch.is_tensor`."
    ),
}
# Runs, and the message for each kind of memory that is off
WEIGHED: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("weighed.toml").read_text(encoding="utf-8")
)


def trained_once(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small network and its optimizer after a step (or a "new" one), as a run of `WEIGHED`."""
    width = 1 if how == "new" else 16
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    if how == "tied":
        model[2].weight = model[0].weight
        model[1].requires_grad_(False)
    model.to(torch.bfloat16 if how == "masters" else torch.float32)
    weights = list(model.parameters())
    if how == "flat":  # all weights are parts of one storage, and so are all gradients
        for name in ("data", "grad"):
            for weight, part in zip(weights, torch.zeros(300 * len(weights)).split(300), strict=True):
                setattr(weight, name, part[: weight.numel()].view_as(weight))
    updated = [weight.detach().float() for weight in weights] if how in ("masters", "flat") else weights
    optimizer = torch.optim.AdamW([{"params": updated[:2]}, {"params": updated[2:]}])
    if how != "new":
        model(torch.ones(8, width, dtype=weights[0].dtype)).sum().backward()
        for weight, master in zip(weights, updated, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        optimizer.step()
    if how == "flat":
        for state in optimizer.state.values():
            state.update(exp_avg=state["exp_avg"].bfloat16(), exp_avg_sq=state["exp_avg_sq"].byte(), count=1)
    return model, optimizer


def _weighed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    updated = [weight for group in optimizer.param_groups for weight in group["params"]]
    found = [("weights", weight) for weight in model.parameters()]
    found += [("master_weights", weight) for weight in updated]
    found += [("gradients", weight.grad) for _, weight in found]
    found += [("states", value) for state in optimizer.state.values() for value in state.values()]
    # A storage counts once, for the first kind that has it: a weight that is updated itself is no master.
    storages: dict[int, tuple[str, int]] = {}
    for kind, tensor in found:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    return {name: sum(size for kind, size in storages.values() if kind == name) for name in KINDS}


@exercise("01.2", "Every byte that a model and its optimizer hold, counted once, in five runs.")
def weigh(answer: Any) -> None:
    """`answer(model, optimizer)` is a dictionary: bytes of weights, master_weights, gradients and states."""
    for how, messages in WEIGHED.items():
        model, optimizer = trained_once(how)
        wanted = _weighed(model, optimizer)
        returned = call(answer, hints=WEIGH_HINTS, model=model, optimizer=optimizer, returns=Mapping)
        got = entries(returned, KINDS)
        expect(wanted == _weighed(model, optimizer), "Your function changes what it should only read.")
        numbers = "You count numbers, not bytes: how many bytes does each take?"
        expect(how != "adamw" or 4 * got["weights"] != wanted["weights"], numbers)
        lost = (
            "You find no states. "
            "Go through all of `optimizer.state`: its keys need not be the model's parameters."
        )
        expect(got["states"] or not wanted["states"], lost)
        for kind in KINDS:
            off = f"The {kind.replace('_', ' ')} are off in a run with shared memory or frozen weights."
            expect(got[kind] == wanted[kind], messages.get(kind, off))


# --------------------------------------------------------------------------------------------------
# 01.3: largest_micro_batch

# the run that has to fit: everything but its batch
FIT_RUN = TrainingRun("gpt2-xl", seq_len=1024, precision="bf16-master", attention="flash", recompute="full")
# the fifth fits in what the driver lists, not in what a program gets; the last has an answer beyond 64
FIT_CASES = (
    ("V100-32GB", 32), ("V100-32GB", 40), ("V100-32GB", 37), ("A100-40GB", 48), ("A100-40GB", 44),
    ("RTX3090-24GB", 32), ("T4-16GB", 32), ("A100-80GB", 64), ("A100-80GB", 150),
)  # fmt: skip
FIT_MISTAKES: Mistakes = {
    "You estimated one micro-batch on its own. From the second one on, earlier gradients take memory too.": (
        lambda card, b: _fitting(card, b, accumulate=False)[-1]
    ),
    "You took the number in the card's name for GB. "
    "But a card sold as 32 GB has GiB: ask `gpu(card).room`.": (
        lambda card, b: _fitting(card, b, GB * int(card.split("-")[1][:2]))[-1]
    ),
    "You took `gpu(card).memory`, what the driver lists. How much of it does a program get?": (
        lambda card, b: _fitting(card, b, gpu(card).memory)[-1]
    ),
    "You tried only micro-batches of up to 64 sequences. A large card takes more.": (
        lambda card, b: max(size for size in _fitting(card, b) if size <= 64)
    ),
    "You returned the smallest that fits, not the largest.": (
        lambda card, b: min(_fitting(card, b)[1:], default=0)
    ),
    "You returned the number of micro-batches, not their size.": (
        lambda card, b: b // (_fitting(card, b)[-1] or 99)
    ),
    "You returned the whole batch, whether it fits or not: compare its peak with `gpu(card).room`.": (
        lambda card, b: b
    ),
    "You tried only powers of two. Other numbers divide a batch, too.": (
        lambda card, b: max(size for size in _fitting(card, b) if size.bit_count() < 2)
    ),
}


def _fitting(card: str, batch: int, memory: int | None = None, accumulate: bool = True) -> list[int]:
    """0 and the micro-batches that divide `batch` and fit in `memory` (by default a program's), rising."""
    runs = [FIT_RUN.replace(micro_batch=b, global_batch=batch if accumulate else b) for b in divisors(batch)]
    limit = gpu(card).room if memory is None else memory
    return [0, *(run.micro_batch for run in runs if estimate(run).total <= limit)]


@exercise(
    "01.3",
    "The largest micro-batch that fits, on cards from 16 to 80 GB, with the gradients of earlier ones.",
)
def largest_micro_batch(answer: Any) -> None:
    """`answer(card, global_batch)` is FIT_RUN's largest micro-batch that divides the batch and fits, or 0."""
    none = "Your function fails when nothing fits. Think of a card that is too small, and return 0."
    hints = dict.fromkeys(("is empty", "empty sequence", "list index out of range"), none)
    hints["is not a multiple of"] = "You try a micro-batch that does not divide the batch. Skip those."
    answers = [call(answer, hints=hints, card=card, global_batch=batch) for card, batch in FIT_CASES]
    for (card, batch), got in zip(FIT_CASES, answers, strict=True):
        whole = got == int(got) and got >= 0
        expect(whole, f"Your micro-batch for {card} is not a whole number of sequences.")
        divides = not got or batch % got == 0
        expect(divides, f"Your micro-batch for {card} does not divide the batch of {batch}.")
    if not recognized(answers, FIT_CASES, lambda card, b: _fitting(card, b)[-1], FIT_MISTAKES, same=eq):
        for (card, batch), got in zip(FIT_CASES, answers, strict=True):
            too_much = f"On {card} your micro-batch for {batch} needs more than a program gets."
            expect(got in _fitting(card, batch), too_much)
        fail("Yours fit, but on at least one card a larger micro-batch fits too.")


# --------------------------------------------------------------------------------------------------
# 01.4: train
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def small_training(batches: int) -> tuple[nn.Sequential, Batches, torch.optim.Optimizer]:
    """Return a small network, `batches` batches of (inputs, classes), and SGD: always the same."""
    with seeded(5):
        layers = (nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
        model = nn.Sequential(*layers)
        data = [(torch.randn(64, 32), torch.randint(64, (64,))) for _ in range(batches)]
    return model, data, torch.optim.SGD(model.parameters(), lr=0.5)


def memory_while_training(train: Callable[..., object], batches: int) -> list[int]:
    """Return the bytes allocated as each forward pass of `train` begins, and at the end.

    `train(model, batches, optimizer)` is called once.
    """
    return _watched(train, batches)[0]


def _watched(train: Callable[..., object], batches: int) -> tuple[list[int], int]:
    """The bytes of `memory_while_training`, and those at the peak without the inputs."""
    model, data, optimizer = small_training(batches)
    with Tracker("cpu") as tracker:
        tracker.watch(model, list)
        tracker.bind("inputs", [tensor for pair in data for tensor in pair])
        begins: list[int] = []
        model.register_forward_pre_hook(lambda *_: begins.append(len(tracker.events)))
        train(model, data, optimizer)
        ends = [*begins, len(tracker.events)]
    peak = tracker.at(tracker.peak_event())
    return [tracker.at(event).total for event in ends], peak.total - peak["inputs"]


def _train_right(model: nn.Module, batches: Batches, optimizer: Any, parts: int = 0) -> float:
    total = 0.0
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets) / (parts or len(batches))
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _step_after_each_batch(model: nn.Module, batches: Batches, optimizer: Any, parts: int) -> None:
    for batch in batches:
        _train_right(model, [batch], optimizer, parts)


def _train_on_last(model: nn.Module, batches: Batches, optimizer: Any, parts: int) -> None:
    _train_right(model, batches[-1:], optimizer, parts)


TRAIN_MISTAKES: Mistakes = {  # other ways to train, each tried on whole losses and on parts of them
    "The parameters have not changed. "
    "Where do you call `optimizer.step()`, and on which loss `backward()` before it?": (
        lambda *given, parts: None
    ),
    "The parameters moved too far. Gradients add up to a sum: divide each loss before its `backward()`.": (
        _train_right
    ),
    "You step after every batch. Take one step on the mean of all.": _step_after_each_batch,
    "The step saw only the gradients of the last batch. "
    "Do you call `backward()` on every loss? Do you set gradients to zero in between?": _train_on_last,
}
LOSS_MISTAKES: Mistakes = {
    "You return the last batch's loss. Return the mean of all.": lambda losses: losses[-1],
    "You return the sum of the losses. Return their mean.": sum,
}
TRAIN_HINTS = {
    "does not require grad": (
        "There is nothing left to differentiate: call `backward()` before you detach a loss."
    ),
    "through the graph a second time": (
        "You use a batch's graph twice: call `backward()` once per batch, on its loss."
    ),
}


@exercise("01.4", "One batch's activations at a time, the same step up to rounding, and the right mean loss.")
def train(answer: Any) -> None:
    """`answer(model, batches, optimizer)` takes one step on the batches' mean loss and returns that loss."""
    model, batches, optimizer = small_training(4)
    losses = [cross_entropy(model(inputs), targets).item() for inputs, targets in batches]
    kinds = Real | torch.Tensor
    got = call(answer, hints=TRAIN_HINTS, returns=kinds, model=model, batches=batches, optimizer=optimizer)
    graph = (
        "You return a tensor with its graph, so your caller keeps the graph alive. "
        "`.item()` makes it a number."
    )
    expect(not getattr(got, "requires_grad", False), graph)
    mean = float(of_kind(got, Real))
    _expect_no_leak(answer)
    _expect_parameters(answer)
    otherwise = (
        "The parameters are right, but the loss that you return is not the mean of the batches' losses."
    )
    close = partial(alike, tolerance=1e-4)
    recognized([mean], [(losses,)], lambda each: sum(each) / len(each), LOSS_MISTAKES, otherwise, close)


def _expect_no_leak(answer: Callable[..., object]) -> None:
    model, batches, _ = small_training(1)
    one_batch = sum(item.bytes for item in saved_by(model, batches[0][0]))
    _, few = _watched(answer, 2)
    moments, many = _watched(answer, 6)
    wanted, _ = _watched(_train_right, 6)
    growth = (many - few) / 4  # per batch: the runs differ by four
    waiting = max(moments[1:-1], default=0) - max(wanted[1:-1])
    joined = "All batches go forward as one, so all activations are alive at once. Take one batch at a time."
    expect(len(moments) > 2 or growth < one_batch / 2, joined)
    leak = (
        "The leak is still there: activations add up from batch to batch. What holds a loss with its graph?"
    )
    expect(growth < one_batch / 2, leak)
    small = "Something small still grows with each batch. Do you collect outputs in a list?"
    expect(growth < one_batch / 50, small)
    two = "Nothing grows any more, but two batches' activations are alive at once. Do you retain a graph?"
    expect(waiting < one_batch / 4, two)


def _expect_parameters(answer: Callable[..., object]) -> None:
    def after(train: Callable[..., object], calls: int = 1) -> list[torch.Tensor]:
        model, data, optimizer = small_training(4)
        for _ in range(calls):
            train(model, data, optimizer)
        return list(model.parameters())

    got = after(answer)
    if not same(got, after(_train_right)):
        for message, other in TRAIN_MISTAKES.items():
            expect(not any(same(got, after(partial(other, parts=parts))) for parts in (1, 4)), message)
        fail(
            "The parameters are not those after one step on the mean loss of all batches. "
            "What else changes them?"
        )
    again = (
        "The first call is right, the second is not: "
        "it starts with gradients that the first call left behind."
    )
    expect(same(after(answer, calls=2), after(_train_right, calls=2)), again)
