"""All tables by name, and the functions that make them."""

from collections.abc import Callable

from . import gpu, published_tables
from .accuracy import frozen_accuracy
from .tables import Table

MADE: dict[str, Callable[[bool, Callable[[str], None]], list[Table]]] = {
    "accuracy": frozen_accuracy,
    "published-gpus": published_tables.tables,
    **gpu.GPU_TABLES,
}
