"""Bytes to text and back."""

import pytest

from course_utils.units import GB, GiB, format_bytes, parse_bytes, round_up


def test_rounds_up_to_the_allocators_blocks():
    assert [round_up(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 KB"),
        (9_996_000_000, "10.0 GB"),
        (31_152_224_000, "31.2 GB"),
        (99_960_000_000, "100 GB"),
        (999_600_000_000, "1.00 TB"),
        (-3_115_222_400, "−3.12 GB"),
    ],
)
def test_three_figures_and_a_decimal_unit(size, text):
    assert format_bytes(size) == text


def test_unit_and_digits_are_kept():
    assert format_bytes(80 * GiB, "GiB", 1) == "80.0 GiB"
    assert format_bytes(80 * GiB, "GB", 1) == "85.9 GB"
    assert format_bytes(5 * GB // 1000, "GB") == "0.005 GB"
    with pytest.raises(ValueError, match=r"unknown unit 'Gigs'.*GiB"):
        format_bytes(1, "Gigs")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80 GB", 80 * GB),
        ("1.5GiB", 3 * GiB // 2),
        ("16gib", 16 * GiB),
        ("1,024 B", 1024),
        ("1_234_567.5 KB", 1_234_567_500),
        ("512", 512),
        (7, 7),
    ],
)
def test_parses_what_people_write(text, size):
    assert parse_bytes(text) == size
