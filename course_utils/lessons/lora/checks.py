"""Checks of lesson 16, "LoRA and quantization": each names the misconception, never the answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout, linear, pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...interactive.feedback import Mistakes, call, exercise, expect, fail, recognized
from ...networks.frozen import FrozenLinear, nf4_pairs
from ..shared.judging import alive_during, forward_backward, same, seeded

# --------------------------------------------------------------------------------------------------
# 16.1: lora_linear
N_IN, N_OUT, RANK, ALPHA = 64, 48, 3, 4.5
SLACK = 4 * (2 * RANK * (N_IN + N_OUT) + N_IN)  # bytes of factors that are scaled or copied: far less than W
GRAPH = "merge() gives W a graph, which keeps all its inputs. What is `no_grad` for?"
ADDED = "A merged forward should use only the frozen layer. Does it check `self.merged`, and who sets that?"
LORA_MISTAKES: Mistakes = {
    "The adapter is missing: that is only the frozen layer.": lambda x, W, b, A, B: linear(x, W, b),
    "The frozen layer is missing: that is only the adapter.": lambda x, W, b, A, B: _thin(x, A, B),
    "The frozen layer's bias is missing.": lambda x, W, b, A, B: _lora_right(x, W, None, A, B),
    "You leave out the scale, alpha/r.": lambda x, W, b, A, B: linear(x, W, b) + x @ A.T @ B.T,
    "You scale the frozen layer, too.": lambda x, W, b, A, B: ALPHA / RANK * linear(x, W, b) + _thin(x, A, B),
    "You subtract the adapter. Add it.": lambda x, W, b, A, B: linear(x, W, b) - _thin(x, A, B),
}
MASKED_MISTAKES: Mistakes = {  # what drops is seeded as in `forward_backward`
    "In training mode nothing is dropped.": lambda x, *weights: _lora_right(x, *weights),
    "You also drop from the frozen layer's input. Dropout is only for the adapter's input.": seeded()(
        lambda x, *weights: _lora_right(dropout(x, 0.5), *weights)
    ),
    "You drop from x·Aᵀ. Dropout comes before A.": seeded()(
        lambda x, W, b, A, B: linear(x, W, b) + ALPHA / RANK * dropout(x @ A.T, 0.5) @ B.T
    ),
}


def _thin(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    return ALPHA / RANK * (x @ A.T) @ B.T


def _lora_right(x: torch.Tensor, W: Any, bias: Any, A: Any, B: Any, p: float = 0.0) -> torch.Tensor:
    return linear(x, W, bias) + _thin(dropout(x, p), A, B)


@exercise("16.1", "It trains only thin factors, merges and unmerges, without a copy of W.")
def lora_linear(answer: Any) -> None:
    """`answer(base, r, alpha, dropout)` has `merge` and `unmerge`, and keeps nothing of W's size."""
    expect(not isinstance(answer, nn.Module), "Give the class, not a layer: its name, without parentheses.")
    for rows, p, bias in (((10,), 0.0, True), ((3, 4), 0.5, True), ((1,), 0.0, False)):
        with seeded():
            base = nn.Linear(N_IN, N_OUT, bias)
            layer = call(answer, base, RANK, ALPHA, p, returns=nn.Module)
            x = torch.randn(*rows, N_IN)
            learned = torch.randn(N_OUT, RANK)
        lacks = [name for name in ("base", "A", "B", "merge", "unmerge") if not hasattr(layer, name)]
        expect(not lacks, f"Your layer has no {' and no '.join(lacks)}: keep the names that were given.")
        expect(layer.base is base, "Your layer uses another base layer than the one that it was given.")
        weights = base.weight, base.bias, layer.A, layer.B
        at_first = [call(layer.eval(), x, returns=torch.Tensor)]
        not_old = "B is zero at first, yet the new layer's output is not the old one's."
        recognized(
            at_first, [(x, *weights)], lambda x, W, b, *_: linear(x, W, b), LORA_MISTAKES, not_old, same
        )
        layer.B.data.copy_(learned)
        _expect_trains(layer, x, p, weights)
        for training in (True, False):
            _expect_merges(layer, x, training)
        changed = "B has changed after merge() and unmerge(). It is what you train, and save."
        expect(same([layer.B], [learned]), changed)
        _expect_trains(layer, x, p, weights)


