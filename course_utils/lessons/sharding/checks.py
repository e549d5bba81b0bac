"""Checks of the exercises of lesson 09, "ZeRO and FSDP": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from course_utils.interactive.feedback import (
    alike,
    by_name,
    call,
    call_or_none,
    entries,
    exercise,
    expect,
    fail,
    unit_slip,
)

from .labs import (
    ABOVE_CASES,
    ACTIVATION_CASES,
    BYTES_CASES,
    CHOOSE_CASES,
    CHOOSE_MISTAKES,
    MICRO_BATCHES,
    PADDING_CASES,
    STEP_CASES,
    STEP_MISTAKES,
    STEPS,
    RanksApart,
    Shapes,
    above_right,
    activations_right,
    bytes_right,
    choose_right,
    padding_right,
    rounded_share,
    several_steps,
    step_right,
    units,
)

__all__ = ["MICRO_BATCHES", "above", "choose", "padding", "rank_activations", "rank_bytes", "units", "zero_1_step"]

Mistakes = tuple[tuple[Callable[..., float], str], ...]

EXACT = 1e-12
"""What floating-point arithmetic may leave of a difference."""


def _name_mistake(got: list[float], cases: Any, mistakes: Mistakes, tolerance: float = 1e-9) -> None:
    """Fail with the message of the mistake that gives all of `got`, if one does."""
    for mistaken, message in mistakes:
        expect(not alike(got, (mistaken(*case) for case in cases), tolerance), message)


# ---------------------------------------------------------------------------------------------------- 09.1: rank_bytes

BYTES_NAMES = ("N", "D", "stage", "weight", "gradient", "optimizer")
BYTES_MISTAKES: Mistakes = (
    (lambda N, D, stage, w, g, K: (w + g + K) * N, "That is one rank without sharding, whatever the stage is."),
    (lambda N, D, stage, w, g, K: (w + g + K) * N / D, "You divide everything, whatever the stage is."),
    (
        lambda N, D, stage, w, g, K: bytes_right(N, D, stage, 2, 2, 12),
        "You took 2, 2 and 12 for granted: use what you were given.",
    ),
    (
        lambda N, D, stage, w, g, K: D * bytes_right(N, D, stage, w, g, K),
        "Those are all ranks together. One rank's was asked for.",
    ),
    (
        lambda N, D, stage, w, g, K: bytes_right(N, D, {0: 0, 1: 1, 2: 2, 3: 2}[stage], w, g, K),
        "At stage 3 weights are divided, too.",
    ),
    (
        lambda N, D, stage, w, g, K: bytes_right(N, D, stage + 1 if stage < 3 else 3, w, g, K),
        "You cut one kind more than the stage says: stage 1 cuts the optimizer's states alone.",
    ),
    (
        lambda N, D, stage, w, g, K: bytes_right(N, D, stage, K, g, w),
        "The order is off: the optimizer's states go first, the weights last.",
    ),
    (lambda N, D, stage, w, g, K: bytes_right(N, D, stage, g, w, K), "Weights and gradients are swapped."),
    (rounded_share, "You round the share of the parameters, and lose some bytes of each: round last, if at all."),
)

SCALED = (
    (2.0, "Everything is twice too much. `weight`, `gradient` and `optimizer` are bytes already."),
    (0.5, "Everything is half of it. `weight`, `gradient` and `optimizer` are bytes, and each counts in full."),
)


@exercise("09.1", "One kind more at each stage, and what is not cut stays whole on every rank.")
def rank_bytes(answer: Any) -> None:
    """`answer(N, D, stage, weight, gradient, optimizer)` is bytes of states on one rank."""
    got = [float(call(answer, **by_name(BYTES_NAMES, case))) for case in BYTES_CASES]
    right = [bytes_right(*case) for case in BYTES_CASES]
    as_asked = [_to_whole_bytes(*both, stage=case[2]) for *both, case in zip(got, right, BYTES_CASES, strict=True)]
    if all(as_asked):
        return
    _name_mistake(got, BYTES_CASES, BYTES_MISTAKES)
    slip = unit_slip(got[0], right[0])
    expect(slip is None, f"The first is {slip}")
    for factor, message in SCALED:
        expect(not alike(got, (factor * one for one in right), 1e-9), message)
    wrong = next(case[2] for case, good in zip(BYTES_CASES, as_asked, strict=True) if not good)
    fail(f"Stage {wrong} is off: which of the three kinds does it divide by D?")


def _to_whole_bytes(got: float, right: float, stage: int) -> bool:
    """Whether an answer is right; a share that is no whole bytes may be rounded, once for each kind that is divided."""
    if alike([got], [right], EXACT):
        return True
    return not right.is_integer() and got.is_integer() and abs(got - right) < stage


# ------------------------------------------------------------------------------------------------------- 09.2: padding


def _as_matrix(shape: tuple[int, ...]) -> int:
    """Numbers in a parameter for somebody who thinks of vectors and matrices alone."""
    return math.prod(shape[:2])


SHARD_MISTAKES: tuple[tuple[Callable[[Shapes, int], float], str], ...] = (
    (
        lambda shapes, D: sum(math.prod(s) for s in shapes) // D,
        "You rounded down: then the last rows belong to nobody.",
    ),
    (
        lambda shapes, D: sum(s[0] // D * math.prod(s[1:]) for s in shapes),
        "You rounded down: then the last rows belong to nobody.",
    ),
    (
        lambda shapes, D: sum(math.prod(s) for s in shapes) / D,
        "That is an even share of the numbers, a fraction. FSDP2 cuts whole rows.",
    ),
    (
        lambda shapes, D: sum(-(-math.prod(s) // D) for s in shapes),
        "You cut the numbers one by one. FSDP2 cuts whole rows, along the first dimension.",
    ),
    (
        lambda shapes, D: -(-sum(math.prod(s) for s in shapes) // D),
        "You cut all parameters as one flat piece. FSDP2 cuts each parameter by itself.",
    ),
    (
        lambda shapes, D: sum(-(-s[0] // D) for s in shapes),
        "Those are rows. Each has as many numbers as the other dimensions say.",
    ),
    (
        lambda shapes, D: sum(-(-s[0] // D) * _as_matrix(s) // s[0] for s in shapes),
        "A parameter can have more than two dimensions. How many numbers does a row hold then?",
    ),
    (
        lambda shapes, D: sum(-(-s[0] // D) * (s[-1] if len(s) > 1 else 1) for s in shapes),
        "A parameter can have more than two dimensions. How many numbers does a row hold then?",
    ),
    (
        lambda shapes, D: D * padding_right(shapes, D)["shard"],
        "Those are all shards together. One rank's was asked for.",
    ),
    (lambda shapes, D: 2 * padding_right(shapes, D)["shard"], "Those are bytes in 16 bits. Count numbers."),
    (lambda shapes, D: 4 * padding_right(shapes, D)["shard"], "Those are bytes in fp32. Count numbers."),
)
PADDING_MISTAKES: tuple[tuple[Callable[[Shapes, int], float], str], ...] = (
    (lambda shapes, D: D * padding_right(shapes, D)["shard"], "Those are all shards together, real numbers included."),
    (
        lambda shapes, D: padding_right(shapes, D)["padding"] / D,
        "That is a D-th of it: all shards' padding was asked for.",
    ),
    (lambda shapes, D: sum(-s[0] % D for s in shapes), "Those are rows of padding. Count their numbers."),
    (lambda shapes, D: 2 * padding_right(shapes, D)["padding"], "Those are bytes in 16 bits. Count numbers."),
    (lambda shapes, D: 4 * padding_right(shapes, D)["padding"], "Those are bytes in fp32. Count numbers."),
    (
        lambda shapes, D: D * padding_right(shapes, D)["shard"] - sum(map(_as_matrix, shapes)),
        "A parameter can have more than two dimensions. How many of its numbers are real?",
    ),
    (
        lambda shapes, D: sum(math.prod(s) % D for s in shapes),
        "That is the remainder, what is left over. Padding is what is missing to the next multiple.",
    ),
)


@exercise("09.2", "Whole rows, rounded up, for each parameter by itself.")
def padding(answer: Any) -> None:
    """`answer(shapes, D)` is a dictionary: shard (numbers of one rank's shard) and padding (in all shards)."""
    got = [
        entries(call(answer, shapes=list(shapes), D=D, returns=Mapping), ("shard", "padding"))
        for shapes, D in PADDING_CASES
    ]
    for name, mistakes in (("shard", SHARD_MISTAKES), ("padding", PADDING_MISTAKES)):
        values = [both[name] for both in got]
        if values == [padding_right(shapes, D)[name] for shapes, D in PADDING_CASES]:
            continue
        _name_mistake(values, PADDING_CASES, mistakes)
        fail(f"{name} is off. Take one parameter of 10 rows on 3 ranks, and draw it.")


# --------------------------------------------------------------------------------------------------- 09.3: zero_1_step


@exercise("09.3", "ZeRO-1 by hand: the weights of plain data parallelism, and a D-th of the momentum on each rank.")
def zero_1_step(answer: Any) -> None:
    """`answer(weights, gradients, momenta, lr, beta)` gives the new weights; each rank's momentum changes in place."""

    def called(*arguments: Any) -> torch.Tensor:
        momenta = list(arguments[2])
        places = [(momentum.shape, momentum.data_ptr()) for momentum in momenta]
        names = ("weights", "gradients", "momenta", "lr", "beta")
        with RanksApart(momenta) as watched:
            given = dict(zip(names, arguments, strict=True))
            found = call(answer, **given, returns=torch.Tensor, may_change=("weights", "momenta"))
        expect(
            [momentum.shape for momentum in arguments[2]] == [shape for shape, _ in places],
            "A momentum has changed its size: each rank keeps that of its own slice, and no more.",
        )
        expect(
            [(momentum.shape, momentum.data_ptr()) for momentum in arguments[2]] == places,
            "You put new tensors in the place of momenta, so that for a moment there are two. Change those that you "
            "were given.",
        )
        expect(
            not watched.mixed,
            "Somewhere your step has the momenta of several ranks together, and no rank has more than its own. Take "
            "one rank after the other.",
        )
        expect(
            found.shape == arguments[0].shape,
            "The new weights have another shape than the old: after the step all slices are gathered.",
        )
        return found.detach().to(arguments[0].dtype)

    results = [several_steps(called, case) for case in STEP_CASES]
    right = [several_steps(step_right, case) for case in STEP_CASES]
    if all(_same(mine[:1], wanted[:1]) for mine, wanted in zip(results, right, strict=True)):
        kept = all(_same(mine[1], wanted[1]) for mine, wanted in zip(results, right, strict=True))
        expect(
            kept, "The weights are right. But the momenta that you were given are not: each rank keeps its own there."
        )
        return
    for message, mistaken in STEP_MISTAKES.items():
        wrong = [several_steps(mistaken, case) for case in STEP_CASES]
        same = all(_same(mine[:1], other[:1]) for mine, other in zip(results, wrong, strict=True))
        expect(not same, message)
    first = [several_steps(called, case, steps=1)[0] for case in STEP_CASES]
    if all(
        torch.allclose(one, several_steps(step_right, case, 1)[0]) for one, case in zip(first, STEP_CASES, strict=True)
    ):
        fail(f"The first step is right; after {STEPS} they are not. What should be left in momenta from step to step?")
    fail("The new weights are off already in the first step. Go through it with 4 weights on 2 ranks, by hand.")


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(some, others, strict=True))


