"""The checks of lesson 04: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy
from checking import Answers, JudgedAnswers, hint

from course_utils.lessons.parameters import checks as lesson_04
from course_utils.models import PRESETS, parameter_shapes

# ------------------------------------------------------------------------------------------------------- 04.1: block


def block_by_layers(h: int, bias: bool) -> int:
    layers = ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))
    return sum(m * n + m * bias for m, n in layers) + 2 * (h + h * bias)


def blocks(matrices: int = 12, biases: int = 13, norms: int = 2, factor: float = 1) -> Any:
    """Matrices of h·h, numbers per h with biases, and without."""
    return lambda h, bias: factor * (matrices * h * h + (biases if bias else norms) * h)


BLOCK = Answers(
    right=[block_by_layers, blocks(), blocks(factor=1.0)],
    wrong=[
        (blocks(biases=0, norms=0), "Those are the matrices."),
        (blocks(norms=13), "whether the model has them or not"),
        (blocks(biases=9, norms=0), "The block has two norms"),
        (blocks(biases=11, norms=1), "One norm is missing"),
        (blocks(biases=11), "where the model has biases it shifts them"),
        (blocks(norms=4), "has no shift either"),
        (blocks(norms=0), "the norms do not vanish"),
        (blocks(matrices=11, biases=12), "one more matrix before the residual"),
        (blocks(matrices=10, biases=11), "each of the three has a matrix"),
        (blocks(matrices=8, biases=10), "two matrices, not one"),
        (blocks(biases=10), "One of the layers has 4h outputs"),
        (blocks(biases=17, norms=17), "The first case that is off: h=1600, bias=True"),
        (blocks(factor=1e-6), "off by the same factor"),
        (blocks(factor=2), "off by the same factor"),
    ],
)

# --------------------------------------------------------------------------------------------------------- 04.2: gpt


def gpt(V: int, P: int, h: int, L: int) -> int:
    return (V + P + 2) * h + L * block_by_layers(h, True)


GPT = Answers(
    right=[gpt, lambda **sizes: numpy.float64(gpt(**sizes))],
    wrong=[
        (lambda V, P, h, L: 12 * L * h * h, "rule of thumb"),
        (lambda V, P, h, L: gpt(V, P, h, L) + V * h, "You count the words twice"),
        (lambda V, P, h, L: gpt(V, P, h, L) - P * h, "The positions are missing"),
        (lambda V, P, h, L: gpt(V, P, h, L) - 2 * h, "comes one more norm"),
        (lambda V, P, h, L: gpt(V, P, h, L) - V * h, "Where are the words?"),
        (lambda V, P, h, L: gpt(V, P, h, L) - 13 * h * L, "a block is more than 12h²"),
        (lambda V, P, h, L: gpt(V, P, h, L) + 2 * h * (L - 1), "is there once, not once a block"),
        (lambda V, P, h, L: gpt(V, P, h, L) + P * h * (L - 1), "added once, before the first block"),
        (lambda V, P, h, L: gpt(V, P, h, L) + 1, "Which of them is off?"),
    ],
)

# ------------------------------------------------------------------------------------------------------- 04.3: llama


def llama(V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, tied: bool) -> int:
    head = h // heads
    attention = h * head * (2 * heads + 2 * kv_heads)
    return (1 if tied else 2) * V * h + L * (attention + 3 * h * ffn + 2 * h) + h


def llama_by_shapes(V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, tied: bool) -> int:
    k = h * kv_heads // heads
    one = [(h, h), (k, h), (k, h), (h, h), (ffn, h), (ffn, h), (h, ffn), (h,), (h,)]
    shapes = [*[(V, h)] * (1 if tied else 2), *one * L, (h,)]
    return sum(prod(shape) for shape in shapes)


LLAMA = Answers(
    right=[llama, llama_by_shapes, lambda **sizes: numpy.float64(llama(**sizes))],
    wrong=[
        (lambda **c: llama(**c | {"kv_heads": c["heads"]}), "as wide as the queries"),
        (lambda **c: llama(**c | {"heads": c["h"]}), "how wide is a head?"),
        (lambda **c: llama(**c) - c["L"] * c["h"] * c["ffn"], "SwiGLU has a third"),
        (lambda **c: llama(**c) + (2 * c["L"] + 1) * c["h"], "half of a LayerNorm"),
        (lambda **c: llama(**c | {"tied": True}), "What does `tied=False` mean"),
        (lambda **c: llama(**c | {"tied": False}), "What does `tied=True` say"),
        (lambda **c: llama(**c | {"tied": not c["tied"]}), "Turned round"),
        (lambda **c: llama(**c) - c["h"], "one more norm"),
        (lambda **c: llama(**c) - 2 * c["L"] * c["h"], "two in each"),
        (lambda **c: llama(**c | {"ffn": 4 * c["h"]}), "You take 4h"),
        (lambda **c: llama(**c | {"heads": 32, "kv_heads": 8}), "compare your lines"),
        (lambda **c: llama(**c) / 1e6, "off by the same factor"),
    ],
)


def test_the_reference_counts_published_models() -> None:
    for name in ("llama3-8b", "llama3-70b", "llama3.2-1b", "tinyllama-1.1b", "mistral-7b"):
        m = PRESETS[name]
        assert llama(m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn, m.tied) == m.parameters


# ----------------------------------------------------------------------------------------------------- 04.4: experts


def mixture(wrong: Callable[..., Any] = lambda s, a, d, r, c: (s, a)) -> Any:
    """An answer by what is stored and active, the dense model, all routers, and the sizes."""

    def answer(V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, E: int, chosen: int) -> Any:
        dense, one, router = llama(V, h, L, heads, kv_heads, ffn, False), 3 * h * ffn * L, E * h * L
        stored, active = (dense + (count - 1) * one + router for count in (E, chosen))
        return wrong(stored, active, dense, router, {"V": V, "h": h, "E": E, "chosen": chosen})

    return answer


EXPERTS = Answers(
    right=[mixture(), mixture(lambda s, a, d, r, c: [s, a])],
    wrong=[
        (mixture(lambda s, a, d, r, c: (c["E"] * d, c["chosen"] * d)), "You multiply the whole model"),
        (mixture(lambda s, a, d, r, c: (s - r, a - r)), "each block has a router"),
        (mixture(lambda s, a, d, r, c: (s, a - r * (c["E"] - c["chosen"]) // c["E"])), "A token uses the whole router"),
        (mixture(lambda s, a, d, r, c: (s, s * c["chosen"] // c["E"])), "chosen/E of everything"),
        (mixture(lambda s, a, d, r, c: (a, s)), "what is stored comes first"),
        (mixture(lambda s, a, d, r, c: (s, a + 1)), "which of those does a token visit?"),
        (mixture(lambda s, a, d, r, c: (s, a, d)), "these are 3"),
    ],
)


def test_the_reference_counts_mixtral() -> None:
    m = PRESETS["mixtral-8x7b"]
    found = mixture()(m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn, m.experts, m.experts_per_token)
    assert found == (m.parameters, m.active_parameters)


# -------------------------------------------------------------------------------------------------- 04.5: vocabulary


def meeting(
    table: Any, low: int = 0, high: int = 0, half: int = 500_000, first: Any = max, last: Any = min
) -> tuple[int, int]:
    """The interval that the vocabularies of all rows have in common, its ends moved."""
    lows, highs = [], []
    for row in table:
        rest = gpt(0, row["P"], row["h"], row["L"])
        lows.append(-((rest - row["millions"] * 10**6 + half) // row["h"]))
        highs.append((row["millions"] * 10**6 + half - rest - 1) // row["h"])
    return first(lows) + low, last(highs) + high


def by_trying(table: Any) -> tuple[int, int]:
    def fits(V: int) -> bool:
        return all(round(gpt(V, row["P"], row["h"], row["L"]) / 1e6) == row["millions"] for row in table)

    found = [V for V in range(20_000, 150_000) if fits(V)]
    return min(found), max(found)


VOCABULARY = Answers(
    right=[meeting, lambda table: numpy.array(meeting(table)), by_trying],
    wrong=[
        (lambda table: meeting(table[:1]), "Only one row"),
        (lambda table: meeting(table, first=min, last=max), "fits *some* row"),
        (lambda table: meeting(table, half=1_000_000), "You allow a whole million"),
        (lambda table: (meeting(table)[0],) * 2, "One vocabulary for each table?"),
        (lambda table: meeting(table)[::-1], "Your smallest is above your largest"),
        (lambda table: meeting(table, low=-1), "Off by one at an end"),
        (lambda table: meeting(table, high=1), "Off by one at an end"),
        (lambda table: (1, 50_257), "What does it round to?"),
    ],
)


def test_the_papers_table_fits_the_vocabulary_of_the_first_gpt() -> None:
    low, high = meeting(lesson_04.PAPER)
    assert low <= 40_478 <= high < 50_257


# ------------------------------------------------------------------------------------------------------ 04.6: widest


def widest(each: float = 16, count: Callable[..., int] = gpt, less: int = 0, wider: int = 0, least: int = 0) -> Any:
    """The widest of all that fit, at `each` bytes per parameter."""

    def answer(memory: int, V: int, P: int) -> int:
        fitting = [h for h in range(64, 9_000, 64) if each * count(V, P, h, h // 64) <= memory - less]
        return max([least, *fitting]) + wider

    return answer


def widest_step_by_step(memory: int, V: int, P: int) -> int:
    for h in range(64, 10**6, 64):
        if gpt(V, P, h, h // 64) > memory // 16:
            return h - 64
    return 0


WIDEST = Answers(
    right=[widest(), widest_step_by_step, lambda **sizes: float(widest()(**sizes))],
    wrong=[
        (widest(count=lambda V, P, h, L: 12 * h * h * L), "12·L·h² alone"),
        (widest(each=2), "the 16-bit weights"),
        (widest(each=4), "the fp32 weights alone"),
        (widest(each=8), "Eight bytes are half of it"),
        (widest(less=1), "to the last byte"),
        (widest(wider=64), "One step too wide"),
        (widest(least=64), "return 0"),
        (widest(count=lambda V, P, h, L: gpt(V, P, h, L) + V * h), "The head is tied"),
        (widest(count=lambda V, P, h, L: gpt(50257, 1024, h, L)), "is it more for h + 64?"),
    ],
)

# ------------------------------------------------------------------------------------------------- 04.7: read_shapes


def read(shapes: Any) -> dict[str, Any]:
    """Reads the sizes in another way than the solution: from how often each shape occurs."""
    often = {shape: shapes.count(shape) for shape in shapes}
    (h,) = next(shape for shape in often if len(shape) == 1)
    L = (often[(h,)] - 1) // 2
    V = next(shape[0] for shape, times in often.items() if times < L and shape[1:] == (h,))
    f = next(shape[1] for shape, times in often.items() if len(shape) == 2 and shape[1] != h)
    k = next((shape[0] for shape, times in often.items() if shape[1:] == (h,) and shape[0] not in (h, f, V)), h)
    return {"hidden": h, "layers": L, "vocab": V, "ffn": f, "kv": k, "tied": often[(V, h)] == 1}


def reads(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The right sizes, some of them changed."""
    return lambda shapes: read(shapes) | change(read(shapes))


