"""Gradient descent with late gradients: the smallest case there is, computed and in closed form.

On the valley w²/2 the gradient is w itself. A gradient that is d updates late makes the descent
w(t+1) = w(t) − α·w(t−d), which settles if and only if 0 < α < 2·cos(d·π/(2d + 1)) (Levin and May 1976).
"""

from math import cos, pi

FAR = 1e6  # A descent that has come this far from the valley is not coming back: it is left there


def late_descent(rate: float, late: int, steps: int) -> list[float]:
    """w after 0, 1, … `steps` updates, from 1, each by the gradient at the w of `late` updates before."""
    path = [1.0] * (late + 1)
    for _ in range(steps):
        path.append(path[-1] - rate * path[-1 - late])
        if abs(path[-1]) > FAR:
            break
    return path[late:]


def largest_rate(late: int) -> float:
    """The learning rate up to which that descent settles, by the formula."""
    return 2 * cos(late * pi / (2 * late + 1))


def found_rate(late: int, steps: int = 4000) -> float:
    """The largest rate by trying, to 0.0005: a rate settles if the last swings are smaller than those halfway."""
    low, high = 0.0, 4.0
    while high - low > 5e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _settles(middle, late, steps) else (low, middle)
    return (low + high) / 2


def _settles(rate: float, late: int, steps: int) -> bool:
    path = late_descent(rate, late, steps)
    if len(path) <= steps:
        return False
    window = steps // 8
    halfway, last = (max(map(abs, part)) for part in (path[steps // 2 : steps // 2 + window], path[-window:]))
    return last < max(halfway, 1e-300)  # below that, floating point underflows
