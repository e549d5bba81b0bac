"""Checks of lesson 17, "Quantization": each names the misconception, never the answer."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...interactive.feedback import Mistakes, call, exercise, expect, recognized
from ...networks.frozen import FrozenLinear, nf4_pairs
from ..shared.judging import alive_during, forward_backward, same, seeded

# --------------------------------------------------------------------------------------------------
# 17.1: packed
Change = Callable[[torch.Tensor], torch.Tensor]


def packed_right(
    values: torch.Tensor,
    block: int,
    read: Change = torch.clone,
    levels: int = 7,
    nearest: Change = torch.round,
) -> torch.Tensor:
    """Values after absmax in 4 bits. Its largest code is `levels`; `read` changes what unpacking finds."""
    count = values.numel()
    # a row per block; zeros fill the last one
    rows = pad(values.flatten(), (0, -count % block)).view(-1, block)
    scales = rows.abs().amax(dim=1, keepdim=True) / levels
    codes = read(nearest(rows / torch.where(scales == 0, 1.0, scales)).flatten()[:count])
    return (pad(codes, (0, -count % block)).view(-1, block) * scales).flatten()[:count].view(values.shape)


def _swapped(codes: torch.Tensor) -> torch.Tensor:
    """The codes with the two of each byte in the other order."""
    return pad(codes, (0, len(codes) % 2)).view(-1, 2).flip(1).flatten()[: len(codes)]


PACKED_MISTAKES: Mistakes = {
    "Negative codes come back as large positive ones: the upper half of 0 to 15 means numbers below zero.": (
        partial(packed_right, read=lambda codes: codes % 16)
    ),
    "All numbers share one scale. Each block has its own.": (
        lambda values, block: packed_right(values, values.numel())
    ),
    "In four bits, 7 is the largest code. 8 is read as −8: which scale gives the largest magnitude a 7?": (
        partial(packed_right, levels=8, read=lambda codes: torch.where(codes > 7, codes - 16, codes))
    ),
    "The two numbers of each byte are swapped.": partial(packed_right, read=_swapped),
    "You cut off the digits. Round to the *nearest* code.": partial(packed_right, nearest=torch.trunc),
    "You round down. Round to the *nearest* code.": partial(packed_right, nearest=torch.floor),
}


class Conversions(TorchDispatchMode):
    """Notices conversions to integers that differ between processors: of a nan, and of −1.0 to a uint8."""

    nan = False
    negative = False
    # .to(torch.int8), codes[i] = …
    conversions = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.conversions and not result.dtype.is_floating_point:
            given = [value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()]
            self.nan |= any(bool(value.isnan().any()) for value in given)
            if result.dtype == torch.uint8:
                self.negative |= any(bool((value <= -1).any()) for value in given)
        return result


@exercise("17.1", "Half a byte per number, four bytes per block, and no error above half a step.")
def packed(answer: Any) -> None:
    """`answer(values, block)` holds 4-bit codes and scales; `unpack()` makes values of them."""
    dice = torch.Generator().manual_seed(4)
    uneven = torch.randn(4, 32, generator=dice) * torch.logspace(-3, 1, 128).view(4, 32)
    zeros = torch.cat((torch.zeros(16), torch.randn(16, generator=dice)))
    below = -torch.rand(7, 5, generator=dice)
    # values and block size: whole bytes, an odd number in cut blocks, zeros, one number, a transposed tensor
    cases = [(uneven, 32), (below, 16), (zeros, 16), (torch.tensor([-3.0]), 64), (uneven[1:, :5].T, 5)]
    otherwise = (
        "Some numbers come back wrong. "
        "Try two blocks of four, one with its largest *magnitude* below zero and one above. "
        "Print the codes before and after packing: the upper four bits of a negative one are ones."
    )
    close = partial(same, tolerance=1e-4)
    found = [_packed_and_back(answer, *case) for case in cases]
    recognized(found, cases, packed_right, PACKED_MISTAKES, otherwise, close)
    small = torch.tensor([1e-7, -7e-7, 3e-7, 0.0])
    tiny = "A block of tiny numbers comes back wrong: what do you add to a scale, or clamp it at?"
    # scaled up: else no error would show
    expect(close([1e7 * _packed_and_back(answer, small, 4)], [1e7 * packed_right(small, 4)]), tiny)


def _packed_and_back(answer: Any, case: torch.Tensor, block: int) -> torch.Tensor:
    """The tensor that comes back; CheckFailed unless it is held in half a byte per number."""
    flat = "A transposed tensor has no flat view: `flatten` and `reshape` copy it."
    hints = {"view size is not compatible": flat}
    make = partial(call, answer, returns=object, hints=hints)
    with Conversions() as seen:
        made, _, held, _ = alive_during(lambda: make(case.clone(), block))
    expect(not seen.nan, "In a block of zeros you divide 0 by 0. Keep zeros out of the divisor.")
    below_zero = "A negative float becomes a uint8: the result depends on the CPU. Use int8 first."
    expect(not seen.negative, below_zero)
    expect(hasattr(made, "unpack"), "What you return has no `unpack`.")
    got = call(made.unpack, returns=torch.Tensor).clone()
    other_shape = f"{case.numel()} numbers come back in another shape than they went in."
    expect(got.shape == case.shape, other_shape)
    expect(got.dtype == torch.float32, f"The values come back as {got.dtype}, not as fp32.")
    _expect_small(made, held, case, block)
    changes = "A second unpack() returns other values: the first one changes what you store."
    expect(same([got], [call(made.unpack, returns=torch.Tensor)], 0), changes)

    def used() -> Any:
        again = make(case.clone(), block)
        again.unpack()
        return again

    keeps = "unpack() leaves more bytes than were held. Compute the values again each time."
    expect(alive_during(used).end <= held, keeps)
    return got


def _expect_small(made: Any, held: int, case: torch.Tensor, block: int) -> None:
    """CheckFailed unless `made` holds the codes and scales of `case` alone; says what is too much."""
    count = case.numel()
    wanted = -(-count // 2) + 4 * -(-count // block)
    leaves = tree_leaves(getattr(made, "__dict__", {}))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    names = ", ".join(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in tensors)
    names = names or "no tensor that is found"
    where = f"{count} numbers in blocks of {block}: {held:,} bytes are held, in {names}."
    little = "That is too little: half a byte per number, and fp32 scales, all in tensors."
    expect(held >= wanted, f"{where} {little}")
    original = held > wanted and any(same([one.flatten()], [case.flatten()]) for one in tensors)
    expect(not original, f"{where} The original numbers are among them.")
    more = "What is neither two codes per byte nor one fp32 scale per block? Or is a slice held?"
    expect(held == wanted, f"{where} {more}")


# --------------------------------------------------------------------------------------------------
# 17.2: product
PRODUCT_CASES = (((5, 64), 48, torch.float32), ((2, 3, 32), 64, torch.bfloat16), ((1, 128), 1, torch.float32))


class FourBits:
    """A matrix in NF4, `shape` (n_out, n_in); `unpack()` makes it in fp32, `times` counts how often."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        self.times = 0
        layer = nn.Linear(*reversed(weight.shape), bias=False)
        layer.weight.data.copy_(weight)
        self._layer = FrozenLinear(layer, 4, torch.float32, nf4_pairs(torch.float32, weight.device))
        self.stored = list(self._layer.buffers())

    def __repr__(self) -> str:
        return f"W of {tuple(self.shape)} in four bits"

    def unpack(self) -> torch.Tensor:
        self.times += 1
        return self._layer.dense_weight().detach()


