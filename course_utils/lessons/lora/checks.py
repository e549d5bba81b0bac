"""Checks of the exercises of lesson 12, "LoRA and quantization": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from numbers import Real
from operator import eq
from statistics import NormalDist
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils.estimating import estimate
from course_utils.gpus import gpu
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

# ------------------------------------------------------------------------------------------------------- 12.1: adapter

LLAMA_BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
ADAPTER_CASES = ((LLAMA_BLOCK, 16), ([(768, 768)], 4), ([(3072, 768), (768, 3072)], 64), ([(48, 64)], 1), ([], 8))

Shapes = Sequence[tuple[int, int]]


def _summed(one: Callable[[int, int, int], float]) -> Callable[[Shapes, int], float]:
    return lambda shapes, r: sum(one(n_out, n_in, r) for n_out, n_in in shapes)


ADAPTER_MISTAKES: Mistakes = {
    "Those are the frozen matrices. LoRA's factors are thin.": _summed(lambda n_out, n_in, r: n_out * n_in),
    "That is A alone. B learns as well.": _summed(lambda n_out, n_in, r: r * n_in),
    "That is B alone. A learns as well.": _summed(lambda n_out, n_in, r: r * n_out),
    "You count W, too. It is frozen.": _summed(lambda n_out, n_in, r: n_out * n_in + r * (n_out + n_in)),
    "Both factors as wide as the input: B is as long as the output.": _summed(lambda n_out, n_in, r: 2 * r * n_in),
    "There is no r × r matrix between A and B.": _summed(lambda n_out, n_in, r: r * (n_out + n_in) + r * r),
    "That is rank 1, whatever r is.": _summed(lambda n_out, n_in, r: n_out + n_in),
    "r counts twice: each factor has r lines, no more.": _summed(lambda n_out, n_in, r: r * r * (n_out + n_in)),
}


@exercise("12.1", "Two thin factors for each matrix: r·(n_out + n_in).")
def adapter(answer: Any) -> None:
    """`answer(shapes, r)` is how many numbers LoRA adds to matrices of these (n_out, n_in)."""
    got = [call(answer, shapes=list(shapes), r=r) for shapes, r in ADAPTER_CASES]
    right = _summed(lambda n_out, n_in, r: r * (n_out + n_in))
    if not recognized(got, ADAPTER_CASES, right, ADAPTER_MISTAKES, same=partial(alike, tolerance=1e-9)):
        expect(got[-1] == 0, "Without any matrix there is nothing to learn.")
        fail("Some count is off. Draw W, B and A for one matrix of 3 × 5 and r = 2, and count the cells of B and A.")


# --------------------------------------------------------------------------------------------------------- 12.2: merge


def _merge_cases() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """W, A, B and alpha; some of them square, where a shape does not reveal a slip."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(12))
    sizes = ((6, 6, 2, 2.0), (6, 6, 3, 12.0), (5, 8, 2, 16.0), (8, 5, 4, 1.0))
    return [(draw(m, n), draw(r, n), draw(m, r), alpha) for m, n, r, alpha in sizes]


MERGE_MISTAKES: Mistakes = {
    "You leave out the scale: alpha/r.": lambda W, A, B, alpha: W + B @ A,
    "You scale by alpha alone. It is divided by the rank.": lambda W, A, B, alpha: W + B @ A * alpha,
    "You divide by r alone. What is alpha for?": lambda W, A, B, alpha: W + B @ A / A.shape[0],
    "You divide by A's columns. r is how many rows it has.": lambda W, A, B, alpha: W + B @ A * (alpha / A.shape[1]),
    "The difference alone: where is W?": lambda W, A, B, alpha: B @ A * (alpha / A.shape[0]),
    "You scale W, too. It is what it was.": lambda W, A, B, alpha: (W + B @ A) * (alpha / A.shape[0]),
    "You take the difference away. It is added.": lambda W, A, B, alpha: W - B @ A * (alpha / A.shape[0]),
    "r over alpha: turned round.": lambda W, A, B, alpha: W + B @ A * (A.shape[0] / alpha),
}


@exercise("12.2", "One matrix that does what the layer with its factors does.")
def merge(answer: Any) -> None:
    """`answer(W, A, B, alpha)` is the merged weight, a new tensor."""
    got, cases = [], _merge_cases()
    for case in cases:
        W, A, B = (tensor.clone() for tensor in case[:3])
        found = call(answer, W=W, A=A, B=B, alpha=case[3], returns=torch.Tensor, may_change=("W",))  # see below
        expect(torch.equal(W, case[0]), "You changed W itself. To switch the adapter off again, the old one is needed.")
        expect(found.shape == W.shape, "The merged weight has W's shape, (n_out, n_in). Yours has another.")
        got.append(found.to(W.dtype))
    otherwise = "x·Wᵀ + (x·Aᵀ)·Bᵀ·alpha/r has to be x times your matrix, transposed. Pull x out on the left."
    recognized(got, cases, lambda W, A, B, alpha: W + B @ A * (alpha / A.shape[0]), MERGE_MISTAKES, otherwise, _close)


