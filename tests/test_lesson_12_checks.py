"""The checks of lesson 12: right answers of every style pass, each wrong answer gets the hint it deserves."""

from collections.abc import Callable, Iterable
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from checking import Answers, JudgedAnswers

from course_utils import TrainingRun, estimate, gpu
from course_utils.lessons.lora.checks import normal_float_right
from course_utils.networks.frozen import nf4_code


def by_tensors(shapes: Any, r: int) -> int:
    factors = [(torch.empty(r, n_in), torch.empty(n_out, r)) for n_out, n_in in shapes]
    return sum(A.numel() + B.numel() for A, B in factors)


ADAPTER = Answers(
    right=[
        by_tensors,
        lambda shapes, r: np.array(shapes).sum() * r,
        lambda shapes, r: float(sum(r * n for shape in shapes for n in shape)),
    ],
    wrong=[
        (lambda shapes, r: sum(n * m for n, m in shapes), "the frozen matrices"),
        (lambda shapes, r: sum(r * m for n, m in shapes), "That is A alone"),
        (lambda shapes, r: sum(r * n for n, m in shapes), "That is B alone"),
        (lambda shapes, r: sum(n * m + r * n + r * m for n, m in shapes), "You count W, too"),
        (lambda shapes, r: sum(2 * r * m for n, m in shapes), "as wide as the input"),
        (lambda shapes, r: sum(r * n + r * r + r * m for n, m in shapes), "no r × r matrix"),
        (lambda shapes, r: sum(n + m for n, m in shapes), "rank 1, whatever r is"),
        (lambda shapes, r: sum((n * r) * r + r * (r * m) for n, m in shapes), "r counts twice"),
        (lambda shapes, r: by_tensors(shapes, 16), "Some count is off"),
        (lambda shapes, r: by_tensors(shapes, r) or r, "Without any matrix"),
        (lambda shapes, r: shapes.clear() or 0, "changes 'shapes'"),
    ],
)


def by_columns(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, alpha: float) -> torch.Tensor:
    merged = W.clone()
    for row, column in zip(A, B.T, strict=True):
        merged += torch.outer(column, row) * alpha / len(A)
    return merged


MERGE = Answers(
    right=[
        by_columns,
        lambda W, A, B, alpha: torch.addmm(W, B, A, alpha=alpha / A.shape[0]),
        lambda W, A, B, alpha: W.double() + (A.double().T @ B.double().T).T * alpha / B.shape[1],
    ],
    wrong=[
        (lambda W, A, B, alpha: W + B @ A, "You leave out the scale"),
        (lambda W, A, B, alpha: W + alpha * B @ A, "You scale by alpha alone"),
        (lambda W, A, B, alpha: W + B @ A / len(A), "You divide by r alone"),
        (lambda W, A, B, alpha: W + B @ A * (alpha / A.shape[1]), "You divide by A's columns"),
        (lambda W, A, B, alpha: B @ A * (alpha / len(A)), "where is W?"),
        (lambda W, A, B, alpha: (W + B @ A) * (alpha / len(A)), "You scale W, too"),
        (lambda W, A, B, alpha: W - B @ A * (alpha / len(A)), "You take the difference away"),
        (lambda W, A, B, alpha: W + B @ A * (len(A) / alpha), "r over alpha"),
        (lambda W, A, B, alpha: W.add_(B @ A, alpha=alpha / len(A)), "You changed W itself"),
        (lambda W, A, B, alpha: W.T + A.T @ B.T * (alpha / len(A)), "has W's shape"),
        (lambda W, A, B, alpha: W, "Pull x out on the left"),
    ],
)


def accounting(**changes: Callable[[int, int, int, int], Any]) -> Any:
    """A learner's account, with some of its entries counted in another way."""
    counts = {"frozen": lambda N, n, bits, block: N / block * (block * bits + 32) / 8,
              "adapters": lambda N, n, bits, block: n * 16 / 8,
              "gradients": lambda N, n, bits, block: n * 16 // 8,
              "states": lambda N, n, bits, block: 2 * (4 * n)} | changes  # fmt: skip
    return lambda N, learning, bits, block: {kind: of(N, learning, bits, block) for kind, of in counts.items()}


