"""Every published step is simulated again: it says what was frozen. `test --full` runs all of them."""

import pytest

from course_utils.evidence.published import Row, published_rows, say

ROWS = [row for row in published_rows() if row.family]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
@pytest.mark.sweep(6)
def test_a_row_says_again_what_was_frozen(row: Row):
    assert say(row) == row.said