def _expect_trains(layer: Any, x: torch.Tensor, p: float, weights: Any) -> None:
    run = partial(call, layer.eval(), returns=torch.Tensor)
    dropped = "In eval mode numbers are still dropped: use the layer's own `self.dropout`."
    expect(same([run(x)], [run(x)]), dropped)
    _expect_like(run, x, 0.0, weights, LORA_MISTAKES, "The output is off in eval mode.")
    layer.train()
    off = "It is off in training mode. Is dropout applied once, to x?"
    _expect_like(run, x, p, weights, MASKED_MISTAKES, off)


def _expect_like(run: Any, x: torch.Tensor, p: float, weights: Any, mistakes: Mistakes, off: str) -> None:
    """CheckFailed unless output, gradients and what is kept are those of `_lora_right`."""
    there = [one for one in weights if one is not None]
    right = forward_backward(lambda x: _lora_right(x, *weights, p=p), [x], there)
    got = forward_backward(run, [x], there)
    recognized([got.output], [(x, *weights)], lambda *_: right.output, mistakes, off, same)
    frozen = "W or its bias gets a gradient. They are frozen: who made them require one?"
    # In the order of the inputs: x, W, perhaps its bias, A, B.
    expect(not any(one is not None for one in got.gradients[1:-2]), frozen)
    for name, place in {"x": 0, "A": -2, "B": -1}.items():
        close = same([got.gradients[place]], [right.gradients[place]], 1e-4)
        expect(close, f"The output is right, but the gradient of {name} is not.")
    most = right.kept + 8 / 3 * N_IN * N_OUT
    expect(got.kept < most, "Forward keeps a matrix as large as W: in which order do you multiply?")
    expect(got.kept <= right.kept + SLACK, "Forward keeps more than its input, what dropout needs, and x·Aᵀ.")


def _expect_merges(layer: Any, x: torch.Tensor, training: bool) -> None:
    """Merge and unmerge twice each: first in this mode, then in the other, where nothing should change."""
    W = layer.base.weight
    before = layer.base.weight.clone()
    apart = layer.eval()(x).detach()
    merged = before + ALPHA / RANK * layer.B.detach() @ layer.A.detach()
    for calls, mode in {"merge()": training, "merge() twice": not training}.items():
        _expect_in_place(layer, layer.merge, calls, mode)
        expect(layer.base.weight is W, "After merge(), W is another tensor. Change its numbers in place.")
        expect(W.grad_fn is None, GRAPH)
        expect(not W.requires_grad, "After merge(), W requires a gradient. It is frozen.")
        expect(not same([W], [before]), "After merge(), W is what it was before.")
        twice = same([W], [2 * merged - before], 1e-4)
        expect(not twice, "merge() twice adds the adapter twice. What does `self.merged` say?")
        expect(not same([W], [before + (merged - before) * RANK / ALPHA]), "merge() leaves out the scale.")
        expect(same([W], [merged], 1e-4), f"After {calls}, W is not W + scale·B·A, whatever dropout is.")
        dropping = "In training mode a merged layer still drops numbers. It should compute only the base."
        for mode, message in ((False, ADDED), (True, dropping)):
            expect(same([call(layer.train(mode), x, returns=torch.Tensor)], [apart], 1e-4), message)
    for calls, mode in {"unmerge()": training, "unmerge() twice": not training}.items():
        _expect_in_place(layer, layer.unmerge, calls, mode)
        expect(same([W], [before], 1e-4), f"After {calls}, W is not what it was before merge().")
    found = call(layer.eval(), x, returns=torch.Tensor)
    whole = same([found], [apart], 1e-4) and found.requires_grad
    expect(whole, "After unmerge(), the adapter's part is missing.")


