"""What the checks of lesson 14 run: right answers, wrong ones that learners give, and the cases to tell them apart."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from course_utils.estimating import estimate
from course_utils.estimating.step_time import lost_seconds
from course_utils.gpus import GPUS
from course_utils.planning.twin import SAFETY
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB, MiB

from .detective import CAUSES, Evidence, broken

# ----------------------------------------------------------------------------------------------------- 14.1: choose

Configurations = Sequence[tuple[int, float]]
"""(bytes at the peak, seconds lost) of each."""

Choose = Callable[[Configurations, int], int | None]

CHOICES: tuple[tuple[Configurations, int], ...] = (
    ([(20 * GB, 1.4), (30 * GB, 0.9), (29 * GB, 0.5), (60 * GB, 0.1)], 34 * GB),
    ([(40 * GB, 0.2), (33 * GB, 0.3), (32 * GB, 0.8), (31 * GB, 0.7)], 34 * GB),
    ([(90 * GB, 0.2), (85 * GB, 0.1), (81 * GB, 0.3)], 85 * GB),
    ([(15 * GB, 2.0), (14 * GB, 2.0), (13 * GB, 2.5)], 16 * GB),
    ([(12 * GB, 2.0), (14 * GB, 2.0), (13 * GB, 2.0)], 16 * GB),
    ([(50 * GB, 0.4), (49 * GB, 0.2)], 84 * GB),
    ([(35 * GB, 0.2), (33 * GB, 0.3), (30 * GB, 0.9)], 34 * GB),
)
"""Configurations and the room of a card."""


def choose_right(configurations: Configurations, room: int) -> int | None:
    """The right answer: of those that fit with the reserve the one that loses least, the smaller one of equals."""
    fitting = [index for index, (peak, _) in enumerate(configurations) if peak * SAFETY <= room]
    return min(fitting, key=lambda index: configurations[index][::-1], default=None)


def _best(key: Callable[[tuple[int, float]], Any], reserve: float = SAFETY) -> Choose:
    """A chooser by another key, or with another reserve."""

    def choose(configurations: Configurations, room: int) -> int | None:
        fitting = [index for index, (peak, _) in enumerate(configurations) if peak * reserve <= room]
        return min(fitting, key=lambda index: key(configurations[index]), default=None)

    return choose


CHOOSE_MISTAKES: Mapping[str, Choose] = {
    "You leave no reserve: a plan that fills the card to the last byte fails on the first scratch buffer.": _best(
        lambda one: one[::-1], 1.0
    ),
    "You take the lowest peak. Memory that is free at the peak earns nothing: what does a step lose?": _best(
        lambda one: one
    ),
    "You take the fullest of those that fit. Full is not the same as fast.": _best(lambda one: (-one[0], one[1])),
    "You take the first that fits. There may be a better one behind it.": _best(lambda one: 0),
    "You take 5 % off the wrong side: the estimate with its reserve has to fit the card.": _best(
        lambda one: one[::-1], 1 / SAFETY
    ),
}


# ------------------------------------------------------------------------------------------------ 14.2: sequences

SIZES = ((32, 2.0, 5.5, 33.0), (32, 24.0, 2.0, 33.0), (64, 10.0, 0.4, 80.0), (30, 4.0, 3.0, 24.0), (8, 40.0, 1.0, 33.0),
         (12, 1.0, 1.0, 9.0), (1, 5.0, 1.0, 10.0), (16, 20.0, 1.0, 28.0))  # fmt: skip
"""Sequences a step, GB that are there whatever the micro-batch, GB for each sequence in it, GB of room."""


def split_right(batch: int, fixed: float, each: float, room: float) -> tuple[int, int] | None:
    """The right answer: the largest micro-batch that divides the batch and fits, and how many of them."""
    fitting = [size for size in range(1, batch + 1) if batch % size == 0 and (fixed + each * size) * SAFETY <= room]
    return (max(fitting), batch // max(fitting)) if fitting else None


def _split(largest: Callable[[int, float, float, float], int]) -> Callable[..., Any]:
    def split(batch: int, fixed: float, each: float, room: float) -> Any:
        size = largest(batch, fixed, each, room)
        return (size, batch // size) if size >= 1 else None

    return split


def _under(batch: int, limit: float) -> int:
    return max((size for size in range(1, batch + 1) if batch % size == 0 and size <= limit), default=0)


SPLIT_MISTAKES: Mapping[str, Callable[..., Any]] = {
    "Your micro-batch does not always divide the batch, so that some sequences are left out.": _split(
        lambda batch, fixed, each, room: min(batch, int((room / SAFETY - fixed) // each))
    ),
    "You leave no reserve of 5 %.": _split(lambda batch, fixed, each, room: _under(batch, (room - fixed) / each)),
    "Weights, gradients and states are there too, whatever the micro-batch.": _split(
        lambda batch, fixed, each, room: _under(batch, room / SAFETY / each)
    ),
    "The reserve belongs to everything, what is fixed included.": _split(
        lambda batch, fixed, each, room: _under(batch, (room - fixed) / SAFETY / each)
    ),
    "One sequence at a time always fits best, and wastes the card: the weights are read anew for each micro-batch.": (
        _split(lambda batch, fixed, each, room: 1 if split_right(batch, fixed, each, room) else 0)
    ),
    "The two numbers are the wrong way round: first the sequences in a micro-batch, then how many micro-batches.": (
        lambda batch, fixed, each, room: (split_right(batch, fixed, each, room) or ())[::-1] or None
    ),
}


# ------------------------------------------------------------------------------------------------------- 14.3: T4

T4 = GPUS["T4-16GB"]
ASKED = {"model": "gpt2-large", "global_batch": 32, "seq_len": 1024}
"""What the T4 has to train; a step of the best plan that `fit` finds loses `best_lost` seconds."""

SLOWER = 1.1
"""A plan may lose this times what the best loses."""


@cache
def best_lost() -> float:
    """Seconds that a step loses at least."""
    from course_utils.planning.fit import fit

    plan = fit(ASKED["model"], T4, global_batch=ASKED["global_batch"], seq_len=ASKED["seq_len"])
    assert plan.best is not None
    return plan.best.lost


def lost_on_t4(run: TrainingRun) -> float:
    """Seconds that a step of this run loses on the T4."""
    return lost_seconds(run, T4)


# ---------------------------------------------------------------------------------------------- 14.4: predicted_peak

HIDDEN = tuple(
    TrainingRun(name, b, s, recompute="full", optimizer="adamw-fused", accumulation_steps=4)
    for name, b, s in (
        ("gpt2-xl", 4, 1024), ("gpt2-xl", 32, 1024), ("gpt2-large", 1, 1024), ("gpt2-medium", 16, 512),
        ("gpt2", 8, 1024), ("gpt2-large", 8, 512),
    )
)  # fmt: skip
"""GPTs under autocast with full recomputation, the fused update, and gradients that are added to."""

TOLERANCE = 0.05


def letters(run: TrainingRun) -> dict[str, Any]:
    """A run's letters by name."""
    model = run.model
    return {"N": model.parameters, "L": model.layers, "h": model.hidden, "a": model.heads, "V": model.vocab,
            "s": run.seq_len, "b": run.micro_batch}  # fmt: skip


