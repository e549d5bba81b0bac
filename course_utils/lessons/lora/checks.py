"""Checks of lesson 16, "LoRA": each names the misconception, never the answer."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout, linear

from ...interactive.feedback import Mistakes, call, call_for_effect, exercise, expect, recognized
from ..shared.judging import alive_during, forward_backward, same, seeded

# --------------------------------------------------------------------------------------------------
# 16.1: lora_linear
N_IN, N_OUT, RANK, ALPHA = 64, 48, 3, 4.5
SCALE = ALPHA / RANK
SLACK = 4 * (2 * RANK * (N_IN + N_OUT) + N_IN)  # bytes of factors that are scaled or copied: far less than W
GRAPH = "merge() gives W a graph, which keeps all its inputs. What is `no_grad` for?"
MERGE_HINTS = {"Cannot assign non-leaf": GRAPH, "a leaf Variable that requires grad": GRAPH}
LORA_MISTAKES: Mistakes = {
    "The adapter is missing: that is only the frozen layer.": lambda x, W, b, A, B: linear(x, W, b),
    "The frozen layer's bias is missing.": lambda x, W, b, A, B: _lora_right(x, W, None, A, B),
    "You leave out the scale, alpha/r.": lambda x, W, b, A, B: linear(x, W, b) + x @ A.T @ B.T,
    "You scale the frozen layer, too.": lambda x, W, b, A, B: SCALE * (linear(x, W, b) + x @ A.T @ B.T),
}
MASKED_MISTAKES: Mistakes = {  # what drops is seeded as in `forward_backward`
    "In training mode nothing is dropped.": lambda x, *weights: _lora_right(x, *weights),
    "You also drop from the frozen layer's input. Dropout is only for the adapter's input.": seeded()(
        lambda x, *weights: _lora_right(dropout(x, 0.5), *weights)
    ),
    "You drop from x·Aᵀ. Dropout comes before A.": seeded()(
        lambda x, W, b, A, B: linear(x, W, b) + SCALE * dropout(x @ A.T, 0.5) @ B.T
    ),
}


def _lora_right(x: torch.Tensor, W: Any, bias: Any, A: Any, B: Any, p: float = 0.0) -> torch.Tensor:
    return linear(x, W, bias) + SCALE * (dropout(x, p) @ A.T) @ B.T


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
        layer.B.data.copy_(learned)
        _expect_trains(layer, x, p)
        for training in (True, False):
            _expect_merges(layer, x, training)
        changed = "B has changed after merge() and unmerge(). It is what you train, and save."
        expect(same([layer.B], [learned]), changed)
        _expect_trains(layer, x, p)


def _expect_trains(layer: Any, x: torch.Tensor, p: float) -> None:
    run = partial(call, layer.eval(), returns=torch.Tensor)
    dropped = "In eval mode numbers are still dropped: use the layer's own `self.dropout`."
    expect(same([run(x)], [run(x)]), dropped)
    _expect_like(layer.eval(), x, 0.0, LORA_MISTAKES, "The output is off in eval mode.")
    off = "It is off in training mode. Is dropout applied once, to x?"
    _expect_like(layer.train(), x, p, MASKED_MISTAKES, off)


def _expect_like(layer: Any, x: torch.Tensor, p: float, mistakes: Mistakes, off: str) -> None:
    """CheckFailed unless output, gradients and what is kept are those of `_lora_right`."""
    weights = layer.base.weight, layer.base.bias, layer.A, layer.B
    there = [one for one in weights if one is not None]
    right = forward_backward(lambda x: _lora_right(x, *weights, p=p), [x], there)
    got = forward_backward(partial(call, layer, returns=torch.Tensor), [x], there)
    recognized([got.output], [(x, *weights)], lambda *_: right.output, mistakes, off, same)
    frozen = "W or its bias gets a gradient. They are frozen: who made them require one?"
    # in the order of the inputs: x, W, perhaps its bias, A, B
    expect(not any(one is not None for one in got.gradients[1:-2]), frozen)
    slopes = "The output is right, but the gradient of x, A or B is not."
    expect(same(got.gradients, right.gradients, 1e-4), slopes)
    most = "Forward keeps more than x, x·Aᵀ and what dropout needs: in which order do you multiply?"
    expect(got.kept <= right.kept + SLACK, most)


def _expect_merges(layer: Any, x: torch.Tensor, training: bool) -> None:
    """Merge and unmerge twice each, in this mode."""
    W = layer.base.weight
    before = W.clone()
    apart = layer.eval()(x).detach()
    merged = before + SCALE * layer.B.detach() @ layer.A.detach()
    for calls in ("merge()", "merge() twice"):
        _expect_in_place(layer, layer.merge, calls, training)
        expect(layer.base.weight is W, "After merge(), W is another tensor. Change its numbers in place.")
        expect(not W.requires_grad, GRAPH)
        twice = same([W], [2 * merged - before], 1e-4)
        expect(not twice, "merge() twice adds the adapter twice. What does `self.merged` say?")
        expect(same([W], [merged], 1e-4), f"After {calls}, W is not W + scale·B·A, whatever dropout is.")
    added = "A merged forward should use only the frozen layer. Does it check `self.merged`?"
    dropping = "In training mode a merged layer still drops numbers. It should compute only the base."
    for mode, message in ((False, added), (True, dropping)):
        expect(same([call(layer.train(mode), x, returns=torch.Tensor)], [apart], 1e-4), message)
    for calls in ("unmerge()", "unmerge() twice"):
        _expect_in_place(layer, layer.unmerge, calls, training)
        expect(same([W], [before], 1e-4), f"After {calls}, W is not what it was before merge().")


def _expect_in_place(layer: Any, method: Any, name: str, training: bool) -> None:
    layer.train(training)
    run = partial(call_for_effect, method, hints=MERGE_HINTS)
    held = alive_during(run, layer.parameters()).end
    expect(held < N_IN * N_OUT, f"{name} leaves {held:,} more bytes than before: W's copy, a new W, or B·A.")
    mode = f"{name} turns training mode on or off. Leave that to the caller."
    expect(all(module.training is training for module in layer.modules()), mode)


# --------------------------------------------------------------------------------------------------
# 16.2: lora_embedding
def _embedded(ids: Any, W: Any, A: Any, B: Any, scale: float) -> torch.Tensor:
    return W[ids] + scale * A[ids] @ B


EMBEDDING_MISTAKES: Mistakes = {
    "The adapter is missing: those are only W's rows.": lambda ids, W, A, B, scale: W[ids],
    "You leave out the scale.": lambda ids, W, A, B, scale: _embedded(ids, W, A, B, 1.0),
    "You scale W's rows, too.": lambda ids, W, A, B, scale: scale * _embedded(ids, W, A, B, 1.0),
    "W's rows are missing: that is only the adapter.": (
        lambda ids, W, A, B, scale: _embedded(ids, torch.zeros_like(W), A, B, scale)
    ),
}


@exercise("16.2", "It looks up thin rows, and never makes a matrix of W's size.")
def lora_embedding(answer: Any) -> None:
    """`answer(ids, W, A, B, scale)` embeds ids (b, s) by W + scale·A·B, W (V, h), A (V, r), B (r, h)."""
    for shape, vocabulary, h, r in (((2, 5), 400, 32, 3), ((7,), 500, 16, 1), ((1, 1), 900, 32, 2)):
        with seeded():
            ids = torch.randint(vocabulary, shape)
            W, A, B = torch.randn(vocabulary, h), torch.randn(vocabulary, r), torch.randn(r, h)
        weights = [A.requires_grad_(), B.requires_grad_(), W]
        given = {"W": W, "A": A, "B": B, "scale": 0.5}
        # without `may_change`, `call` would copy W
        run = partial(call, answer, **given, may_change=tuple(given), returns=torch.Tensor)
        got = forward_backward(run, [ids], weights)
        right = forward_backward(partial(_embedded, **given), [ids], weights)
        wanted = (*shape, h)
        expect(got.output.shape == wanted, f"ids of {shape} give {tuple(got.output.shape)}, not {wanted}.")
        otherwise = "Some number is off. Does each id take its own row of A, times B?"
        recognized([got.output], [(ids, W, A, B, 0.5)], _embedded, EMBEDDING_MISTAKES, otherwise, same)
        expect(same(got.gradients, right.gradients, 1e-4), "The output is right, a gradient is not.")
        whole = "You make a matrix of W's size. Look up rows of A *before* you multiply by B."
        expect(got.peak < right.peak + W.nbytes // 2, whole)


# --------------------------------------------------------------------------------------------------
# 16.3: two_factors
def _nearest(difference: torch.Tensor, r: int, power: float = 1.0, largest: bool = True) -> torch.Tensor:
    """The product of two factors of rank r, by singular values to a `power`; on request the smallest ones."""
    U, S, V = torch.linalg.svd(difference, full_matrices=False)
    kept = slice(0, r) if largest else slice(len(S) - r, None)
    return U[:, kept] @ (S[kept] ** power).diag() @ V[kept]


FACTORS_MISTAKES: Mistakes = {
    "You leave out the singular values.": partial(_nearest, power=0),
    "Both factors have the singular values: their product has the squares.": partial(_nearest, power=2),
    "Only their square roots are in the product: one factor lacks its half.": partial(_nearest, power=0.5),
    "You keep the smallest singular values.": partial(_nearest, largest=False),
}


@exercise("16.3", "No two factors of this rank come nearer (Eckart and Young 1936).")
def two_factors(answer: Any) -> None:
    """`answer(difference, r)` returns B (n_out, r) and A (r, n_in) whose product is nearest to it."""
    dice = torch.Generator().manual_seed(3)
    cases = [
        (torch.randn(n_out, n_in, generator=dice), r) for n_out, n_in, r in ((9, 6, 2), (5, 8, 5), (4, 4, 1))
    ]
    cases.append((torch.randn(12, 2, generator=dice) @ torch.randn(2, 7, generator=dice), 2))
    products = []
    for difference, r in cases:
        found = call(answer, difference.clone(), r, returns=tuple)
        expect(len(found) == 2, f"You return {len(found)} things, not B and A.")
        B, A = found
        n_out, n_in = difference.shape
        swapped = "You return A, then B. B comes first."
        expect((tuple(B.shape), tuple(A.shape)) != ((r, n_in), (n_out, r)) or n_out == n_in == r, swapped)
        shapes = f"Rank {r} of {(n_out, n_in)}: B is {tuple(B.shape)} and A {tuple(A.shape)}."
        expect(tuple(B.shape) == (n_out, r) and tuple(A.shape) == (r, n_in), shapes)
        products.append(B @ A)
    otherwise = "B·A is not the nearest. Did you transpose V? torch.linalg.svd returns it transposed."
    recognized(products, cases, _nearest, FACTORS_MISTAKES, otherwise, partial(same, tolerance=1e-4))
