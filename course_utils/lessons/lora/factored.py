"""A weight as the sum of two tensors that take few values each, one of them seen in another, orthogonal basis.

After Merkulov et al. 2024, "Quantization of large language models with an overdetermined basis": W ≈ U + V·Q. They
replace the entries of U and V by centroids. Here each greedy step adds ±c to every entry, for one bit each.
"""

from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """W ≈ U + V·Q."""

    U: torch.Tensor
    V: torch.Tensor
    Q: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        """The weight that they approximate."""
        return self.U + self.V @ self.Q


def orthogonal(size: int) -> torch.Tensor:
    """A random orthogonal matrix (size, size), always the same."""
    dice = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(size, size, generator=dice, dtype=torch.float64))[0].float()


def split(weight: torch.Tensor, steps: int, *, one_basis: bool = False) -> Factors:
    """`weight` (n_out, n_in) split greedily: each step adds ±c to every entry of U or of V, whichever helps more.

    For a remainder R the best ±c in a basis has R's signs there and c = mean |R|, and it lowers the sum of squares by
    n·c²: so the basis in which the mean magnitude is larger takes the step. `one_basis` leaves V out.
    """
    Q = orthogonal(weight.shape[1])
    U, V, remainder = torch.zeros_like(weight), torch.zeros_like(weight), weight
    for _ in range(steps):
        seen = remainder @ Q.T
        here, there = remainder.abs().mean(), seen.abs().mean()
        if one_basis or here >= there:
            U = U + here * remainder.sign()
        else:
            V = V + there * seen.sign()
        remainder = weight - U - V @ Q
    return Factors(U, V, Q)