# --------------------------------------------------------------------------------------------------------- 09.4: above

ABOVE_NAMES = ("outer", "block", "next", "reduce")


@exercise("09.4", "Four things that are whole for a moment, and none of them shrinks with D.")
def above(answer: Any) -> None:
    """`answer(outer, block)` is a dictionary of bytes: outer, block, next, reduce."""
    sizes = [units(run) for run in ABOVE_CASES]
    got = [entries(call(answer, outer=outer, block=block, returns=Mapping), ABOVE_NAMES) for outer, block in sizes]
    for name in ABOVE_NAMES:
        values = [terms[name] for terms in got]
        wanted = [float(above_right(run)[name]) for run in ABOVE_CASES]
        if alike(values, wanted, 1e-4):
            continue
        _explain_above(name, values, wanted)


def _explain_above(name: str, values: list[float], wanted: list[float]) -> None:
    def is_times(factor: float) -> bool:
        return alike(values, (factor * one for one in wanted), 1e-4)

    if name == "reduce":
        expect(
            not is_times(0.5), "Gradients are summed in another format than weights are gathered in: how many bytes?"
        )
    else:
        expect(not is_times(2.0), f"`{name}` is twice too much: weights are gathered in 16 bits.")
    expect(not is_times(0.0), f"`{name}` is nothing at your place, but it is there.")
    expect(not is_times(0.5 if name != "reduce" else 0.25), f"`{name}` is in elements, or in one byte each.")
    pairs = list(zip(wanted, ABOVE_CASES, strict=True))
    expect(
        not alike(values, (one / run.world_size for one, run in pairs), 1e-2),
        f"`{name}` is a shard of it. While it is used it is whole: D does not divide it.",
    )
    expect(
        not alike(values, (one * run.model.layers for one, run in pairs), 1e-2),
        f"`{name}` is all blocks at once. At stage 3 the others are let go.",
    )
    fail(f"`{name}` is off: which of the two units is it of, and how many bytes does an element take?")