@exercise("17.2", "Nothing is kept between forward and backward: both unpack W from its four bits.")
def product(answer: Any) -> None:
    """`answer(x, packed, bias)` is x·Wᵀ + bias, differentiable in x, and keeps neither x nor W."""
    only_x = "Backward returns None for all but x: the bias is frozen, `packed` not a tensor."
    hints = {"different than None": only_x}
    for shape, n_out, dtype in PRODUCT_CASES:
        with seeded():
            x = torch.randn(shape).to(dtype)
            bias = torch.randn(n_out).to(dtype)
            packed = FourBits(torch.randn(n_out, shape[-1]))
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        dense = packed.unpack().to(dtype)
        there = [*packed.stored, bias]
        for b in (bias, None):
            packed.times = 0
            run = partial(call, answer, returns=torch.Tensor)
            got = forward_backward(lambda x: run(x, packed, b), [x], there, hints=hints)  # noqa: B023
            right = forward_backward(lambda x: linear(x, dense, b), [x], there)  # noqa: B023
            expect(got.output.dtype == dtype, f"x is {dtype}, but the output is not: the unpacked W is fp32.")
            expect(b is None or not same([got.output + b], [right.output], tolerance), "The bias is missing.")
            expect(same([got.output], [right.output], tolerance), "The output is not x·Wᵀ + bias.")
            expect(got.kept < dense.numel(), "W is kept for backward, unpacked. Four bits should be enough.")
            times_w = same(got.gradients, right.gradients, tolerance)
            expect(times_w, "The gradient of x is not the output's times W.")
            expect(got.kept < x.nbytes, "x is kept for backward. Who needs it, if W does not learn?")
            expect(got.kept == 0, f"{got.kept:,} bytes are kept for backward that nobody needs.")
            often = f"W is unpacked {packed.times} times, not once in forward and once in backward."
            expect(packed.times == 2, often)


# --------------------------------------------------------------------------------------------------
# 17.3: product8
def product8_right(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    most: Change = lambda x: x.abs().amax(dim=-1, keepdim=True),
    nearest: Change = torch.round,
    added: Change = torch.clone,
) -> torch.Tensor:
    """x·Wᵀ from 8-bit codes, one scale per token and per row of W; each choice may be made differently."""
    each = most(x) / 127
    rounded = nearest(x / torch.where(each == 0, 1.0, each))
    return added(rounded.double() @ codes.double().T).float() * each * scale.T


