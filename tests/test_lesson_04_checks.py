"""The checks of lesson 04: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
from checking import Check, passes, said

from course_utils.checks import lesson_04
from course_utils.models import PRESETS, parameter_shapes

ALL = tuple(
    getattr(lesson_04, name) for name in ("block", "gpt", "llama", "experts", "vocabulary", "widest", "read_shapes")
)


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_answers_that_are_no_functions_get_a_hint(check: Check) -> None:
    assert "without parentheses" in said(check, 3)
    assert "does every path end in `return`?" in said(check, lambda *_, **__: None)


def numbers_in(message: str) -> set[str]:
    return {word.strip(".,:()") for word in message.split() if word.strip(".,:()").isdigit()}


# ------------------------------------------------------------------------------------------------------- 04.1: block


def linear(m: int, n: int, bias: bool) -> int:
    return m * n + (m if bias else 0)


def block_by_layers(h: int, bias: bool) -> int:
    layers = sum(linear(m, n, bias) for m, n in ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h)))
    return layers + 2 * linear(1, h, False) * (2 if bias else 1)


def block_in_floats(h: int, bias: bool) -> float:
    return float(12 * h * h + (13 * h if bias else 2 * h))


@pytest.mark.parametrize("answer", [block_by_layers, block_in_floats])
def test_block_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_04.block, answer, capsys, "04.1")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda h, bias: 12 * h * h, "Those are the matrices."),
        (lambda h, bias: 12 * h * h + 13 * h, "whether the model has them or not"),
        (lambda h, bias: 12 * h * h + (9 * h if bias else 0), "The block has two norms"),
        (lambda h, bias: 12 * h * h + (11 * h if bias else h), "One norm is missing"),
        (lambda h, bias: 12 * h * h + (11 * h if bias else 2 * h), "where the model has biases it shifts them"),
        (lambda h, bias: 12 * h * h + (13 * h if bias else 4 * h), "has no shift either"),
        (lambda h, bias: 12 * h * h + (13 * h if bias else 0), "the norms do not vanish"),
        (lambda h, bias: 11 * h * h + (12 * h if bias else 2 * h), "one more matrix before the residual"),
        (lambda h, bias: 10 * h * h + (11 * h if bias else 2 * h), "each of the three has a matrix"),
        (lambda h, bias: 8 * h * h + (10 * h if bias else 2 * h), "two matrices, not one"),
        (lambda h, bias: 12 * h * h + (10 * h if bias else 2 * h), "One of the layers has 4h outputs"),
        (lambda h, bias: 12 * h * h + 17 * h, "The first case that is off: h=1600, bias=True"),
        (lambda h, bias: "12h²", "a text, where a number is asked for"),
    ],
)
def test_block_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_04.block, answer)


# --------------------------------------------------------------------------------------------------------- 04.2: gpt


def gpt(V: int, P: int, h: int, L: int) -> int:
    return (V + P + 2) * h + L * block_by_layers(h, True)


def gpt_by_loop(V: int, P: int, h: int, L: int) -> int:
    count = V * h + P * h
    for _ in range(L):
        count += 12 * h**2 + 13 * h
    return count + 2 * h


@pytest.mark.parametrize("answer", [gpt, gpt_by_loop])
def test_gpt_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_04.gpt, answer, capsys, "04.2")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda N, V, P, h, L: 12 * L * h * h, "rule of thumb"),
        (lambda N, V, P, h, L: N + V * h, "You count the words twice"),
        (lambda N, V, P, h, L: N - P * h, "The positions are missing"),
        (lambda N, V, P, h, L: N - 2 * h, "comes one more norm"),
        (lambda N, V, P, h, L: N - h, "it shifts, too"),
        (lambda N, V, P, h, L: N - 2 * h - P * h, "Two things outside the blocks"),
        (lambda N, V, P, h, L: N - V * h, "Where are the words?"),
        (lambda N, V, P, h, L: N - 13 * h * L, "a block is more than 12h²"),
        (lambda N, V, P, h, L: N + 2 * h * (L - 1), "is there once, not once a block"),
        (lambda N, V, P, h, L: N + P * h * (L - 1), "added once, before the first block"),
        (lambda N, V, P, h, L: N + 1, "Which of them is off?"),
    ],
)
def test_gpt_names_the_misconception(wrong: Any, hint: str) -> None:
    assert hint in said(lesson_04.gpt, lambda V, P, h, L: wrong(gpt(V, P, h, L), V, P, h, L))


# ------------------------------------------------------------------------------------------------------- 04.3: llama


def llama(V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, tied: bool) -> int:
    head = h // heads
    attention = h * head * (2 * heads + 2 * kv_heads)
    return (1 if tied else 2) * V * h + L * (attention + 3 * h * ffn + 2 * h) + h


def test_llama_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_04.llama, llama, capsys, "04.3")
    passes(lesson_04.llama, lambda **sizes: float(llama(**sizes)), capsys, "04.3")


@pytest.mark.parametrize(
    ("factor", "hint"), [(1e-6, "millions?"), (1e-9, "billions?"), (2, "twice"), (4, "four times"), (16, "16 times")]
)
def test_something_else_than_a_number_of_parameters_is_named(factor: float, hint: str) -> None:
    for check, right in ((lesson_04.block, lesson_04._block), (lesson_04.gpt, lesson_04._gpt)):
        assert hint in said(check, lambda right=right, **case: factor * right(**case))
    assert hint in said(lesson_04.llama, lambda **case: factor * lesson_04._llama(**case))


def test_the_reference_counts_published_models() -> None:
    for name in ("llama3-8b", "llama3-70b", "llama3.2-1b", "tinyllama-1.1b", "mistral-7b"):
        m = PRESETS[name]
        assert llama(m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn, m.tied) == m.parameters


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda c: llama(**{**c, "kv_heads": c["heads"]}), "as wide as the queries"),
        (lambda c: llama(**{**c, "heads": c["h"]}), "how wide is a head?"),
        (lambda c: llama(**c) - c["L"] * c["h"] * c["ffn"], "SwiGLU has a third"),
        (lambda c: llama(**c) + (2 * c["L"] + 1) * c["h"], "half of a LayerNorm"),
        (lambda c: llama(**{**c, "tied": True}), "What does `tied=False` mean"),
        (lambda c: llama(**{**c, "tied": False}), "What does `tied=True` say"),
        (lambda c: llama(**{**c, "tied": not c["tied"]}), "Turned round"),
        (lambda c: llama(**c) - c["h"], "one more norm"),
        (lambda c: llama(**c) - 2 * c["L"] * c["h"], "two in each"),
        (lambda c: llama(**c) - c["L"] * c["h"] ** 2, "a fourth matrix"),
        (lambda c: llama(**{**c, "ffn": 4 * c["h"]}), "You take 4h"),
        (lambda c: 0, "compare your lines"),
    ],
)
def test_llama_names_the_misconception(wrong: Any, hint: str) -> None:
    def answer(V, h, L, heads, kv_heads, ffn, tied):
        return wrong({"V": V, "h": h, "L": L, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "tied": tied})

    assert hint in said(lesson_04.llama, answer)


# ----------------------------------------------------------------------------------------------------- 04.4: experts


def experts(V, h, L, heads, kv_heads, ffn, E, chosen):
    dense, one = llama(V, h, L, heads, kv_heads, ffn, False), 3 * h * ffn * L
    return dense + (E - 1) * one + E * h * L, dense + (chosen - 1) * one + E * h * L


def test_experts_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_04.experts, experts, capsys, "04.4")
    passes(lesson_04.experts, lambda **sizes: list(experts(**sizes)), capsys, "04.4")


def test_the_reference_counts_mixtral() -> None:
    m = PRESETS["mixtral-8x7b"]
    found = experts(m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn, m.experts, m.experts_per_token)
    assert found == (m.parameters, m.active_parameters)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda s, a, d, r, c: (c["E"] * d, c["chosen"] * d), "You multiply the whole model"),
        (lambda s, a, d, r, c: (c["E"] * d + r, c["chosen"] * d + r), "You multiply the whole model"),
        (lambda s, a, d, r, c: (s - r, a - r), "each block has a router"),
        (lambda s, a, d, r, c: (s, a - r * (c["E"] - c["chosen"]) // c["E"]), "A token uses the whole router"),
        (lambda s, a, d, r, c: (s, a - r), "part of what every token uses"),
        (lambda s, a, d, r, c: (s, s * c["chosen"] // c["E"]), "chosen/E of everything"),
        (lambda s, a, d, r, c: (a, s), "what is stored comes first"),
        (lambda s, a, d, r, c: (s - c["V"] * c["h"], a - c["V"] * c["h"]), "a head of their own"),
        (lambda s, a, d, r, c: (s, a + 1), "the active ones are not"),
        (lambda s, a, d, r, c: (s + 1, a), "The stored parameters are off"),
        (lambda s, a, d, r, c: (s, a, d), "these are 3"),
        (lambda s, a, d, r, c: (s, "some"), "is a text"),
        (lambda s, a, d, r, c: s, "where a tuple or a list is asked for"),
    ],
)
def test_experts_names_the_misconception(wrong: Any, hint: str) -> None:
    def answer(**c: Any) -> Any:
        dense = llama(**{name: size for name, size in c.items() if name not in ("E", "chosen")}, tied=False)
        return wrong(*experts(**c), dense, c["L"] * c["E"] * c["h"], c)

    assert hint in said(lesson_04.experts, lambda V, h, L, heads, kv_heads, ffn, E, chosen: answer(
        V=V, h=h, L=L, heads=heads, kv_heads=kv_heads, ffn=ffn, E=E, chosen=chosen))  # fmt: skip


# -------------------------------------------------------------------------------------------------- 04.5: vocabulary


def vocabularies(table: Any, half: int = 500_000) -> list[tuple[int, int]]:
    """For each row the smallest and the largest vocabulary that fits it."""
    found = []
    for row in table:
        rest = gpt(0, row["P"], row["h"], row["L"])
        low, high = (row["millions"] * 10**6 + sign * half - rest for sign in (-1, 1))
        found.append((-(-low // row["h"]), (high - 1) // row["h"]))
    return found


def meeting(rows: list[tuple[int, int]]) -> tuple[int, int]:
    return max(low for low, _ in rows), min(high for _, high in rows)


def by_trying(table: Any) -> tuple[int, int]:
    fits = [
        V
        for V in range(20_000, 150_000)
        if all(round(gpt(V, row["P"], row["h"], row["L"]) / 1e6) == row["millions"] for row in table)
    ]
    return min(fits), max(fits)


def test_vocabulary_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_04.vocabulary, lambda table: meeting(vocabularies(table)), capsys, "04.5")
    passes(lesson_04.vocabulary, by_trying, capsys, "04.5")


def test_the_papers_table_fits_the_vocabulary_of_the_first_gpt() -> None:
    low, high = meeting(vocabularies(lesson_04.PAPER))
    assert low <= 40_478 <= high < 50_257


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda table: vocabularies(table)[0], "Only one row"),
        (lambda table: vocabularies(table)[-1], "Only one row"),
        (
            lambda table: (min(low for low, _ in vocabularies(table)), max(high for _, high in vocabularies(table))),
            "fits *some* row",
        ),
        (lambda table: meeting(vocabularies(table, 1_000_000)), "You allow a whole million"),
        (lambda table: (meeting(vocabularies(table))[0],) * 2, "One vocabulary for each table?"),
        (lambda table: meeting(vocabularies(table))[::-1], "Your smallest is above your largest"),
        (lambda table: (meeting(vocabularies(table))[0] - 1, meeting(vocabularies(table))[1]), "Off by one at an end"),
        (lambda table: (1, 50_257), "What does it round to?"),
        (lambda table: (1, 2, 3), "these are 3"),
        (lambda table: ("1", 2), "is a text"),
    ],
)
def test_vocabulary_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_04.vocabulary, answer)


# ------------------------------------------------------------------------------------------------------ 04.6: widest


def largest(memory: int, size: Callable[[int], int]) -> int:
    return max([0, *(h for h in range(64, 9_000, 64) if size(h) <= memory)])


def test_widest_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_04.widest, lambda memory, V, P: largest(memory, lambda h: 16 * gpt(V, P, h, h // 64)), capsys, "04.6")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda memory, V, P: largest(memory, lambda h: 16 * 12 * h**3 // 64), "12·L·h² alone"),
        (lambda memory, V, P: largest(memory, lambda h: 2 * gpt(V, P, h, h // 64)), "the 16-bit weights"),
        (lambda memory, V, P: largest(memory, lambda h: 4 * gpt(V, P, h, h // 64)), "the fp32 weights alone"),
        (lambda memory, V, P: largest(memory, lambda h: 8 * gpt(V, P, h, h // 64)), "Eight bytes are half of it"),
        (lambda memory, V, P: largest(memory - 1, lambda h: 16 * gpt(V, P, h, h // 64)), "to the last byte"),
        (lambda memory, V, P: 64 + largest(memory, lambda h: 16 * gpt(V, P, h, h // 64)), "One step too wide"),
        (lambda memory, V, P: max(64, largest(memory, lambda h: 16 * gpt(V, P, h, h // 64))), "return 0"),
        (lambda memory, V, P: largest(memory, lambda h: 16 * (gpt(V, P, h, h // 64) + V * h)), "The head is tied"),
        (lambda memory, V, P: 1024, "is it more for h + 64?"),
    ],
)
def test_widest_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_04.widest, answer)


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


def test_read_shapes_takes_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_04.read_shapes, read, capsys, "04.7")


def test_anonymous_shapes_are_those_of_the_real_model() -> None:
    m = PRESETS["llama3.2-1b"]
    shapes = lesson_04.anonymous_shapes(m.hidden, m.layers, m.vocab, m.kv, m.ffn, m.tied)
    assert shapes == sorted(parameter_shapes(m).values())
    assert lesson_04.count_of(shapes) == sum(map(prod, shapes)) == m.parameters


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda r: {"hidden": r["ffn"]}, "which size do all vectors have?"),
        (lambda r: {"layers": 2 * r["layers"] + 1}, "Those are the norms."),
        (lambda r: {"layers": r["layers"] + 1}, "exactly once in a block"),
        (lambda r: {"vocab": max(r["vocab"], r["ffn"])}, "need not be the largest size"),
        (lambda r: {"vocab": r["vocab"] + 1}, "only once or twice"),
        (lambda r: {"ffn": 4 * r["hidden"] + 1}, "ffn is off"),
        (lambda r: {"kv": r["hidden"] // 4}, "without grouped queries"),
        (lambda r: {"tied": True}, "there is one matrix of words"),
        (lambda r: {"tied": not r["tied"]}, "there is one matrix of words"),
    ],
)
def test_read_shapes_names_the_misconception(change: Any, hint: str) -> None:
    assert hint in said(lesson_04.read_shapes, lambda shapes: read(shapes) | change(read(shapes)))


def test_read_shapes_asks_for_every_size() -> None:
    assert "has no 'tied'" in said(
        lesson_04.read_shapes, lambda shapes: {name: size for name, size in read(shapes).items() if name != "tied"}
    )


def test_no_hint_gives_the_answer_away() -> None:
    assert not {"40468", "40812", "40478"} & numbers_in(said(lesson_04.vocabulary, lambda table: (1, 2)))
    assert "1557611200" not in said(lesson_04.gpt, lambda V, P, h, L: 0)