READ_SHAPES = Answers(
    right=[
        read,
        lambda shapes: {name: numpy.int64(size) for name, size in read(shapes).items()},
        lambda shapes: {name: float(size) for name, size in reversed(read(shapes).items())},
    ],
    wrong=[
        (reads(lambda r: {"hidden": r["ffn"]}), "which size do all vectors have?"),
        (reads(lambda r: {"layers": 2 * r["layers"] + 1}), "Those are the norms."),
        (reads(lambda r: {"layers": r["layers"] + 1}), "exactly once in a block"),
        (reads(lambda r: {"vocab": max(r["vocab"], r["ffn"])}), "need not be the largest size"),
        (reads(lambda r: {"vocab": r["vocab"] + 1}), "only once or twice"),
        (reads(lambda r: {"ffn": 4 * r["hidden"] + 1}), "ffn is off"),
        (reads(lambda r: {"kv": r["hidden"] // 4}), "without grouped queries"),
        (reads(lambda r: {"tied": True}), "there is one matrix of words"),
    ],
)


def test_anonymous_shapes_are_those_of_the_real_model() -> None:
    m = PRESETS["llama3.2-1b"]
    shapes = lesson_04.anonymous_shapes(m.hidden, m.layers, m.vocab, m.kv, m.ffn, m.tied)
    assert shapes == sorted(parameter_shapes(m).values())
    assert lesson_04.count_of(shapes) == sum(map(prod, shapes)) == m.parameters


ANSWERS = {f"04.{n}": one for n, one in enumerate((BLOCK, GPT, LLAMA, EXPERTS, VOCABULARY, WIDEST, READ_SHAPES), 1)}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


def test_no_hint_gives_the_answer_away() -> None:
    words = {word.strip(".,:()") for word in hint("04.5", lambda table: (1, 2)).split()}
    assert not {"40468", "40812", "40478"} & words
    assert "1557611200" not in hint("04.2", lambda V, P, h, L: 0)
