"""Times that only a GPU can tell: variants of one run, timed one after the other in one process, with their spread.

Each comparison shrinks its batch until every variant fits the card, so that all of them train the same.
"""

from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any

from ..planning.twin import fits, unsupported
from ..run import TrainingRun

Variants = Mapping[str, TrainingRun]

MOST_SEQUENCES = 8
"""Sequences in a batch on a card with room enough; a smaller card halves it."""


def _recomputation(batch: int) -> Variants:
    run = TrainingRun("gpt2-medium", batch, 1024)
    return {name: run.replace(recompute=name) for name in ("none", "selective", "full")}


def _precision(batch: int) -> Variants:
    run = TrainingRun("gpt2", batch, 1024, attention="efficient")  # the one fused kernel that takes fp32, too
    return {name: run.replace(precision=name) for name in ("fp32", "tf32", "amp-bf16", "amp-fp16")}


def _optimizer(batch: int) -> Variants:
    run = TrainingRun("gpt2-medium", batch, 1024)
    return {name: run.replace(optimizer=f"adamw-{name}") for name in ("loop", "foreach", "fused")}


def _accumulation(batch: int) -> Variants:
    run, counts = TrainingRun("gpt2", batch, 1024), [count for count in (1, 2, 4, 8) if count <= batch]
    return {
        "one batch" if count == 1 else f"{count} micro-batches": run.replace(
            micro_batch=batch // count, accumulation_steps=count
        )
        for count in counts
    }


COMPARISONS: dict[str, Callable[[int], Variants]] = {
    "recomputation": _recomputation,
    "precision": _precision,
    "optimizer": _optimizer,
    "accumulation": _accumulation,
}
"""By topic: the variants for a batch of so many sequences."""


def sized(topic: str, free: int, capability: tuple[int, int]) -> dict[str, TrainingRun | str]:
    """The variants of a comparison as a GPU with `free` bytes can train them; a reason for each that it cannot compute.

    An older card gets fp16 and the efficient kernel, as `twin` has it, except where precisions are compared. Raises
    ValueError for a card on which not even a single sequence fits.
    """
    batch = MOST_SEQUENCES
    while batch:
        runs = {label: _supported(topic, run, capability) for label, run in COMPARISONS[topic](batch).items()}
        if all(fits(run, free) for run in runs.values() if isinstance(run, TrainingRun)):
            return runs
        batch //= 2
    raise ValueError(f"the comparison of {topic} does not fit {free:,} bytes, not even one sequence at a time")


def _supported(topic: str, run: TrainingRun, capability: tuple[int, int]) -> TrainingRun | str:
    reason = unsupported(run, capability)
    if reason and topic != "precision":
        run = run.replace(precision="amp-fp16", attention="efficient")
        reason = unsupported(run, capability)
    return reason or run


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles, extremes and number of repeated measurements, in their unit. ValueError for none."""
    if not values:
        raise ValueError("nothing was measured")
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    figures = {"median": middle, "q1": low, "q3": high, "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in figures.items()} | {"n": len(values)}
