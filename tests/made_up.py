"""A made-up measurement, breakdowns and one figure of each form: what tests of figures draw."""

from collections.abc import Callable
from functools import partial
from typing import Any

from course_utils import figures as plots
from course_utils.breakdown import MemoryBreakdown
from course_utils.measurement import Mark, Measurement, Provenance, Timeline
from course_utils.units import GB, MB

NONE = MemoryBreakdown(
    {"parameters": 6 * GB, "weight_copies": 3 * GB, "optimizer_states": 12 * GB, "activations": 109 * GB},
    "backward",
)
FULL = MemoryBreakdown(
    {"parameters": 6 * GB, "optimizer_states": 12 * GB, "activations": 20 * GB, "inputs": 524_288}
)


def training(steps: int = 2, layers: int = 6, operations: int = 8) -> Measurement:
    """A made-up measurement with the shape of a real one: `steps` steps of a model of `layers` layers."""
    changes: list[tuple[int, str]] = [(70 * MB, "parameters")] * layers
    marks: list[Mark] = []
    for step in range(1, steps + 1):
        marks.append(Mark(len(changes), step, "forward"))
        one = [(25 * MB, "activations"), (40 * MB, "temporaries"), (-40 * MB, "temporaries")]
        changes += one * layers * operations
        marks.append(Mark(len(changes), step, "loss"))
        changes += [(900 * MB, "activations"), (700 * MB, "temporaries"), (-700 * MB, "temporaries")]
        marks.append(Mark(len(changes), step, "backward"))
        changes.append((-900 * MB, "activations"))
        changes += [*[(-25 * MB, "activations")] * operations, (70 * MB, "gradients")] * layers
        marks.append(Mark(len(changes), step, "optimizer"))
        changes += [(140 * MB, "optimizer_states")] * layers if step == 1 else []
        changes += [(30 * MB, "temporaries"), (-30 * MB, "temporaries")] * layers
        marks.append(Mark(len(changes), step, "zero_grad"))
        changes += [(-70 * MB, "gradients")] * layers
    timeline = Timeline(changes, marks)
    totals = timeline.totals()
    peak = max(range(len(totals)), key=totals.__getitem__) + 1
    at_peak = {kind: curve[peak - 1] for kind, curve in timeline.curves().items()}
    breakdown = MemoryBreakdown(at_peak, [mark.phase for mark in marks if mark.event < peak][-1])
    origin = Provenance("simulated", "simulated GPU", "2.13.0", "2026-11-21")
    return Measurement(
        breakdown, moments={}, phase_peaks={}, timeline=timeline, provenance=origin, peak_event=peak
    )


FIGURES: dict[str, Callable[..., Any]] = {
    "stack": partial(
        plots.stack, {"none": NONE, "full": FULL}, "Only <full> & nothing else fits", capacity=80 * GB
    ),
    "timeline": partial(plots.timeline, training(), "The loss owns the peak", capacity=16 * GB),
    "compare": partial(plots.compare_bars, NONE, training(), "Far apart"),
    "bars": partial(plots.bars, {"AdamW": 16 * GB, "SGD": 8 * GB}, "Adam costs double"),
    "lines": partial(
        plots.lines, {"eager": ([10, 20], [3, 24])}, "Rising", "sequences", "GB", log_x=True, log_y=True
    ),
}
"""Draws a figure of each form, by its name."""
