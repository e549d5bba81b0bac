"""Checks of lesson 05: right answers of every style pass, and each planted wrong answer gets its hint."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
from checking import Answers, JudgedAnswers

from course_utils import PRESETS, TrainingRun
from course_utils.estimating.exact.activations import block_saved
from course_utils.interactive.saved import saved_by
from course_utils.lessons.activations import checks as lesson_05
from course_utils.lessons.activations.checks import STATEMENTS, hidden_sweeps, story_letters, story_measured

TANH, RELU, SIGMOID, EXP, DIVIDED = lesson_05.EXPRESSIONS
RIGHT = {TANH: 1, RELU: 1, SIGMOID: 2, EXP: 2, DIVIDED: 1}


def counting(changes: dict[str, float], each: float = 2) -> Any:
    return lambda n: {name: each * n * count for name, count in (RIGHT | changes).items()}


def asks_autograd(n: int) -> dict[str, int]:
    kept = {name: saved_by(work, (n,), (n,), dtype="bf16") for name, work in lesson_05.EXPRESSIONS.items()}
    return {name: sum(item.bytes for item in items) for name, items in kept.items()}


EXPRESSIONS = Answers(
    right=[counting({}), asks_autograd, lambda n: dict(zip(RIGHT, numpy.array([2, 2, 4, 4, 2]) * n, strict=True))],
    wrong=[
        (counting({TANH: 3}), "an addition asks for neither of its terms; and tanh?"),
        (counting({TANH: 2}), "so its output is enough; what else did you count?"),
        (counting({RELU: 2}), "how many storages are these two?"),
        (counting({SIGMOID: 3}), "which the product needs too: it is stored once"),
        (counting({SIGMOID: 1}), "asks for both of its factors"),
        (counting({EXP: 1}), "Is exp's storage the same?"),
        (counting({EXP: 3}), "exp needs its output alone"),
        (counting({DIVIDED: 2}), "a division by a number keeps nothing, and neither"),
        (counting({}, each=1), "A bf16 number takes two"),
        (counting({}, each=16), "tanh(x + y) is off"),
    ],
)  # fmt: skip


def mlp(per_h: float = 3, per_ffn: float = 8, more: float = 0, factor: float = 1) -> Any:
    return lambda s, b, h, ffn: factor * s * b * (per_h * h + per_ffn * ffn) + more


def mlp_by_hooks(s: int, b: int, h: int, ffn: int) -> int:
    found = saved_by(lesson_05.bilinear_mlp(h, ffn), (b, s, h), dtype="bf16", device="gpu")
    return sum(item.bytes for item in found)


MLP_BYTES = Answers(
    right=[mlp(), mlp(factor=numpy.float64(1)), mlp_by_hooks],
    wrong=[
        (mlp(per_h=5), "is one storage: you count it twice"),
        (mlp(per_h=4), "Dropout's mask takes one byte an element"),
        (mlp(per_h=2), "The mask of dropout is missing"),
        (mlp(per_h=2, per_ffn=9), "A mask of width ffn?"),
        (mlp(per_ffn=6), "One wide tensor short"),
        (mlp(per_ffn=10), "One wide tensor too many"),
        (mlp(per_ffn=4), "a GELU MLP without a gate"),
        (lambda s, b, h, ffn: s * (3 * h + 8 * ffn), "That is right for one sequence"),
        (lambda s, b, h, ffn: s * b * (3 * h + 8 * 4 * h), "List the tensors"),
        (mlp(factor=1e-6), "MB where bytes"),
        (mlp(factor=0.5), "Exactly half"),
        (mlp(more=24), "Whose random state"),
    ],
)


def block(
    masks: Callable[[bool], float] = lambda dropout: 34 if dropout else 32,
    pairs: Callable[[bool], float] = lambda dropout: 5 if dropout else 2,
    statistics: int = 16,
    rows: int = 4,
    factor: float = 1,
    more: float = 0,
    state: float = 0,
) -> Any:
    """An answer with bytes per s·b·h and per a·s²·b by dropout, per token, per row of a head; `state` for flash."""

    def answer(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> float:
        core = pairs(dropout) * a * s**2 * b if attention == "eager" else rows * a * s * b + state
        return factor * (masks(dropout) * s * b * h + statistics * s * b + core) + more

    return answer


def block_of_the_engine(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    model = replace(PRESETS["gpt2"], hidden=h, heads=a, kv_heads=a, ffn=4 * h, dropout=0.1 if dropout else 0.0)
    return sum(item.size for item in block_saved(TrainingRun(model, b, s, "bf16-master", attention=attention)))


def published(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    return s * b * (34 * h + 16) + 5 * a * s**2 * b


BLOCK_BYTES = Answers(
    right=[block(), block(factor=1.0, state=24), block_of_the_engine],
    wrong=[
        (published, "With eager attention, without dropout: the published formula, whatever kernel"),
        (block(statistics=0), "all there but the statistics of the norms"),
        (block(statistics=8), "half of the statistics is missing"),
        (block(masks=lambda dropout: 34), "the masks are still in your 34"),
        (block(masks=lambda dropout: 34 if dropout else 33), "only one of the masks has gone"),
        (block(pairs=lambda dropout: 5), "a·s² still counts as with dropout"),
        (block(pairs=lambda dropout: 5 if dropout else 4), "softmax's output and the factor of the next product"),
        (block(rows=0), "With flash attention, with dropout: the kernel keeps something small"),
        (block(rows=2), "With flash attention, with dropout it is off"),
        (block(factor=2**-20), "MiB where bytes were asked"),
        (block(more=1), "a number where a formula belongs"),
        (block(more=24), "Whose random state"),
    ],
)


def longest(fits: Callable[[int, int], bool] = lambda kept, budget: kept <= budget, more: float = 0) -> Any:

    def answer(budget: int, b: int, h: int, a: int, L: int) -> float:
        low, high = 0, 2**40
        while high - low > 1:
            middle = (low + high) // 2
            kept = L * b * middle * (34 * h + 5 * a * middle)
            low, high = (middle, high) if fits(kept, budget) else (low, middle)
        return low + more

    return answer


def longest_by_counting(budget: int, b: int, h: int, a: int, L: int) -> int:
    s = 0
    while L * b * (s + 1) * (34 * h + 5 * a * (s + 1)) <= budget:
        s += 1
    return s


def longest_by_root(budget: int, b: int, h: int, a: int, L: int) -> float:
    return float(math.floor((math.sqrt((34 * h) ** 2 + 20 * a * budget / (L * b)) - 34 * h) / (10 * a)))


LONGEST = Answers(
    right=[longest(), longest_by_counting, longest_by_root],
    wrong=[
        (longest(lambda kept, budget: kept < budget), "still fits"),
        (lambda budget, b, h, a, L: budget // (L * b * 34 * h), "That is flash attention's length"),
        (lambda budget, b, h, a, L: math.isqrt(budget // (L * b * 5 * a)), "the linear part is far from nothing"),
        (lambda budget, b, h, a, L: longest()(budget, b, h, a, 1), "all L blocks keep their share"),
        (lambda budget, b, h, a, L: longest()(budget, 1, h, a, L), "There are b of them at once"),
        (longest(more=0.5), "round down"),
        (longest(more=1), "too long"),
        (lambda budget, b, h, a, L: longest()(budget, b, h, a, L) // 2, "a longer sequence fits"),
    ],
)


def fitted(sweep: dict[int, int], short: int = 0, long: int = 0) -> dict[str, Any]:
    short, long = short or min(sweep), long or max(sweep)
    square = (sweep[long] / long - sweep[short] / short) / (long - short)
    linear = sweep[short] / short - square * short
    kernel = "eager" if square * long > 0.02 * linear else "flash"
    return {"attention": kernel, "next": 2 * long * (linear + 2 * long * square)}


def by_ratio(sweep: dict[int, int]) -> dict[str, Any]:
    tokens = sorted(size / s for s, size in sweep.items())
    if tokens[-1] / tokens[0] > 1.02:
        return {**fitted(sweep), "attention": "eager"}
    return {"attention": "flash", "next": 2 * sweep[max(sweep)]}


def by_polynomial(sweep: dict[int, int]) -> dict[str, Any]:
    square, linear = numpy.polyfit(list(sweep), [size / s for s, size in sweep.items()], 1)
    s = numpy.array(max(sweep))
    kernel = "flash" if s * square < linear / 50 else "eager"
    return {"next": linear * 2 * s + square * (2 * s) ** 2, "attention": kernel}


def with_kernel(kernel: Callable[[dict[int, int], str], str]) -> Any:
    return lambda sweep: fitted(sweep) | {"attention": kernel(sweep, fitted(sweep)["attention"])}


def with_next(size: Callable[[dict[int, int], float], float]) -> Any:
    return lambda sweep: fitted(sweep) | {"next": size(sweep, fitted(sweep)["next"])}


READ_SWEEP = Answers(
    right=[fitted, by_ratio, by_polynomial],
    wrong=[
        (with_kernel(lambda sweep, right: "flash"), "whatever the sweep says"),
        (with_kernel(lambda sweep, right: {"eager": "flash", "flash": "eager"}[right]), "Turned round"),
        (with_kernel(lambda sweep, right: "eager" if max(sweep.values()) > 2e9 else "flash"), "by how much is kept"),
        (with_next(lambda sweep, right: 2 * sweep[max(sweep)]), "You double the last size"),
        (with_next(lambda sweep, right: 4 * sweep[max(sweep)]), "You take four times the last size"),
        (with_next(lambda sweep, right: right / 10**9), "next is GB where bytes were asked"),
        (lambda sweep: fitted(sweep, *[list(sweep)[place] for place in (0, -1)]), "a next size is off, by flash"),
        (with_kernel(lambda sweep, right: "Flash"), "you say 'Flash'"),
    ],
)


def test_neither_size_nor_order_gives_a_kernel_away() -> None:
    hidden = hidden_sweeps()
    order = [case.attention for case in sorted(hidden, key=lambda case: max(case.sweep.values()))]
    assert order not in (["eager"] * 2 + ["flash"] * 2, ["flash"] * 2 + ["eager"] * 2)
    assert any(list(case.sweep) != sorted(case.sweep) for case in hidden)
    assert fitted(lesson_05.example_sweep())["attention"] == "eager"


STORY = {"A": 5, "B": 4, "C": 7, "D": 2, "E": 9, "F": 1}


def telling(**changes: Any) -> Any:
    return lambda: STORY | changes


TOLD = Answers(
    right=[
        telling(),
        lambda: dict(zip("FEDCBA", (1, 9, 2, 7, 4, 5), strict=True)),
        lambda: {letter: numpy.float64(number) for letter, number in STORY.items()},
    ],
    wrong=[
        (telling(E=3), "is it a leak if every later step begins at this height?"),
        (telling(C=3), "Who will want it when the next micro-batch is through?"),
        (telling(F=6), "before the optimizer has run"),
        (telling(B=6), "does any formula of an optimizer ask for an activation?"),
        (telling(D=8), "They are no copies"),
        (telling(C=9, E=7), "C lies inside a step"),
        (telling(E=7), "E lies between two steps"),
        (telling(A=10), "numbers 1 to 9"),
        (telling(A=8, B=8), "A and B have the same explanation"),
        (telling(A=8), "A is off"),
    ],
)


def test_what_is_said_of_each_moment_is_true_of_the_measured_run() -> None:
    curves, moments = story_measured().timeline.curves(), story_letters()
    at = {letter: {kind: curve[event - 1] for kind, curve in curves.items()} for letter, event in moments.items()}
    kinds = {letter: {kind for kind, size in sizes.items() if size} for letter, sizes in at.items()}
    assert kinds["A"] == {"parameters", "inputs"}
    assert kinds["B"] >= {"activations"} and "gradients" not in kinds["B"]
    assert kinds["C"] == {"parameters", "inputs", "gradients"}
    assert kinds["D"] == {"parameters", "inputs", "gradients", "optimizer_states"}
    assert kinds["E"] == {"parameters", "inputs", "optimizer_states"}
    assert at["D"]["optimizer_states"] > 2 * at["D"]["parameters"] * 0.99
    assert 0.2 < at["F"]["activations"] / max(curves["activations"]) < 0.8 and "gradients" in kinds["F"]
    assert set(STORY.values()) < set(STATEMENTS) and len(STATEMENTS) == len(STORY) + 3
    assert all(f'data-letter="{letter}"' in lesson_05.story().svg for letter in STORY)


ANSWERS = {
    "05.1": EXPRESSIONS, "05.2": MLP_BYTES, "05.3": BLOCK_BYTES, "05.4": LONGEST, "05.5": READ_SWEEP, "05.6": TOLD
}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
