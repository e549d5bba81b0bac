"""Times that only a GPU can give: variants of one run, timed one after the other in one process, with their spread.

Each comparison shrinks its batch until every variant fits the card, so that all of them train the same.
"""

from statistics import quantiles
from typing import Any

from ..planning.twin import fits, unsupported
from ..run import TrainingRun

MOST_SEQUENCES = 8  # Sequences in a batch on a card with room enough; a smaller card halves it


def variants(topic: str, batch: int) -> dict[str, TrainingRun]:
    """The runs of a comparison by label, for a batch of so many sequences."""
    small, medium = TrainingRun("gpt2", batch, 1024), TrainingRun("gpt2-medium", batch, 1024)
    fused = small.replace(attention="efficient")  # the one fused kernel that takes fp32, too
    if topic == "recomputation":
        return {name: medium.replace(recompute=name) for name in ("none", "selective", "full")}
    if topic == "precision":
        return {name: fused.replace(precision=name) for name in ("fp32", "tf32", "amp-bf16", "amp-fp16")}
    if topic == "optimizer":
        return {name: medium.replace(optimizer=f"adamw-{name}") for name in ("loop", "foreach", "fused")}
    return {
        f"{count} micro-batches" if count > 1 else "one batch": small.replace(
            micro_batch=batch // count, accumulation_steps=count
        )
        for count in (1, 2, 4, 8)
        if count <= batch
    }


COMPARISONS = ("recomputation", "precision", "optimizer", "accumulation")  # The topics of comparisons


def sized(topic: str, free: int, capability: tuple[int, int]) -> dict[str, TrainingRun | str]:
    """The variants of a comparison as a GPU with `free` bytes can train them; a reason for each that it cannot compute.

    An older card gets fp16 and the efficient kernel, as `twin` has it, except where precisions are compared. Raises
    ValueError for a card on which not even a single sequence fits.
    """
    batch = MOST_SEQUENCES
    while batch:
        runs = {label: _supported(topic, run, capability) for label, run in variants(topic, batch).items()}
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
