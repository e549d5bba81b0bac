"""Checks of the exercises of lesson 14, "Will it fit?": each names the misconception, never the answer."""

import math
from numbers import Real
from typing import Any

from course_utils.estimating import estimate
from course_utils.interactive.feedback import by_name, call, call_or_none, exercise, expect, fail, of_kind
from course_utils.planning.twin import SAFETY, unsupported
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

from .detective import CAUSES, Evidence, case
from .labs import (
    ASKED,
    BROKEN,
    CHOICES,
    CHOOSE_MISTAKES,
    DIAGNOSE_MISTAKES,
    HIDDEN,
    PEAK_MISTAKES,
    SIZES,
    SLOWER,
    SPLIT_MISTAKES,
    T4,
    TOLERANCE,
    best_lost,
    choose_right,
    evidence,
    letters,
    lost_on_t4,
    peaks,
    split_right,
    true_peaks,
)

__all__ = ["CAUSES", "choose", "diagnose", "example", "on_a_t4", "predicted_peak", "split"]

# ------------------------------------------------------------------------------------------------------- 14.1: choose


@exercise("14.1", "That line is what fit does, after it has made the list.")
def choose(answer: Any) -> None:
    """`answer(configurations, room)` is the index of the one to take, or None."""
    got = [_index(answer, *one) for one in CHOICES]
    right = [choose_right(*one) for one in CHOICES]
    if got == right:
        return
    for message, mistaken in CHOOSE_MISTAKES.items():
        expect(got != [mistaken(*one) for one in CHOICES], message)
    expect(_lost(got) != _lost(right), "Of two that lose the same take the smaller, wherever the list has it.")
    expect(
        not any(mine is None and wanted is not None for mine, wanted in zip(got, right, strict=True)),
        "You find nothing where something fits.",
    )
    expect(
        not any(mine is not None and wanted is None for mine, wanted in zip(got, right, strict=True)),
        "You choose something where nothing fits with 5 % in reserve.",
    )
    fail("Some choices are off. First leave out what does not fit, then compare seconds lost.")


def _index(answer: Any, configurations: Any, room: int) -> int | None:
    got = call_or_none(answer, configurations=list(configurations), room=room, returns=int)
    expect(got is None or 0 <= got < len(configurations), "That index is not one of the list.")
    return got


def _lost(chosen: list[int | None]) -> list[float | None]:
    return [None if index is None else case[index][1] for index, (case, _) in zip(chosen, CHOICES, strict=True)]


# -------------------------------------------------------------------------------------------------------- 14.2: split


@exercise("14.2", "The batch stays what it was; only how much of it is there at once has changed.")
def split(answer: Any) -> None:
    """`answer(batch, fixed, each, room)` is (sequences in a micro-batch, micro-batches), or None."""
    names = ("batch", "fixed", "each", "room")
    got = [_pair(answer, **by_name(names, one)) for one in SIZES]
    right = [split_right(*one) for one in SIZES]
    if got == right:
        return
    for message, mistaken in SPLIT_MISTAKES.items():
        expect(got != [mistaken(*one) for one in SIZES], message)
    for one, mine, wanted in zip(SIZES, got, right, strict=True):
        told = f"{one[0]} sequences, {one[1]:g} + {one[2]:g} GB a sequence, {one[3]:g} GB of room"
        expect(not (mine is None and wanted), f"{told}: something fits.")
        expect(not (mine and wanted is None), f"{told}: not even one sequence fits with the reserve.")
        if mine != wanted and mine is not None:
            expect(mine[0] * mine[1] == one[0], f"{told}: {mine[0]} × {mine[1]} is another batch.")
            fail(f"{told}: {mine[0]} at a time is not the largest that fits, or does not fit.")


def _pair(answer: Any, **sizes: float) -> tuple[int, int] | None:
    got = call_or_none(answer, returns=tuple, **sizes)
    if got is None:
        return None
    expect(len(got) == 2, "Return two whole numbers, or None where not even one sequence fits.")
    first, second = (of_kind(size, int, "One of your two numbers is") for size in got)
    return first, second


# ------------------------------------------------------------------------------------------------------ 14.3: on_a_t4


