"""Checks of the exercises of lesson 13, "Who is right?": each names the misconception, never the answer."""

from collections.abc import Callable, Mapping
from functools import partial
from math import isclose
from numbers import Real
from operator import eq
from typing import Any

import torch

from course_utils.estimating import estimate
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
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB

from .errata import ERRATA
from .layer import MODEL, TORCHS, gap, one_layer

# ---------------------------------------------------------------------------------------------------- 13.1: unit_meant

UNIT_REPORTS = {
    17_106_000_000: (15.93, 17.11),
    24_921_779_200: (24.9, 23.2, 24.0, 26.8, 24.55, 23.57),
    497_759_232: (0.497, 0.4636),
    1_400_000_000_000: (1303.9, 1390.0, 1350.0),
}
UNIT_CASES = [(number, size) for size, numbers in UNIT_REPORTS.items() for number in numbers]


def _first_near(near: Callable[[float, int], bool]) -> Callable[[float, int], str]:
    """An answer: the first unit in which a number, in bytes, is near the size."""
    units = (("GB", GB), ("GiB", GiB))
    return lambda number, size: next((name for name, unit in units if near(number * unit, size)), "neither")


unit_right = _first_near(lambda said, size: abs(said / size - 1) <= 0.01)

UNIT_MISTAKES: Mistakes = {
    "You have the two units the wrong way round: 1 GiB is the larger one.":
        lambda number, size: {"GB": "GiB", "GiB": "GB"}.get(unit_right(number, size), "neither"),
    "You always take the nearer of the two. Some numbers fit neither.":
        lambda number, size: "GB" if abs(number * GB - size) <= abs(number * GiB - size) else "GiB",
    "You look at one side alone: a number may be a little too large, or a little too small.":
        _first_near(lambda said, size: said / size - 1 <= 0.01),
    "Your tolerance is a fixed amount. One percent of a small size is less than that, of a large one more.":
        _first_near(lambda said, size: abs(said - size) <= 0.01 * GB),
    "Your tolerance is too wide: some numbers fit neither unit.":
        _first_near(lambda said, size: abs(said / size - 1) <= 0.05),
}  # fmt: skip


@exercise("13.1", "One percent is nearer than a letter: GB and GiB are 7 % apart.")
def unit_meant(answer: Any) -> None:
    """`answer(number, size)` is "GB", "GiB" or "neither"."""
    got = [call(answer, number=number, size=size, returns=str) for number, size in UNIT_CASES]
    expect({*got} <= {"GB", "GiB", "neither"}, 'The answers are "GB", "GiB" and "neither".')
    expect(set(got) != {"neither"}, "Reports round their numbers: give each a tolerance, and say neither beyond it.")
    expect(len(set(got)) > 1, "The same unit for every report: do you compare at all, or is GB as good as GiB to you?")
    otherwise = "Some units are off. Turn the number into bytes both ways, and compare each with the size as a ratio."
    recognized(got, UNIT_CASES, unit_right, UNIT_MISTAKES, otherwise, eq)


# -------------------------------------------------------------------------------------------------- 13.2: last_percent

LEFT = 10**8
"""Bytes of the gap that may stay without a name."""


def _expect_same_numbers(name: str, own: Any) -> None:
    x = torch.linspace(-3, 4, 24).reshape(2, 3, 4)
    given = (x, torch.linspace(1, 2, 4)) if name == "norm" else (x,)
    got, wanted = call(own, *given, returns=torch.Tensor), TORCHS[name](*given)
    same = got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-4)
    expect(same, f"Your {name} gives other numbers than torch's. Compare the two on a small tensor.")


def _expect_bytes(name: str, said: float, kept: int, peak: int) -> None:
    """Raise CheckFailed unless `said` is what the operation adds to the whole model's peak, to 4 %: a layer or two."""
    layers, near = MODEL.layers, partial(isclose, said, rel_tol=0.04)
    expect(max(kept, peak) > 10**6, f"Your {name} takes no more memory than torch's. Is it one operation of torch's?")
    if name == "softmax":
        expect(abs(said) > LEFT / 2, "softmax: forward keeps next to nothing more. At which moment is the step's peak?")
        expect(kept < 10**6, "Your softmax keeps another tensor for backward: see how the table takes the largest.")
        expect(not near(layers * peak), "softmax: at the peak, only one layer's softmax is in its backward.")
    else:
        expect(not near(kept), f"{name}: that is one layer. How many of them wait for backward?")
        expect(not near(layers * kept / 2), f"{name}: half of it. How often is it in a layer, and in what format?")
        expect(not near(2 * layers * kept), f"{name}: twice what it adds. What did torch's own keep already?")
    wanted = peak if name == "softmax" else layers * kept
    expect(said > 10**4, f"{name}: bytes are asked for, not MB or GB.")
    expect(near(wanted), f"{name}: your code adds something else. Measure one layer with it and without.")


