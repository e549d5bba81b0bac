"""All tables by name, and the functions that make them."""

from collections.abc import Callable

from . import gpu, published
from .accuracy import frozen_accuracy
from .speed import explorer_table, speed_table
from .tables import Table

MADE: dict[str, Callable[[bool, Callable[[str], None]], list[Table]]] = {
    "accuracy": frozen_accuracy,
    "published-gpus": published.tables,
    "speed": lambda quick, report: [speed_table(quick, report)],
    "explorer": lambda quick, report: [explorer_table(quick, report)],
    **gpu.GPU_TABLES,
}