@cache
def true_peaks() -> tuple[int, ...]:
    """The estimated peak of each hidden run, to which the formula is compared."""
    return tuple(estimate(run).total for run in HIDDEN)


def peak_right(N: int, L: int, h: int, a: int, V: int, s: int, b: int) -> float:
    """The right answer: the fuller of the loss, with all weight copies, and its backward, when the blocks' are gone."""
    kept = 16 * N + 4 * s * b * h * L + 6 * s * b * h
    at_loss = kept + 2 * (h * V + 12 * L * h * h) + 8 * s * b * V
    backward = kept + 2 * h * V + 10 * s * b * V
    return max(at_loss, backward)


def _off(change: Callable[..., float]) -> Callable[..., float]:
    """The right answer plus what `change` makes of the same letters."""
    return lambda **of: peak_right(**of) + change(**of)


PEAK_MISTAKES: Mapping[str, Callable[..., float]] = {
    "That is 16 bytes a parameter alone: nothing of it sees the batch.": lambda N, **_: 16 * N,
    "The gradients are missing: earlier micro-batches have left theirs.": _off(lambda N, **_: -4 * N),
    "You count the gradients twice.": _off(lambda N, **_: 4 * N),
    "Nothing is recomputed in your formula: every block keeps all of its tensors.": _off(
        lambda L, s, b, h, a, **_: L * s * b * (34 * h + 4 * a)
    ),
    "The checkpoints are missing: a block's input for each of the L blocks.": _off(
        lambda L, s, b, h, **_: -4 * s * b * h * L
    ),
    "Your checkpoints are in 16 bits. Under autocast the residual stream is not.": _off(
        lambda L, s, b, h, **_: -2 * s * b * h * L
    ),
    "The loss is missing: tensors of s·b·V numbers, and there are several at once.": lambda N, L, h, V, s, b, **_: (
        16 * N + 4 * s * b * h * L + 6 * s * b * h + 2 * (h * V + 12 * L * h * h)
    ),
    "You take the loss alone. Its backward has more tensors of s·b·V numbers.": lambda N, L, h, V, s, b, **_: (
        16 * N + 4 * s * b * h * L + 6 * s * b * h + 2 * (h * V + 12 * L * h * h) + 8 * s * b * V
    ),
    "You take the loss's backward alone. Before it all of autocast's weight copies are there.": (
        lambda N, L, h, V, s, b, **_: 16 * N + 4 * s * b * h * L + 6 * s * b * h + 2 * h * V + 10 * s * b * V
    ),
    "You add up two moments that are never together: the blocks' weight copies, and the gradient of the logits.": (
        lambda N, L, h, V, s, b, **_: (
            16 * N + 4 * s * b * h * L + 6 * s * b * h + 2 * (h * V + 12 * L * h * h) + 10 * s * b * V
        )
    ),
}


