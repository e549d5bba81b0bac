"""Recorded times with their spread, and what watching costs, as tables."""

from ..measuring.recorded import newest
from .gpu import devices, nothing
from .tables import Cell, Table


def gpu_times_tables() -> list[Table]:
    """Each comparison's variants on each GPU: median and quartiles of a step, repetitions, ratio to the first."""
    found = newest("times")
    if not found:
        return [nothing("gpu-times", "Times on a GPU")]
    rows: list[tuple[Cell, ...]] = []
    for item in found:
        first = 0.0
        for variant in item.parts["times"]["variants"]:
            topic = item.task.removeprefix("times of ")
            if "refused" in variant:
                rows.append((item.device, topic, variant["label"], variant["refused"], "", "", ""))
                continue
            step = variant["step_ms"]
            first = first or step["median"]
            quartiles = f"{step['q1']:,.2f} to {step['q3']:,.2f}"
            ratio = f"{step['median'] / first:.3f}"
            rows.append(
                (item.device, topic, variant["label"], f"{step['median']:,.2f}", quartiles, str(step["n"]), ratio)
            )
    headings = ("GPU", "comparison", "variant", "median, ms", "quartiles, ms", "repetitions", "to the first")
    return [Table("gpu-times", "Times on a GPU", headings, tuple(rows), (), devices(found))]


def gpu_overhead_tables() -> list[Table]:
    """What the meter and the tracker add to a step's time and to its peak."""
    found = newest("overhead")
    if not found:
        return [nothing("gpu-overhead", "What watching costs on a GPU")]
    rows: list[tuple[Cell, ...]] = []
    for item in found:
        modes = item.parts["overhead"]["modes"]
        alone = modes[0]
        for mode in modes:
            step = mode["step_ms"]
            slower = 100 * (step["median"] / alone["step_ms"]["median"] - 1)
            more = mode["allocated"] - alone["allocated"]
            quartiles = f"{step['q1']:,.2f} to {step['q3']:,.2f}"
            rows.append((item.device, mode["mode"], step["median"], quartiles, slower, mode["allocated"], more))
    headings = ("GPU", "", "median, ms", "quartiles, ms", "slower, %", "peak, bytes", "more, bytes")
    notes = ("As the course uses them, the meter and the counters see a step that no tracker watches.",)
    return [Table("gpu-overhead", "What watching costs on a GPU", headings, tuple(rows), notes, devices(found))]