PRODUCT8_MISTAKES: Mistakes = {
    "You round nothing: that is the product with x itself.": lambda x, codes, scale: x @ (codes * scale).T,
    "All tokens share one scale. Each has its own.": partial(product8_right, most=lambda x: x.abs().amax()),
    "You leave out the scales of W's rows.": (
        lambda x, codes, scale: product8_right(x, codes, torch.ones_like(scale))
    ),
    "You cut off the digits. Round to the *nearest* code.": partial(product8_right, nearest=torch.trunc),
    "Your sums overflow: a sum of products of codes does not fit into int8.": partial(
        product8_right, added=lambda sums: (sums + 128) % 256 - 128
    ),
}


@exercise("17.3", "Codes times codes, and both scales after the sum.")
def product8(answer: Any) -> None:
    """`answer(x, codes, scale)` is x·Wᵀ from int8 codes of both, each token's scale computed at run time."""
    dice = torch.Generator().manual_seed(8)
    cases = []
    for *tokens, n_in, n_out in ((5, 64, 48), (2, 3, 32, 6)):
        x = torch.randn(*tokens, n_in, generator=dice)
        x *= torch.logspace(0, 2, tokens[-1]).unsqueeze(-1)  # tokens of very different size
        x[..., 0, :] = -x[..., 0, :].abs()
        codes = torch.randint(-127, 128, (n_out, n_in), generator=dice).to(torch.int8)
        cases.append((x, codes, 0.001 + torch.rand(n_out, 1, generator=dice)))
    x, codes, scale = cases[0]
    zeros = torch.zeros_like(x)
    zeros[1] = x[1]
    got = [_eight_bits(answer, *case) for case in (*cases, (zeros, codes, scale))]
    otherwise = (
        "Some number is off. Print each token's codes: does its largest *magnitude* get 127 or −127? "
        "And do both scales come after the sum?"
    )
    close = partial(same, tolerance=1e-4)
    recognized(got, [*cases, (zeros, codes, scale)], product8_right, PRODUCT8_MISTAKES, otherwise, close)
    clamped = "A tiny token comes out wrong: what do you add to its scale, or clamp it at?"
    small = 1e7 * _eight_bits(answer, 1e-7 * x, codes, scale)
    expect(close([small], [product8_right(x, codes, scale)]), clamped)


def _eight_bits(answer: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    with Conversions() as seen:
        found = call(answer, x, codes, scale, returns=torch.Tensor)
    expect(not seen.nan, "You divide 0 by 0: a token may be all zeros. Keep zeros out of the divisor.")
    expect(found.dtype == torch.float32, f"You return {found.dtype}. After the scales, it is fp32.")
    expect(found.isfinite().all(), "Some number is nan or infinity: a token may be all zeros.")
    wanted = (*x.shape[:-1], len(codes))
    sizes = f"x of {tuple(x.shape)} and W of {tuple(codes.shape)}"
    expect(found.shape == wanted, f"{sizes} give {wanted}, not {tuple(found.shape)}.")
    return found


# --------------------------------------------------------------------------------------------------
# 17.4: largest_rank
def _largest_rank(
    shapes: Any, bits: int, room: int, scales: bool = True, each: int = 8, both: bool = True
) -> int:
    """The largest rank that fits; a mistaken one has no `scales`, other bytes per number, or one factor."""
    frozen = 0
    for n_out, n_in in shapes:
        groups = {16: 0, 8: n_out, 4: n_out * n_in // 64}[bits]
        frozen += n_out * n_in * bits // 8 + (4 * groups if scales else 0)
    one = each * sum(n_in + (n_out if both else 0) for n_out, n_in in shapes)
    return max(0, (room - frozen) // one)


RANK_MISTAKES: Mistakes = {
    "You forget the scales: fp32, one per row in 8 bits, one per 64 numbers in 4.": (
        partial(_largest_rank, scales=False)
    ),
    "You count 2 bytes per number of the factors. They also have gradients and two moments.": (
        partial(_largest_rank, each=2)
    ),
    "You count 16 bytes per number of the factors: everything that learns is in 16 *bits*.": (
        partial(_largest_rank, each=16)
    ),
    "You count one factor. Rank r takes r rows of A and r columns of B.": partial(_largest_rank, both=False),
    "You take the smallest rank that does not fit, one too many.": (
        lambda shapes, bits, room: _largest_rank(shapes, bits, room) + 1
    ),
}


@exercise("17.4", "Codes, scales and factors fit, and one rank more would not.")
def largest_rank(answer: Any) -> None:
    """`answer(shapes, bits, room)` is the largest rank whose frozen matrices and factors fit in `room`."""
    block = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)]
    numbers = sum(map(prod, block))
    cases = [(block, bits, numbers * bits // 8 + 30_000_000) for bits in (16, 8, 4)]
    cases += [([(64, 128)], 4, 8192 // 2 + 4 * 128 + 8 * 192 * 3), (block, 16, numbers)]
    found = [call(answer, *case, returns=int) for case in cases]
    none = "In the last case the frozen matrices alone do not fit: the rank is 0, not negative."
    expect(all(rank >= 0 for rank in found), none)
    otherwise = "Some rank is off. Add up the bytes of one matrix of (64, 128) in 4 bits, by hand."
    recognized(found, cases, _largest_rank, RANK_MISTAKES, otherwise)
