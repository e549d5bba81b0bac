"""Lesson 00: the line that a learner writes, and the cells around it."""

import pytest
from lesson_source import printed_with

START = "return elements * bytes_each  # write this line"


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("return elements * bytes_each", 1),
        ("return elements * bytes_each + 512", 0),
        ("return elements * bytes_each // 512 * 512", 1),
        ("return -(-elements * bytes_each // 512) * 512", 3),
    ],
)
def test_the_learners_line_is_right_when_it_counts_whole_blocks(line: str, right: int) -> None:
    printed = printed_with("00", START, line, "import predict, reveal", "torch.zeros(()")
    assert printed.count("Right.") == right and printed.count("Not yet") == 3 - right
