"""What the checks of lesson 01 run: right answers, wrong ones that learners give, instruments to tell them apart."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.measurement import Measurement, Timeline
from course_utils.measuring import measure
from course_utils.measuring.tracker import Tracker
from course_utils.run import TrainingRun
from course_utils.units import GB

# --------------------------------------------------------------------------------------- 01.3: tensors that come and go

Life = tuple[str, int, int, int | None]
"""A tensor's name, its bytes, the event at which it is born, the event at which it dies (None: it stays)."""

STEP: list[Life] = [
    ("weights", 40, 0, None),
    ("input", 10, 0, None),
    ("activation 1", 30, 1, 6),
    ("scratch of layer 1", 60, 1, 2),
    ("activation 2", 30, 2, 5),
    ("logits", 50, 3, 4),
    ("gradient of the logits", 50, 4, 5),
    ("gradient 2", 20, 5, None),
    ("gradient 1", 20, 6, None),
]
"""A small made-up step, to count on one's fingers."""


def highest(lives: Sequence[Life], alive: Callable[[Life, int], bool]) -> int:
    """The largest sum of bytes over all events at which some tensor is born, by one's own idea of `alive`."""
    return max(sum(life[1] for life in lives if alive(life, event)) for event in {born for _, _, born, _ in lives})


def peak_of(lives: Sequence[Life]) -> int:
    """The right answer: a tensor is alive from the event of its birth to just before that of its death."""
    return highest(lives, lambda life, event: life[2] <= event and (life[3] is None or event < life[3]))


def _when_the_largest_is_born(lives: Sequence[Life]) -> int:
    moment = max(lives, key=lambda life: life[1])[2]
    return sum(size for _, size, born, died in lives if born <= moment and (died is None or moment < died))


PEAK_MISTAKES: dict[str, Callable[[Sequence[Life]], int]] = {
    "That is everything that ever lived, added up. Two tensors of which one dies before the other is born never share "
    "the memory.": lambda lives: sum(life[1] for life in lives),
    "That is the largest single tensor. A small one on top of many others may be what overflows.": lambda lives: max(
        life[1] for life in lives
    ),
    "That is what is left when everything is over. The peak may be long past by then.": lambda lives: sum(
        life[1] for life in lives if life[3] is None
    ),
    "You let a tensor take memory at the very event at which it dies. By the rule, its bytes are free again before "
    "anything is born there.": lambda lives: highest(
        lives, lambda life, event: life[2] <= event and (life[3] is None or event <= life[3])
    ),
    "A tensor of yours takes no memory yet at the event at which it is born. It does, from then on.": lambda lives: (
        highest(lives, lambda life, event: life[2] < event and (life[3] is None or event < life[3]))
    ),
    "Tensors whose `died` is None are missing from your sum: they are the ones that stay, so they always count.": (
        lambda lives: highest(lives, lambda life, event: life[3] is not None and life[2] <= event < life[3])
    ),
    "You looked at the moment when the largest tensor is born. The sum may well be larger at another.": (
        _when_the_largest_is_born
    ),
    "That is how many tensors are alive at once, not how many bytes they take.": lambda lives: peak_of(
        [(name, 1, born, died) for name, _, born, died in lives]
    ),
}
"""What a learner can mean by "peak", and what to say to it."""


def peak_cases() -> list[list[Life]]:
    """Lists of tensors in no particular order: the small step, random ones, and those of a step that really ran."""
    dice = random.Random(1)
    return [STEP, *([_random_life(dice, number) for number in range(14)] for _ in range(3)), list(real_step()[0])]


def _random_life(dice: random.Random, number: int) -> Life:
    born = dice.randrange(0, 12)
    died = None if dice.random() < 0.2 else born + dice.randint(1, 5)
    return f"tensor {number}", dice.randint(1, 100), born, died


@cache
def real_step() -> tuple[tuple[Life, ...], int]:
    """Every tensor of two training steps of a tiny GPT on the CPU, and the most bytes that were allocated at once."""
    run = TrainingRun("tiny-gpt", micro_batch=2, seq_len=32, precision="fp32", attention="eager")
    measured = measure(run, source="cpu")
    lives = tuple((item.operation, item.bytes, item.born, item.died) for item in measured.allocations)
    return lives, max(measured.timeline.totals())