def _expect_in_place(layer: Any, method: Any, name: str, mode: bool) -> None:
    layer.train(mode)
    hints = {"Cannot assign non-leaf": GRAPH, "a leaf Variable that requires grad": GRAPH}
    run = partial(call, method, returns=object | None, finite=False, hints=hints)
    held = alive_during(run, layer.parameters()).end
    expect(held < N_IN * N_OUT, f"{name} leaves {held:,} more bytes than before: W's copy, a new W, or B·A.")
    kept = all(module.training is mode for module in layer.modules())
    turned = "off" if mode else "on"
    expect(kept, f"{name} turns training mode {turned}. Leave that to the caller.")


# --------------------------------------------------------------------------------------------------
# 16.2: packed
Change = Callable[[torch.Tensor], torch.Tensor]


def packed_right(
    values: torch.Tensor, block: int, read: Change = torch.clone, levels: int = 7
) -> torch.Tensor:
    """Values after absmax in 4 bits. Its largest code is `levels`; `read` changes what unpacking finds."""
    count = values.numel()
    # A row per block; zeros fill the last one.
    rows = pad(values.flatten(), (0, -count % block)).view(-1, block)
    scales = rows.abs().amax(dim=1, keepdim=True) / levels
    codes = read((rows / torch.where(scales == 0, 1.0, scales)).round().flatten()[:count])
    return (pad(codes, (0, -count % block)).view(-1, block) * scales).flatten()[:count].view(values.shape)


def _by_pairs(change: Change, codes: torch.Tensor) -> torch.Tensor:
    """The codes after a change of the matrix that has the two of each byte in a row."""
    return change(pad(codes, (0, len(codes) % 2)).view(-1, 2)).flatten()[: len(codes)]


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
    "Codes go from −7 to 7: the largest magnitude must get the largest code.": partial(
        packed_right, levels=8
    ),
    "The two numbers of each byte are swapped.": partial(packed_right, read=partial(_by_pairs, torch.fliplr)),
    "Codes come back in another order. Which two share a byte, and how do you flatten the pairs again?": (
        partial(packed_right, read=partial(_by_pairs, torch.t))
    ),
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


@exercise("16.2", "Half a byte per number, four bytes per block, and no error above half a step.")
def packed(answer: Any) -> None:
    """`answer(values, block)` holds 4-bit codes and scales; `unpack()` makes values of them."""
    dice = torch.Generator().manual_seed(4)
    uneven = torch.randn(4, 32, generator=dice) * torch.logspace(-3, 1, 128).view(4, 32)
    zeros = torch.cat((torch.zeros(16), torch.randn(16, generator=dice)))
    below = -torch.rand(7, 5, generator=dice)
    few = torch.randn(5, 5, generator=dice)
    # Values and block size: whole bytes, an odd number, cut blocks, zeros, a transposed one, tiny ones.
    cases = [
        (uneven, 32),
        (below, 16),
        (zeros, 16),
        (few, 5),
        (torch.tensor([-3.0]), 64),
        (uneven[1:, :5], 4),
        (uneven[1:, :5].T, 4),
        (torch.tensor([1e-7, -7e-7, 3e-7, 0.0]), 4),
    ]
    found = [_packed_and_back(answer, *case) for case in cases]
    close = partial(same, tolerance=1e-4)
    # The tiny block comes last, and is judged alone: until it is scaled up, no error in it shows.
    recognized(found[:-1], cases[:-1], packed_right, PACKED_MISTAKES, _slip(found, cases), close)
    tiny = (
        "A block of tiny numbers comes back wrong: "
        "you add to the scale, or clamp it at, more than it is itself."
    )
    expect(same([1e7 * found[-1]], [1e7 * packed_right(*cases[-1])], 1e-4), tiny)


