"""Is the table of docs/reference_code.md what the simulations say?"""

import re

import pytest
from reference_code import DIFFERENCES, percents

from course_utils.interactive.course_files import ROOT

PAGE = (ROOT / "docs" / "reference_code.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|]+) \| (?:GPT-2|Llama) \| (\S+) % \| (\S+) % \|", re.MULTILINE)
ROWS = {name: [autocast, low] for name, autocast, low in ROW.findall(PAGE)}


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.sweep(1)
def test_a_difference_moves_the_peak_as_the_page_says(name: str) -> None:
    assert set(ROWS) == set(DIFFERENCES)
    assert [f"{percent:+.1f}".replace("-", "−") for percent in percents(name)] == ROWS[name]
