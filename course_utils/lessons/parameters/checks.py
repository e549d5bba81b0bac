"""Checks of the exercises of lesson 04, "Counting parameters": each names the misconception, never the answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isclose, prod
from numbers import Real
from operator import eq
from typing import Any, NamedTuple

from course_utils.gpus import gpu
from course_utils.interactive.feedback import Mistakes, by_name, call, entries, exercise, expect, of_kind, recognized
from course_utils.models import PRESETS

from .counting import GPT2_PAPER

Case = tuple[Any, ...]
Count = Callable[..., int]


def _expect_counts(
    answer: Any, names: Sequence[str], cases: Sequence[Case], right: Count, mistakes: Mistakes, otherwise: str
) -> None:
    got, wanted = [call(answer, **by_name(names, case)) for case in cases], [right(*case) for case in cases]
    factor = "All of it is off by the same factor: millions, billions, bytes? Count numbers, one by one."
    for times in (1e-9, 1e-6, 2, 4, 16):
        expect(not all(map(isclose, got, (times * one for one in wanted))), factor)
    off = next((case for case, one, other in zip(cases, got, wanted, strict=True) if one != other), cases[0])
    where = ", ".join(f"{name}={size}" for name, size in zip(names, off, strict=True))
    recognized(got, cases, right, mistakes, f"{otherwise} (The first case that is off: {where}.)", eq)


def _pair(answer: Any, names: str, **given: Any) -> tuple[Any, ...]:
    got = call(answer, **given, returns=(tuple, list))
    expect(len(got) == 2, f"Return two numbers, {names}; these are {len(got)}.")
    return tuple(of_kind(number, Real, "One of the two is") for number in got)


# -------------------------------------------------------------------------------------------------------- 04.1: block

BLOCKS: tuple[Case, ...] = ((1600, True), (7, True), (768, True), (1600, False), (96, False))


def _block(h: int, bias: bool, matrices: int = 12, biases: int = 9, norms: int = 4, plain_norms: int = 2) -> int:
    return matrices * h**2 + (biases * h + norms * h if bias else plain_norms * h)


BLOCK_MISTAKES: Mistakes = {
    "Those are the matrices. Each has biases where there are any, and two norms are left.": lambda h, bias: 12 * h**2,
    "You count biases whether the model has them or not, in norms too.": lambda h, bias: _block(h, True),
    "The block has two norms, and they have parameters of their own.": partial(_block, norms=0, plain_norms=0),
    "One norm is missing: one is before attention, one before the MLP.": partial(_block, norms=2, plain_norms=1),
    "A LayerNorm scales the h numbers, and where the model has biases it shifts them, too.": partial(_block, norms=2),
    "Without biases a LayerNorm has no shift either. What is left of it?": partial(_block, plain_norms=4),
    "Without biases the norms do not vanish: they still scale.": partial(_block, plain_norms=0),
    "A layer is missing: attention has one more matrix before the residual.": partial(_block, matrices=11, biases=8),
    "Queries, keys and values: each of the three has a matrix of its own.": partial(_block, matrices=10, biases=7),
    "The MLP goes up to 4h and comes back down: two matrices, not one.": partial(_block, matrices=8, biases=6),
    "A bias has one number for each output. One of the layers has 4h outputs.": partial(_block, biases=6),
}


@exercise("04.1", "Matrices, biases and norms, for every width, with and without biases.")
def block(answer: Any) -> None:
    """`answer(h, bias)` is the number of parameters of one block of a GPT."""
    otherwise = "Not yet: write the four linear layers one below the other, then the two norms."
    _expect_counts(answer, ("h", "bias"), BLOCKS, _block, BLOCK_MISTAKES, otherwise)


# ---------------------------------------------------------------------------------------------------------- 04.2: gpt

_GPT_PRESETS = (PRESETS["gpt2"], PRESETS["gpt2-xl"], PRESETS["gpt3-175b"])
GPTS: tuple[Case, ...] = (*((m.vocab, m.max_positions, m.hidden, m.layers) for m in _GPT_PRESETS), (101, 7, 12, 3))


def _gpt(V: int, P: int, h: int, L: int) -> int:
    return V * h + P * h + L * (12 * h**2 + 13 * h) + 2 * h


GPT_MISTAKES: Mistakes = {
    "That is the rule of thumb, the blocks' matrices alone. Here every unit counts.": lambda V, P, h, L: 12 * L * h**2,
    "You count the words twice. The head is tied: it is the same matrix.": lambda V, P, h, L: _gpt(2 * V, P, h, L),
    "The positions are missing. GPT-2 learns a vector for each.": lambda V, P, h, L: _gpt(V, 0, h, L),
    "After the last block comes one more norm.": lambda V, P, h, L: _gpt(V, P, h, L) - 2 * h,
    "Where are the words? The embedding is a matrix as well.": lambda V, P, h, L: _gpt(0, P, h, L),
    "Biases and norms are missing: a block is more than 12h².": lambda V, P, h, L: _gpt(V, P, h, L) - L * 13 * h,
    "The last norm is there once, not once a block.": lambda V, P, h, L: _gpt(V, P, h, L) + (L - 1) * 2 * h,
    "The positions are added once, before the first block, not in each.": lambda V, P, h, L: _gpt(V, L * P, h, L),
}


@exercise("04.2", "To the unit, from a toy to GPT-3.")
def gpt(answer: Any) -> None:
    """`answer(V, P, h, L)` is N of a GPT-2 of these sizes."""
    otherwise = "Not yet: embedding, positions, L blocks, one norm. Which of them is off?"
    _expect_counts(answer, ("V", "P", "h", "L"), GPTS, _gpt, GPT_MISTAKES, otherwise)


# -------------------------------------------------------------------------------------------------------- 04.3: llama


class Sizes(NamedTuple):
    """The sizes of a Llama, as the exercise names them."""

    V: int
    h: int
    L: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = False


def _sizes(name: str) -> Sizes:
    m = PRESETS[name]
    return Sizes(m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn, m.tied)


LLAMAS = (*map(_sizes, ("llama3-8b", "llama3.2-1b", "tinyllama-1.1b")), Sizes(50, 24, 2, 4, 4, 37, tied=True))


def _llama(
    V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, tied: bool, *, mlp: int = 3, norm: int = 1
) -> int:
    k = h // heads * kv_heads
    words = V * h if tied else 2 * V * h
    return words + L * (2 * h**2 + 2 * h * k + mlp * ffn * h + 2 * norm * h) + norm * h


def _llama_with(change: Callable[[Sizes], dict[str, Any]]) -> Count:
    return lambda *sizes: _llama(*Sizes(*sizes)._replace(**change(Sizes(*sizes))))


LLAMA_MISTAKES: Mistakes = {
    "Your keys and values are as wide as the queries.": _llama_with(lambda m: {"kv_heads": m.heads}),
    "You take `kv_heads` for a width: it counts heads; how wide is a head?": _llama_with(lambda m: {"heads": m.h}),
    "Two matrices in the MLP. SwiGLU has a third: one branch gates the other.": partial(_llama, mlp=2),
    "RMSNorm scales and does not shift: it is half of a LayerNorm.": partial(_llama, norm=2),
    "You never count a head. What does `tied=False` mean for it?": _llama_with(lambda m: {"tied": True}),
    "You count a head in every model. What does `tied=True` say about it?": _llama_with(lambda m: {"tied": False}),
    "Turned round: a tied head is the embedding itself.": _llama_with(lambda m: {"tied": not m.tied}),
    "After the last block comes one more norm.": lambda V, h, *sizes: _llama(V, h, *sizes) - h,
    "The blocks' norms are missing: two in each.": lambda V, h, L, *sizes: _llama(V, h, L, *sizes) - 2 * L * h,
    "You take 4h for the MLP's width. Llama's is its own: `ffn`.": _llama_with(lambda m: {"ffn": 4 * m.h}),
}


@exercise("04.3", "Grouped queries, SwiGLU, RMSNorm, tied or not: as published, to the unit.")
def llama(answer: Any) -> None:
    """`answer(V, h, L, heads, kv_heads, ffn, tied)` is N of a Llama of these sizes."""
    otherwise = "Not yet: compare your lines with the table of the block of Llama-3 8B in the lesson."
    _expect_counts(answer, Sizes._fields, LLAMAS, _llama, LLAMA_MISTAKES, otherwise)


# ------------------------------------------------------------------------------------------------------ 04.4: experts

EXPERTS: tuple[tuple[Sizes, int, int], ...] = (
    (_sizes("mixtral-8x7b"), 8, 2),
    (Sizes(60, 24, 3, 4, 2, 40), 16, 3),
    (Sizes(200, 48, 2, 6, 6, 20), 4, 1),
)
"""A Llama, how many experts it has, and how many of them a token uses."""


def _experts(m: Sizes, E: int, chosen: int, routers: int = 1) -> tuple[int, int]:
    """The numbers of parameters that are stored and that are active."""
    one = 3 * m.h * m.ffn * m.L
    rest = _llama(*m) - one + routers * m.L * E * m.h
    return rest + E * one, rest + chosen * one


EXPERT_MISTAKES: Mistakes = {
    "You multiply the whole model. Which parts are there once for each expert, and which once for all?":
        lambda m, E, chosen: (E * _llama(*m), chosen * _llama(*m)),
    "Nothing chooses a token's experts: each block has a router, a row of h for each.": partial(_experts, routers=0),
    "A token uses the whole router, with the rows of experts that are then not chosen.": lambda m, E, chosen:
        (_experts(m, E, chosen)[0], _experts(m, E, chosen)[1] - m.L * m.h * (E - chosen)),
    "You take chosen/E of everything as active. Attention and words are active for every token.":
        lambda m, E, chosen: (_experts(m, E, chosen)[0], _experts(m, E, chosen)[0] * chosen // E),
    "Turned round: what is stored comes first, what is active second.": lambda *case: _experts(*case)[::-1],
}  # fmt: skip


@exercise("04.4", "Stored and active: experts share everything but their MLPs.")
def experts(answer: Any) -> None:
    """`answer(V, h, L, heads, kv_heads, ffn, E, chosen)` is (stored, active) of a Llama with experts, untied."""
    given = [by_name(Sizes._fields[:-1], m[:-1]) | {"E": E, "chosen": chosen} for m, E, chosen in EXPERTS]
    answers = [_pair(answer, "(stored, active)", **one) for one in given]
    otherwise = "Not yet: take a Llama. Which of its lines are there E times, and which of those does a token visit?"
    recognized(answers, EXPERTS, _experts, EXPERT_MISTAKES, otherwise, eq)


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


VOCABULARY_MISTAKES: Mistakes = {
    "Only one row is in it. Each row leaves an interval; a vocabulary has to lie in all of them.":
        lambda table: _interval(table[:1]),
    "Your interval holds what fits *some* row. What fits every row is narrower.": lambda table:
        (min(_interval([row])[0] for row in table), max(_interval([row])[1] for row in table)),
    "You allow a whole million to either side. Millions are rounded to the nearest.": partial(_interval, half=1.0),
}  # fmt: skip


@exercise("04.5", "The vocabularies that fit every row at once. One of them is famous.")
def vocabulary(answer: Any) -> None:
    """`answer(table)` is (smallest, largest) vocabulary with which every row's N rounds to the printed millions."""
    answers = [_pair(answer, "(smallest, largest)", table=[dict(row) for row in table]) for table in TABLES]
    ends = zip(sum(answers, ()), sum(map(_interval, TABLES), ()), strict=True)
    off = "Not yet: put one vocabulary that you return back into N for the first row. What does it round to?"
    if all(low == high for low, high in answers):
        off = "One vocabulary for each table? Rounding leaves room: find the smallest and the largest."
    elif any(low > high for low, high in answers):
        off = "Your smallest is above your largest in one of the tables."
    elif all(abs(got - right) <= 1 for got, right in ends):
        off = "Off by one at an end: does the vocabulary that you return still round to the printed number?"
    recognized(answers, [(table,) for table in TABLES], _interval, VOCABULARY_MISTAKES, off, eq)


