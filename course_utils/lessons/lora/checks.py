"""Checks of the exercises of lesson 12, "LoRA and quantization": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from course_utils.interactive.feedback import (
    alike,
    by_name,
    call,
    call_or_none,
    entries,
    exercise,
    expect,
    fail,
    in_other_form,
    of_kind,
    unit_slip,
)

from .labs import (
    BEST_CASES,
    BEST_MISTAKES,
    BITS,
    CODE_MISTAKES,
    MERGE_CASES,
    MERGE_MISTAKES,
    QUANTIZE_CASES,
    RANKS,
    Merge,
    NoNumberAsInteger,
    best_right,
    merge_right,
    normal_float_right,
    steps_right,
)

__all__ = ["BITS", "RANKS", "account", "adapter", "best", "merge", "normal_float", "quantize"]

# ------------------------------------------------------------------------------------------------------- 12.1: adapter

LLAMA_BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
ADAPTER_CASES = ((LLAMA_BLOCK, 16), ([(768, 768)], 4), ([(3072, 768), (768, 3072)], 64), ([(48, 64)], 1), ([], 8))

Shapes = Sequence[tuple[int, int]]


def _summed(one: Callable[[int, int, int], float]) -> Callable[[Shapes, int], float]:
    return lambda shapes, r: sum(one(n_out, n_in, r) for n_out, n_in in shapes)


ADAPTER_MISTAKES: tuple[tuple[Callable[[Shapes, int], float], str], ...] = (
    (_summed(lambda n_out, n_in, r: n_out * n_in), "Those are the frozen matrices. LoRA's factors are thin."),
    (_summed(lambda n_out, n_in, r: r * n_in), "That is A alone. B learns as well."),
    (_summed(lambda n_out, n_in, r: r * n_out), "That is B alone. A learns as well."),
    (_summed(lambda n_out, n_in, r: n_out * n_in + r * (n_out + n_in)), "You count W, too. It is frozen."),
    (_summed(lambda n_out, n_in, r: 2 * r * n_in), "Both factors as wide as the input: B is as long as the output."),
    (_summed(lambda n_out, n_in, r: r * (n_out + n_in) + r * r), "There is no r × r matrix between A and B."),
    (_summed(lambda n_out, n_in, r: n_out + n_in), "That is rank 1, whatever r is."),
    (_summed(lambda n_out, n_in, r: r * r * (n_out + n_in)), "r counts twice: each factor has r lines, no more."),
    (_summed(lambda n_out, n_in, r: 2 * r * (n_out + n_in)), "Those are bytes in 16 bits. Count numbers."),
    (_summed(lambda n_out, n_in, r: 4 * r * (n_out + n_in)), "Those are bytes in fp32. Count numbers."),
    (
        lambda shapes, r: sum(r * sum(shape) for shape in shapes[:1]),
        "That is the first matrix alone. Sum over the list.",
    ),
)


@exercise("12.1", "Two thin factors for each matrix: r·(n_out + n_in).")
def adapter(answer: Any) -> None:
    """`answer(shapes, r)` is how many numbers LoRA's factors have beside matrices of these (n_out, n_in)."""
    got = [call(answer, shapes=list(shapes), r=r) for shapes, r in ADAPTER_CASES]

    def agrees(function: Callable[[Shapes, int], float]) -> bool:
        return alike(got, (function(*case) for case in ADAPTER_CASES), 1e-9)

    if agrees(_summed(lambda n_out, n_in, r: r * (n_out + n_in))):
        return
    for mistaken, message in ADAPTER_MISTAKES:
        expect(not agrees(mistaken), message)
    expect(got[-1] == 0, "Without any matrix there is nothing to learn.")
    fail("Some count is off. Draw W, B and A for one matrix of 3 × 5 and r = 2, and count the cells of B and A.")


# --------------------------------------------------------------------------------------------------------- 12.2: merge