def peaks(answer: Callable[..., float]) -> tuple[float, ...]:
    """What a formula says of each hidden run."""
    return tuple(answer(**letters(run)) for run in HIDDEN)


# ------------------------------------------------------------------------------------------------------ 14.5: diagnose

BROKEN: tuple[tuple[str, str, int], ...] = (
    ("loss", "loss", 6 * GiB + 200 * MiB),
    ("loss", "loss", 5 * GiB + 512 * MiB),
    ("states", "states", 3 * GiB + 512 * MiB),
    ("states", "states", 4 * GiB + 512 * MiB),
    ("update", "states", 6 * GiB),
    ("update", "states", 6 * GiB + 200 * MiB),
    ("attention", "attention", 4 * GiB),
    ("attention", "attention", 5 * GiB),
    ("fragmentation", "fragmentation", 6 * GiB),
    ("fragmentation", "fragmentation", 5 * GiB + 924 * MiB),
    ("graphs", "graphs", 144 * MiB),
    ("graphs", "graphs", 200 * MiB),
    ("activations", "activations", 3 * GiB),
    ("activations", "activations", 5 * GiB),
)
"""What each hidden case died of, the run, and its card's memory for tensors."""


def evidence(number: int) -> Evidence:
    """The evidence of a hidden case, by its number from 0."""
    _, name, capacity = BROKEN[number]
    return broken(name, capacity).evidence


DIAGNOSE_MISTAKES: tuple[tuple[set[str], set[str], str], ...] = (
    (set(CAUSES), {"fragmentation"}, "You call it fragmentation as soon as the request would fit into all that is "
     "free. At 1 % free that is no news: every full card has crumbs."),
    ({"update"}, {"states"}, "You call all that dies in the optimizer's step the states. Are they complete, 8 bytes a "
     "parameter?"),
    ({"states"}, {"update"}, "You call all that dies in the optimizer's step copies of the update. Were its states "
     "complete?"),
    ({"loss", "attention"}, {"activations"}, "You blame the activations for what attention or the loss asked for. How "
     "large was the request, in b·a·s² or in s·b·V?"),
    (set(CAUSES), {"graphs"}, "Not every later step is a leak: does each one begin with more than the one before?"),
    ({"graphs"}, set(CAUSES), "A run whose steps each begin with more than the one before is blamed on its last "
     "request."),
    ({"fragmentation"}, set(CAUSES), "You miss fragmentation: free in all was more than the request, and by a lot."),
)  # fmt: skip
"""What wrong answers are about, and what they say: the runs' causes, the causes named, and the misconception."""
