"""Checks of the exercises of lesson 15, "My lesson": each names the misconception, never the answer."""

from functools import partial
from typing import Any

import torch

from course_utils.interactive.feedback import Mistakes, call, exercise, expect, recognized
from course_utils.lessons.shared.judging import same

# YOURS: a check for each exercise. This one judges lesson 01's first exercise.
SHAPES = ((3, 4, 5, 2), (1, 6, 2, 7), (2, 3, 4, 4))  # batch b, sequence s, inputs i and outputs o of a linear layer
_gradient = partial(torch.einsum, "bsi,bso->oi")  # of x and dL/dy
MISTAKES: Mistakes = {
    "A mean over all tokens: dL/dy has that factor in it already.": lambda x, dy: _gradient(x, dy) / x[..., 0].numel(),
    "Only the first sequence is in it. Every token used W.": lambda x, dy: _gradient(x[:1], dy[:1]),
    "Only the last token is in it. Every token used W.": lambda x, dy: _gradient(x[:, -1:], dy[:, -1:]),
    "A factor of two: where does it come from?": lambda x, dy: 2 * _gradient(x, dy),
}


@exercise("15.1", "The same as autograd's. That x is what forward had to keep.")
def weight_gradient(answer: Any) -> None:
    """`answer(x, dy)` is dL/dW of y = x·Wᵀ for x of shape (b, s, inputs) and dL/dy of shape (b, s, outputs)."""
    cases, answers = [], []
    for b, s, i, o in SHAPES:
        dice = torch.Generator().manual_seed(b + s)
        x, dy = (torch.randn(b, s, width, generator=dice) for width in (i, o))
        got = call(answer, x=x, dy=dy, returns=torch.Tensor)
        expect(got.dim() == 2, "A gradient has the shape of what it belongs to, and W has two dimensions.")
        expect(got.shape == (o, i), "The shape is turned round: W has a row for each output, as in y = x·Wᵀ.")
        cases.append((x, dy))
        answers.append(got)
    recognized(answers, cases, _gradient, MISTAKES, "The shape is right, the values are not: compare one entry.", same)
