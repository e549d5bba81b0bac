"""torchtitan's published steps: what was said stays within bounds, and small steps allocate rightly."""

from collections import Counter
from typing import Any

import pytest
from published_models.sharded_models import titan

from course_utils.estimating.workspaces import Workspaces
from course_utils.evidence import published_tables
from course_utils.evidence.published import NOT_YET, percent, rows_of
from course_utils.measurement import Measurement

ROWS = list(rows_of("sharded_models"))
LIMITS = {"allocated": 0.5, "reserved": 3.0}
SMALL = {"ranks": 2, "b": 1, "s": 64, "L": 2, "d": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "V": 512}


def small(**how: Any) -> Measurement:
    return titan(Workspaces(0, 0), **SMALL, positions=64, **how)


@pytest.mark.parametrize("row", [row for row in ROWS if row.family], ids=lambda row: row.id)
def test_what_was_said_is_near_what_was_published(row):
    assert row.said != NOT_YET
    assert abs(percent(row, row.said)) <= LIMITS[row.counter] or row.gap


def test_rows_that_are_not_covered_say_why_and_are_not_counted(monkeypatch):
    left_out = [row for row in ROWS if not row.family]
    assert left_out and all(row.gap and row.said == NOT_YET and not row.how for row in left_out)
    monkeypatch.setattr(published_tables, "say", lambda row: row.said)
    monkeypatch.setattr(published_tables, "published_rows", lambda: ROWS)
    summary, each = published_tables.tables(False, lambda _: None)
    assert len(each.rows) == sum(int(line[2]) for line in summary.rows) == len(ROWS) - len(left_out)
    assert all(any(row.id in note and row.gap in note for note in summary.notes) for row in left_out)


def kept(measured: Measurement) -> Counter[str]:
    """How many tensors wait for the second step's backward, by the operator that made them."""
    event = next(mark.event for mark in measured.timeline.marks if (mark.step, mark.phase) == (2, "backward"))
    alive = (item for item in measured.alive_at(event) if item.kind == "activations")
    return Counter(item.operation for item in alive)


def test_selective_recomputation_keeps_every_other_product_of_each_block():
    """Those of wq, wv, w1 and w2, and what attention gave; the head's own product is gone."""
    found = kept(small(recompute=["selective"]))
    assert found["mm"] == 2 * 4
    assert found["_scaled_dot_product_flash_attention"] >= 2
    assert kept(small(recompute=["full"]))["mm"] == 0


def test_in_march_2024_reductions_began_and_ended_on_their_own_stream():
    streams = []
    for upcast in (False, True):
        allocations = small(recompute=["full"], upcast=upcast).allocations
        streams.append({item.stream for item in allocations if item.kind == "communication"})
    assert streams == [{0, 1}, {0, 1, 3}]


def test_logits_of_march_2024_live_until_the_next_are_made():
    early = small(recompute=["full"], upcast=True).moments["end of step 2"]
    late = small(recompute=["full"], upcast=False).moments["end of step 2"]
    before = early["activations"] + early["temporaries"]
    assert before == 4 * 64 * 512 + late["activations"] + late["temporaries"]
