"""Published steps are simulated again: each says what was frozen. `test --full` runs all of them."""

import pytest

from course_utils.evidence.published import Row, published_rows, say

QUICK = (
    "liger-tiled_geglu-forward-T1024-rtx4090-l1674",
    "liger-group_norm-full-C32-b200-l1851",
    "liger-megatron_rms_norm-full-H4096-h100-l2274",
    "liger-rope-full-H2048-a100-l354",
    "liger-kl_div-full-V4096-h100-l418",
    "liger-megatron_swiglu-full-ffn_local4096-h100-l2440",
    "liger-softmax-full-N4096-rtx3090-l825",
    "litgpt-lora-phi-1.5-1.3B-mb1",
    "peft-3b-lora-r32-live",
    "hf-bertlarge-loaded",
    "rasbt-gpt124m-00-orig-live",
    "pt-recipe-zero-before-step",
    "litgpt-lora-phi-1.5-1.3B-nf4-dq",
    "ao-vitb-adam8bit-bnb",
)
"""One row of each family of steps that has a row of seconds. `SLOW` holds all other rows."""

ROWS = {row.id: row for row in published_rows() if row.family}
SLOW = [row for name, row in ROWS.items() if name not in QUICK]


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_row_of_each_family_says_again_what_was_frozen(name: str):
    assert say(ROWS[name]) == ROWS[name].said


@pytest.mark.parametrize("row", SLOW, ids=lambda row: row.id)
@pytest.mark.sweep(2)
def test_a_row_says_again_what_was_frozen(row: Row):
    assert say(row) == row.said
