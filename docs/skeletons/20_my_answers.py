"""Do the checks of lesson 20 pass right answers, and give each planted wrong answer its own hint?"""

import torch
from checking import Answers, JudgedAnswers


def by_einsum(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bso,bsi->oi", dy, x)


def in_double(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return (dy.double().transpose(1, 2) @ x.double()).sum(0)


def by_token(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    pairs = zip(dy.flatten(0, 1), x.flatten(0, 1), strict=True)
    return torch.stack([torch.outer(out, inward) for out, inward in pairs]).sum(0)


def averaged(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return by_einsum(x, dy) / (x.size(0) * x.size(1))


# YOURS: at least three right answers and six wrong ones for each exercise
WEIGHT_GRADIENT = Answers(
    right=[by_einsum, in_double, by_token],
    wrong=[
        (lambda x, dy: by_einsum(x, dy).T, "The shape is transposed"),
        (lambda x, dy: dy.transpose(1, 2) @ x, "W has two dimensions"),
        (averaged, "You averaged over all tokens"),
        (lambda x, dy: dy[0].T @ x[0], "Your gradient has only the first sequence"),
        (lambda x, dy: dy[:, -1].T @ x[:, -1], "Your gradient has only the last token"),
        (lambda x, dy: by_einsum(x, dy) * 2, "Your gradient is twice too large"),
        (lambda x, dy: by_einsum(x, dy) + 1, "the values are not"),
    ],
)

ANSWERS = {"20.1": WEIGHT_GRADIENT}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