def _close(got: Sequence[Any], wanted: Sequence[Any]) -> bool:
    pairs = zip(map(torch.as_tensor, got), map(torch.as_tensor, wanted), strict=True)
    return all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)


# ------------------------------------------------------------------------------------------------------- 12.3: account

ACCOUNT_CASES = ((6_500_000_000, 40_000_000, 4, 64), (1_024_000_000, 8_000_000, 8, 4096), (64_000, 1_000, 4, 32))
ACCOUNT: dict[str, Callable[[int, int, int, int], float]] = {
    "frozen": lambda N, n, bits, block: N * bits / 8 + 4 * N / block,
    "adapters": lambda N, n, bits, block: 2 * n,
    "gradients": lambda N, n, bits, block: 2 * n,
    "states": lambda N, n, bits, block: 8 * n,
}

ACCOUNT_MISTAKES: dict[str, Mistakes] = {
    "frozen": {
        "The scales are missing: one fp32 number for each block.": lambda N, n, bits, block: N * bits / 8,
        "Those are bits. Bytes were asked for.": lambda N, n, bits, block: N * bits + 32 * N / block,
        "A scale in fp32 takes more than one byte.": lambda N, n, bits, block: N * bits / 8 + N / block,
        "The scales are fp32, not 16-bit.": lambda N, n, bits, block: N * bits / 8 + 2 * N / block,
        "`block` is a size. How many blocks are there?": lambda N, n, bits, block: N * bits / 8 + 4 * block,
        "That is the frozen model in 16 bits.": lambda N, n, bits, block: 2 * N,
    },
    "adapters": {
        "The adapters learn: they are 16-bit, not quantized.": lambda N, n, bits, block: n * bits / 8,
        "The adapters are 16-bit here, not fp32.": lambda N, n, bits, block: 4 * n,
    },
    "gradients": {
        "Frozen parameters get no gradients.": lambda N, n, bits, block: 2 * (N + n),
        "Gradients come in the format of what learns: 16 bits.": lambda N, n, bits, block: 4 * n,
    },
    "states": {
        "The optimizer keeps nothing for what is frozen.": lambda N, n, bits, block: 8 * (N + n),
        "Half of what Adam keeps: two moments, each in fp32.": lambda N, n, bits, block: 4 * n,
        "There is no fp32 master copy in this recipe.": lambda N, n, bits, block: 12 * n,
        "That is the 8-bit Adam. This one keeps fp32 moments.": lambda N, n, bits, block: 2 * n,
    },
}


@exercise("12.3", "The frozen model is most of it; what learns hardly shows.")
def account(answer: Any) -> None:
    """`answer(N, learning, bits, block)` is a dictionary of bytes: frozen, adapters, gradients, states."""
    names = ("N", "learning", "bits", "block")
    got = [entries(call(answer, **by_name(names, case), returns=Mapping), tuple(ACCOUNT)) for case in ACCOUNT_CASES]
    for part, right in ACCOUNT.items():
        values = [one[part] for one in got]
        if not recognized(values, ACCOUNT_CASES, right, ACCOUNT_MISTAKES[part]):
            slip = unit_slip(values[0], right(*ACCOUNT_CASES[0]))
            expect(slip is None, f"{part} is {slip}")
            fail(f"{part} is off. How many numbers are there of it, and how many bytes does each take?")


# ------------------------------------------------------------------------------------------------------ 12.4: quantize


def _quantize_cases() -> tuple[tuple[torch.Tensor, int, int], ...]:
    """Values, bits and the size of a block; one block is all zeros."""
    dice = torch.Generator().manual_seed(4)
    uneven = torch.randn(128, generator=dice) * torch.logspace(-3, 1, 128)
    below = -torch.rand(64, generator=dice)  # the largest magnitude belongs to a negative number
    zeros = torch.cat((torch.zeros(16), torch.randn(16, generator=dice)))
    return (uneven, 4, 32), (below, 8, 64), (below, 4, 16), (uneven, 3, 16), (zeros, 4, 16)


