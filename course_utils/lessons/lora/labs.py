"""What the checks of lesson 12 run: right answers, and wrong ones that learners give."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.run import TrainingRun

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

# ------------------------------------------------------------------------------------------------------------- merging


def _merge_cases() -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float], ...]:
    dice = torch.Generator().manual_seed(12)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice)

    sizes = ((6, 6, 2, 2.0), (6, 6, 3, 12.0), (5, 8, 2, 16.0), (8, 5, 4, 1.0))
    return tuple((draw(m, n), draw(r, n), draw(m, r), alpha) for m, n, r, alpha in sizes)


MERGE_CASES = _merge_cases()
"""W, A, B and alpha; some of them square, where a shape cannot tell a slip."""


def merge_right(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, alpha: float) -> torch.Tensor:
    """W + B·A·alpha/r."""
    return W + B @ A * (alpha / A.shape[0])


MERGE_MISTAKES: dict[str, Merge] = {
    "You leave out the scale: alpha/r.": lambda W, A, B, alpha: W + B @ A,
    "You scale by alpha alone. It is divided by the rank.": lambda W, A, B, alpha: W + B @ A * alpha,
    "You divide by r alone. What is alpha for?": lambda W, A, B, alpha: W + B @ A / A.shape[0],
    "You divide alpha by n_in, how many columns A has. r is how many rows it has.":
        lambda W, A, B, alpha: W + B @ A * (alpha / A.shape[1]),
    "You divide alpha by n_out, how many rows B has. r is how many columns it has.":
        lambda W, A, B, alpha: W + B @ A * (alpha / B.shape[0]),
    "The difference alone: where is W?": lambda W, A, B, alpha: B @ A * (alpha / A.shape[0]),
    "You scale W, too. It is what it was.": lambda W, A, B, alpha: (W + B @ A) * (alpha / A.shape[0]),
    "You take the difference away. It is added.": lambda W, A, B, alpha: W - B @ A * (alpha / A.shape[0]),
    "r over alpha: turned round.": lambda W, A, B, alpha: W + B @ A * (A.shape[0] / alpha),
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ rounding


def _quantize_cases() -> tuple[tuple[torch.Tensor, int, int], ...]:
    dice = torch.Generator().manual_seed(4)
    uneven = torch.randn(128, generator=dice) * torch.logspace(-3, 1, 128)
    below = -torch.rand(64, generator=dice)  # the largest magnitude belongs to a negative number
    zeros = torch.cat((torch.zeros(16), torch.randn(16, generator=dice)))
    return (uneven, 4, 32), (below, 8, 64), (below, 4, 16), (uneven, 3, 16), (zeros, 4, 16)


QUANTIZE_CASES = _quantize_cases()
"""Values, bits and the size of a block; one block is all zeros."""


class NoNumberAsInteger(TorchDispatchMode):
    """Notices a conversion from floats to integers that meets a nan: what comes of it differs between processors."""

    happened = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.dtype.is_floating_point and func in CONVERSIONS:
            sources = [value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()]
            self.happened |= any(bool(source.isnan().any()) for source in sources)
        return result


CONVERSIONS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Operations of `.to(torch.int8)`, `.char()` and `codes[i] = …`."""


