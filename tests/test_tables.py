"""Tables: columns in line in a terminal, the same cells in HTML."""

import pytest

from course_utils.units import aligned, html_table

ROWS = (("", "GB"), ("weights & more", "3.1"), ("total", "12.0"))


def test_words_begin_in_line_and_numbers_end_in_line() -> None:
    assert aligned(ROWS).splitlines() == ["                  GB", "weights & more   3.1", "total           12.0"]
    assert aligned(ROWS, words=2).splitlines() == ["                GB", "weights & more  3.1", "total           12.0"]
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a", "b"), ("c",)])


def test_html_says_the_same_and_sets_off_header_and_totals() -> None:
    table = html_table(ROWS, totals=True)
    assert "<td style='text-align:left'>weights &amp; more</td><td>3.1</td>" in table
    assert table.count("<th") == 4 and table.count("<td") == 2 and table.count("text-align:left") == 3
    assert html_table(ROWS, words=2).count("text-align:left") == 6 == html_table(ROWS).count("<td") + 2