# ------------------------------------------------------------------------------------------------------- 04.6: widest

CARDS: tuple[Case, ...] = (
    (gpu("V100-32GB").memory, 50257, 1024), (gpu("A100-80GB").memory, 50257, 1024),
    (gpu("A100-80GB").memory, 128256, 4096), (16 * _gpt(1000, 64, 128, 2), 1000, 64), (1_000_000, 50257, 1024),
)  # fmt: skip


def _widest(memory: int, V: int, P: int, count: Count = _gpt, per_parameter: int = 16) -> int:
    """The widest GPT, in steps of 64 with a layer for each, whose parameters at these bytes fit."""
    h = 0
    while per_parameter * count(V, P, h + 64, (h + 64) // 64) <= memory:
        h += 64
    return h


WIDEST_MISTAKES: Mistakes = {
    "You count 12·L·h² alone, without words.": partial(_widest, count=lambda V, P, h, L: 12 * L * h**2),
    "Those are the 16-bit weights. Training keeps more.": partial(_widest, per_parameter=2),
    "Those are the fp32 weights alone: gradients and states come on top.": partial(_widest, per_parameter=4),
    "Eight bytes are half of it: weights and gradients, or states, not both.": partial(_widest, per_parameter=8),
    "A model that fills the memory to the last byte still fits.": lambda memory, V, P: _widest(memory - 1, V, P),
    "One step too wide: you return the first width that does not fit any more.": lambda *case: _widest(*case) + 64,
    "Where not even the narrowest fits, return 0.": lambda *case: max(64, _widest(*case)),
    "The head is tied: it is the embedding.": partial(_widest, count=lambda V, P, h, L: _gpt(2 * V, P, h, L)),
}


@exercise("04.6", "The widest model whose weights, gradients and states fit, and not 64 more.")
def widest(answer: Any) -> None:
    """`answer(memory, V, P)` is the largest h, a multiple of 64 with L = h/64, whose 16·N bytes fit into `memory`."""
    otherwise = "Not yet: for your h, is 16·N at most the memory, and is it more for h + 64?"
    _expect_counts(answer, ("memory", "V", "P"), CARDS, _widest, WIDEST_MISTAKES, otherwise)


# -------------------------------------------------------------------------------------------------- 04.7: read_shapes

SIZES = {
    "hidden": "which size do all vectors have? Only norms are vectors here.",
    "layers": "which shape is there exactly once in a block?",
    "vocab": "which matrix is there only once or twice in the whole model?",
    "ffn": "one shape has h rows and another number of columns, once in each block.",
    "kv": "without grouped queries, keys and values have the queries' shape.",
    "tied": "with a tied head there is one matrix of words, otherwise there are two.",
}
"""What is asked for, and where to look."""

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
    """`answer(shapes)` is a dictionary of the `SIZES` of the Llama whose tensors have these shapes."""
    for sizes in HIDDEN_MODELS:
        got = entries(call(answer, shapes=anonymous_shapes(**sizes), returns=Mapping), tuple(SIZES), object)
        norms = "Those are the norms. How many does a block have, and how many come after?"
        expect(got["layers"] != 2 * sizes["layers"] + 1, norms)
        largest = "That is the MLP's width. The vocabulary need not be the largest size: how often is its matrix there?"
        expect(got["vocab"] != sizes["ffn"], largest)
        for name, hint in SIZES.items():
            expect(got[name] == sizes[name], f"{name} is off: {hint}")


def count_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """The numbers in tensors of these shapes, all together."""
    return sum(prod(shape) for shape in shapes)
