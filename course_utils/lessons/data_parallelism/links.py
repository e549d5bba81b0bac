"""Time of a message, α + β·n seconds for n bytes (Hockney 1994): fitted to measured times, and of rings."""

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

# Half a band's width: about 95 % if errors were normal, which on a busy machine they hardly are.
STANDARD_ERRORS = 2
Band = tuple[float, float, float]  # lowest, expected and highest value


class Link(NamedTuple):
    """`alpha` seconds to start a message, `beta` seconds for each byte; their variances and covariance."""

    alpha: float
    beta: float
    alpha_variance: float = 0.0
    beta_variance: float = 0.0
    covariance: float = 0.0

    def message(self, size: float) -> Band:
        """Seconds for one message of `size` bytes."""
        return self._band(1.0, size)

    def all_reduce(self, size: float, ranks: int) -> Band:
        """Seconds of a ring all-reduce of `size` bytes: 2(D−1) messages in turn, of size/D bytes each."""
        return self._band(2 * (ranks - 1), 2 * (ranks - 1) / ranks * size)

    def efficiency(self, size: float, ranks: int, compute: float, hidden: float = 0.0) -> Band:
        """Throughput of `ranks` over as many times one rank's: each computes `compute` s, then all-reduces.

        `hidden` seconds of the all-reduce cost nothing, as something else is computed meanwhile.
        """
        sent = self.all_reduce(size, ranks)
        low, expected, high = (compute / (compute + max(0.0, seconds - hidden)) for seconds in sent)
        return high, expected, low

    def _band(self, messages: float, size: float) -> Band:
        expected = messages * self.alpha + size * self.beta
        variance = messages**2 * self.alpha_variance + size**2 * self.beta_variance
        error = STANDARD_ERRORS * sqrt(max(0.0, variance + 2 * messages * size * self.covariance))
        return max(0.0, expected - error), expected, expected + error


def fit_link(measured: Sequence[tuple[float, Sequence[float]]]) -> Link:
    """The link whose α + β·n is closest to the medians of measured (bytes, seconds of each try).

    Least squares of errors relative to the line, or the largest message alone would decide: weighted by the
    line found before, until it converges. Raises ValueError for fewer than three different sizes, which leave
    no uncertainty.
    """
    if len({size for size, _ in measured}) < 3:
        raise ValueError("a link is fitted to three different sizes or more")
    points = [(size, median(times)) for size, times in measured]
    link = _weighted(points, [seconds for _, seconds in points])
    for _ in range(50):  # more than enough to converge
        # at least a tenth of the measured time: where a line comes near zero, errors would weigh too much
        expected = [max(link.alpha + link.beta * size, 0.1 * seconds) for size, seconds in points]
        link = _weighted(points, expected)
    return link


def _weighted(points: Sequence[tuple[float, float]], expected: Sequence[float]) -> Link:
    """Least squares of errors over `expected`, in closed form: the normal equations of α and β."""
    rows = [
        (1 / scale, size / scale, seconds / scale)
        for (size, seconds), scale in zip(points, expected, strict=True)
    ]
    w = sum(one**2 for one, _, _ in rows)
    wx = sum(one * x for one, x, _ in rows)
    wxx = sum(x**2 for _, x, _ in rows)
    wy = sum(one * y for one, _, y in rows)
    wxy = sum(x * y for _, x, y in rows)
    determinant = w * wxx - wx * wx
    alpha = (wxx * wy - wx * wxy) / determinant
    beta = (w * wxy - wx * wy) / determinant
    noise = sum((y - alpha * one - beta * x) ** 2 for one, x, y in rows) / (len(rows) - 2)
    return Link(alpha, beta, noise * wxx / determinant, noise * w / determinant, -noise * wx / determinant)
