"""Published steps of language, vision and quantized models: what was frozen of them, and is said again."""

import pytest

from course_utils.evidence.published import percent, published_rows, say

MODULES = ("language_models", "vision_models", "low_bit")
ROWS = {row.id: row for row in published_rows() if row.family.split(".")[0] in MODULES}

WANTED = {"allocated": 0.5, "reserved": 1.0, "driver": 1.0}
"""Percent within which a row is that has no reason given for its difference."""

FAST = ("litgpt-lora-StableLMAlpha-3B-mb1", "rasbt-gpt124m-07-sdpa", "pt-tutorial-vitl16-adam-foreach")
FAST += (
    "litgpt-lora-phi-1.5-1.3B-nf4-dq",
    "fms-mistral7b-qlora-bs4",
    "ao-vitb-adam8bit-bnb",
    "ao-vith-adam4bit-ao",
)


@pytest.mark.parametrize("name", ROWS)
def test_a_frozen_row_is_near_or_has_a_reason(name):
    row = ROWS[name]
    assert row.said.allocated > 0
    assert row.gap or abs(percent(row, row.said)) <= WANTED[row.counter]


def test_known_configurations_are_near_without_a_reason():
    certain = [row for row in ROWS.values() if row.certain]
    assert len(certain) >= 5
    assert all(abs(percent(row, row.said)) <= 0.1 for row in certain)


@pytest.mark.parametrize("name", FAST)
def test_a_row_says_again_what_was_frozen(name):
    assert say(ROWS[name]) == ROWS[name].said