@exercise("14.3", "774 million parameters on a card of 2018, and the batch is what it was.")
def on_a_t4(answer: Any) -> None:
    """`answer()` is a TrainingRun that trains what was asked for on a T4."""
    run = call(answer, returns=TrainingRun)
    expect(run.model.name == ASKED["model"], f"That is {run.model.name}. {ASKED['model']} was asked for.")
    expect(run.seq_len == ASKED["seq_len"], "The sequences were to stay as long as they are.")
    expect(run.world_size == run.tensor_parallel == 1, "There is one T4.")
    learned = f"{run.micro_batch} × {run.accumulation_steps} is another batch, and another training"
    expect(run.global_batch == ASKED["global_batch"], f"{learned}: {ASKED['global_batch']} sequences a step.")
    refused = unsupported(run, T4.capability)
    expect(not refused, f"A T4 cannot run that: {refused}.")
    expect(
        run.precision.name == "amp-fp16", f"{run.precision.name} changes the training, or wastes the card: autocast."
    )
    expect(run.optimizer.algorithm == "adamw", f"{run.optimizer.algorithm} is another optimizer: AdamW was asked for.")
    expect(not run.lora_rank, "All weights were to be trained.")
    expect(run.model.dropout > 0, "The model has dropout: without it another training goes on.")
    peak = estimate(run).total
    over = format_bytes(round(peak * SAFETY) - T4.room, "GB", 2)
    expect(peak * SAFETY <= T4.room, f"With the reserve it is {over} too much for a T4.")
    share = lost_on_t4(run) / best_lost()
    expect(share <= SLOWER, f"It fits, and loses {share:.2f} times what the best plan loses. What costs it most?")


# ----------------------------------------------------------------------------------------------- 14.4: predicted_peak


@exercise("14.4", "That is an estimator, on one line of paper.")
def predicted_peak(answer: Any) -> None:
    """`answer(N, L, h, a, V, s, b)` is the peak in bytes, within 5 % for each hidden run."""
    got = [call(answer, returns=Real, **letters(run)) for run in HIDDEN]
    errors = [value / peak - 1 for value, peak in zip(got, true_peaks(), strict=True)]
    if all(abs(error) <= TOLERANCE for error in errors):
        return
    for factor, words in ((1e-9, "GB"), (2.0**-30, "GiB"), (0.5, "16-bit numbers")):
        same = all(abs(value / (peak * factor) - 1) <= TOLERANCE for value, peak in zip(got, true_peaks(), strict=True))
        expect(not same, f"Right in {words}; bytes were asked for.")
    for message, mistaken in PEAK_MISTAKES.items():
        expect(not all(math.isclose(*pair, rel_tol=0.02) for pair in zip(got, peaks(mistaken), strict=True)), message)
    worst = max(range(len(HIDDEN)), key=lambda index: abs(errors[index]))
    run, error = HIDDEN[worst], f"{errors[worst]:+.0%}".replace("%", " %").replace("-", "−")
    fail(f"{run.model.name} with {run.micro_batch} × {run.seq_len:,} tokens: prediction − peak is {error}.")


# ----------------------------------------------------------------------------------------------------- 14.5: diagnose


def example(number: int = 1) -> Evidence:
    """The evidence of one of the lesson's six cases, by its number from 1."""
    return case(number).evidence


@exercise("14.5", "Fourteen broken runs, and no guess among the answers.")
def diagnose(answer: Any) -> None:
    """`answer(seen)` is the name of the cause."""
    got = [call(answer, evidence(number), returns=str) for number in range(len(BROKEN))]
    seen = [evidence(number) for number in range(len(BROKEN))]
    unknown = sorted({name for name in got if name not in CAUSES})
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of {', '.join(CAUSES)}.")
    right = [cause for cause, _, _ in BROKEN]
    if got == right:
        return
    expect(len(set(got)) > 1, "The same cause for every run: what do you look at?")
    wrong = [(wanted, mine) for wanted, mine in zip(right, got, strict=True) if mine != wanted]
    for causes, named, message in DIAGNOSE_MISTAKES:
        expect(not all(wanted in causes and mine in named for wanted, mine in wrong), message)
    for one, mine, wanted in zip(seen, got, right, strict=True):
        where = f"step {one.step}, {one.phase.replace('_', ' ')}, a request of {format_bytes(one.requested)}"
        expect(mine == wanted, f"A run that failed in {where}, did not die of {mine!r}. Which clue speaks for that?")