@exercise("12.2", "One matrix that does what the layer with its factors does.")
def merge(answer: Any) -> None:
    """`answer(W, A, B, alpha)` is the merged weight, a new tensor."""
    got: list[torch.Tensor] = []
    for case in MERGE_CASES:
        W, A, B = (tensor.clone() for tensor in case[:3])
        found = call(answer, W=W, A=A, B=B, alpha=case[3], returns=torch.Tensor, may_change=("W",))  # see below
        expect(
            torch.equal(W, case[0]),
            "You changed W itself. Who wants to switch the adapter off again needs the old one.",
        )
        expect(found.shape == W.shape, "The merged weight has W's shape, (n_out, n_in). Yours has another.")
        got.append(found.to(W.dtype))

    def agrees(function: Merge) -> bool:
        return all(torch.allclose(one, function(*case), atol=1e-4) for one, case in zip(got, MERGE_CASES, strict=True))

    if agrees(merge_right):
        return
    for message, mistaken in MERGE_MISTAKES.items():
        expect(not agrees(mistaken), message)
    fail("x·Wᵀ + (x·Aᵀ)·Bᵀ·alpha/r has to be x times your matrix, transposed. Pull x out on the left.")


# ------------------------------------------------------------------------------------------------------- 12.3: account

ACCOUNT_CASES = ((6_500_000_000, 40_000_000, 4, 64), (1_024_000_000, 8_000_000, 8, 4096), (64_000, 1_000, 4, 32))
PARTS = ("frozen", "adapters", "gradients", "states")


def _account(N: int, learning: int, bits: int, block: int) -> dict[str, float]:
    frozen = N * bits / 8 + 4 * N / block
    return {"frozen": frozen, "adapters": 2 * learning, "gradients": 2 * learning, "states": 8 * learning}


ACCOUNT_MISTAKES: dict[str, tuple[tuple[Callable[..., float], str], ...]] = {
    "frozen": (
        (lambda N, learning, bits, block: N * bits / 8, "The scales are missing: one fp32 number for each block."),
        (lambda N, learning, bits, block: N * bits + 32 * N / block, "Those are bits. Bytes were asked for."),
        (lambda N, learning, bits, block: N * bits / 8 + N / block, "A scale in fp32 takes more than one byte."),
        (lambda N, learning, bits, block: N * bits / 8 + 2 * N / block, "The scales are fp32, not 16-bit."),
        (lambda N, learning, bits, block: N * bits / 8 + 4 * block, "`block` is how many numbers share a scale. How "
         "many blocks are there?"),
        (lambda N, learning, bits, block: 2 * N, "That is the frozen model in 16 bits."),
        (lambda N, learning, bits, block: N / 2 + N / 16, "That is 4 bits in blocks of 64, whatever `bits` and `block` "
         "are."),
        (lambda N, learning, bits, block: N, "That is how many numbers there are. How many bits does each take?"),
    ),
    "adapters": (
        (lambda N, learning, bits, block: learning * bits / 8, "The adapters learn: they are 16-bit, not quantized."),
        (lambda N, learning, bits, block: 4 * learning, "The adapters are 16-bit here, not fp32."),
        (lambda N, learning, bits, block: learning, "That is how many numbers learn. Bytes were asked for."),
    ),
    "gradients": (
        (lambda N, learning, bits, block: 2 * N, "Frozen parameters get no gradients."),
        (lambda N, learning, bits, block: 2 * (N + learning), "Frozen parameters get no gradients."),
        (lambda N, learning, bits, block: 4 * learning, "Gradients come in the format of what learns: 16 bits."),
        (lambda N, learning, bits, block: 0, "No gradients? Something does learn."),
        (lambda N, learning, bits, block: learning, "That is how many gradients there are. Bytes were asked for."),
    ),
    "states": (
        (lambda N, learning, bits, block: 8 * N, "The optimizer keeps nothing for what is frozen."),
        (lambda N, learning, bits, block: 8 * (N + learning), "The optimizer keeps nothing for what is frozen."),
        (lambda N, learning, bits, block: 4 * learning, "Half of what Adam keeps: two moments, each in fp32."),
        (lambda N, learning, bits, block: 12 * learning, "There is no fp32 master copy in this recipe."),
        (lambda N, learning, bits, block: 2 * learning, "That is the 8-bit Adam. This one keeps fp32 moments."),
    ),
}  # fmt: skip


