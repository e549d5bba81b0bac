"""Checks of the exercises of lesson 05, "What does each operation keep?": each names the misconception."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from course_utils.figures.canvas import Figure
from course_utils.interactive.feedback import by_name, call, entries, exercise, expect, fail, of_kind, unit_slip

from .labs import (
    BLOCK_CASES,
    BLOCK_MISTAKES,
    BUDGET_CASES,
    EXPLAINED,
    EXPRESSION_MISTAKES,
    EXPRESSIONS,
    LENGTH_MISTAKES,
    MLP_CASES,
    MLP_MISTAKES,
    NEXT_MISTAKES,
    STATEMENTS,
    STORY_MISTAKES,
    bilinear_mlp,
    block_bytes_of,
    example_sweep,
    expression_bytes_of,
    hidden_sweeps,
    longest_of,
    mlp_bytes_of,
    story_figure,
)

__all__ = [
    "EXPRESSIONS",
    "STATEMENTS",
    "bilinear_mlp",
    "block_bytes",
    "example_sweep",
    "expressions",
    "longest_sequence",
    "mlp_bytes",
    "read_sweep",
    "story",
    "told",
]

Mistakes = Mapping[str, Callable[..., Any]]

FACTOR_SLIPS = {
    0.5: "Exactly half: did you count a 16-bit number as one byte, and a mask as half of one?",
    2.0: "Exactly twice: numbers have 16 bits here and a mask one byte, in every row.",
}
"""What to say to whom everything is off by one factor."""


RANDOM_STATE = 24
"""Bytes of random state that a flash kernel keeps: an answer may count them or leave them out."""


def _recognize(
    got: Sequence[float], cases: Sequence[Sequence[Any]], right: Callable[..., Any], known: Mistakes, optional: int = 0
) -> bool:
    """Whether all answers are right, to the byte; CheckFailed with the message of the mistake that gives these answers.

    `optional` bytes may be counted or left out.
    """

    def same(function: Callable[..., Any], *extras: int) -> bool:
        wanted = [function(*case) for case in cases]
        return all(
            other > 0 and any(abs(one - other - extra) < 0.5 for extra in extras)
            for one, other in zip(got, wanted, strict=True)
        )

    if same(right, 0, optional):
        return True
    for message, mistaken in known.items():
        expect(not same(mistaken, 0, optional), message)
    expect(
        not same(right, RANDOM_STATE), "Whose random state is that? Only a flash kernel keeps one; others keep masks."
    )
    slip = unit_slip(got[0], right(*cases[0]))
    expect(not slip, f"{slip}")
    ratios = {one / right(*case) for one, case in zip(got, cases, strict=True)}
    for factor, words in FACTOR_SLIPS.items():
        expect(ratios != {factor}, words)
    near = all(abs(one - right(*case)) < A_FEW_BYTES for one, case in zip(got, cases, strict=True))
    expect(not near, "Off by a few bytes only, whatever the sizes: have you added a number where a formula belongs?")
    return False


A_FEW_BYTES = 1000


# ---------------------------------------------------------------------------------------------------- 05.1: expressions


@exercise("05.1", "Autograd was asked, and keeps what you said, for every expression.")
def expressions(answer: Any) -> None:
    """`answer(n)` is a dictionary: bytes kept for each of EXPRESSIONS, x and y being n bf16 numbers."""
    for n in (1024, 4096):
        got = entries(call(answer, n=n, returns=Mapping), tuple(EXPRESSIONS))
        for name in EXPRESSIONS:
            size, wanted = float(got[name]), expression_bytes_of(name, n)
            if size == wanted:
                continue
            for message, factor in EXPRESSION_MISTAKES[name].items():
                expect(size != factor * 2 * n, f"{name}: {message}")
            expect(size != wanted / 2, f"{name}: numbers where bytes were asked? A bf16 number takes two.")
            fail(f"{name} is off. Take its operations one by one, then strike out what is listed twice.")


# ------------------------------------------------------------------------------------------------------ 05.2: mlp_bytes


@exercise("05.2", "What hooks find in the genuine layer, whatever its sizes.")
def mlp_bytes(answer: Any) -> None:
    """`answer(s, b, h, ffn)` is what an MLP with a GELU gate and dropout keeps, in 16-bit."""
    got = [float(call(answer, s=s, b=b, h=h, ffn=ffn)) for s, b, h, ffn in MLP_CASES]
    if not _recognize(got, MLP_CASES, mlp_bytes_of, MLP_MISTAKES):
        fail("Not what autograd keeps. List the tensors: one of width h, some of width ffn, one mask.")


# ---------------------------------------------------------------------------------------------------- 05.3: block_bytes


@exercise("05.3", "Both kernels, with dropout and without, to the byte, statistics included.")
def block_bytes(answer: Any) -> None:
    """`answer(s, b, h, a, attention, dropout)` is what a GPT block keeps, in 16-bit."""
    for attention in ("eager", "flash"):
        for dropout in (True, False):
            cases = [(*case, attention, dropout) for case in BLOCK_CASES]
            names = ("s", "b", "h", "a", "attention", "dropout")
            got = [float(call(answer, **by_name(names, case))) for case in cases]
            where = f"With {attention} attention, {'with' if dropout else 'without'} dropout"
            known = {f"{where}: {message}": mistake for message, mistake in BLOCK_MISTAKES.items()}
            state = RANDOM_STATE if attention == "flash" else 0
            if not _recognize(got, cases, block_bytes_of, known, optional=state):
                fail(f"{where} it is off. Compare with the lesson's ledger, row by row.")


# ----------------------------------------------------------------------------------------------- 05.4: longest_sequence


@exercise("05.4", "One token more would not fit, for any budget and any model.")
def longest_sequence(answer: Any) -> None:
    """`answer(budget, b, h, a, L)` is the largest s whose L eager blocks fit into `budget` bytes."""
    names = ("budget", "b", "h", "a", "L")
    got = [call(answer, **by_name(names, case)) for case in BUDGET_CASES]
    for value in got:
        expect(value == int(value) and value >= 0, "A length is a whole number of tokens; round down what you get.")
    wanted = [longest_of(*case) for case in BUDGET_CASES]
    if list(map(int, got)) == wanted:
        return
    for message, mistaken in LENGTH_MISTAKES.items():
        expect(list(map(int, got)) != [mistaken(*case) for case in BUDGET_CASES], message)
    for value, right in zip(got, wanted, strict=True):
        expect(value <= right, "One of your lengths is too long: put it into the formula and compare with the budget.")
    fail("What you give fits, but a longer sequence fits as well.")


# ----------------------------------------------------------------------------------------------------- 05.5: read_sweep


@exercise("05.5", "Kernel and next length of every hidden model, from a handful of lengths.")
def read_sweep(answer: Any) -> None:
    """`answer(sweep)` is {"attention": "eager" or "flash", "next": bytes at twice the largest s}."""
    hidden = hidden_sweeps()
    answers = [_sweep_answer(answer, dict(case.sweep)) for case in hidden]
    kernels, wanted = [kernel for kernel, _ in answers], [case.attention for case in hidden]
    expect(len(set(kernels)) > 1, "You name the same kernel whatever the sweep says. The hidden models differ.")
    if kernels != wanted:
        opposite = ["eager" if kernel == "flash" else "flash" for kernel in wanted]
        expect(kernels != opposite, "Turned round: which of the two kernels writes s×s matrices?")
        fail("A kernel is off. Don't judge by how much is kept: what remains when you divide it by s?")
    got = [size for _, size in answers]
    for message, mistaken in NEXT_MISTAKES.items():
        right = [math.isclose(size, mistaken(case.sweep), rel_tol=1e-3) for size, case in zip(got, hidden, strict=True)]
        expect(not all(right), message)
    for size, case in zip(got, hidden, strict=True):
        slip = unit_slip(size, case.next)
        expect(not slip, f"The kernels are right; next is {slip}")
        close = math.isclose(size, case.next, rel_tol=1e-2)
        expect(close, f"The kernels are right, but a next size is off, by {case.attention} attention.")


def _sweep_answer(answer: Any, sweep: dict[int, int]) -> tuple[str, float]:
    got = call(answer, sweep=sweep, returns=Mapping)
    for name in ("attention", "next"):
        expect(name in got, f"Your dictionary has no {name!r}.")
    kernel = of_kind(got["attention"], str, "attention is")
    expect(kernel in ("eager", "flash"), f"attention is 'eager' or 'flash'; you say {kernel!r}.")
    return kernel, float(of_kind(got["next"], Real, "next is"))


# ------------------------------------------------------------------------------------------------------- 05.6: explain


def story() -> Figure:
    """The timeline that is to be explained, with its moments as letters."""
    return story_figure()


@exercise("05.6", "Every moment has its cause: nothing leaks, and nothing waits for the optimizer but gradients.")
def told(answer: Any) -> None:
    """`answer()` is a dictionary from each letter to the number of what STATEMENTS says of that moment."""
    got = entries(call(answer, returns=Mapping), tuple(EXPLAINED), int)
    for letter, number in got.items():
        expect(number in STATEMENTS, f"{letter} is {number}: the statements have numbers 1 to {len(STATEMENTS)}.")
    if all(got[letter] == number for letter, number in EXPLAINED.items()):
        return
    for letter in EXPLAINED:
        expect((letter, got[letter]) not in STORY_MISTAKES, STORY_MISTAKES.get((letter, got[letter]), ""))
    twice = [f"{one} and {other}" for one in EXPLAINED for other in EXPLAINED if one < other and got[one] == got[other]]
    expect(not twice, f"{' '.join(twice[:1])} have the same explanation. Every statement is of one moment at most.")
    wrong = next(letter for letter, number in EXPLAINED.items() if got[letter] != number)
    fail(f"{wrong} is off. Which kinds of memory are there at that moment, and which have come or gone since the last?")
