"""Accuracy on several ranks: estimates against real processes of the CPU, which data parallelism needs.

DistributedDataParallel's reducer wants real gradients, so such runs cannot be simulated, and the accuracy tables
refuse them. A few small ones represent them here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..estimating import estimate
from ..estimating.sharding import zero_1_shares
from ..measuring import measure
from ..models import TransformerConfig
from ..run import TrainingRun
from ..units import BLOCK
from .tables import Cell, Table

MODEL = TransformerConfig("gpt2, tiny", "gpt2", layers=2, hidden=256, heads=4, vocab=16384, max_positions=128)
"""Its peak owes nothing to what CPU kernels do otherwise than a GPU's: no dropout, and a large vocabulary."""

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"bucket_view": True},
    {"accumulation_steps": 2},
    {"optimizer": "momentum"},
    {"zero_stage": 1},
    {"zero_stage": 1, "optimizer": "momentum"},
)


def rank_runs(quick: bool) -> list[TrainingRun]:
    """Two ranks with and without ZeRO-1; with `quick` one of each."""
    run = TrainingRun(MODEL, 2, 32, "fp32", attention="eager", world_size=2)
    runs = [run.replace(**changes) for changes in CHANGES]
    return [runs[0], runs[-1]] if quick else runs


def ranks_table(runs: Sequence[TrainingRun], report: Callable[[str], None]) -> Table:
    """Estimated and measured peak of rank 0 of each of `runs`, and the difference that step counters leave.

    Raises like `estimate` and `measure`.
    """
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        found, truth = estimate(run), measure(run, "cpu")
        gap, counters = found.total - truth.peak, counter_bytes(run)
        phases = f"{found.phase} / {truth.peak_phase}"
        rows.append((str(run), found.total, truth.peak, gap, -counters, gap + counters, phases))
        report(str(run))
    headings = (
        "run", "estimated, bytes", "measured, bytes", "difference", "of which step counters", "rest",
        "phase: estimated / measured",
    )  # fmt: skip
    note = (
        "Peak of rank 0. On a CPU Adam's step counters, a block of 512 bytes for each tensor that the rank steps, are "
        "in the memory that is traced; on a GPU they are not."
    )
    return Table(
        "ranks", "Data parallelism and ZeRO-1: estimate against processes", headings, tuple(rows), (note,), "CPU, gloo"
    )


def counter_bytes(run: TrainingRun) -> int:
    """Bytes of the step counters that Adam keeps on the CPU for what rank 0 steps; 0 for an optimizer without them."""
    if run.optimizer.algorithm not in ("adam", "adamw"):
        return 0
    return BLOCK * len(zero_1_shares(run.model, run.world_size if run.zero_stage else 1)[0])
