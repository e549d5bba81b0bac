"""Do the checks of lesson 13 pass a right answer, and give each planted wrong answer its own hint?"""

import torch
from checking import Answers, JudgedAnswers


def by_einsum(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bso,bsi->oi", dy, x)


def averaged(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return by_einsum(x, dy) / (x.size(0) * x.size(1))


# YOURS: for each exercise a right answer, and the wrong ones that learners really give
WEIGHT_GRADIENT = Answers(
    right=by_einsum,
    wrong=[
        (lambda x, dy: by_einsum(x, dy).T, "The shape is transposed"),
        (lambda x, dy: dy.transpose(1, 2) @ x, "W has two dimensions"),
        (averaged, "You averaged over all tokens"),
        (lambda x, dy: dy[0].T @ x[0], "Your gradient has only the first sequence"),
    ],
)

ANSWERS = {"13.1": WEIGHT_GRADIENT}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
