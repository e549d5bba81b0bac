"""Checks of the exercises of lesson 14, "Will it fit?": each names the misconception, never the answer."""

from collections.abc import Callable, Sequence
from functools import cache
from numbers import Real
from operator import eq
from typing import Any

from course_utils.estimating import estimate
from course_utils.estimating.step_time import lost_seconds
from course_utils.gpus import GPUS
from course_utils.interactive.feedback import Mistakes, alike, by_name, call, exercise, expect, fail, recognized
from course_utils.planning.fit import arrange
from course_utils.planning.twin import SAFETY, unsupported
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB, MiB, format_bytes

from .detective import CAUSES, Evidence, broken, case

# ------------------------------------------------------------------------------------------------------- 14.1: choose

Configurations = Sequence[tuple[int, float]]
"""(bytes at the peak, seconds lost) of each."""

CHOICES: tuple[tuple[Configurations, int], ...] = (
    ([(20 * GB, 1.4), (30 * GB, 0.9), (29 * GB, 0.5), (60 * GB, 0.1)], 34 * GB),
    ([(40 * GB, 0.2), (33 * GB, 0.3), (32 * GB, 0.8), (31 * GB, 0.7)], 34 * GB),
    ([(90 * GB, 0.2), (85 * GB, 0.1), (81 * GB, 0.3)], 85 * GB),
    ([(15 * GB, 2.0), (14 * GB, 2.0), (13 * GB, 2.5)], 16 * GB),
    ([(12 * GB, 2.0), (14 * GB, 2.0), (13 * GB, 2.0)], 16 * GB),
    ([(50 * GB, 0.4), (49 * GB, 0.2)], 84 * GB),
    ([(35 * GB, 0.2), (33 * GB, 0.3), (30 * GB, 0.9)], 34 * GB),
)


def _least(key: Callable[[int, float], Any], reserve: float = SAFETY) -> Callable[[Configurations, int], int | None]:
    """An answer: of those that fit with the reserve the one with the least `key`."""

    def choose(configurations: Configurations, room: int) -> int | None:
        fitting = [index for index, (peak, _) in enumerate(configurations) if peak * reserve <= room]
        return min(fitting, key=lambda index: key(*configurations[index]), default=None)

    return choose


choose_right = _least(lambda peak, lost: (lost, peak))

CHOOSE_MISTAKES: Mistakes = {
    "You leave no reserve: a full card fails on the first buffer.": _least(lambda peak, lost: (lost, peak), 1.0),
    "You take the lowest peak. Free memory earns nothing: what does a step lose?":
        _least(lambda peak, lost: (peak, lost)),
    "You take the fullest of those that fit. Full is not the same as fast.": _least(lambda peak, lost: (-peak, lost)),
    "You take the first that fits. There may be a better one behind it.": _least(lambda peak, lost: 0),
    "You take 5 % off the wrong side: the estimate grows by it.": _least(lambda peak, lost: (lost, peak), 1 / SAFETY),
    "Of two that lose the same take the smaller, wherever the list has it.": _least(lambda peak, lost: lost),
}  # fmt: skip


@exercise("14.1", "That line is what fit does, after it has made the list.")
def choose(answer: Any) -> None:
    """`answer(configurations, room)` is the index of the one to take, or None."""
    got = [call(answer, configurations=list(one), room=room, returns=int | None) for one, room in CHOICES]
    if recognized(got, CHOICES, choose_right, CHOOSE_MISTAKES, same=eq):
        return
    for mine, one in zip(got, CHOICES, strict=True):
        wanted = choose_right(*one)
        expect(mine is not None or wanted is None, "You find nothing where something fits.")
        expect(mine is None or wanted is not None, "You choose something where nothing fits with 5 % in reserve.")
    fail("Some choices are off. First leave out what does not fit, then compare seconds lost.")


# -------------------------------------------------------------------------------------------------------- 14.2: split

SIZES = ((32, 2.0, 5.5, 33.0), (32, 24.0, 2.0, 33.0), (64, 10.0, 0.4, 80.0), (30, 4.0, 3.0, 24.0), (8, 40.0, 1.0, 33.0),
         (12, 1.0, 1.0, 9.0), (1, 5.0, 1.0, 10.0), (16, 20.0, 1.0, 28.0))  # fmt: skip