# ---------------------------------------------------------------------------------------------------- 01.4: make it fit

FIT_RUN = TrainingRun("gpt2-xl", seq_len=1024, precision="bf16-master", attention="flash", recompute="full")
"""The run that has to fit: everything but its batch."""

FIT_CASES = (
    ("V100-32GB", 32), ("V100-32GB", 40), ("V100-32GB", 37), ("A100-40GB", 48),
    ("RTX3090-24GB", 32), ("T4-16GB", 32), ("A100-80GB", 64),
)  # fmt: skip


def divisors(number: int) -> list[int]:
    """Every whole number that divides `number`, smallest first."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def peak_bytes(micro_batch: int, global_batch: int, accumulate: bool = True) -> int:
    """Bytes at the estimated peak; without `accumulate`, those of a step that is one micro-batch."""
    run = FIT_RUN.replace(micro_batch=micro_batch, accumulation_steps=global_batch // micro_batch if accumulate else 1)
    return estimate(run).total


def fitting(card: str, global_batch: int, memory: int | None = None, accumulate: bool = True) -> list[int]:
    """The micro-batches that divide `global_batch` and fit into `memory` (that of `card` without), smallest first."""
    limit = gpu(card).memory if memory is None else memory
    return [size for size in divisors(global_batch) if peak_bytes(size, global_batch, accumulate) <= limit]


def largest_fitting(card: str, global_batch: int) -> int:
    """The right answer: the largest of those, 0 where there is none."""
    return max(fitting(card, global_batch), default=0)


def _name_as_memory(card: str) -> int:
    """The bytes that a card's name seems to promise: "V100-32GB" taken for 32 GB."""
    found = re.search(r"(\d+)GB", card)
    if found is None:
        raise ValueError(f"{card} does not carry its memory in its name")
    return int(found[1]) * GB


FIT_MISTAKES: dict[str, Callable[[str, int], int]] = {
    "You estimated one micro-batch on its own. From the second one on, the gradients of those before it are there "
    "while it runs forward: tell the run how many there are.": lambda card, batch: max(
        fitting(card, batch, accumulate=False), default=0
    ),
    "You took the number in the card's name for GB. A card sold as 32 GB holds GiB, which is more: "
    "ask `gpu(card).memory` for bytes.": lambda card, batch: max(
        fitting(card, batch, memory=_name_as_memory(card)), default=0
    ),
    "You returned the smallest that fits. Small pieces keep a GPU waiting: the largest was asked for.": (
        lambda card, batch: min(fitting(card, batch), default=0)
    ),
    "That is how many micro-batches there are. The question is how many sequences each of them holds.": (
        lambda card, batch: batch // largest_fitting(card, batch) if fitting(card, batch) else 0
    ),
    "You returned the whole batch whether it fits or not: compare the estimate with the card's bytes.": (
        lambda card, batch: batch
    ),
    "You tried powers of two alone. Other numbers divide a batch, too.": lambda card, batch: max(
        (size for size in fitting(card, batch) if size.bit_count() == 1), default=0
    ),
}
"""What a learner can compute instead, and what to say to it."""


# -------------------------------------------------------------------------------------------------- 01.5: find the leak

Batches = list[tuple[torch.Tensor, torch.Tensor]]
ROWS, WIDTHS, LEARNING_RATE = 64, (32, 256, 256, 64), 0.5


def small_training(batches: int = 6) -> tuple[nn.Sequential, Batches, torch.optim.Optimizer]:
    """A small network, `batches` batches of (inputs, classes), and an SGD optimizer: the same for everybody."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first, second, third, last = WIDTHS
        model = nn.Sequential(
            nn.Linear(first, second), nn.GELU(), nn.Linear(second, third), nn.GELU(), nn.Linear(third, last)
        )
        data = [(torch.randn(ROWS, first), torch.randint(last, (ROWS,))) for _ in range(batches)]
    return model, data, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


@dataclass(frozen=True)
class Watched:
    """Bytes allocated as each forward pass of a `train` began, then when it was over; at its peak, inputs left out."""

    moments: list[int]
    peak: int


def watch(train: Callable[..., object], batches: int) -> Watched:
    """Run `train(model, batches, optimizer)` on the CPU under the course's tracker."""
    model, data, optimizer = small_training(batches)
    with Tracker("cpu") as tracker:
        tracker.watch(model, list)
        tracker.bind("inputs", [tensor for pair in data for tensor in pair])
        begins: list[int] = []
        model.register_forward_pre_hook(lambda *_: begins.append(len(tracker.events)))
        train(model, data, optimizer)
        ends = [*begins, len(tracker.events)]
    peak = tracker.at(tracker.peak_event())
    return Watched([tracker.at(event).total for event in ends], peak.total - peak["inputs"])


