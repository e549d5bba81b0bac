"""All tables by name, and the functions that make them."""

from collections.abc import Callable
from dataclasses import replace

from . import gpu, published
from .accuracy import accuracy_tables, frozen_accuracy
from .draw import random_run
from .speed import explorer_table, speed_table
from .tables import Table

Report = Callable[[str], None]

RANDOM_RUNS = 100


def _random_accuracy(quick: bool, seed: int, report: Report) -> list[Table]:
    count = 20 if quick else RANDOM_RUNS
    runs = [random_run(one) for one in range(seed, seed + count)]
    source = f"simulated GPU, seeds {seed} to {seed + count - 1}"
    return [replace(t, name=f"random_{t.name}") for t in accuracy_tables(runs, source, report)]


def _recorded(tables: Callable[[], list[Table]]) -> Callable[[bool, int, Report], list[Table]]:
    return lambda *_: tables()


MADE: dict[str, Callable[[bool, int, Report], list[Table]]] = {
    "accuracy": lambda quick, seed, report: frozen_accuracy(quick, report),
    "random": _random_accuracy,
    "published-gpus": lambda quick, seed, report: published.tables(quick, report),
    "speed": lambda quick, seed, report: [speed_table(quick, report)],
    "explorer": lambda quick, seed, report: [explorer_table(quick, report)],
    **{name: _recorded(tables) for name, tables in gpu.GPU_TABLES.items()},
}
