"""Check the exercises of lesson 13, "Outside the step": name the misconception, never the answer."""

from functools import partial
from typing import Any

import torch

from course_utils.interactive.feedback import Mistakes, call, exercise, expect, recognized
from course_utils.lessons.shared.judging import same

# YOURS: a check for each exercise. This one judges the gradient of a linear layer.
# batch b, sequence s, inputs i and outputs o of a linear layer
SHAPES = ((3, 4, 5, 2), (1, 6, 2, 7), (2, 3, 4, 4))
_gradient = partial(torch.einsum, "bsi,bso->oi")  # of x and dL/dy


def _averaged(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return _gradient(x, dy) / x[..., 0].numel()


def _first_sequence(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return _gradient(x[:1], dy[:1])


def _last_token(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return _gradient(x[:, -1:], dy[:, -1:])


def _twice(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return 2 * _gradient(x, dy)


MISTAKES: Mistakes = {
    "You averaged over all tokens: dL/dy already has that factor.": _averaged,
    "Your gradient has only the first sequence. Every token used W.": _first_sequence,
    "Your gradient has only the last token. Every token used W.": _last_token,
    "Your gradient is twice too large: where does the factor come from?": _twice,
}


@exercise("13.1", "Your gradient equals autograd's. It needs x, so forward had to keep x.")
def weight_gradient(answer: Any) -> None:
    """Check that `answer` gives dL/dW of y = x·Wᵀ, for x (b, s, inputs) and dL/dy (b, s, outputs)."""
    cases, answers = [], []
    for b, s, i, o in SHAPES:
        dice = torch.Generator().manual_seed(b + s)
        x, dy = (torch.randn(b, s, width, generator=dice) for width in (i, o))
        got = call(answer, x=x, dy=dy, returns=torch.Tensor)
        two = "A gradient has the shape of its parameter, and W has two dimensions."
        expect(got.dim() == 2, two)
        transposed = "The shape is transposed: W has a row for each output, as in y = x·Wᵀ."
        expect(got.shape == (o, i), transposed)
        cases.append((x, dy))
        answers.append(got)
    other = "The shape is right, the values are not: compare one entry."
    recognized(answers, cases, _gradient, MISTAKES, other, same)
