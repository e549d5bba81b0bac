"""The result: parts that sum to their total, a timeline that adds up, and where it comes from."""

from course_utils.breakdown import KIND_NOTES, KINDS, MemoryBreakdown
from course_utils.measurement import Allocation, Mark, Measurement, Provenance, Timeline

TIMELINE = Timeline(
    [
        (1024, "parameters"),
        (512, "activations"),
        (512, "temporaries"),
        (-512, "temporaries"),
        (-512, "activations"),
    ],
    [Mark(1, 1, "forward"), Mark(3, 1, "backward")],
)
WEIGHT = Allocation("parameters", 1024, (256,), "float32", "set-up", "", "", 0, born=0, died=None)
KEPT = Allocation("activations", 512, (100,), "float32", "mul", "mlp", "forward", 1, born=1, died=4)
BRIEF = Allocation("temporaries", 512, (90,), "float32", "mul", "mlp", "forward", 1, born=2, died=3)


def measurement() -> Measurement:
    parts = {"parameters": 1024, "activations": 512, "temporaries": 512}
    breakdown = MemoryBreakdown(parts, "forward", "peak")
    provenance = Provenance("simulated", "simulated GPU", "2.13.0", "2026-01-01", "a note")
    return Measurement(breakdown, {}, TIMELINE, provenance, peak_event=3, allocations=(BRIEF, WEIGHT, KEPT))


def test_parts_sum_to_the_total_and_keep_the_order_of_kinds():
    parts = {"activations": 5, "parameters": 3}
    breakdown = MemoryBreakdown(parts)
    parts["parameters"] = 4  # changes nothing
    assert breakdown.total == sum(breakdown.values()) == 8
    assert tuple(breakdown) == KINDS and len(breakdown) == len(KINDS)
    assert breakdown["gradients"] == 0 and set(KIND_NOTES) == set(KINDS)


def test_shows_itself_in_a_terminal_and_in_a_notebook():
    breakdown = MemoryBreakdown({"weight_copies": 2 * 10**9, "parameters": 10**9}, "forward", "peak <1>")
    assert str(breakdown).splitlines()[0] == "peak <1>, in forward"
    assert "3.000 GB" in str(breakdown) and "gradients" not in str(breakdown)
    html = breakdown._repr_html_()
    assert "peak &lt;1&gt;" in html and "weight copies" in html and "3.000 GB" in html
    assert "2.501 MB" in str(MemoryBreakdown({"parameters": 2_500_000, "gradients": 512}))


def test_measurement_names_its_peak():
    found = measurement()
    assert (found.peak, found.peak_phase, found.source) == (2048, "forward", "simulated")
    assert found.largest(1) == [WEIGHT] and set(found.largest()) == {WEIGHT, KEPT, BRIEF}
    assert str(found.provenance) == "simulated GPU · torch 2.13.0 · a note"
    assert str(found.provenance) in found.summary() and "in forward" in found.summary()
    assert str(found.provenance) in str(found) and str(found.provenance) in found._repr_html_()
