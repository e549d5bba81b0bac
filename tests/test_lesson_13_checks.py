"""The checks of lesson 13: right answers of every style pass, each wrong answer gets the hint it deserves."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch
from checking import Answers, JudgedAnswers
from torch.nn import functional as F

from course_utils import TrainingRun, estimate
from course_utils.benchmark.published import published_rows
from course_utils.lessons.calculators import checks as lesson_13
from course_utils.lessons.calculators.checks import JUDGED, candidates
from course_utils.lessons.calculators.errata import ERRATA
from course_utils.lessons.calculators.layer import PUBLISHED, gap, one_layer
from course_utils.units import parse_bytes

UNITS = {"GB": 10**9, "GiB": 2**30}


def by_ratio(number: float, size: int) -> str:
    """From bytes to the unit, with the course's parser."""
    ratios = {unit: number / (size / parse_bytes(f"1 {unit}")) for unit in UNITS}
    return next((unit for unit, ratio in ratios.items() if 0.99 <= ratio <= 1.01), "neither")


def by_distance(number: float, size: int) -> str:
    off = np.abs(number * np.array([1e9, 2.0**30]) - size)
    return str(np.array(["GB", "GiB"])[off.argmin()]) if off.min() <= 0.01 * size else "neither"


def meant(near: Callable[[float, int], bool]) -> Any:
    """The first unit in which the number, in bytes, is near the size."""
    return lambda number, size: next((name for name, one in UNITS.items() if near(number * one, size)), "neither")


UNIT_MEANT = Answers(
    right=[by_ratio, by_distance, meant(lambda said, size: abs(said - size) <= 0.01 * size)],
    wrong=[
        (lambda number, size: {"GB": "GiB", "GiB": "GB"}.get(by_ratio(number, size), "neither"), "the wrong way round"),
        (lambda number, size: min(UNITS, key=lambda unit: abs(number * UNITS[unit] - size)), "the nearer of the two"),
        (meant(lambda said, size: said / size - 1 <= 0.01), "too large, or a little too small"),
        (meant(lambda said, size: abs(said - size) <= 10**7), "Your tolerance is a fixed amount"),
        (meant(lambda said, size: abs(said / size - 1) <= 0.05), "Your tolerance is too wide"),
        (meant(lambda said, size: abs(said / size - 1) <= 0.02), "Some units are off"),
        (meant(lambda said, size: said == size), "Reports round"),
        (lambda number, size: "GB", "The same unit for every report"),
        (lambda number, size: by_ratio(number, size).lower(), 'The answers are "GB"'),
    ],
)


def norm(x: Any, weight: Any) -> Any:
    wide = x.to(torch.float32)
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def norm_in_another_order(x: Any, weight: Any) -> Any:
    return weight * (x.float() / (x.float().square().mean(dim=-1, keepdim=True) + 1e-5).sqrt())


def silu(x: Any) -> Any:
    return x * torch.sigmoid(x)


