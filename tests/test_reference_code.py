"""Is the table of docs/reference_code.md what the simulations say?"""

import re
from pathlib import Path

import pytest
from reference_code import DIFFERENCES, percents

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "reference_code.md").read_text(encoding="utf-8")
ROWS = {
    name: [autocast, low]
    for name, autocast, low in re.findall(
        r"^\| ([^|]+) \| (?:GPT-2|Llama) \| (\S+) % \| (\S+) % \|", PAGE, re.MULTILINE
    )
}


def test_the_page_has_a_row_for_each_difference():
    assert set(ROWS) == set(DIFFERENCES)


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.sweep(1)
def test_a_difference_moves_the_peak_as_the_page_says(name):
    assert [f"{percent:+.1f}".replace("-", "−") for percent in percents(name)] == ROWS[name]