def steps_right(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The scale of each row: its largest magnitude over the largest code."""
    return rows.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)


# --------------------------------------------------------------------------------------------------------------- codes


def _code(delta: float, below: int, above: int) -> list[float]:
    """Quantiles at `below` probabilities from δ to ½ and `above` from ½ to 1 − δ, the ½ shared, over the largest."""
    low = [delta + (0.5 - delta) * step / (below - 1) for step in range(below)]
    high = [0.5 + (0.5 - delta) * step / (above - 1) for step in range(1, above)]
    quantiles = [NormalDist().inv_cdf(probability) for probability in (*low, *high)]
    most = max(-quantiles[0], quantiles[-1])
    return [quantile / most for quantile in quantiles]


def _delta(bits: int) -> float:
    count = 2**bits
    return (1 / (2 * count) + 1 / (2 * (count - 1))) / 2


def normal_float_right(bits: int) -> list[float]:
    """NF4's recipe for any number of bits."""
    return _code(_delta(bits), 2 ** (bits - 1), 2 ** (bits - 1) + 1)


def _without_zero(bits: int) -> list[float]:
    count, delta = 2**bits, _delta(bits)
    quantiles = [NormalDist().inv_cdf(delta + (1 - 2 * delta) * step / (count - 1)) for step in range(count)]
    return [quantile / quantiles[-1] for quantile in quantiles]


CODE_MISTAKES: dict[str, Callable[[int], list[float]]] = {
    "Zero is not among your values: the two halves share the probability ½.": _without_zero,
    "Turned round: there is one value more above zero than below.": lambda bits: [
        -value for value in reversed(normal_float_right(bits))
    ],
    "Those values are evenly spaced. Take quantiles of the normal distribution.": lambda bits: [
        2 * step / (2**bits - 1) - 1 for step in range(2**bits)
    ],
    "Your δ is half a step with 2^bits values. Take the mean with the other half, which has one value less.": (
        lambda bits: _code(1 / 2 ** (bits + 1), 2 ** (bits - 1), 2 ** (bits - 1) + 1)
    ),
    "Your δ is half a step with 2^bits − 1 values. Take the mean with the other half, which has one value more.": (
        lambda bits: _code(1 / (2 * (2**bits - 1)), 2 ** (bits - 1), 2 ** (bits - 1) + 1)
    ),
    "Your δ is that of 4 bits, whatever `bits` is.": lambda bits: _code(
        _delta(4), 2 ** (bits - 1), 2 ** (bits - 1) + 1
    ),
}

# ------------------------------------------------------------------------------------------------------------ choosing

BITS = (16, 8, 4)
"""Bits that frozen weights may have, best first."""

RANKS = (64, 32, 16, 8, 4, 2)
"""Ranks of LoRA, best first."""

LLAMA = TrainingRun("llama3-8b", 1, 2048, "bf16", recompute="full", lora_rank=2, lora_targets=("attention", "mlp"))

LLAMA_70B = LLAMA.replace(model="llama3-70b", seq_len=512)

BEST_CASES = (
    (LLAMA, "A100-80GB"),
    (LLAMA, "RTX4080-16GB"),
    (LLAMA.replace(micro_batch=4, seq_len=2112), "RTX3090-24GB"),
    (LLAMA_70B, "H200-141GB"),
    (LLAMA_70B.replace(seq_len=4096), "A100-80GB"),
    (LLAMA_70B, "RTX4090-24GB"),
)
"""Runs and cards; nothing fits the last."""


def fits(run: TrainingRun, card: str, bits: int, rank: int) -> bool:
    """Whether the run fits the card with its frozen weights in `bits` and LoRA of `rank`."""
    return estimate(run.replace(frozen_bits=bits, lora_rank=rank)).total <= gpu(card).memory


def best_right(run: TrainingRun, card: str) -> tuple[int, int] | None:
    """The most bits that fit with any rank, then the highest rank."""
    return next(((bits, rank) for bits in BITS for rank in RANKS if fits(run, card, bits, rank)), None)


def _rank_first(run: TrainingRun, card: str) -> tuple[int, int] | None:
    return next(((bits, rank) for rank in RANKS for bits in BITS if fits(run, card, bits, rank)), None)


def _smallest(run: TrainingRun, card: str) -> tuple[int, int] | None:
    return next(((bits, rank) for bits in BITS[::-1] for rank in RANKS[::-1] if fits(run, card, bits, rank)), None)


def _lowest_rank(run: TrainingRun, card: str) -> tuple[int, int] | None:
    return next(((bits, rank) for bits in BITS for rank in RANKS[::-1] if fits(run, card, bits, rank)), None)


def _fewest_bits(run: TrainingRun, card: str) -> tuple[int, int] | None:
    return next(((bits, rank) for bits in BITS[::-1] for rank in RANKS if fits(run, card, bits, rank)), None)


def _read_off_the_name(run: TrainingRun, card: str) -> tuple[int, int] | None:
    room = int(card.rsplit("-", 1)[1].removesuffix("GB")) * 10**9
    return next(
        (
            (bits, rank)
            for bits in BITS
            for rank in RANKS
            if estimate(run.replace(frozen_bits=bits, lora_rank=rank)).total <= room
        ),
        None,
    )


BEST_MISTAKES: dict[str, Callable[[TrainingRun, str], tuple[int, ...] | None]] = {
    "You spend the memory on rank first. Bits come first: the model is in them.": _rank_first,
    "You take the fewest bits that fit. The most were asked for.": _fewest_bits,
    "You take the lowest rank that fits. The highest was asked for.": _lowest_rank,
    "You take the least of everything.": _smallest,
    "The pair is turned round: first the bits, then the rank.": (
        lambda run, card: (best_right(run, card) or ())[::-1] or None
    ),
    "You take the number in the card's name for its memory. Ask `gpu(card).memory`.": _read_off_the_name,
}