def memory_while_training(train: Callable[..., object], batches: int = 6) -> list[int]:
    """Bytes allocated as each forward pass of `train` begins, and, last, when it is over."""
    return watch(train, batches).moments


def parameters_after(train: Callable[..., object], calls: int = 1, batches: int = 4) -> torch.Tensor:
    """All parameters in one row after `calls` calls of `train`."""
    model, data, optimizer = small_training(batches)
    for _ in range(calls):
        train(model, data, optimizer)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_right(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer) -> float:
    """The right answer: each batch's part of the mean goes backward at once; one step at the end."""
    total = 0.0
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets) / len(batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _train_undivided(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in batches:
        nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def _train_stepping(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer, parts: int = 1) -> None:
    for inputs, targets in batches:
        (nn.functional.cross_entropy(model(inputs), targets) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_stepping_by_parts(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer) -> None:
    _train_stepping(model, batches, optimizer, parts=len(batches))


def _train_last(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer) -> None:
    _train_stepping(model, batches[-1:], optimizer)


def _train_last_part(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer) -> None:
    _train_stepping(model, batches[-1:], optimizer, parts=len(batches))


def _train_without_step(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer) -> None:
    """Nothing is learned."""


_STEPPING = (
    "You step after every batch. Those are several small steps, each from other weights; one step on the mean of all "
    "batches was asked for."
)
_ONLY_LAST = (
    "The step saw the gradients of the last batch alone: something sets them to zero between the batches. Let them add "
    "up."
)

TRAIN_MISTAKES: tuple[tuple[Callable[..., object], str], ...] = (
    (_train_without_step, "The parameters have not moved. Who calls `optimizer.step()`?"),
    (
        _train_undivided,
        "The parameters moved too far. Gradients of several batches add up to a sum, and a mean was asked for: divide "
        "each loss before it goes backward.",
    ),
    (_train_stepping, _STEPPING),
    (_train_stepping_by_parts, _STEPPING),
    (_train_last, _ONLY_LAST),
    (_train_last_part, _ONLY_LAST),
)
"""Other ways to train, and what to say when the parameters come out as theirs do."""


# ------------------------------------------------------------------------------------------------ 01.6: read a timeline


@dataclass(frozen=True)
class Suspect:
    """A measurement without its tensors' names and shapes, and the run that it is of."""

    run: TrainingRun
    measurement: Measurement


SUSPECTS: tuple[dict[str, Any], ...] = (
    {"micro_batch": 4, "seq_len": 256, "precision": "amp-bf16", "recompute": "none"},
    {"micro_batch": 2, "seq_len": 512, "precision": "amp-bf16", "recompute": "full"},
    {"micro_batch": 1, "seq_len": 512, "precision": "bf16-master", "recompute": "none"},
    {"micro_batch": 3, "seq_len": 256, "precision": "fp32", "recompute": "full", "attention": "efficient"},
)
"""Chosen so that no shortcut works: equal tokens in unlike batches; neither peaks nor lengths tell who recomputes."""


def hidden_runs() -> list[TrainingRun]:
    """The runs of GPT-2 behind the hidden measurements."""
    return [TrainingRun("gpt2", **choices) for choices in SUSPECTS]


@cache
def suspects() -> tuple[Suspect, ...]:
    """The hidden runs, measured on a simulated GPU."""
    return tuple(Suspect(run, anonymous(measure(run, source="simulated"))) for run in hidden_runs())


def handed(measurement: Measurement) -> Measurement:
    """The measurement with lists of its own: what an answer changes in them is not missing the next time."""
    timeline = Timeline(list(measurement.timeline.changes), list(measurement.timeline.marks))
    return replace(measurement, moments=dict(measurement.moments), timeline=timeline)


def anonymous(measurement: Measurement) -> Measurement:
    """The measurement with its timeline, moments and peaks, but without the list of tensors."""
    return replace(measurement, allocations=())