# -------------------------------------------------------------------------------------------------------- 09.5: choose


@exercise("09.5", "As little sharding as the card makes you do, then as many sequences as it takes.")
def choose(answer: Any) -> None:
    """`answer(run, ranks, card, least)` is (stage, micro_batch), or None if nothing fits."""
    names = ("run", "ranks", "card", "least")
    got = [call_or_none(answer, **by_name(names, case), returns=tuple) for case in CHOOSE_CASES]
    right = [choose_right(*case) for case in CHOOSE_CASES]
    if got == right:
        return
    for found in (one for one in got if one is not None):
        whole = len(found) == 2 and all(isinstance(part, int) and not isinstance(part, bool) for part in found)
        expect(whole, "Return two whole numbers, (stage, micro_batch), or None.")
        expect(found[0] in range(4), "There are stages 0, 1, 2 and 3.")
        expect(found[1] in MICRO_BATCHES, "That micro-batch is none of MICRO_BATCHES.")
    for message, mistaken in CHOOSE_MISTAKES.items():
        expect(got != [mistaken(*case) for case in CHOOSE_CASES], message)
    _explain_choice(got, right)


def _explain_choice(got: list[Any], right: list[Any]) -> None:
    for found, wanted, (_, ranks, card, _) in zip(got, right, CHOOSE_CASES, strict=True):
        where = f"On {ranks} cards {card}"
        expect(found is None or wanted is not None, f"{where} you choose something, but nothing fits there.")
        expect(found is not None or wanted is None, f"{where} you find nothing, but something fits.")
        if found is not None and wanted is not None and found[0] != wanted[0]:
            high = found[0] > wanted[0]
            fail(f"{where} the stage is too {'high: less sharding fits' if high else 'low: it does not fit'}.")
    fail("Every stage is right, and some micro-batch is not the largest that fits there.")