def by_blocks(N: int, learning: int, bits: int, block: int) -> dict[str, int]:
    blocks = N // block
    return {"states": 8 * learning, "gradients": 2 * learning, "adapters": 2 * learning,
            "frozen": blocks * (block * bits // 8 + 4)}  # fmt: skip


ACCOUNT = Answers(
    right=[accounting(), by_blocks, lambda **of: {kind: np.float64(n) for kind, n in by_blocks(**of).items()}],
    wrong=[
        (accounting(frozen=lambda N, n, bits, block: N * bits // 8), "The scales are missing"),
        (accounting(frozen=lambda N, n, bits, block: N * bits + N // block * 32), "Those are bits"),
        (accounting(frozen=lambda N, n, bits, block: N * bits / 8 + N / block), "more than one byte"),
        (accounting(frozen=lambda N, n, bits, block: N * bits / 8 + 2 * N / block), "fp32, not 16-bit"),
        (accounting(frozen=lambda N, n, bits, block: N * bits / 8 + 4 * block), "How many blocks are there"),
        (accounting(frozen=lambda N, n, bits, block: 2 * N), "frozen model in 16 bits"),
        (accounting(frozen=lambda N, n, bits, block: (N * bits / 8 + 4 * N / block) / 1e9), "frozen is GB where bytes"),
        (accounting(adapters=lambda N, n, bits, block: n * bits / 8), "not quantized"),
        (accounting(adapters=lambda N, n, bits, block: 4 * n), "16-bit here, not fp32"),
        (accounting(gradients=lambda N, n, bits, block: 2 * (n + N)), "Frozen parameters get no gradients."),
        (accounting(gradients=lambda N, n, bits, block: 4 * n), "the format of what learns"),
        (accounting(states=lambda N, n, bits, block: 8 * (N + n)), "keeps nothing for what is frozen."),
        (accounting(states=lambda N, n, bits, block: 4 * n), "Half of what Adam keeps"),
        (accounting(states=lambda N, n, bits, block: 4 * n + 4 * n + 4 * n), "no fp32 master copy"),
        (accounting(states=lambda N, n, bits, block: 2 * n), "8-bit Adam"),
        (accounting(states=lambda N, n, bits, block: n / 3), "states is off"),
        (lambda N, learning, bits, block: {"frozen": N}, "has no 'adapters'"),
    ],
)


def quantizing(
    largest: Any = lambda rows: rows.abs().amax(dim=1),
    levels: Any = lambda bits: 2 ** (bits - 1) - 1,
    to_code: Any = torch.round,
    dtype: torch.dtype = torch.int8,
    scale: Any = None,
    guard: Any = lambda scales: scales.clamp_min(1e-30),
) -> Any:
    """The textbook's answer, with one thing done in another way."""

    def answer(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.view(-1, block)
        scales = largest(rows) / levels(bits)
        codes = to_code(rows / guard(scales).unsqueeze(1)).to(dtype)
        return codes, scales if scale is None else scale(rows)

    return answer


def as_list(values: torch.Tensor, bits: int, block: int) -> list[torch.Tensor]:
    """A loop over blocks, scales as a column, a block of zeros with the scale 1."""
    codes, scales = [], []
    for row in values.split(block):
        scale = row.abs().max() / (2 ** (bits - 1) - 1) or torch.tensor(1.0)
        codes.append(torch.floor(row / scale + 0.5).int())
        scales.append(scale)
    return [torch.stack(codes), torch.stack(scales).unsqueeze(1)]


def one_scale(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = values.abs().max() / (2 ** (bits - 1) - 1)
    return (values / scale).round().view(-1, block).to(torch.int8), scale


def unguarded_in_a_loop(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(len(values) // block, block, dtype=torch.int8), []
    for number, row in enumerate(values.split(block)):
        scales.append(row.abs().max() / (2 ** (bits - 1) - 1))
        codes[number] = (row / scales[-1]).round()
    return codes, torch.stack(scales)


QUANTIZE = Answers(
    right=[
        quantizing(guard=lambda scales: torch.where(scales == 0, 1.0, scales)),
        quantizing(guard=lambda scales: scales, to_code=lambda x: torch.nan_to_num(x).round()),
        as_list,
    ],
    wrong=[
        (one_scale, "not one scale for all"),
        (quantizing(guard=lambda scales: scales), "you divide 0 by 0"),
        (unguarded_in_a_loop, "you divide 0 by 0"),
        (lambda values, bits, block: quantizing()(values.mul_(2), bits, block), "changes 'values'"),
        (quantizing(levels=lambda bits: 2**bits - 1, dtype=torch.int32), "half of the codes are for negative"),
        (quantizing(levels=lambda bits: 2 ** (bits - 1), dtype=torch.int32), "has no partner above zero"),
        (quantizing(levels=lambda bits: 7), "Some scale is off"),
        (quantizing(levels=lambda bits: 127), "more than `bits` bits"),
        (quantizing(to_code=torch.trunc), "above half a step"),
        (quantizing(to_code=lambda x: x, dtype=torch.float32), "Did you forget to round"),
        (quantizing(dtype=torch.float32), "stored as floats"),
        (quantizing(largest=lambda rows: rows.amax(dim=1), dtype=torch.int32), "the largest *magnitude*"),
        (quantizing(scale=lambda rows: rows.abs().amax(dim=1)), "for the largest code to stand for that"),
        (quantizing(scale=lambda rows: torch.ones(3)), "nor another number"),
        (quantizing(scale=lambda rows: (rows / quantizing()(rows.flatten(), 4, rows.shape[1])[0]).abs().amax(dim=1)),
         "divide by what may be 0"),
        (quantizing(scale=lambda rows: rows.amin(dim=1) / 7), "the largest *magnitude*"),
        (quantizing(scale=lambda rows: rows.abs().amax().item()), "Your scales are a number, where a Tensor"),
        (lambda values, bits, block: (quantizing()(values, bits, block)[0].flatten(), torch.ones(1)), "one row for"),
        (lambda values, bits, block: quantizing()(values, bits, block)[0], "Two things were asked for"),
    ],
)  # fmt: skip


def as_tensor(bits: int) -> torch.Tensor:
    """By linspace and the error function's inverse."""
    n = 2**bits
    delta = (1 / n + 1 / (n - 1)) / 4
    low = torch.linspace(delta, 0.5, n // 2, dtype=torch.float64)
    high = torch.linspace(0.5, 1 - delta, n // 2 + 1, dtype=torch.float64)[1:]
    quantiles = torch.special.ndtri(torch.cat((low, high)))
    return quantiles / quantiles[-1]


def with_delta(delta: Callable[[int], float]) -> Any:
    """The lesson's cell with another δ for `n` values."""

    def answer(bits: int) -> list[float]:
        n, half = 2**bits, 2 ** (bits - 1)
        low = np.linspace(delta(n), 0.5, half)
        high = np.linspace(0.5, 1 - delta(n), half + 1)[1:]
        found = [NormalDist().inv_cdf(p) for p in [*low, *high]]
        return [value / found[-1] for value in found]

    return answer


as_learned = with_delta(lambda n: (1 / n + 1 / (n - 1)) / 4)


def evenly_in_one(bits: int) -> list[float]:
    """Probabilities from δ to 1 − δ in one go, without the ½."""
    delta = (1 / 2**bits + 1 / (2**bits - 1)) / 4
    found = [NormalDist().inv_cdf(p) for p in np.linspace(delta, 1 - delta, 2**bits)]
    return [value / max(found) for value in found]


NORMAL_FLOAT = Answers(
    right=[as_learned, as_tensor, lambda bits: list(as_tensor(bits)), lambda bits: as_tensor(bits).numpy()],
    wrong=[
        (evenly_in_one, "share the probability ½"),
        (lambda bits: [-value for value in as_learned(bits)][::-1], "one value more above zero"),
        (lambda bits: np.linspace(-1, 1, 2**bits).tolist(), "evenly spaced"),
        (with_delta(lambda n: 1 / (2 * n)), "Your δ is of 2^bits values"),
        (with_delta(lambda n: 1 / (2 * (n - 1))), "Your δ is of 2^bits − 1 values"),
        (with_delta(lambda n: (1 / 32 + 1 / 30) / 2), "δ is that of 4 bits"),
        (lambda bits: nf4_code(), "another number of them"),
        (lambda bits: [as_learned(bits)] * 2**bits, "One of your values is a list"),
        (lambda bits: as_learned(bits)[::-1], "should rise"),
        (lambda bits: [NormalDist().inv_cdf((k + 0.5) / 2**bits) for k in range(2**bits)], "Divide by the largest"),
        (lambda bits: [-1.0, *(0.5 + k / 1000 for k in range(2**bits - 2)), 1.0], "Zero is not among"),
        (lambda bits: torch.special.ndtri(torch.linspace(0, 1, 2**bits)), "infinitely far out"),
        (lambda bits: [value**3 for value in as_learned(bits)], "Some value is off"),
    ],
)


def test_the_right_code_is_nf4_with_four_bits() -> None:
    assert normal_float_right(4) == pytest.approx(nf4_code(), abs=1e-12)


BITS, RANKS = (16, 8, 4), (64, 32, 16, 8, 4, 2)


def peak(run: TrainingRun, bits: int, rank: int) -> int:
    return estimate(run.replace(frozen_bits=bits, lora_rank=rank)).total


def by_sorting(run: TrainingRun, card: str) -> tuple[int, int] | None:
    return max((pair for pair in product(BITS, RANKS) if peak(run, *pair) <= gpu(card).memory), default=None)


def first_of(pairs: Iterable[tuple[int, int]], room: Any = lambda card: gpu(card).memory) -> Any:
    """The first of these pairs that fits."""
    pairs = list(pairs)
    return lambda run, card: next((pair for pair in pairs if peak(run, *pair) <= room(card)), None)


BEST = Answers(
    right=[by_sorting, lambda **case: list(by_sorting(**case) or ()) or None, first_of(product(BITS, RANKS))],
    wrong=[
        (first_of((bits, rank) for rank in RANKS for bits in BITS), "the memory on rank first"),
        (first_of(product(BITS[::-1], RANKS)), "the fewest bits that fit"),
        (first_of(product(BITS, RANKS[::-1])), "the lowest rank that fits"),
        (first_of(product(BITS, RANKS), lambda card: int(card[:-2].split("-")[1]) * 10**9), "in the card's name"),
        (lambda run, card: by_sorting(run, card) or (4, 2), "nothing fits there"),
        (lambda run, card: None, "you find nothing"),
        (lambda run, card: by_sorting(run, card) and (16, 64), "is not the best"),
        (lambda run, card: (5, 2), "one of BITS"),
    ],
)  # fmt: skip

ANSWERS = {"12.1": ADAPTER, "12.2": MERGE, "12.3": ACCOUNT, "12.4": QUANTIZE, "12.5": NORMAL_FLOAT, "12.6": BEST}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