class NoNumberAsInteger(TorchDispatchMode):
    """Notices a conversion of a nan to an integer, whose result differs between processors."""

    happened = False
    conversions = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)  # .to(torch.int8), codes[i] = …

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.conversions and not result.dtype.is_floating_point:
            sources = [value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()]
            self.happened |= any(bool(source.isnan().any()) for source in sources)
        return result


@exercise("12.4", "Codes and scales, and no error above half a step of its own block.")
def quantize(answer: Any) -> None:
    """`answer(values, bits, block)` is (codes, scales): whole numbers (blocks, block), and a scale for each block."""
    for values, bits, block in _quantize_cases():
        with NoNumberAsInteger() as watch:
            pair = call(answer, values=values.clone(), bits=bits, block=block, returns=(tuple, list))
        expect(not watch.happened, "In a block of zeros you divide 0 by 0. Keep zeros out of what you divide by.")
        expect(len(pair) == 2, "Two things were asked for: the codes, and the scales.")
        codes = of_kind(pair[0], torch.Tensor, "Your codes are")
        scales = of_kind(pair[1], torch.Tensor, "Your scales are")
        _expect_codes(codes, scales, values.view(-1, block), bits)


def _expect_codes(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, bits: int) -> None:
    expect(codes.shape == rows.shape, "The codes have one row for each block. Yours have another shape.")
    expect(scales.numel() == len(rows), "There is a scale for each block, not one scale for all, nor another number.")
    expect(torch.equal(codes, codes.round()), "Codes are whole numbers. Did you forget to round?")
    expect(bool(torch.isfinite(scales).all()), "Some scale is not finite. Do you divide by what may be 0?")
    scales, most, limit = scales.float().reshape(-1, 1), codes.abs().max().item(), 2 ** (bits - 1) - 1
    right, one_sided = rows.abs().amax(dim=1, keepdim=True) / limit, rows.amax(dim=1, keepdim=True) / limit
    misled = not torch.equal(one_sided, right) and torch.allclose(scales, one_sided)
    sizes, there = bool((scales >= 0).all()) and not misled, right > 0
    expect(sizes, "A scale is a size. Take the largest *magnitude*, not the largest number.")
    expect(most <= limit + 1, "Some code needs more than `bits` bits: half of the codes are for negative numbers.")
    expect(most <= limit, "−2^(bits−1) has no partner above zero. Absmax leaves it out.")
    undivided = torch.allclose(scales, right * limit, rtol=1e-4)
    expect(not undivided, "Your scale is the largest magnitude. What is it for the largest code to stand for that?")
    equal = torch.allclose(scales[there], right[there], rtol=1e-4)
    expect(equal, "Some scale is off: the block's largest magnitude has to get the largest code.")
    off = (codes * scales - rows).abs()
    expect(bool((off <= 0.5001 * right + 1e-9).all()), "Some error is above half a step: round to the *nearest* code.")
    expect(not codes.dtype.is_floating_point, "Your codes are right, but stored as floats. `torch.int8` takes a byte.")


# -------------------------------------------------------------------------------------------------- 12.5: normal_float


def _delta(bits: int) -> float:
    return (1 / 2**bits + 1 / (2**bits - 1)) / 4


def _quantiles(probabilities: Iterable[float]) -> list[float]:
    """Quantiles of the normal distribution, divided by the largest, which is the last."""
    values = [NormalDist().inv_cdf(probability) for probability in probabilities]
    return [value / values[-1] for value in values]


def _code(bits: int, delta: float) -> list[float]:
    """NF4's recipe for any number of bits: even probabilities from δ to ½, and one more from ½ to 1 − δ."""
    half = 2 ** (bits - 1)
    low = [delta + (0.5 - delta) * step / (half - 1) for step in range(half)]
    return _quantiles([*low, *(0.5 + (0.5 - delta) * step / half for step in range(1, half + 1))])


def normal_float_right(bits: int) -> list[float]:
    """NormalFloat with 2^bits values (Dettmers et al. 2023, QLoRA, section 3)."""
    return _code(bits, _delta(bits))


CODE_MISTAKES: Mistakes = {
    "Zero is not among your values: the two halves share the probability ½.": lambda bits:
        _quantiles(_delta(bits) + (1 - 2 * _delta(bits)) * step / (2**bits - 1) for step in range(2**bits)),
    "Turned round: one value more above zero than below.": lambda bits: [-x for x in normal_float_right(bits)[::-1]],
    "Those values are evenly spaced. Take quantiles.": lambda bits: torch.linspace(-1, 1, 2**bits),
    "Your δ is of 2^bits values. Take the mean with the other half.": lambda bits: _code(bits, 0.5 / 2**bits),
    "Your δ is of 2^bits − 1 values. Take the mean with the other half.": lambda b: _code(b, 0.5 / (2**b - 1)),
    "Your δ is that of 4 bits, whatever `bits` is.": lambda bits: _code(bits, _delta(4)),
}  # fmt: skip