@exercise("13.2", "Three operations written out: 4 % of what a GPU counted.")
def last_percent(answer: Any) -> None:
    """`answer()` is a dictionary of norm, silu and softmax: for each its operation and the bytes it adds."""
    got = entries(call(answer, returns=Mapping), tuple(TORCHS), tuple)
    for name, pair in got.items():
        expect(len(pair) == 2, f"{name}: a pair is asked for, your function and its bytes.")
        _expect_same_numbers(name, pair[0])
        of_kind(pair[1], Real, f"{name}: your bytes are")
    without = one_layer()
    for name, (own, said) in got.items():
        with_it = one_layer(**{name: own})
        kept = with_it.moments["end of forward"].total - without.moments["end of forward"].total
        _expect_bytes(name, float(said), kept, with_it.peak - without.peak)
    left = gap() - sum(float(said) for _, said in got.values())
    expect(abs(left) <= LEFT, "Your bytes are those of your code, and the gap is not theirs: follow the table's order.")


# --------------------------------------------------------------------------------------------------------- 13.3: judge

JUDGMENTS = ("right", "weights", "states", "eager", "GiB", "unknown")

LLAMA_1B = TrainingRun("llama3.2-1b", 4, 2048)
MEDIUM = TrainingRun("gpt2-medium", 8, 1024, "bf16-master")
LARGE = TrainingRun("gpt2-large", 2, 1024)


def candidates(run: TrainingRun) -> dict[str, float]:
    """Each candidate as the number that somebody would call GB."""
    peak, N = estimate(run).total, run.model.parameters
    eager = estimate(run.replace(attention="eager")).total
    return {"right": peak / GB, "weights": 2 * N / GB, "states": 16 * N / GB, "eager": eager / GB, "GiB": peak / GiB}


def judged_right(said: float, run: TrainingRun) -> str:
    return next((name for name, value in candidates(run).items() if abs(said / value - 1) <= 0.01), "unknown")


SAID = (
    ("weights", LLAMA_1B, 1), ("eager", MEDIUM, 1), ("GiB", LARGE, 1), ("states", MEDIUM, 1), ("right", LLAMA_1B, 1),
    ("right", MEDIUM, 1.05), ("eager", LARGE, 0.993), ("GiB", LLAMA_1B, 1.006), ("states", LARGE, 2),
)  # fmt: skip
JUDGED = [(round(candidates(run)[name] * factor, 2), run) for name, run, factor in SAID]
"""Numbers of posts, and the runs that they are about; the first three are shown."""


def posts() -> tuple[str, ...]:
    """Answers of a forum that does not exist."""
    (easy, llama), (computed, medium), (script, large) = JUDGED[:3]
    return (
        f"“{llama.model.name} at batch 4? Easy, {easy:g} GB, it runs on anything.”",
        f"“I computed it for {medium.model.name}: {computed:g} GB. Attention is quadratic, you know.”",
        f"“My script says {script:g} GB for {large.model.name}, straight from the byte counter.”",
    )


@exercise("13.3", "Every wrong number is the right answer to another question.")
def judge(answer: Any) -> None:
    """`answer(said, run)` names what a number is."""
    got = [call(answer, said=said, run=run, returns=str) for said, run in JUDGED]
    unknown = {*got} - {*JUDGMENTS}
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of {', '.join(JUDGMENTS)}.")
    expect(set(got) != {"unknown"}, "Nothing is near enough: are your candidates in GB as well, do you allow for 1 %?")
    expect(len(set(got)) > 1, "You give the same answer to every post. They were written by different people.")
    for (said, run), mine in zip(JUDGED, got, strict=True):
        if mine != (wanted := judged_right(said, run)):
            expect(wanted != "right", f"{said:g} GB for {run} is what the run takes, and you call it {mine!r}.")
            expect(mine != "unknown", f"{said:g} GB for {run} is one of the five: within 1 %, above it or below it.")
            off = f"{said:g} GB for {run}: you call it {mine!r}, but it is more than 1 % off that."
            fail(f"{off} Do you allow for more, or compute that candidate otherwise, or in another unit?")


