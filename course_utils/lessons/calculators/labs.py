"""What the checks of lesson 13 run: right answers, and wrong ones that learners give."""

from collections.abc import Callable
from functools import cache

from course_utils.estimating import estimate
from course_utils.measuring import measure
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB

from .calculators import TERMS, Truth, gaps, largest_gap, truth

# -------------------------------------------------------------------------------------------------- 13.1: unit_meant

UNIT_CASES = (
    (15.93, 17_106_000_000),
    (17.11, 17_106_000_000),
    (24.9, 24_921_779_200),
    (23.2, 24_921_779_200),
    (24.0, 24_921_779_200),
    (26.8, 24_921_779_200),
    (24.55, 24_921_779_200),
    (23.57, 24_921_779_200),
    (0.497, 497_759_232),
    (0.4636, 497_759_232),
    (1303.9, 1_400_000_000_000),
    (1390.0, 1_400_000_000_000),
    (1350.0, 1_400_000_000_000),
)


def unit_right(number: float, size: int) -> str:
    """The right answer."""
    return _first_near(number, size, lambda said, size: abs(said / size - 1) <= 0.01)


def _first_near(number: float, size: int, near: Callable[[float, int], bool]) -> str:
    return next((name for name, one in (("GB", GB), ("GiB", GiB)) if near(number * one, size)), "neither")


def _swapped(number: float, size: int) -> str:
    return {"GB": "GiB", "GiB": "GB"}.get(unit_right(number, size), "neither")


def _nearest(number: float, size: int) -> str:
    return min(("GB", GB), ("GiB", GiB), key=lambda pair: abs(number * pair[1] - size))[0]


UNIT_MISTAKES: dict[str, Callable[[float, int], str]] = {
    "You have the two units the wrong way round: 1 GiB is the larger one.": _swapped,
    "You always take the nearer of the two. Some numbers fit neither.": _nearest,
    "You look at one side alone: a number may be a little too large, or a little too small.": (
        lambda number, size: _first_near(number, size, lambda said, size: 0 <= said / size - 1 <= 0.01)
    ),
    "You look at one side alone: a number may be a little too small, or a little too large.": (
        lambda number, size: _first_near(number, size, lambda said, size: said / size - 1 <= 0.01)
    ),
    "Your tolerance is a fixed amount. One percent of a small size is less than that, of a large one more.": (
        lambda number, size: _first_near(number, size, lambda said, size: abs(said - size) <= 0.01 * GB)
    ),
    "Your tolerance is too wide: some numbers fit neither unit.": (
        lambda number, size: _first_near(number, size, lambda said, size: abs(said / size - 1) <= 0.05)
    ),
}
"""What a learner can write instead, and what to say to it."""

# ------------------------------------------------------------------------------------------------ 13.2: missing_term

SUSPECTS = ("accelerate", "DeepSpeed ZeRO-2", "ZeRO", "Korthikanti et al.", "EleutherAI cookbook")
TERM_NAMES = tuple(term.name for term in TERMS)
SMALL = TrainingRun("gpt2", 8, 1024)


@cache
def _real() -> Truth:
    return truth(measure(SMALL, source="simulated"))


def share_of_peak(name: str, term: str) -> float:
    """What a calculator has wrong in one term, answer minus truth, in percent of the simulated peak of GPT-2's step."""
    real = _real()
    return 100 * gaps(name, SMALL, real)[term] / real.peak


def worst_term(name: str) -> str:
    """The right answer: the term that is furthest off, whatever its sign."""
    return largest_gap(name, SMALL, _real())


# ------------------------------------------------------------------------------------------------------- 13.3: judge

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
    """The right answer."""
    return next((name for name, value in candidates(run).items() if abs(said / value - 1) <= 0.01), "unknown")


def _said(name: str, run: TrainingRun, factor: float = 1.0) -> tuple[float, TrainingRun]:
    return round(candidates(run)[name] * factor, 2), run


JUDGED = (
    _said("weights", LLAMA_1B),
    _said("eager", MEDIUM),
    _said("GiB", LARGE),
    _said("states", MEDIUM),
    _said("right", LLAMA_1B),
    _said("right", MEDIUM, 1.05),
    _said("eager", LARGE, 0.993),
    _said("GiB", LLAMA_1B, 1.006),
    _said("states", LARGE, 2.0),
)
"""Numbers of posts, the first three of which are shown, and the runs that they are about."""

POSTS = (
    f"“{JUDGED[0][1].model.name} at batch 4? Easy, {JUDGED[0][0]:g} GB, it runs on anything.”",
    f"“I computed it for {JUDGED[1][1].model.name}: {JUDGED[1][0]:g} GB. Attention is quadratic, you know.”",
    f"“My script says {JUDGED[2][0]:g} GB for {JUDGED[2][1].model.name}, straight from the byte counter.”",
)

# ------------------------------------------------------------------------------------------------ 13.4: bytes_a_token

TOKEN_CASES = ((4096, 1024, 14336, 32), (2048, 512, 8192, 32), (3584, 512, 18944, 28), (1000, 1000, 2700, 10))


def token_right(h: int, kv: int, ffn: int, a: int) -> int:
    """The right answer: 22h + 4kv + 8ffn + 4a + 8."""
    return 22 * h + 4 * kv + 8 * ffn + 4 * a + 8


TOKEN_MISTAKES: dict[str, Callable[[int, int, int, int], float]] = {
    "That is 12·h, right for a pure 16-bit recipe. Under autocast five matrices keep a copy of their input besides.": (
        lambda h, kv, ffn, a: 12 * h + 4 * kv + 8 * ffn + 4 * a + 8
    ),
    "One copy for q, k and v together, one for gate and up? Each matrix makes its own.": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) - 6 * h
    ),
    "A sixth copy? The matrix after attention reads what is 16-bit already, and mlp's last one too.": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) + 2 * h
    ),
    "Your norms keep their input in 16 bits. The residual stream is fp32.": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) - 4 * h
    ),
    "Two tensors of width ffn: that is a GELU MLP. SwiGLU keeps four.": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) - 4 * ffn
    ),
    "Three tensors of width ffn: what does the last matrix read?": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) - 2 * ffn
    ),
    "Your keys and values are as wide as the queries. Grouped queries make them kv numbers each.": (
        lambda h, kv, ffn, a: token_right(h, h, ffn, a)
    ),
    "The norms' statistics are missing: one fp32 number a token for each of two.": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) - 8
    ),
    "Two statistics for each norm are LayerNorm's. RMSNorm has one.": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) + 8
    ),
    "The flash kernel's fp32 number for each head is missing.": (
        lambda h, kv, ffn, a: token_right(h, kv, ffn, a) - 4 * a
    ),
    "Those are elements. Bytes were asked for: which tensors have 2, which 4 for each?": (
        lambda h, kv, ffn, a: 9 * h + 2 * kv + 4 * ffn + a + 2
    ),
}
"""What a learner can write instead, and what to say to it."""