@exercise("12.3", "The frozen model is most of it; what learns hardly shows.")
def account(answer: Any) -> None:
    """`answer(N, learning, bits, block)` is a dictionary of bytes: frozen, adapters, gradients, states."""
    names = ("N", "learning", "bits", "block")
    got = [entries(call(answer, **by_name(names, case), returns=Mapping), PARTS) for case in ACCOUNT_CASES]
    for part in PARTS:
        values = [one[part] for one in got]
        if alike(values, [_account(*case)[part] for case in ACCOUNT_CASES]):
            continue
        for mistaken, message in ACCOUNT_MISTAKES[part]:
            expect(not alike(values, [mistaken(*case) for case in ACCOUNT_CASES]), message)
        slip = unit_slip(values[0], _account(*ACCOUNT_CASES[0])[part])
        expect(slip is None, f"{part} is {slip}")
        fail(f"{part} is off. How many numbers are there of it, and how many bytes does each take?")


# ------------------------------------------------------------------------------------------------------ 12.4: quantize


@exercise("12.4", "Codes and scales, and no error above half a step of its own block.")
def quantize(answer: Any) -> None:
    """`answer(values, bits, block)` is (codes, scales): whole numbers (blocks, block), and a scale for each block."""
    for values, bits, block in QUANTIZE_CASES:
        with NoNumberAsInteger() as watch:
            pair = call(answer, values=values.clone(), bits=bits, block=block, returns=(tuple, list))
        expect(not watch.happened, ZERO_BY_ZERO)
        expect(len(pair) == 2, "Two things were asked for: the codes, and the scales.")
        codes = of_kind(pair[0], torch.Tensor, "Your codes are")
        scales = of_kind(pair[1], torch.Tensor, "Your scales are")
        _expect_codes(codes, scales, values.view(-1, block), bits)


ZERO_BY_ZERO = (
    "In a block of zeros you divide 0 by 0. That is not a number, and which integer comes of it depends on the "
    "processor. Keep zeros out of what you divide by."
)


def _expect_codes(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, bits: int) -> None:
    expect(codes.shape == rows.shape, "The codes have one row for each block. Yours have another shape.")
    expect(scales.numel() != 1 or len(rows) == 1, "You have one scale for all. Each block has its own.")
    expect(scales.numel() == len(rows), "There is one scale for each block. You have another number of scales.")
    expect(torch.equal(codes, codes.round()), "Codes are whole numbers. Did you forget to round?")
    coarse = "Your scales are 16-bit, which puts an error of its own into every number of a block. Keep them in fp32."
    expect(scales.dtype.itemsize > 2, coarse)
    expect(bool(torch.isfinite(scales).all()), "Some scale is not finite. Do you divide by what may be 0?")
    scales, most, limit = scales.float().reshape(-1, 1), codes.abs().max().item(), 2 ** (bits - 1) - 1
    one_sided = rows.amax(dim=1, keepdim=True) / limit
    misled = not torch.equal(one_sided, steps_right(rows, bits)) and torch.allclose(scales, one_sided)
    expect(bool((scales >= 0).all()) and not misled,
           "A scale is a size. Take the largest *magnitude*, not the largest number.")  # fmt: skip
    expect(most <= limit + 1, "Some code needs more than `bits` bits: half of the codes are for negative numbers.")
    expect(most <= limit, "−2^(bits−1) has no partner above zero. Absmax leaves it out.")
    right = steps_right(rows, bits)
    expect(
        not torch.allclose(scales, right * limit, rtol=1e-4),
        "Your scale is the largest magnitude. What does it have to be for the largest code to stand for that?",
    )
    there = right > 0
    expect(torch.allclose(scales[there], right[there], rtol=1e-4),
           "Some scale is off: the block's largest magnitude has to get the largest code.")  # fmt: skip
    off = (codes * scales - rows).abs()
    expect(bool((off <= 0.5001 * right + 1e-9).all()), "Some error is above half a step: round to the *nearest* code.")
    expect(not codes.dtype.is_floating_point, "Your codes are right, but stored as floats. `torch.int8` takes a byte.")


