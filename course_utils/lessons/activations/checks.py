"""Checks of the exercises of lesson 05, "What does each operation keep?": each names the misconception."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import isqrt
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from course_utils.estimating.exact.activations import activation_bytes
from course_utils.figures import timeline
from course_utils.figures.canvas import Figure
from course_utils.interactive.feedback import (
    Mistakes,
    alike,
    by_name,
    call,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
    recognized,
    unit_slip,
)
from course_utils.interactive.saved import saved_by
from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.models import PRESETS
from course_utils.run import TrainingRun

from ..recomputation.policies import small_gpt

RANDOM_STATE = 24  # bytes of random state that a flash kernel keeps: an answer may count them or leave them out


def _same_bytes(got: Sequence[float], wanted: Sequence[float], extras: Sequence[int] = (0,)) -> bool:
    pairs = list(zip(got, wanted, strict=True))
    return all(other > 0 and any(abs(one - other - extra) < 0.5 for extra in extras) for one, other in pairs)


def _judge_bytes(
    got: Sequence[float], cases: Sequence[Any], right: Callable[..., int], mistakes: Mistakes, otherwise: str,
    optional: int = 0,
) -> None:  # fmt: skip
    """Raise CheckFailed unless all answers are right to the byte; `optional` bytes may be counted or left out."""
    if recognized(got, cases, right, mistakes, same=partial(_same_bytes, extras=(0, optional))):
        return
    wanted = [right(*case) for case in cases]
    pairs = list(zip(got, wanted, strict=True))
    slip, ratios = unit_slip(got[0], wanted[0]), {one / other for one, other in pairs}
    near = all(abs(one - other) < 1000 for one, other in pairs)
    for wrong, message in (
        (_same_bytes(got, wanted, (RANDOM_STATE,)), "Whose random state is that? Only a flash kernel keeps one."),
        (slip, f"{slip}"),
        (ratios == {0.5}, "Exactly half: did you count a 16-bit number as one byte, and a mask as half of one?"),
        (near, "Off by a few bytes only, whatever the sizes: have you added a number where a formula belongs?"),
        (True, otherwise),
    ):
        expect(not wrong, message)


# ---------------------------------------------------------------------------------------------------- 05.1: expressions

EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "tanh(x + y)": lambda x, y: torch.tanh(x + y),
    "relu(x) ** 2": lambda x, y: torch.relu(x) ** 2,
    "x * sigmoid(x)": lambda x, y: x * torch.sigmoid(x),
    "exp(x) + sin(x)": lambda x, y: torch.exp(x) + torch.sin(x),
    "sigmoid(x) / 3 + y": lambda x, y: torch.sigmoid(x) / 3 + y,
}
"""Operations that the lesson has not shown, of two tensors of one shape."""

EXPRESSION_MISTAKES: Mapping[tuple[str, float], str] = {
    ("tanh(x + y)", 3): "an addition asks for neither of its terms; and tanh?",
    ("tanh(x + y)", 2): "tanh's slope is 1 − tanh², so its output is enough; what else did you count?",
    ("relu(x) ** 2", 2): "ReLU keeps its output and the square keeps its input: how many storages are these two?",
    ("x * sigmoid(x)", 3): "the sigmoid keeps its output, which the product needs too: it is stored once.",
    ("x * sigmoid(x)", 1): "a product of two activations asks for both of its factors.",
    ("exp(x) + sin(x)", 1): "sin's slope is cos(x), which its output does not tell. Is exp's storage the same?",
    ("exp(x) + sin(x)", 3): "exp needs its output alone: its slope is its value.",
    ("sigmoid(x) / 3 + y", 2): "a division by a number keeps nothing, and neither does an addition.",
}
"""The hint for an answer that counts so many tensors of n numbers for an expression."""


@exercise("05.1", "Autograd was asked, and keeps what you said, for every expression.")
def expressions(answer: Any) -> None:
    """`answer(n)` is a dictionary: bytes kept for each of EXPRESSIONS, x and y being n bf16 numbers."""
    for n in (1024, 4096):
        got = entries(call(answer, n=n, returns=Mapping), tuple(EXPRESSIONS))
        for name, work in EXPRESSIONS.items():
            size, wanted = float(got[name]), sum(item.bytes for item in saved_by(work, (n,), (n,), dtype="bf16"))
            if size == wanted:
                continue
            hint = EXPRESSION_MISTAKES.get((name, size / (2 * n)))
            expect(not hint, f"{name}: {hint}")
            expect(size != wanted / 2, f"{name}: numbers where bytes were asked? A bf16 number takes two.")
            fail(f"{name} is off. Take its operations one by one, then strike out what is listed twice.")


# ------------------------------------------------------------------------------------------------------ 05.2: mlp_bytes


class BilinearMLP(nn.Module):
    """dropout((GELU(x·W1) · (x·W2))·W3): GEGLU (Shazeer 2020), without biases."""

    def __init__(self, h: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((h, ffn), (h, ffn), (ffn, h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.gelu(self.gate(x)) * self.up(x)
        return nn.functional.dropout(self.down(wide), 0.1)


bilinear_mlp = BilinearMLP  # The layer of exercise 2, to look at with `saved_by`
MLP_CASES = ((512, 2, 256, 1024), (128, 8, 512, 1365), (64, 3, 128, 200))  # s, b, h and ffn

MLP_MISTAKES: Mistakes = {
    "Both first matrices' input is one storage: you count it twice.": lambda s, b, h, ffn: s * b * (5 * h + 8 * ffn),
    "Dropout's mask takes one byte an element, not two.": lambda s, b, h, ffn: s * b * (4 * h + 8 * ffn),
    "The mask of dropout is missing.": lambda s, b, h, ffn: s * b * (2 * h + 8 * ffn),
    "A mask of width ffn? Dropout comes last, where it is h again.": lambda s, b, h, ffn: s * b * (2 * h + 9 * ffn),
    "One wide tensor short: a product keeps both of its factors.": lambda s, b, h, ffn: s * b * (3 * h + 6 * ffn),
    "That is right for one sequence. There are b of them.": lambda s, b, h, ffn: s * (3 * h + 8 * ffn),
    "That is a GELU MLP without a gate, whose product asks for more.": lambda s, b, h, ffn: s * b * (3 * h + 4 * ffn),
    "One wide tensor too many: two are one storage.": lambda s, b, h, ffn: s * b * (3 * h + 10 * ffn),
}  # fmt: skip


@exercise("05.2", "What hooks find in the genuine layer, whatever its sizes.")
def mlp_bytes(answer: Any) -> None:
    """`answer(s, b, h, ffn)` is what an MLP with a GELU gate and dropout keeps, in 16-bit."""
    got = [float(call(answer, s=s, b=b, h=h, ffn=ffn)) for s, b, h, ffn in MLP_CASES]
    otherwise = "Not what autograd keeps. List the tensors: one of width h, some of width ffn, one mask."
    _judge_bytes(got, MLP_CASES, lambda s, b, h, ffn: s * b * (2 * h + 8 * ffn + h), MLP_MISTAKES, otherwise)


# ---------------------------------------------------------------------------------------------------- 05.3: block_bytes

BLOCK_CASES = ((512, 2, 768, 12), (1024, 4, 1600, 25), (256, 1, 512, 4))  # s, b, h and a


def block_bytes_of(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    core = (5 if dropout else 2) * a * s * s * b if attention == "eager" else 4 * a * s * b
    return (34 if dropout else 32) * s * b * h + 16 * s * b + core


BLOCK_MISTAKES: Mistakes = {
    "the published formula, whatever kernel and dropout are. What does each of them change?":
        lambda s, b, h, a, *how: -1 if how == ("eager", True) else block_bytes_of(s, b, h, a, "eager", True),
    "all there but the statistics of the norms: two norms, two fp32 numbers a token.":
        lambda s, b, *rest: block_bytes_of(s, b, *rest) - 16 * s * b,
    "half of the statistics is missing: a block has two norms, and their numbers are fp32.":
        lambda s, b, *rest: block_bytes_of(s, b, *rest) - 8 * s * b,
    "the masks are still in your 34.": lambda s, b, h, *rest: block_bytes_of(s, b, h, *rest) + 2 * s * b * h,
    "only one of the masks has gone: attention's output and the MLP's each have one.":
        lambda s, b, h, *rest: block_bytes_of(s, b, h, *rest) + s * b * h,
    "a·s² still counts as with dropout. Its mask goes, and what does the last product keep then?":
        lambda s, b, h, a, *how: -1 if how[1] else block_bytes_of(s, b, h, a, *how) + 3 * a * s**2 * b,
    "a·s²: the mask has gone, but softmax's output and the factor of the next product are one.":
        lambda s, b, h, a, *how: -1 if how[1] else block_bytes_of(s, b, h, a, *how) + 2 * a * s**2 * b,
    "the kernel keeps something small that you lack: one fp32 number for each row of each head.":
        lambda s, b, h, a, *how: -1 if how[0] == "eager" else block_bytes_of(s, b, h, a, *how) - 4 * a * s * b,
}  # fmt: skip


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
            otherwise = f"{where} it is off. Compare with the lesson's ledger, row by row."
            state = RANDOM_STATE if attention == "flash" else 0
            _judge_bytes(got, cases, block_bytes_of, known, otherwise, optional=state)


# ----------------------------------------------------------------------------------------------- 05.4: longest_sequence

BUDGET_CASES = (
    (40 * 10**9, 1, 1600, 25, 48),
    (8 * 2**30, 4, 768, 12, 12),
    (200 * 10**9, 2, 4096, 32, 32),
    (10**6, 8, 1600, 25, 48),
    (12 * 2 * 1000 * (34 * 768 + 5 * 12 * 1000), 2, 768, 12, 12),
)
"""budget in bytes, b, h, a and L; 1,000 tokens fill the last one to the byte."""


def longest_of(budget: int, b: int, h: int, a: int, L: int) -> int:
    """The largest s with L·b·(34·h·s + 5·a·s²) ≤ budget: a quadratic equation, exact in whole numbers."""
    per_layer = budget // (L * b)
    root = isqrt((34 * h) ** 2 + 4 * 5 * a * per_layer)
    s = (root - 34 * h) // (10 * a)
    while 34 * h * (s + 1) + 5 * a * (s + 1) ** 2 <= per_layer:
        s += 1
    return s


LENGTH_MISTAKES: Mistakes = {
    "What fills the budget to the last byte still fits.": lambda budget, *rest: longest_of(budget - 1, *rest),
    "Linear alone? That is flash attention's length.": lambda budget, b, h, a, L: budget // (L * b * 34 * h),
    "s² alone: the linear part is far from nothing.": lambda budget, b, h, a, L: isqrt(budget // (L * b * 5 * a)),
    "One block fills it, but all L blocks keep their share.": lambda budget, b, h, a, _: longest_of(budget, b, h, a, 1),
    "Right for one sequence. There are b of them at once.": lambda budget, b, *rest: longest_of(budget, 1, *rest),
}  # fmt: skip


@exercise("05.4", "One token more would not fit, for any budget and any model.")
def longest_sequence(answer: Any) -> None:
    """`answer(budget, b, h, a, L)` is the largest s whose L eager blocks fit into `budget` bytes."""
    names = ("budget", "b", "h", "a", "L")
    got = [call(answer, **by_name(names, case)) for case in BUDGET_CASES]
    for value in got:
        expect(value == int(value) and value >= 0, "A length is a whole number of tokens; round down what you get.")
    if recognized(got, BUDGET_CASES, longest_of, LENGTH_MISTAKES):
        return
    too_long = any(value > longest_of(*case) for value, case in zip(got, BUDGET_CASES, strict=True))
    expect(not too_long, "One of your lengths is too long: put it into the formula and compare with the budget.")
    fail("What you give fits, but a longer sequence fits as well.")


# ----------------------------------------------------------------------------------------------------- 05.5: read_sweep


class Sweep(NamedTuple):
    """A hidden run: bytes at the end of forward for some lengths, its kernel, and bytes at twice the longest."""

    sweep: dict[int, int]
    attention: str
    next: int


def _sweep(run: TrainingRun, *lengths: int) -> Sweep:
    sizes = {s: activation_bytes(run.replace(seq_len=s)) for s in lengths}
    return Sweep(sizes, run.attention, activation_bytes(run.replace(seq_len=2 * max(lengths))))


@cache
def hidden_sweeps() -> tuple[Sweep, ...]:
    """Sweeps of four models; neither size nor order of the lengths gives the kernel away."""
    small = TrainingRun("gpt2", 2, 128, "bf16-master")
    large = TrainingRun(replace(PRESETS["llama3.2-1b"], layers=4), 8, 512, "bf16-master")
    return (
        _sweep(large, 512, 1024, 2048),
        _sweep(small.replace(attention="eager"), 128, 256, 512),
        _sweep(large.replace(attention="eager", micro_batch=1), 256, 512, 768),
        _sweep(small.replace(precision="amp-bf16", micro_batch=1), 384, 128, 256),
    )


def example_sweep() -> dict[int, int]:
    """A sweep to try `read_sweep` on: a tiny GPT with eager attention, bytes by length."""
    return _sweep(TrainingRun("tiny-gpt", 4, 32, "bf16-master", attention="eager"), 32, 64, 128).sweep


NEXT_MISTAKES: Mistakes = {
    "You double the last size. With s×s matrices that is too little.": lambda sweep, *_: 2 * sweep[max(sweep)],
    "You take four times the last size. Only a part of it grows with s².": lambda sweep, *_: 4 * sweep[max(sweep)],
}


@exercise("05.5", "Kernel and next length of every hidden model, from a handful of lengths.")
def read_sweep(answer: Any) -> None:
    """`answer(sweep)` is {"attention": "eager" or "flash", "next": bytes at twice the largest s}."""
    hidden = hidden_sweeps()
    answers = [_sweep_answer(answer, dict(case.sweep)) for case in hidden]
    kernels, wanted = [kernel for kernel, _ in answers], [case.attention for case in hidden]
    expect(len(set(kernels)) > 1, "You name the same kernel whatever the sweep says. The hidden models differ.")
    some_right, all_right = any(map(str.__eq__, kernels, wanted)), kernels == wanted
    expect(some_right, "Turned round: which of the two kernels writes s×s matrices?")
    expect(all_right, "A kernel is off. Don't judge by how much is kept: what remains when you divide it by s?")
    got = [size for _, size in answers]
    if recognized(got, hidden, lambda *case: case[-1], NEXT_MISTAKES, same=partial(alike, tolerance=1e-2)):
        return
    for size, case in zip(got, hidden, strict=True):
        slip = unit_slip(size, case.next)
        expect(not slip, f"The kernels are right; next is {slip}")
        close = math.isclose(size, case.next, rel_tol=1e-2)
        expect(close, f"The kernels are right, but a next size is off, by {case.attention} attention.")


def _sweep_answer(answer: Any, sweep: dict[int, int]) -> tuple[str, float]:
    got = entries(call(answer, sweep=sweep, returns=Mapping), ("attention", "next"), (Real, str))
    kernel = of_kind(got["attention"], str, "attention is")
    expect(kernel in ("eager", "flash"), f"attention is 'eager' or 'flash'; you say {kernel!r}.")
    return kernel, float(of_kind(got["next"], Real, "next is"))


# ------------------------------------------------------------------------------------------------------- 05.6: explain

STORY = TrainingRun(small_gpt(layers=3), 8, 128, "amp-bf16", attention="eager", accumulation_steps=2)

STATEMENTS = {
    1: "Backward is half way through: what a block has kept goes as soon as it has been used.",
    2: "The optimizer has stepped for the first time: its two states have just been made.",
    3: "A leak: memory of the step before was not given back.",
    4: "Forward is through: each block keeps what its backward will ask for.",
    5: "Weights and tokens alone: nothing has been computed yet.",
    6: "Activations wait here until the optimizer has used them.",
    7: "One micro-batch is done: its activations have gone, its gradients wait for those of the next.",
    8: "The weights are loaded a second and a third time, so that the optimizer can work on copies.",
    9: "A step begins: gradients have been set to none, the optimizer's states stay.",
}
"""Statements about moments, in no order; three are wrong for every moment."""

EXPLAINED = {"A": 5, "B": 4, "C": 7, "D": 2, "E": 9, "F": 1}  # The right statement of each moment
STORY_MISTAKES: Mapping[tuple[str, int], str] = {
    ("E", 3): "E: is it a leak if every later step begins at this height? See what it is that stays.",
    ("C", 3): "C: what is left there is one kind of memory. Who will want it when the next micro-batch is through?",
    ("F", 6): "F: the curve falls right there, before the optimizer has run. Who has used what has gone?",
    ("B", 6): "B: does any formula of an optimizer ask for an activation? Look when they go.",
    ("D", 8): "D: two tensors for each weight have come, in fp32. They are no copies: what does Adam remember?",
    ("C", 9): "C lies inside a step. Are there gradients at C, and states of the optimizer?",
    ("E", 7): "E lies between two steps. Are there gradients at E, and states of the optimizer?",
}
"""The hint for a moment that is given this statement."""


@cache
def story_measured() -> Measurement:
    return measure(STORY, source="simulated")


def story_letters() -> dict[str, int]:
    """The moments of exercise 6, as counts of events: where phases of the two steps begin, and one within backward."""
    starts: dict[tuple[int, str], list[int]] = {}
    for mark in story_measured().timeline.marks:
        starts.setdefault((mark.step, mark.phase), []).append(mark.event)
    first, second = starts[1, "forward"]
    loss, zero_grad, step = starts[1, "loss"][0], starts[1, "zero_grad"][0], starts[2, "forward"][0]
    halfway = (starts[2, "backward"][-1] + starts[2, "optimizer"][0]) // 2
    return {"A": first, "B": loss, "C": second, "D": zero_grad, "E": step, "F": halfway}


def story() -> Figure:
    """The timeline that is to be explained, with its moments as letters."""
    title = "Two steps of a small GPT, two micro-batches each: what happens at A to F?"
    return timeline(story_measured(), title, unit="MB", steps=[1, 2], letters=story_letters())


@exercise("05.6", "Every moment has its cause: nothing leaks, and nothing waits for the optimizer but gradients.")
def told(answer: Any) -> None:
    """`answer()` is a dictionary from each letter to the number of the statement about that moment."""
    got = entries(call(answer, returns=Mapping), tuple(EXPLAINED), int)
    for letter, number in got.items():
        expect(number in STATEMENTS, f"{letter} is {number}: the statements have numbers 1 to {len(STATEMENTS)}.")
    if got == EXPLAINED:
        return
    for given in got.items():
        expect(given not in STORY_MISTAKES, STORY_MISTAKES.get(given, ""))
    twice = [f"{one} and {other}" for one in EXPLAINED for other in EXPLAINED if one < other and got[one] == got[other]]
    expect(not twice, f"{' '.join(twice[:1])} have the same explanation. Every statement is of one moment at most.")
    wrong = next(letter for letter, number in EXPLAINED.items() if got[letter] != number)
    fail(f"{wrong} is off. Which kinds of memory are there at that moment, and which have come or gone since the last?")
