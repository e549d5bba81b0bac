"""Checks of the exercises of lesson 04, "Counting parameters": each names the misconception, never the answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isclose, prod
from numbers import Real
from typing import Any

from course_utils.gpus import gpu
from course_utils.interactive.feedback import call, entries, exercise, expect, fail, of_kind
from course_utils.models import PRESETS

from .counting import GPT2_PAPER

__all__ = ["PAPER", "anonymous_shapes", "block", "experts", "gpt", "llama", "read_shapes", "vocabulary", "widest"]

Case = Mapping[str, Any]
Count = Callable[..., Any]
Mistakes = Sequence[tuple[Count, str]]


def _recognize(answer: Any, cases: Sequence[Case], right: Count, mistakes: Mistakes, otherwise: str) -> None:
    """CheckFailed with the message of the first mistake that explains every answer, or with `otherwise`."""
    answers = [call(answer, **case) for case in cases]
    if answers == [right(**case) for case in cases]:
        return
    for mistaken, message in mistakes:
        alike = all(isclose(got, mistaken(**case), rel_tol=1e-12) for got, case in zip(answers, cases, strict=True))
        expect(not alike, message)
    wrong = next(case for case, got in zip(cases, answers, strict=True) if got != right(**case))
    fail(f"{otherwise} (The first case that is off: {', '.join(f'{name}={value}' for name, value in wrong.items())}.)")


def _and_slips(right: Count, mistakes: Mistakes) -> Mistakes:
    """`mistakes`, and the slips of who returns something else than a plain number of parameters."""
    slips = (
        (1e-6, "millions? Return the number of parameters itself."),
        (1e-9, "billions? Return the number of parameters itself."),
        (2, "exactly twice: bytes in 16-bit? Count numbers, not bytes. Or is everything listed twice?"),
        (4, "exactly four times: bytes in fp32? Count numbers, not bytes."),
        (16, "exactly 16 times: the bytes of a training's states? Count numbers, not bytes."),
    )
    return *mistakes, *(
        (partial(_times, factor, right), f"All of it is off by a factor: {said}") for factor, said in slips
    )


def _times(factor: float, right: Count, **case: Any) -> float:
    return factor * right(**case)


# -------------------------------------------------------------------------------------------------------- 04.1: block

BLOCKS: tuple[Case, ...] = tuple(
    {"h": h, "bias": bias} for h, bias in ((1600, True), (7, True), (768, True), (1600, False), (96, False))
)


def _block(h: int, bias: bool, matrices: int = 12, biases: int = 9, norms: int = 4, plain_norms: int = 2) -> int:
    return matrices * h**2 + (biases * h + norms * h if bias else plain_norms * h)


BLOCK_MISTAKES: Mistakes = (
    (lambda h, bias: 12 * h**2, "Those are the matrices. Each has biases where there are any, and two norms are left."),
    (
        lambda h, bias: _block(h, True),
        "You count the biases whether the model has them or not. What does `bias=False` take away, in the norms too?",
    ),
    (
        lambda h, bias: _block(h, bias, norms=0, plain_norms=0),
        "The block has two norms, and they have parameters of their own: how many for each of the h numbers?",
    ),
    (
        lambda h, bias: _block(h, bias, norms=2, plain_norms=1),
        "One norm is missing: a block has one before attention and one before the MLP.",
    ),
    (
        lambda h, bias: _block(h, bias, norms=2),
        "A LayerNorm scales each of the h numbers, and where the model has biases it shifts them, too.",
    ),
    (
        lambda h, bias: _block(h, bias, plain_norms=4),
        "Without biases a LayerNorm has no shift either. What is left of it?",
    ),
    (lambda h, bias: _block(h, bias, plain_norms=0), "Without biases the norms do not vanish: they still scale."),
    (
        lambda h, bias: _block(h, bias, matrices=11, biases=8),
        "A layer is missing: what attention has gathered goes through one more matrix before the residual is added.",
    ),
    (
        lambda h, bias: _block(h, bias, matrices=10, biases=7),
        "Queries, keys and values: each of the three has a matrix of its own.",
    ),
    (
        lambda h, bias: _block(h, bias, matrices=8, biases=6),
        "The MLP goes up to 4h and comes back down: two matrices, not one.",
    ),
    (
        lambda h, bias: _block(h, bias, biases=6),
        "A bias has one number for each output. One of the layers has 4h outputs.",
    ),
)


@exercise("04.1", "Matrices, biases and norms, for every width, with and without biases.")
def block(answer: Any) -> None:
    """`answer(h, bias)` is the number of parameters of one block of a GPT."""
    otherwise = "Not yet: write the four linear layers one below the other, then the two norms."
    _recognize(answer, BLOCKS, _block, _and_slips(_block, BLOCK_MISTAKES), otherwise)


# ---------------------------------------------------------------------------------------------------------- 04.2: gpt

GPTS: tuple[Case, ...] = (
    *(
        {"V": m.vocab, "P": m.max_positions, "h": m.hidden, "L": m.layers}
        for m in (PRESETS["gpt2"], PRESETS["gpt2-xl"], PRESETS["gpt3-175b"])
    ),
    {"V": 101, "P": 7, "h": 12, "L": 3},
)


def _gpt(V: int, P: int, h: int, L: int) -> int:
    return V * h + P * h + L * (12 * h**2 + 13 * h) + 2 * h


GPT_MISTAKES: Mistakes = (
    (
        lambda V, P, h, L: 12 * L * h**2,
        "That is the rule of thumb, the blocks' matrices alone. Here every unit counts.",
    ),
    (
        lambda V, P, h, L: _gpt(V, P, h, L) + V * h,
        "You count the words twice. The head is tied: it is the same matrix, used a second time.",
    ),
    (lambda V, P, h, L: _gpt(V, P, h, L) - P * h, "The positions are missing. GPT-2 learns a vector for each."),
    (lambda V, P, h, L: _gpt(V, P, h, L) - 2 * h, "After the last block comes one more norm."),
    (lambda V, P, h, L: _gpt(V, P, h, L) - h, "The last norm is a LayerNorm like the others: it shifts, too."),
    (
        lambda V, P, h, L: _gpt(V, P, h, L) - P * h - 2 * h,
        "Two things outside the blocks are missing: the positions, and a norm after the last block.",
    ),
    (lambda V, P, h, L: _gpt(V, P, h, L) - V * h, "Where are the words? The embedding is a matrix as well."),
    (
        lambda V, P, h, L: V * h + P * h + 12 * L * h**2 + 2 * h,
        "The blocks are counted without their biases and norms: a block is more than 12h².",
    ),
    (
        lambda V, P, h, L: _gpt(V, P, h, L) + (L - 1) * 2 * h,
        "The norm after the last block is there once, not once a block.",
    ),
    (
        lambda V, P, h, L: _gpt(V, P, h, L) + (L - 1) * P * h,
        "The positions are added once, before the first block, not in each.",
    ),
)


@exercise("04.2", "To the unit, from a toy to GPT-3.")
def gpt(answer: Any) -> None:
    """`answer(V, P, h, L)` is N of a GPT-2 of these sizes."""
    otherwise = "Not yet: embedding, positions, L blocks, one norm. Which of them is off?"
    _recognize(answer, GPTS, _gpt, _and_slips(_gpt, GPT_MISTAKES), otherwise)


# -------------------------------------------------------------------------------------------------------- 04.3: llama


def _llama_case(name: str) -> Case:
    m = PRESETS[name]
    sizes = {"V": m.vocab, "h": m.hidden, "L": m.layers, "heads": m.heads, "kv_heads": m.kv_heads}
    return sizes | {"ffn": m.ffn, "tied": m.tied}


LLAMAS: tuple[Case, ...] = (
    _llama_case("llama3-8b"),
    _llama_case("llama3.2-1b"),
    _llama_case("tinyllama-1.1b"),
    {"V": 50, "h": 24, "L": 2, "heads": 4, "kv_heads": 4, "ffn": 37, "tied": True},
)


def _llama(
    V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, tied: bool, *, mlp: int = 3, norm: int = 1
) -> int:
    k = h // heads * kv_heads
    words = V * h if tied else 2 * V * h
    return words + L * (2 * h**2 + 2 * h * k + mlp * ffn * h + 2 * norm * h) + norm * h


LLAMA_MISTAKES: Mistakes = (
    (
        lambda **case: _llama(**{**case, "kv_heads": case["heads"]}),
        "Keys and values are as wide as the queries in your count. They have `kv_heads` heads of h/heads numbers each.",
    ),
    (
        lambda **case: _llama(**{**case, "heads": case["h"]}),
        "You take `kv_heads` for the width of keys and values. It is how many heads there are; how wide is a head?",
    ),
    (
        lambda **case: _llama(**case, mlp=2),
        "Two matrices in the MLP. SwiGLU has a third: one branch gates the other before they come back down.",
    ),
    (lambda **case: _llama(**case, norm=2), "RMSNorm scales and does not shift: it is half of a LayerNorm."),
    (
        lambda **case: _llama(**{**case, "tied": True}),
        "You count the words once in every model. What does `tied=False` mean for the head?",
    ),
    (
        lambda **case: _llama(**{**case, "tied": False}),
        "You count a head in every model. What does `tied=True` say about it?",
    ),
    (
        lambda **case: _llama(**{**case, "tied": not case["tied"]}),
        "Turned round: a tied head is the embedding itself, an untied one is a matrix more.",
    ),
    (lambda **case: _llama(**case) - case["h"], "After the last block comes one more norm."),
    (
        lambda **case: _llama(**case) - 2 * case["L"] * case["h"],
        "The norms inside the blocks are missing: two in each.",
    ),
    (
        lambda **case: _llama(**case) - case["L"] * case["h"] ** 2,
        "Attention has a fourth matrix: its output goes through one before the residual is added.",
    ),
    (
        lambda **case: _llama(**{**case, "ffn": 4 * case["h"]}),
        "You take 4h for the width of the MLP. Llama's has a width of its own: `ffn`.",
    ),
)


@exercise("04.3", "Grouped queries, SwiGLU, RMSNorm, tied or not: as published, to the unit.")
def llama(answer: Any) -> None:
    """`answer(V, h, L, heads, kv_heads, ffn, tied)` is N of a Llama of these sizes."""
    otherwise = "Not yet: compare your lines with the table of the block of Llama-3 8B in the lesson."
    _recognize(answer, LLAMAS, _llama, _and_slips(_llama, LLAMA_MISTAKES), otherwise)


# ------------------------------------------------------------------------------------------------------ 04.4: experts

EXPERTS: tuple[Case, ...] = (
    {**{name: size for name, size in _llama_case("mixtral-8x7b").items() if name != "tied"}, "E": 8, "chosen": 2},
    {"V": 60, "h": 24, "L": 3, "heads": 4, "kv_heads": 2, "ffn": 40, "E": 16, "chosen": 3},
    {"V": 200, "h": 48, "L": 2, "heads": 6, "kv_heads": 6, "ffn": 20, "E": 4, "chosen": 1},
)


def _experts(V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, E: int, chosen: int) -> tuple[int, int]:
    rest = _llama(V, h, L, heads, kv_heads, ffn, False) - L * 3 * h * ffn + L * E * h
    return rest + L * E * 3 * h * ffn, rest + L * chosen * 3 * h * ffn


def _dense(case: Case) -> int:
    return _llama(**{name: size for name, size in case.items() if name not in ("E", "chosen")}, tied=False)


def _router(case: Case, experts: int) -> int:
    return case["L"] * experts * case["h"]


EXPERT_MISTAKES: Mistakes = (
    (
        lambda **case: tuple(case[many] * _dense(case) for many in ("E", "chosen")),
        "You multiply the whole model. Which parts are there once for each expert, and which once for all?",
    ),
    (
        lambda **case: tuple(case[many] * _dense(case) + _router(case, case["E"]) for many in ("E", "chosen")),
        "You multiply the whole model. Which parts are there once for each expert, and which once for all?",
    ),
    (
        lambda **case: tuple(count - _router(case, case["E"]) for count in _experts(**case)),
        "Somebody has to decide which experts a token visits: each block has a router, a row of h for each expert.",
    ),
    (
        lambda **case: (_experts(**case)[0], _experts(**case)[1] - _router(case, case["E"] - case["chosen"])),
        "A token uses the whole router, the rows of experts that are then not chosen, too: how else would it choose?",
    ),
    (
        lambda **case: (_experts(**case)[0], _experts(**case)[1] - _router(case, case["E"])),
        "The router is part of what every token uses: it is there to choose.",
    ),
    (
        lambda **case: (_experts(**case)[0], _experts(**case)[0] * case["chosen"] // case["E"]),
        "You take chosen/E of everything as active. Attention and words are active for every token.",
    ),
    (lambda **case: _experts(**case)[::-1], "Turned round: what is stored comes first, what is active second."),
    (
        lambda **case: tuple(count - case["V"] * case["h"] for count in _experts(**case)),
        "These models have a head of their own: the words are counted twice.",
    ),
)


@exercise("04.4", "Stored and active: experts share everything but their MLPs.")
def experts(answer: Any) -> None:
    """`answer(V, h, L, heads, kv_heads, ffn, E, chosen)` is (stored, active) of a Llama with experts, untied."""

    def pair(**case: Any) -> tuple[Any, ...]:
        got = call(answer, **case, returns=(tuple, list))
        expect(len(got) == 2, f"Return two numbers, (stored, active); these are {len(got)}.")
        return tuple(of_kind(number, Real, "One of the two is") for number in got)

    answers = [pair(**case) for case in EXPERTS]
    right = [_experts(**case) for case in EXPERTS]
    if answers == right:
        return
    for mistaken, message in EXPERT_MISTAKES:
        expect(answers != [tuple(mistaken(**case)) for case in EXPERTS], message)
    expect(
        any(got[0] == wanted[0] for got, wanted in zip(answers, right, strict=True)),
        "The stored parameters are off: take a Llama, and see which of its lines there is E times.",
    )
    fail("The stored parameters are right, the active ones are not: which experts does one token not visit?")


# --------------------------------------------------------------------------------------------------- 04.5: vocabulary

PAPER = [
    {"h": PRESETS[name].hidden, "L": PRESETS[name].layers, "P": 1024, "millions": millions}
    for name, millions in GPT2_PAPER.items()
]
"""Radford et al. 2019, table 2: sizes, and the parameters in millions that the paper says."""


def _rows(vocab: int, sizes: Sequence[tuple[int, int, int]]) -> list[dict[str, int]]:
    """A table as a paper would print it."""
    return [{"h": h, "L": L, "P": P, "millions": round(_gpt(vocab, P, h, L) / 1e6)} for h, L, P in sizes]


TABLES = (
    PAPER,
    _rows(32_000, [(768, 12, 512), (1024, 24, 512), (2048, 24, 512)]),
    _rows(128_256, [(4096, 32, 8192), (512, 8, 1024)]),
)


def _interval(table: Sequence[Mapping[str, int]], half: float = 0.5) -> tuple[int, int]:
    """The smallest and the largest vocabulary with which each row's N rounds to its millions."""
    lows, highs = [], []
    for row in table:
        rest = _gpt(0, row["P"], row["h"], row["L"])
        lows.append(-((rest - round((row["millions"] - half) * 1e6)) // row["h"]))
        highs.append((round((row["millions"] + half) * 1e6) - 1 - rest) // row["h"])
    return max(lows), min(highs)


@exercise("04.5", "The vocabularies that fit every row at once. One of them is famous.")
def vocabulary(answer: Any) -> None:
    """`answer(table)` is (smallest, largest) vocabulary with which every row's N rounds to the printed millions."""
    answers = []
    for table in TABLES:
        got = call(answer, table=[dict(row) for row in table], returns=(tuple, list))
        expect(len(got) == 2, f"Return two numbers, (smallest, largest); these are {len(got)}.")
        answers.append(tuple(of_kind(number, Real, "One of the two is") for number in got))
    wanted = [_interval(table) for table in TABLES]
    if answers == wanted:
        return
    expect(
        answers != [_interval(table[:1]) for table in TABLES]
        and answers != [_interval(table[-1:]) for table in TABLES],
        "Only one row is in it. Each row leaves an interval; a vocabulary has to lie in all of them.",
    )
    union = [(min(_interval([row])[0] for row in table), max(_interval([row])[1] for row in table)) for table in TABLES]
    expect(answers != union, "Your interval holds what fits *some* row. What fits every row is narrower.")
    expect(
        answers != [_interval(table, half=1.0) for table in TABLES],
        "You allow a whole million to either side. A number that is printed in millions was rounded to the nearest.",
    )
    expect(
        any(low != high for low, high in answers),
        "One vocabulary for each table? Rounding leaves room: find the smallest and the largest.",
    )
    expect(all(low <= high for low, high in answers), "Your smallest is above your largest in one of the tables.")
    near = all(
        abs(low - right_low) <= 1 and abs(high - right_high) <= 1
        for (low, high), (right_low, right_high) in zip(answers, wanted, strict=True)
    )
    expect(not near, "Off by one at an end: does the vocabulary that you return still round to the printed number?")
    fail("Not yet: put one vocabulary that you return back into N for the first row. What does it round to?")


# ------------------------------------------------------------------------------------------------------- 04.6: widest

CARDS: tuple[Case, ...] = (
    {"memory": gpu("V100-32GB").memory, "V": 50257, "P": 1024},
    {"memory": gpu("A100-80GB").memory, "V": 50257, "P": 1024},
    {"memory": gpu("A100-80GB").memory, "V": 128256, "P": 4096},
    {"memory": 16 * _gpt(1000, 64, 128, 2), "V": 1000, "P": 64},
    {"memory": 1_000_000, "V": 50257, "P": 1024},
)


def _widest(memory: int, V: int, P: int, count: Count = _gpt, per_parameter: int = 16) -> int:
    """The widest GPT, in steps of 64 with a layer for each, whose parameters at these bytes fit."""
    h = 0
    while per_parameter * count(V, P, h + 64, (h + 64) // 64) <= memory:
        h += 64
    return h


WIDEST_MISTAKES: Mistakes = (
    (
        lambda memory, V, P: _widest(memory, V, P, lambda V, P, h, L: 12 * L * h**2),
        "You count 12·L·h² alone: the words take their bytes, too.",
    ),
    (lambda memory, V, P: _widest(memory, V, P, per_parameter=2), "Those are the 16-bit weights. Training keeps more."),
    (
        lambda memory, V, P: _widest(memory, V, P, per_parameter=4),
        "Those are the fp32 weights alone: gradients and Adam's two states stand beside them.",
    ),
    (
        lambda memory, V, P: _widest(memory, V, P, per_parameter=8),
        "Eight bytes are half of it: weights and gradients, or Adam's two states, but not both.",
    ),
    (lambda memory, V, P: _widest(memory - 1, V, P), "A model that fills the memory to the last byte still fits."),
    (
        lambda memory, V, P: _widest(memory, V, P) + 64,
        "One step too wide: you return the first width that does not fit any more.",
    ),
    (lambda memory, V, P: max(64, _widest(memory, V, P)), "Where not even the narrowest fits, return 0."),
    (
        lambda memory, V, P: _widest(memory, V, P, lambda V, P, h, L: _gpt(V, P, h, L) + V * h),
        "The head is tied: its matrix is the embedding, and is there once.",
    ),
)


@exercise("04.6", "The widest model whose weights, gradients and states fit, and not 64 more.")
def widest(answer: Any) -> None:
    """`answer(memory, V, P)` is the largest h, a multiple of 64 with L = h/64, whose 16·N bytes fit into `memory`."""
    otherwise = "Not yet: for your h, is 16·N at most the memory, and is it more for h + 64?"
    _recognize(answer, CARDS, _widest, WIDEST_MISTAKES, otherwise)


# -------------------------------------------------------------------------------------------------- 04.7: read_shapes

ASKED = ("hidden", "layers", "vocab", "kv", "ffn", "tied")

HIDDEN_MODELS: tuple[Mapping[str, Any], ...] = (
    {"hidden": 2048, "layers": 16, "vocab": 128256, "kv": 512, "ffn": 8192, "tied": True},
    {"hidden": 64, "layers": 5, "vocab": 100, "kv": 64, "ffn": 176, "tied": False},
    {"hidden": 512, "layers": 6, "vocab": 256, "kv": 128, "ffn": 1376, "tied": True},
    {"hidden": 4096, "layers": 32, "vocab": 32000, "kv": 1024, "ffn": 14336, "tied": False},
)


def anonymous_shapes(hidden: int, layers: int, vocab: int, kv: int, ffn: int, tied: bool) -> list[tuple[int, ...]]:
    """The shapes of all tensors of a Llama of these sizes, without names and sorted by their shapes."""
    one = [(hidden,), (hidden,), (hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    one += [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    words = [(vocab, hidden)] * (1 if tied else 2)
    return sorted([*words, *(layers * one), (hidden,)])


@exercise("04.7", "Every size of every hidden model, from shapes alone.")
def read_shapes(answer: Any) -> None:
    """`answer(shapes)` is a dictionary of the sizes (ASKED) of the Llama whose tensors have these shapes."""
    for sizes in HIDDEN_MODELS:
        _expect_sizes(entries(call(answer, shapes=anonymous_shapes(**sizes), returns=Mapping), ASKED, object), sizes)


def _expect_sizes(got: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    h, L, V, k, f = (sizes[name] for name in ("hidden", "layers", "vocab", "kv", "ffn"))
    expect(got["hidden"] == h, "hidden is off: which size do all vectors have? Only norms are vectors here.")
    expect(
        got["layers"] != 2 * L + 1, "Those are the norms. How many does a block have, and how many come after the last?"
    )
    expect(got["layers"] == L, "layers is off: which shape is there exactly once in a block?")
    expect(
        got["vocab"] != f or f == V,
        "That is the MLP's width. The vocabulary need not be the largest size: how often does its matrix occur?",
    )
    expect(got["vocab"] == V, "vocab is off: which matrix is there only once or twice in the whole model?")
    expect(got["ffn"] == f, "ffn is off: one shape has h rows and another number of columns, once in each block.")
    expect(got["kv"] == k, "kv is off. Careful: without grouped queries, keys and values have the queries' shape.")
    expect(
        bool(got["tied"]) == sizes["tied"],
        "tied is off: with a tied head there is one matrix of words, otherwise there are two.",
    )


def count_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """The numbers in tensors of these shapes, all together."""
    return sum(prod(shape) for shape in shapes)
