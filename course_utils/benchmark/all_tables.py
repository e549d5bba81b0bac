"""All tables by name, and the functions that make them."""

from collections.abc import Callable

from . import gpu, published
from .accuracy import frozen_accuracy
from .speed import explorer_table, speed_table
from .tables import Table

Report = Callable[[str], None]


def _recorded(tables: Callable[[], list[Table]]) -> Callable[[bool, Report], list[Table]]:
    return lambda *_: tables()


MADE: dict[str, Callable[[bool, Report], list[Table]]] = {
    "accuracy": frozen_accuracy,
    "published-gpus": published.tables,
    "speed": lambda quick, report: [speed_table(quick, report)],
    "explorer": lambda quick, report: [explorer_table(quick, report)],
    **{name: _recorded(tables) for name, tables in gpu.GPU_TABLES.items()},
}
