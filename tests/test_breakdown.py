"""The result: parts that sum to their total."""

from course_utils.breakdown import KIND_NOTES, KINDS, MemoryBreakdown


def test_parts_sum_to_the_total_and_keep_the_order_of_kinds():
    parts = {"activations": 5, "parameters": 3}
    breakdown = MemoryBreakdown(parts)
    parts["parameters"] = 4  # changes nothing
    assert breakdown.total == sum(breakdown.values()) == 8
    assert tuple(breakdown) == KINDS and len(breakdown) == len(KINDS)
    assert breakdown["gradients"] == 0 and set(KIND_NOTES) == set(KINDS)