"""Sequences per step, GB that are there whatever the micro-batch, GB for each sequence in it, GB of room."""

Pair = tuple[int, int] | None


def _split(fits: Callable[[int, float, float, float], bool], must_divide: bool = True) -> Callable[..., Pair]:
    """An answer: the largest micro-batch for which `fits(size, fixed, each, room)`, and how many of them."""

    def split(batch: int, fixed: float, each: float, room: float) -> Pair:
        fitting = [size for size in range(1, batch + 1) if fits(size, fixed, each, room)]
        sizes = [size for size in fitting if batch % size == 0 or not must_divide]
        return (sizes[-1], batch // sizes[-1]) if sizes else None

    return split


def _fits(size: int, fixed: float, each: float, room: float) -> bool:
    return (fixed + each * size) * SAFETY <= room


split_right = _split(_fits)

SPLIT_MISTAKES: Mistakes = {
    "Your micro-batch does not always divide the batch, so that some sequences are left out.": _split(_fits, False),
    "You leave no reserve of 5 %.": _split(lambda size, fixed, each, room: fixed + each * size <= room),
    "Weights, gradients and states are there too, whatever the micro-batch.":
        _split(lambda size, fixed, each, room: each * size * SAFETY <= room),
    "The reserve belongs to everything, what is fixed included.":
        _split(lambda size, fixed, each, room: fixed + each * size * SAFETY <= room),
    "One sequence at a time always fits best, and wastes the card: the weights are read anew for each micro-batch.":
        _split(lambda size, *sizes: size == 1 and _fits(size, *sizes)),
    "The two are the wrong way round: first the size.": lambda *sizes: (split_right(*sizes) or ())[::-1] or None,
}  # fmt: skip


@exercise("14.2", "The batch stays what it was; only how much of it is there at once has changed.")
def split(answer: Any) -> None:
    """`answer(batch, fixed, each, room)` is (sequences in a micro-batch, micro-batches), or None."""
    got = [call(answer, **by_name(("batch", "fixed", "each", "room"), one), returns=tuple | None) for one in SIZES]
    expect(all(len(one) == 2 for one in got if one), "Return two whole numbers, or None where nothing fits.")
    if recognized(got, SIZES, split_right, SPLIT_MISTAKES, same=eq):
        return
    for (batch, fixed, each, room), mine in zip(SIZES, got, strict=True):
        wanted = split_right(batch, fixed, each, room)
        told = f"{batch} sequences, {fixed:g} + {each:g} GB a sequence, {room:g} GB of room"
        expect(mine or not wanted, f"{told}: something fits.")
        expect(wanted or not mine, f"{told}: not even one sequence fits with the reserve.")
        if mine and mine != wanted:
            expect(mine[0] * mine[1] == batch, f"{told}: {mine[0]} × {mine[1]} is another batch.")
            fail(f"{told}: {mine[0]} at a time is not the largest that fits, or does not fit.")


# ------------------------------------------------------------------------------------------------------ 14.3: on_a_t4

T4 = GPUS["T4-16GB"]
ASKED = TrainingRun("gpt2-large", 32, 1024, "amp-fp16", attention="efficient")


@cache
def best_lost() -> float:
    """Seconds that a step loses at least."""
    return arrange(ASKED, T4).path[-1].lost


@exercise("14.3", "774 million parameters on a card of 2018, and the batch is what it was.")
def on_a_t4(answer: Any) -> None:
    """`answer()` is a TrainingRun that trains what was asked for on a T4."""
    run = call(answer, returns=TrainingRun)
    expect(run.model.name == ASKED.model.name, f"That is {run.model.name}. {ASKED.model.name} was asked for.")
    expect(run.seq_len == ASKED.seq_len, "The sequences were to stay as long as they are.")
    expect(run.world_size == run.tensor_parallel == 1, "There is one T4.")
    learned = f"{run.micro_batch} × {run.accumulation_steps} is another batch, and another training"
    expect(run.global_batch == ASKED.global_batch, f"{learned}: {ASKED.global_batch} sequences a step.")
    refused = unsupported(run, T4.capability)
    expect(not refused, f"A T4 cannot run that: {refused}.")
    name = run.precision.name
    expect(name == "amp-fp16", f"{name} changes the training, or wastes the card: autocast.")
    expect(run.optimizer.algorithm == "adamw", f"{run.optimizer.algorithm} is another optimizer: AdamW was asked for.")
    expect(not run.lora_rank, "All weights were to be trained.")
    expect(run.model.dropout > 0, "The model has dropout: without it another training goes on.")
    peak = estimate(run).total
    over = format_bytes(round(peak * SAFETY) - T4.room, "GB", 2)
    expect(peak * SAFETY <= T4.room, f"With the reserve it is {over} too much for a T4.")
    share = lost_seconds(run, T4) / best_lost()
    expect(share <= 1.1, f"It fits, and loses {share:.2f} times what the best plan loses. What costs it most?")


# ----------------------------------------------------------------------------------------------- 14.4: predicted_peak

HIDDEN = tuple(
    TrainingRun(name, b, s, recompute="full", optimizer="adamw-fused", accumulation_steps=4)
    for name, b, s in (
        ("gpt2-xl", 4, 1024), ("gpt2-xl", 32, 1024), ("gpt2-large", 1, 1024), ("gpt2-medium", 16, 512),
        ("gpt2", 8, 1024), ("gpt2-large", 8, 512),
    )
)  # fmt: skip
"""GPTs under autocast with full recomputation, the fused update, and gradients that are added to."""

TOLERANCE = 0.05


def symbols(run: TrainingRun) -> dict[str, Any]:
    sizes = {"N": run.model.parameters, "L": run.model.layers, "h": run.model.hidden, "a": run.model.heads}
    return sizes | {"V": run.model.vocab, "s": run.seq_len, "b": run.micro_batch}


@cache
def true_peaks() -> tuple[int, ...]:
    """The estimated peak of each hidden run, to which the formula is compared."""
    return tuple(estimate(run).total for run in HIDDEN)


def _at_loss(N: int, L: int, h: int, V: int, s: int, b: int, **_: int) -> int:
    """States, checkpoints, the last norm, autocast's 16-bit copies of all matrices, and four tensors of the loss."""
    return 16 * N + 4 * s * b * h * L + 6 * s * b * h + 2 * (h * V + 12 * L * h * h) + 8 * s * b * V


def _backward(L: int, h: int, V: int, s: int, b: int, **of: int) -> int:
    """The loss's backward: the blocks' copies are gone, and the gradient of the logits is there."""
    return _at_loss(L=L, h=h, V=V, s=s, b=b, **of) - 24 * L * h * h + 2 * s * b * V


def peak_right(**of: int) -> int:
    """The right answer: the fuller of the two moments."""
    return max(_at_loss(**of), _backward(**of))


def _off(change: Callable[..., int]) -> Callable[..., int]:
    return lambda **of: peak_right(**of) + change(**of)


PEAK_MISTAKES: Mistakes = {
    "That is 16 bytes a parameter alone: nothing of it sees the batch.": lambda N, **_: 16 * N,
    "The gradients are missing: earlier micro-batches have left theirs.": _off(lambda N, **_: -4 * N),
    "You count the gradients twice.": _off(lambda N, **_: 4 * N),
    "Nothing is recomputed in your formula: every block keeps all of its tensors.":
        _off(lambda L, s, b, h, a, **_: L * s * b * (34 * h + 4 * a)),
    "The checkpoints are missing: each block's input.": _off(lambda L, s, b, h, **_: -4 * s * b * h * L),
    "Your checkpoints are in 16 bits. The residual stream is not.": _off(lambda L, s, b, h, **_: -2 * s * b * h * L),
    "The loss is missing: tensors of s·b·V numbers.": lambda **of: _at_loss(**of) - 8 * of["s"] * of["b"] * of["V"],
    "You take the loss alone. Its backward has more tensors of s·b·V numbers.": _at_loss,
    "You take the loss's backward alone. Before it all of autocast's weight copies are there.": _backward,
    "You add up two moments that are never together: the blocks' weight copies, and the gradient of the logits.":
        lambda **of: _at_loss(**of) + 2 * of["s"] * of["b"] * of["V"],
}  # fmt: skip


def peaks(answer: Callable[..., float]) -> list[float]:
    """The bytes that a formula gives for each hidden run."""
    return [answer(**symbols(run)) for run in HIDDEN]


@exercise("14.4", "That is an estimator, on one line of paper.")
def predicted_peak(answer: Any) -> None:
    """`answer(N, L, h, a, V, s, b)` is the peak in bytes, within 5 % for each hidden run."""
    got = [call(answer, returns=Real, **symbols(run)) for run in HIDDEN]
    errors: list[float] = [value / peak - 1 for value, peak in zip(got, true_peaks(), strict=True)]
    worst = max(errors, key=abs)
    if abs(worst) <= TOLERANCE:
        return
    for factor, words in ((1e-9, "GB"), (2.0**-30, "GiB"), (0.5, "16-bit numbers")):
        scaled = [value / (peak * factor) - 1 for value, peak in zip(got, true_peaks(), strict=True)]
        expect(max(map(abs, scaled)) > TOLERANCE, f"Right in {words}; bytes were asked for.")
    for message, mistaken in PEAK_MISTAKES.items():
        expect(not alike(got, peaks(mistaken), 0.02), message)
    run, error = HIDDEN[errors.index(worst)], f"{worst:+.0%}".replace("%", " %").replace("-", "−")
    fail(f"{run.model.name} with {run.micro_batch} × {run.seq_len:,} tokens: prediction − peak is {error}.")


# ----------------------------------------------------------------------------------------------------- 14.5: diagnose

BROKEN: tuple[tuple[str, str, int], ...] = (
    ("loss", "loss", 6 * GiB + 200 * MiB), ("loss", "loss", 5 * GiB + 512 * MiB),
    ("states", "states", 3 * GiB + 512 * MiB), ("states", "states", 4 * GiB + 512 * MiB),
    ("update", "states", 6 * GiB), ("update", "states", 6 * GiB + 200 * MiB),
    ("attention", "attention", 4 * GiB), ("attention", "attention", 5 * GiB),
    ("fragmentation", "fragmentation", 6 * GiB), ("fragmentation", "fragmentation", 5 * GiB + 924 * MiB),
    ("graphs", "graphs", 144 * MiB), ("graphs", "graphs", 200 * MiB),
    ("activations", "activations", 3 * GiB), ("activations", "activations", 5 * GiB),
)  # fmt: skip
"""Each hidden case: its cause, the run, and its card's memory for tensors."""

DIAGNOSE_MISTAKES: tuple[tuple[set[str], set[str], str], ...] = (
    (set(CAUSES), {"fragmentation"}, "You go by all that is free. At 1 % free every full card has crumbs."),
    ({"update"}, {"states"}, "You blame the states that the update makes. Are they complete, 8 bytes a parameter?"),
    ({"states"}, {"update"}, "You call all that dies in the optimizer's step copies. Were its states complete?"),
    ({"loss", "attention"}, {"activations"}, "How large was the request that failed, in b·a·s² or in s·b·V?"),
    (set(CAUSES), {"graphs"}, "Not every later step is a leak: does each one begin with more than the one before?"),
    ({"graphs"}, set(CAUSES), "You blame the last request: does each step begin with more than the one before?"),
    ({"fragmentation"}, set(CAUSES), "You miss fragmentation: free in all was more than the request, and by a lot."),
)
"""Wrong answers and their messages: the runs' causes, the causes named, and the misconception."""


def example() -> Evidence:
    """The evidence of the first of the lesson's cases."""
    return case(1).evidence


@exercise("14.5", "Fourteen broken runs, and no guess among the answers.")
def diagnose(answer: Any) -> None:
    """`answer(seen)` is the name of the cause."""
    seen = [broken(name, capacity).evidence for _, name, capacity in BROKEN]
    got = [call(answer, one, returns=str) for one in seen]
    unknown = {*got} - {*CAUSES}
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of {', '.join(CAUSES)}.")
    expect(len(set(got)) > 1, "The same cause for every run: what do you look at?")
    wrong = [(wanted, mine) for (wanted, _, _), mine in zip(BROKEN, got, strict=True) if mine != wanted]
    for causes, named, message in DIAGNOSE_MISTAKES if wrong else ():
        expect(not all(wanted in causes and mine in named for wanted, mine in wrong), message)
    for one, mine, (wanted, _, _) in zip(seen, got, BROKEN, strict=True):
        where = f"step {one.step}, {one.phase.replace('_', ' ')}, a request of {format_bytes(one.requested)}"
        expect(mine == wanted, f"A run that failed in {where}, did not die of {mine!r}. Which clue speaks for that?")