def softmax(x: Any) -> Any:
    exponentials = (x - torch.max(x, -1, keepdim=True)[0]).exp()
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def softmax_by_amax(x: Any) -> Any:
    exponentials = (x - x.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


TOKENS, SCORES = 4 * 512, 4 * 32 * 512 * 512
NORMS, SILUS = 65 * 4 * TOKENS * 2560, 32 * 2 * TOKENS * 10240
PAIRS = {"norm": (norm, NORMS), "silu": (silu, SILUS), "softmax": (softmax, 8 * SCORES)}


def pairs(**changes: Any) -> Any:
    """The right pairs but for some: another function, or other bytes."""
    new = {
        name: (PAIRS[name][0], change) if isinstance(change, (int, float, str)) else change
        for name, change in changes.items()
    }
    return lambda: PAIRS | new


def by_measuring() -> dict[str, Any]:
    own, without = one_layer(norm=norm, silu=silu), one_layer()
    forward = [one.moments["end of forward"].total for one in (own, without, one_layer(norm=norm))]
    norms, silus = forward[2] - forward[1], forward[0] - forward[2]
    more = one_layer(softmax=softmax).peak - without.peak
    return {"softmax": (softmax, more), "silu": (silu, 32.0 * silus), "norm": (norm, 32 * norms)}


LAST_PERCENT = Answers(
    right=[
        pairs(),
        by_measuring,
        pairs(norm=(norm_in_another_order, 63 * 4 * TOKENS * 2560), silu=[lambda x: torch.sigmoid(x) * x, 1.3e9]),
    ],
    wrong=[
        (pairs(norm=2 * 4 * TOKENS * 2560), "norm: that is one layer"),
        (pairs(norm=32 * 4 * TOKENS * 2560), "How often is it in a layer"),
        (pairs(silu=32 * 4 * TOKENS * 10240), "silu: twice what it adds"),
        (pairs(silu=3e9), "silu: your code adds something else"),
        (pairs(silu=1.34), "bytes are asked for"),
        (pairs(softmax=0), "At which moment is the step's peak"),
        (pairs(softmax=32 * 8 * SCORES), "only one layer's softmax"),
        (pairs(softmax=(softmax_by_amax, 10 * SCORES)), "keeps another tensor for backward"),
        (pairs(silu=(F.silu, 0)), "takes no more memory than torch's"),
        (pairs(silu=(torch.sigmoid, 0)), "other numbers than torch's"),
        (pairs(norm="1.3 GB"), "your bytes are a text"),
        (pairs(norm=(norm,)), "a pair is asked for"),
        (lambda: {"norm": PAIRS["norm"]}, "has no 'silu' and no 'softmax'"),
        (pairs(silu=(lambda x: x / (1 + torch.exp(-x)), 32 * 10 * TOKENS * 10240)), "the gap is not theirs"),
    ],
)


def test_the_published_figure_is_the_benchmark_s_and_three_terms_explain_it() -> None:
    row = next(row for row in published_rows() if row.id == "cs336-shibuki-2.7b-bf16-train-step-ctx512")
    assert abs(row.bytes - PUBLISHED) <= 1 and row.printed == "62.69 GiB"
    assert abs(gap() - sum(size for _, size in PAIRS.values())) < 0.001 * PUBLISHED


def judging(near: Callable[[float], bool] = lambda ratio: 0.99 <= ratio <= 1.01, **changes: Any) -> Any:
    """The first candidate that is near, some of them computed in another way."""

    def answer(said: float, run: TrainingRun) -> str:
        values = candidates(run) | {name: change(run) for name, change in changes.items()}
        return next((name for name, value in values.items() if near(said / value)), "unknown")

    return answer


def nearest(said: float, run: TrainingRun, limit: float = 0.01) -> str:
    off = {name: abs(said / value - 1) for name, value in candidates(run).items()}
    name = min(off, key=lambda name: off[name])
    return name if off[name] <= limit else "unknown"


def step_by_step(said: float, run: TrainingRun) -> str:
    peak, N = estimate(run).total, run.model.parameters
    eager = estimate(run.replace(attention="eager")).total / 1e9
    values = {"GiB": peak / 2**30, "eager": eager, "states": 16e-9 * N, "weights": 2e-9 * N, "right": peak / 1e9}
    return next((name for name, value in values.items() if round(abs(said / value - 1) * 100, 6) <= 1), "unknown")


JUDGE = Answers(
    right=[judging(), nearest, step_by_step],
    wrong=[
        (lambda said, run: "states", "the same answer to every post"),
        (judging(lambda ratio: 0.99e-9 <= ratio <= 1.01e-9), "do you allow for 1 %"),
        (lambda said, run: nearest(said, run, limit=1), "more than 1 % off that"),
        (judging(lambda ratio: 1 <= ratio <= 1.01), "above it or below it"),
        (judging(GiB=lambda run: estimate(run).total / 1e9), "is one of the five"),
        (judging(right=lambda run: estimate(run).total / 2**30, GiB=lambda run: estimate(run).total / 1e9),
         "or in another unit"),
        (lambda said, run: {"right": "states"}.get(nearest(said, run), nearest(said, run)), "is what the run takes"),
        (lambda said, run: nearest(said, run).replace("unknown", "wrong"), "not one of right, weights"),
    ],
)  # fmt: skip


def test_every_judgment_occurs_and_the_posts_are_about_the_first_three() -> None:
    assert {lesson_13.judged_right(*case) for case in JUDGED} == {*candidates(JUDGED[0][1]), "unknown"}
    assert all(f"{said:g} GB" in post for post, (said, _) in zip(lesson_13.posts(), JUDGED, strict=False))


def tensor_by_tensor(h: int, kv: int, ffn: int, a: int) -> int:
    fp32, bf16 = [h, 1, h, 1, a], [h] * 7 + [kv, kv] + [ffn] * 4
    return 4 * sum(fp32) + 2 * sum(bf16)


def tally(norm: int = 4, statistic: int = 4, copies: int = 5, wide: bool = False, kernel: int = 4, mlp: int = 4) -> Any:
    """The list, bullet by bullet, with something else for one of them."""

    def answer(h: int, kv: int, ffn: int, a: int) -> int:
        keys = h if wide else kv
        return 2 * (norm * h + statistic) + copies * 2 * h + 2 * (h + keys + keys + h) + kernel * a + mlp * 2 * ffn

    return answer


BYTES_A_TOKEN = Answers(
    right=[tally(), tensor_by_tensor, lambda h, kv, ffn, a: 2.0 * (11 * h + 2 * kv + 4 * ffn + 2 * a + 4)],
    wrong=[
        (tally(copies=0), "right for a pure 16-bit recipe"),
        (tally(copies=2), "Each matrix makes its own"),
        (tally(copies=6), "A sixth copy?"),
        (tally(norm=2), "The residual stream is fp32"),
        (tally(mlp=2), "that is a GELU MLP"),
        (tally(mlp=3), "what does the last matrix read"),
        (tally(wide=True), "Grouped queries make them kv numbers"),
        (tally(statistic=0), "The norms' statistics are missing"),
        (tally(statistic=8), "RMSNorm has one"),
        (tally(kernel=0), "number for each head is missing"),
        (lambda h, kv, ffn, a: 2 * (h + 1) + 5 * h + 2 * (h + kv) + a + 4 * ffn, "Those are elements"),
        (lambda h, kv, ffn, a: 34 * h, "what is left has h in it"),
        (lambda h, kv, ffn, a: 8 * tally()(h, kv, ffn, a), "8 times too much"),
    ],
)

NUMBERS = count()
GOOD = {"claim": "A GiB is 10⁹ bytes", "source": "my notes of lesson 0", "said": 1e9, "evidence": lambda: 2**30,
        "lesson": 1}  # fmt: skip


def with_changes(**changes: Any) -> Any:
    return lambda: {key: value for key, value in (GOOD | changes).items() if value != "left out"}


ERRATUM = Answers(
    right=[
        lambda: GOOD,
        with_changes(said=-3, evidence=lambda: 0.25),
        with_changes(said=np.float32(9), evidence=lambda: estimate(TrainingRun("gpt2")).total / 1e9, lesson=4.0),
    ],
    wrong=[
        (with_changes(said=2**30), "Then the claim holds"),
        (with_changes(evidence=lambda: 0), "comes to 0"),
        (with_changes(evidence=lambda: next(NUMBERS)), "another number each time"),
        (with_changes(evidence=2**30), "without parentheses"),
        (with_changes(said="1 GB"), "said is a text"),
        (with_changes(claim="A GiB is a GB"), "has no number in it"),
        (with_changes(claim=ERRATA[0].claim), "on the course's list already"),
        (with_changes(source="somewhere"), "a little more of the source"),
        (with_changes(lesson=15), "lessons 1 to 14"),
        (with_changes(lesson=0), "lessons 1 to 14"),
        (with_changes(source="left out", lesson="left out"), "has no 'source' and no 'lesson'"),
        (lambda: "8 GB", "where a dictionary is asked for"),
    ],
)

ANSWERS = {"13.1": UNIT_MEANT, "13.2": LAST_PERCENT, "13.3": JUDGE, "13.4": BYTES_A_TOKEN, "13.5": ERRATUM}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
