"""All tables by name, and the functions that make them."""

from collections.abc import Callable

from . import gpu, published
from .accuracy import frozen_accuracy
from .tables import Table

MADE: dict[str, Callable[[bool, Callable[[str], None]], list[Table]]] = {
    "accuracy": frozen_accuracy,
    "published-gpus": published.tables,
    **gpu.GPU_TABLES,
}