@exercise("12.5", "A code for every number of bits, zero included, from quantiles alone.")
def normal_float(answer: Any) -> None:
    """`answer(bits)` is NormalFloat with 2^bits values, rising from −1 to 1."""
    got, cases = [], [(4,), (3,), (2,), (6,)]
    for (bits,) in cases:
        given = call(answer, bits=bits, returns=(list, tuple, torch.Tensor))
        found = [float(of_kind(one, Real, "One of your values is", finite=False)) for one in given]
        expect(len(found) == 2**bits, f"With {bits} bits there are 2^{bits} values. You return another number of them.")
        expect(found == sorted(found), "The values should rise.")
        expect(all(map(math.isfinite, found)), "Probability 0 or 1 is infinitely far out: begin at δ, end at 1 − δ.")
        ends = abs(found[0] + 1) < 1e-6 and abs(found[-1] - 1) < 1e-6
        expect(ends, "Divide by the largest: the code goes from −1 to 1.")
        got.append(found)
    if not recognized(got, cases, normal_float_right, CODE_MISTAKES, same=_close):
        expect(all(min(map(abs, found)) < 1e-9 for found in got), "Zero is not among your values.")
        fail("Some value is off. For 4 bits compare with the lesson's, one by one, from the middle outwards.")


# ---------------------------------------------------------------------------------------------------------- 12.6: best

BITS, RANKS = (16, 8, 4), (64, 32, 16, 8, 4, 2)
"""Bits that frozen weights may have, and ranks of LoRA, both best first."""

LLAMA = TrainingRun("llama3-8b", 1, 2048, "bf16", recompute="full", lora_rank=2, lora_targets=("attention", "mlp"))
LLAMA_70B = LLAMA.replace(model="llama3-70b", seq_len=512)
BEST_CASES = (
    (LLAMA, "A100-80GB"), (LLAMA, "RTX4080-16GB"), (LLAMA.replace(micro_batch=4, seq_len=2112), "RTX3090-24GB"),
    (LLAMA_70B, "H200-141GB"), (LLAMA_70B.replace(seq_len=4096), "A100-80GB"), (LLAMA_70B, "RTX4090-24GB"),
)  # fmt: skip
"""Runs and cards; nothing fits the last."""

Pair = tuple[int, int]


def _first_of(pairs: Iterable[Pair], room: Callable[[str], int] = lambda card: gpu(card).memory) -> Any:
    """An answer: the first of these (bits, rank) that fits into the card's `room`."""
    pairs = list(pairs)

    def chosen(run: TrainingRun, card: str) -> Pair | None:
        sizes = ((pair, estimate(run.replace(frozen_bits=pair[0], lora_rank=pair[1])).total) for pair in pairs)
        return next((pair for pair, size in sizes if size <= room(card)), None)

    return chosen


BEST_FIRST = list(product(BITS, RANKS))
best_right = _first_of(BEST_FIRST)
BEST_MISTAKES: Mistakes = {
    "You spend the memory on rank first. Bits come first: the model is in them.":
        _first_of((bits, rank) for rank in RANKS for bits in BITS),
    "You take the fewest bits that fit. The most were asked for.": _first_of(product(BITS[::-1], RANKS)),
    "You take the lowest rank that fits. The highest was asked for.": _first_of(product(BITS, RANKS[::-1])),
    "You take the number in the card's name for its memory. Ask `gpu(card).memory`.":
        _first_of(BEST_FIRST, lambda card: int(card.rsplit("-", 1)[1].removesuffix("GB")) * 10**9),
}  # fmt: skip


@exercise("12.6", "First as many bits as fit, then as much rank as fits.")
def best(answer: Any) -> None:
    """`answer(run, card)` is (bits, rank) of BITS and RANKS, or None where nothing fits."""
    got = [call(answer, run=run, card=card, returns=tuple | None) for run, card in BEST_CASES]
    if recognized(got, BEST_CASES, best_right, BEST_MISTAKES, same=eq):
        return
    for one, (run, card) in zip(got, BEST_CASES, strict=True):
        expect(one is None or one in BEST_FIRST, "That is no pair of one of BITS and one of RANKS.")
        wanted = best_right(run, card)
        expect(one is None or wanted is not None, f"On the {card} you choose something, and nothing fits there.")
        expect(one is not None or wanted is None, f"On the {card} you find nothing, but something fits.")
    fail("Some choice is not the best: a larger number of bits or, with the same bits, a larger rank fits as well.")