# -------------------------------------------------------------------------------------------------- 12.5: normal_float


@exercise("12.5", "A code for every number of bits, zero included, from quantiles alone.")
def normal_float(answer: Any) -> None:
    """`answer(bits)` is NormalFloat with 2^bits values, rising from −1 to 1."""
    got: list[list[float]] = []
    for bits in (4, 3, 2, 6):
        given = call(answer, bits=bits, returns=(list, tuple, torch.Tensor))
        found = [float(_value(one)) for one in (given.flatten().tolist() if torch.is_tensor(given) else given)]
        expect(len(found) == 2**bits, f"With {bits} bits there are 2^{bits} values. You return another number of them.")
        got.append(found)
    if _same_codes(got, normal_float_right):
        return
    for found in got:
        expect(found == sorted(found), "The values should rise.")
        expect(all(map(math.isfinite, found)), "Probability 0 or 1 is infinitely far out: begin at δ, end at 1 − δ.")
        expect(
            abs(found[0] + 1) < 1e-6 and abs(found[-1] - 1) < 1e-6, "Divide by the largest: the code goes from −1 to 1."
        )
    for message, mistaken in CODE_MISTAKES.items():
        expect(not _same_codes(got, mistaken), message)
    expect(all(0.0 in found or min(map(abs, found)) < 1e-9 for found in got), "Zero is not among your values.")
    fail("Some value is off. For 4 bits compare with the lesson's, one by one, from the middle outwards.")


def _value(given: Any) -> Any:
    """One of the learner's values: a number, which may be infinite, or a tensor that holds one."""
    number = given.item() if torch.is_tensor(given) and given.numel() == 1 else in_other_form(given, (Real,))
    expect(isinstance(number, Real), "One of your values is no number.")
    return number


def _same_codes(got: Sequence[Sequence[float]], function: Callable[[int], Sequence[float]]) -> bool:
    wanted = [function(bits) for bits in (4, 3, 2, 6)]
    return all(
        len(one) == len(other) and all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(one, other, strict=True))
        for one, other in zip(got, wanted, strict=True)
    )


# ---------------------------------------------------------------------------------------------------------- 12.6: best


@exercise("12.6", "First as many bits as fit, then as much rank as fits.")
def best(answer: Any) -> None:
    """`answer(run, card)` is (bits, rank) of BITS and RANKS, or None where nothing fits."""
    got = [call_or_none(answer, run=run, card=card, returns=tuple) for run, card in BEST_CASES]
    right = [best_right(run, card) for run, card in BEST_CASES]
    if got == right:
        return
    for message, mistaken in BEST_MISTAKES.items():
        expect(got != [mistaken(run, card) for run, card in BEST_CASES], message)
    for one in got:
        expect(one is None or len(one) == 2, "Return a pair, bits and rank, or None.")
        known = one is None or (one[0] in BITS and one[1] in RANKS)
        expect(known, "That is no pair of one of BITS and one of RANKS.")
    for one, wanted, (_, card) in zip(got, right, BEST_CASES, strict=True):
        expect(one is None or wanted is not None, f"On the {card} you choose something, and nothing fits there.")
        expect(one is not None or wanted is None, f"On the {card} you find nothing, but something fits.")
    fail("Some choice is not the best: a larger number of bits or, with the same bits, a larger rank fits as well.")