# ------------------------------------------------------------------------------------------------- 13.4: bytes_a_token

TOKEN_CASES = ((4096, 1024, 14336, 32), (2048, 512, 8192, 32), (3584, 512, 18944, 28), (1000, 1000, 2700, 10))


def _token(h: int = 22, kv: int = 4, ffn: int = 8, a: int = 4, one: int = 8) -> Callable[[int, int, int, int], int]:
    """An answer: so many bytes for each of h, kv, ffn and a, and so many more."""
    return lambda *sizes: one + sum(size * each for size, each in zip(sizes, (h, kv, ffn, a), strict=True))


token_right = _token()

TOKEN_MISTAKES: Mistakes = {
    "That is 12·h, right for a pure 16-bit recipe. Under autocast five matrices keep a copy, too.": _token(h=12),
    "One copy for q, k and v together, one for gate and up? Each matrix makes its own.": _token(h=16),
    "A sixth copy? The matrix after attention reads what is 16-bit already, and mlp's last one too.": _token(h=24),
    "Your norms keep their input in 16 bits. The residual stream is fp32.": _token(h=18),
    "Two tensors of width ffn: that is a GELU MLP. SwiGLU keeps four.": _token(ffn=4),
    "Three tensors of width ffn: what does the last matrix read?": _token(ffn=6),
    "Your keys and values are as wide as the queries. Grouped queries make them kv numbers.": _token(h=26, kv=0),
    "The norms' statistics are missing: one fp32 number a token for each of two.": _token(one=0),
    "Two statistics for each norm are LayerNorm's. RMSNorm has one.": _token(one=16),
    "The flash kernel's fp32 number for each head is missing.": _token(a=0),
    "Those are elements. Which tensors have 2 bytes, which 4 for each?": _token(h=9, kv=2, ffn=4, a=1, one=2),
}


@exercise("13.4", "Every tensor has its bytes, and autocast has more of them than it is said to.")
def bytes_a_token(answer: Any) -> None:
    """`answer(h, kv, ffn, a)` is what a Llama's block keeps for one token under autocast."""
    got = [call(answer, **by_name(("h", "kv", "ffn", "a"), case)) for case in TOKEN_CASES]
    if not recognized(got, TOKEN_CASES, token_right, TOKEN_MISTAKES, same=partial(alike, tolerance=1e-9)):
        slip = unit_slip(got[0], token_right(*TOKEN_CASES[0]))
        expect(slip is None, f"Your bytes are {slip}")
        fail("The bytes are off. Call your function with kv, ffn and a of 0: what is left has h in it, and should be "
             "even.")  # fmt: skip


# ------------------------------------------------------------------------------------------------------- 13.5: erratum


@exercise("13.5", "A claim, its source, and evidence that anybody can run: that is all an erratum needs.")
def erratum(answer: Any) -> None:
    """`answer()` is a dictionary: claim, source, said, evidence, lesson."""
    got = entries(call(answer, returns=Mapping), ("claim", "source", "said", "evidence", "lesson"), object)
    claim = of_kind(got["claim"], str, "The claim is")
    source = of_kind(got["source"], str, "The source is")
    said, lesson = of_kind(got["said"], Real, "said is"), of_kind(got["lesson"], int, "lesson is")
    expect(any(letter.isdigit() for letter in claim), "The claim has no number in it: what exactly was claimed?")
    expect(len(source.split()) >= 2, "Say a little more of the source: where does the claim stand, and when was that?")
    expect(claim not in [one.claim for one in ERRATA], "That one is on the course's list already. Find your own.")
    expect(1 <= lesson <= 14, "There are lessons 1 to 14.")
    first, second = call(got["evidence"]), call(got["evidence"])
    expect(first == second, "Your evidence gives another number each time. Fix what is random in it.")
    expect(first != 0, "Your evidence comes to 0: is that really the number in question?")
    expect(
        abs(said / first - 1) > 0.005,
        "Your evidence gives what was said, to half a percent. Then the claim holds, and there is nothing to correct.",
    )
