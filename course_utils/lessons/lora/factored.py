"""A weight as the sum of two tensors that take few values each, one of them seen in another, orthogonal basis.

After Merkulov et al. 2024, "Quantization of large language models with an overdetermined basis": W ≈ U + V·Q. Two
bases have twice as many vectors as are needed, so U and V can be chosen without large entries. They find U and V by a
greedy algorithm and replace their entries by centroids. Here each greedy step adds ±c to every entry, for one bit each.
"""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Factors:
    """W ≈ U + V·Q after some steps; `in_first` says for each step whether it went to U, `sizes` how far it went."""

    U: torch.Tensor
    V: torch.Tensor
    Q: torch.Tensor
    in_first: tuple[bool, ...] = ()
    sizes: tuple[float, ...] = field(default=(), repr=False)

    @property
    def dense(self) -> torch.Tensor:
        """The weight that they approximate."""
        return self.U + self.V @ self.Q

    @property
    def bits(self) -> int:
        """Stored bits for each number of W: one per step. Sizes, and Q with its seed, are not counted."""
        return len(self.sizes)

    @property
    def values(self) -> tuple[int, int]:
        """Numbers of different values that U and V can have: 2^steps of each."""
        return 2 ** sum(self.in_first), 2 ** (len(self.in_first) - sum(self.in_first))


def orthogonal(size: int, seed: int = 0) -> torch.Tensor:
    """A random orthogonal matrix (size, size), the same for the same seed."""
    dice = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=dice, dtype=torch.float64))[0].float()


def split(weight: torch.Tensor, steps: int, seed: int = 0, *, one_basis: bool = False) -> Factors:
    """`weight` (n_out, n_in) split greedily: each step adds ±c to every entry of U or of V, whichever helps more.

    For a remainder R the best ±c in a basis has R's signs there and c = mean |R|, and it lowers the sum of squares by
    n·c²: so the basis in which the mean magnitude is larger takes the step. `one_basis` leaves V out.
    """
    Q = orthogonal(weight.shape[1], seed)
    U, V, remainder = torch.zeros_like(weight), torch.zeros_like(weight), weight.clone()
    in_first, sizes = [], []
    for _ in range(steps):
        seen = remainder @ Q.T
        here, there = remainder.abs().mean(), seen.abs().mean()
        first = one_basis or bool(here >= there)
        if first:
            U = U + here * remainder.sign()
        else:
            V = V + there * seen.sign()
        remainder = weight - U - V @ Q
        in_first.append(first)
        sizes.append((here if first else there).item())
    return Factors(U, V, Q, tuple(in_first), tuple(sizes))