def _packed_and_back(answer: Any, case: torch.Tensor, block: int) -> torch.Tensor:
    """The tensor that comes back; CheckFailed unless it is finite, and held in half a byte per number."""
    flat = "A transposed tensor has no flat view: `flatten` and `reshape` copy it."
    hints = {"view size is not compatible": flat}
    with Conversions() as seen:
        made, _, held, _ = alive_during(
            lambda: call(answer, case.clone(), block, returns=object, hints=hints)
        )
    expect(not seen.nan, "In a block of zeros you divide 0 by 0. Keep zeros out of the divisor.")
    below_zero = "A negative float becomes a uint8: the result depends on the CPU. Use int8 first."
    expect(not seen.negative, below_zero)
    expect(hasattr(made, "unpack"), "What you return has no `unpack`.")
    got = call(made.unpack, returns=torch.Tensor).clone()
    other_shape = f"{case.numel()} numbers come back in another shape than they went in."
    expect(got.shape == case.shape, other_shape)
    expect(got.dtype == torch.float32, f"The values come back as {got.dtype}, not as fp32.")
    finite = bool(torch.isfinite(got).all())
    expect(finite, "Some number comes back as nan or infinity: do you divide 0 by 0?")
    _expect_small(made, held, case, block)
    again = call(made.unpack, returns=torch.Tensor)
    changes = "A second unpack() returns other values: the first one changes what you store."
    expect(same([got], [again], 0), changes)
    more = alive_during(partial(_used, answer, case, block)).end - held
    keeps = f"unpack() leaves {more:,} more bytes than were held. Compute the values again each time."
    expect(more <= 0, keeps)
    return got


def _used(answer: Any, case: torch.Tensor, block: int) -> Any:
    made = answer(case.clone(), block)
    made.unpack()
    return made


def _slip(found: list[torch.Tensor], cases: list[tuple[torch.Tensor, int]]) -> str:
    """The message for values that no known mistake makes."""
    pairs = [(got, packed_right(*case), *case) for got, case in zip(found[:-1], cases[:-1], strict=True)]
    off = [one for one in pairs if not same([one[0]], [one[1]], 1e-4)]
    if off and all(not case.is_contiguous() for *_, case, _ in off):
        return "A transposed tensor comes back in another order: its rows are not contiguous in memory."
    # Where values are off, and what they should be.
    wrong = [(abs(got - right) > 1e-4, right) for got, right, *_ in off]
    if not any(bool((far & (right >= 0)).any()) for far, right in wrong):
        return (
            "Only numbers below zero come back wrong: "
            "is it the sign, or the upper four bits of a negative number?"
        )
    # With the two of each byte swapped, a value stands where its neighbor is.
    neighbors = [(far.flatten(), _by_pairs(torch.fliplr, right.flatten())) for far, right in wrong]
    if not any(bool((far & (neighbor >= 0)).any()) for far, neighbor in neighbors):
        return (
            "Numbers are off where the other number in their byte is below zero: "
            "its upper four bits are ones."
        )
    # With all codes 1, unpacking gives each value's scale: the step between two codes.
    steps = [packed_right(case, block, read=torch.ones_like) for _, _, case, block in off]
    near = all(
        bool((abs(got - case) <= 1.01 * step).all())
        for (got, _, case, _), step in zip(off, steps, strict=True)
    )
    if near:
        ends = [
            (step * 6.5 < abs(right)) & (abs(got - right) < 0.95 * step) & far
            for (got, right, *_), step, (far, _) in zip(off, steps, wrong, strict=True)
        ]
        largest = "The largest magnitude of a block does not come back. Is its scale that magnitude over 7?"
        expect(not any(bool(end.any()) for end in ends), largest)
        return (
            "Numbers are less than a step off, but some by more than half a step: "
            "round to the *nearest* code."
        )
    return (
        "Some numbers come back wrong. "
        "Try two blocks of four, one with its largest *magnitude* below zero and one above. "
        "Print the codes before and after packing."
    )