# ---------------------------------------------------------------------------------------------- 09.6: rank_activations

ACTIVATION_NAMES = ("s", "b", "h", "a", "t", "sequence")
ACTIVATION_MISTAKES: Mistakes = (
    (
        lambda s, b, h, a, t, q: s * b * h * (34 + 5 * a * s / h) / t,
        "You divide all by t, with sequence parallelism and without. What stays whole on every rank without it?",
    ),
    (
        lambda s, b, h, a, t, q: s * b * h * (10 + 24 / t + 5 * a * s / h / t),
        "You keep the 10 whole even with sequence parallelism. It is what that splits.",
    ),
    (lambda s, b, h, a, t, q: s * b * h * (34 + 5 * a * s / h), "That is one GPU: t is missing."),
    (lambda s, b, h, a, t, q: activations_right(s, b, h, 0, t, q), "The attention scores are missing: 5·a·s²·b bytes."),
    (
        lambda s, b, h, a, t, q: activations_right(s, b, h, 0, t, q) + 5 * a * s * s * b,
        "Attention scores are split, too: each rank has a part of the heads.",
    ),
    (lambda s, b, h, a, t, q: 2 * activations_right(s, b, h, a, t, q), "34 is in bytes already: no further 2."),
    (lambda s, b, h, a, t, q: activations_right(s, b, h, a, t, not q), "The two cases are turned round."),
    (lambda s, b, h, a, t, q: activations_right(s, 1, h, a, t, q), "That is one sequence. There are b of them."),
)


@exercise("09.6", "The matrices' parts are split, the norms' parts only along the sequence.")
def rank_activations(answer: Any) -> None:
    """`answer(s, b, h, a, t, sequence)` is bytes that one block keeps on one rank."""
    got = [float(call(answer, **by_name(ACTIVATION_NAMES, case))) for case in ACTIVATION_CASES]
    right = [activations_right(*case) for case in ACTIVATION_CASES]
    if alike(got, right, EXACT):
        return
    _name_mistake(got, ACTIVATION_CASES, ACTIVATION_MISTAKES)
    wrong, mine, wanted = next(
        found for found in zip(ACTIVATION_CASES, got, right, strict=True) if not alike([found[1]], [found[2]], EXACT)
    )
    slip = unit_slip(mine, wanted)
    expect(slip is None, f"It is {slip}")
    case = "With" if wrong[-1] else "Without"
    fail(f"{case} sequence parallelism it is off: what is split by t, and what stays whole?")