def _expect_small(made: Any, held: int, case: torch.Tensor, block: int) -> None:
    """CheckFailed unless `made` holds the codes and scales of `case` alone; says what is too much."""
    count = case.numel()
    codes = -(-count // 2)
    wanted = codes + 4 * -(-count // block)
    leaves = tree_leaves(getattr(made, "__dict__", {}))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not torch.is_tensor(leaf)]
    size = sum(len(x) if isinstance(x, bytes) else getattr(x, "nbytes", 1) for x in others)
    expect(size < 40, "Numbers are held in a list, an array or bytes. Use tensors, which move with a model.")
    names = ", ".join(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in tensors)
    names = names or "no tensor that is found"
    where = f"{count} numbers in blocks of {block}: {held:,} bytes are held, in {names}."
    expect(held >= wanted, f"{where} That is too little: half a byte per number, and fp32 scales.")
    if held == wanted:
        return
    whole = [x.flatten() for x in tensors if x.numel() >= count > 3]
    original = any(same([x], [case.flatten()]) for x in whole)
    expect(not original, f"{where} The original numbers are among them.")
    byte_each = any(not x.is_floating_point() for x in whole)
    expect(not byte_each, f"{where} A code has a whole byte or more. Two should share one.")
    cut = any(x.untyped_storage().nbytes() > x.nbytes for x in tensors)
    padded = any(x.dtype.itemsize * codes < x.numel() for x in tensors)
    expect(not (cut or padded), f"{where} Some are for padding, or for the rest of a sliced tensor.")
    fail(f"{where} What is neither two codes per byte nor one fp32 scale per block?")


# --------------------------------------------------------------------------------------------------
# 16.3: product
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


@exercise("16.3", "Nothing is kept between forward and backward: both unpack W from its four bits.")
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
            expect(got.output.shape == right.output.shape, "The output has another shape than x·Wᵀ.")
            expect(got.output.dtype == dtype, f"x is {dtype}, but the output is not: the unpacked W is fp32.")
            expect(b is None or not same([got.output + b], [right.output], tolerance), "The bias is missing.")
            expect(same([got.output], [right.output], tolerance), "The output is not x·Wᵀ + bias.")
            expect(got.gradients[0] is not None, "No gradient reaches x.")
            expect(got.kept < dense.numel(), "W is kept for backward, unpacked. Four bits should be enough.")
            times_w = same(got.gradients, right.gradients, tolerance)
            expect(times_w, "The gradient of x is not the output's times W.")
            expect(got.kept < x.nbytes, "x is kept for backward. Who needs it, if W does not learn?")
            expect(got.kept == 0, f"{got.kept:,} bytes are kept for backward that nobody needs.")
            often = f"W is unpacked {packed.times} times, not once in forward and once in backward."
            expect(packed.times == 2, often)
            alone = forward_backward(lambda x: run(x, packed, b).clone(), [x], there)  # noqa: B023
            expect(alone.kept == 0, "The output is kept for backward, which needs only W.")


# --------------------------------------------------------------------------------------------------
# 16.4: product8
def product8_right(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    most: Change = lambda x: x.abs().amax(dim=-1, keepdim=True),
    levels: int = 127,
    nearest: Change = torch.round,
    added: Change = torch.clone,
    token_scale: Change = torch.clone,
    row_scale: Change = torch.clone,
) -> torch.Tensor:
    """x·Wᵀ from 8-bit codes, one scale per token and per row of W; each choice may be made differently."""
    each = most(x) / levels
    rounded = nearest(x / torch.where(each == 0, 1.0, each)).clamp(-127, 127)
    return added(rounded.double() @ codes.double().T).float() * token_scale(each) * row_scale(scale.T)


PRODUCT8_MISTAKES: Mistakes = {
    "You round nothing: that is the product with x itself.": lambda x, codes, scale: x @ (codes * scale).T,
    "All tokens share one scale. Each has its own.": partial(product8_right, most=lambda x: x.abs().amax()),
    "Your scales are those of channels: the largest over all tokens. "
    "A token's is along the last dimension.": partial(
        product8_right,
        most=lambda x: x.abs().flatten(0, -2).amax(dim=0),
        token_scale=lambda each: each.mean(),
    ),
    "You leave out the tokens' scales.": partial(product8_right, token_scale=torch.ones_like),
    "You leave out the scales of W's rows.": partial(product8_right, row_scale=torch.ones_like),
    "You leave out both scales.": partial(
        product8_right, token_scale=torch.ones_like, row_scale=torch.ones_like
    ),
    "You divide by the tokens' scales. To round, divide; afterwards, multiply.": partial(
        product8_right, token_scale=lambda each: torch.where(each == 0, 0.0, 1 / each)
    ),
    "The largest code is 127: which scale gives a token's largest magnitude that code?": partial(
        product8_right, levels=128
    ),
    "You cut off the digits. Round to the *nearest* code.": partial(product8_right, nearest=torch.trunc),
    "You round down. Round to the *nearest* code.": partial(product8_right, nearest=torch.floor),
    "Your sums overflow: a sum of products of codes does not fit into int8.": partial(
        product8_right, added=lambda sums: (sums + 128) % 256 - 128
    ),
}


@exercise("16.4", "Codes times codes, and both scales after the sum.")
def product8(answer: Any) -> None:
    """`answer(x, codes, scale)` is x·Wᵀ from int8 codes of both, each token's scale computed at run time."""
    dice = torch.Generator().manual_seed(8)
    got = []
    cases = []
    for *tokens, n_in, n_out in ((5, 64, 48), (2, 3, 32, 6), (4, 7, 4), (1, 300, 3)):
        x = torch.randn(*tokens, n_in, generator=dice)
        x *= torch.logspace(0, 2, tokens[-1]).unsqueeze(-1)  # tokens of very different size
        x[..., 0, :] = -x[..., 0, :].abs()
        codes = torch.randint(-127, 128, (n_out, n_in), generator=dice).to(torch.int8)
        cases.append((x, codes, 0.001 + torch.rand(n_out, 1, generator=dice)))
    zeros = torch.zeros(3, 16)
    tiny = 1e-7 * torch.randn(2, 16, generator=dice)
    zeros[1] = torch.randn(16, generator=dice)
    codes = cases[0][1][:, :16]
    scale = cases[0][2]
    cases.append((zeros, codes, scale))
    for case in [*cases, (tiny, codes, scale)]:
        x, codes, scale = case
        with Conversions() as seen:
            found = call(answer, *case, returns=torch.Tensor)
        expect(not seen.nan, "You divide 0 by 0: a token may be all zeros. Keep zeros out of the divisor.")
        expect(found.dtype == torch.float32, f"You return {found.dtype}. After the scales, it is fp32.")
        wanted = (*x.shape[:-1], len(codes))
        sizes = f"x of {tuple(x.shape)} and W of {tuple(codes.shape)}"
        expect(found.shape == wanted, f"{sizes} give {wanted}, not {tuple(found.shape)}.")
        expect(bool(found.isfinite().all()), "Some number is nan or infinity: a token may be all zeros.")
        got.append(found)
    *got, small = got
    otherwise = "Some number is off. Print each token's codes: does its largest *magnitude* get 127 or −127?"
    recognized(got, cases, product8_right, PRODUCT8_MISTAKES, otherwise, partial(same, tolerance=1e-4))
    right = product8_right(tiny, codes, scale)
    clamped = (
        "A tiny token comes out wrong: what you add to its scale, or clamp it at, is larger than the scale."
    )
    expect(same([1e7 * small], [1e7 * right], 1e-4), clamped)
