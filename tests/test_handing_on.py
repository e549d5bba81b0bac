"""Results handed on: as plain data, JSON, and rows for a table."""

import json
from collections import Counter
from pathlib import Path

import pytest
from engine import GPT, shallow, simulate

from course_utils import KINDS, TrainingRun, compare, estimate
from course_utils.measuring.files import read_measurement, save_measurement

RUN = TrainingRun(shallow(GPT, 2), micro_batch=2, seq_len=128, precision="amp-bf16")


@pytest.mark.parametrize("of", ["breakdown", "measurement", "recorded", "comparison"])
def test_json_comes_back_as_it_went_with_whole_bytes(of: str, tmp_path: Path) -> None:
    measured = simulate(RUN)
    results = {
        "breakdown": lambda: estimate(RUN),
        "measurement": lambda: measured,
        "recorded": lambda: read_measurement(save_measurement(measured, tmp_path / "a.json.gz")),
        "comparison": lambda: compare(RUN, "simulated"),
    }
    one = results[of]()
    floats = list[str]()
    assert json.loads(one.to_json()) == one.to_dict()
    json.loads(one.to_json(), parse_float=floats.append, parse_constant=floats.append)
    assert floats == [] and '"total": ' in one.to_json()


def test_rows_of_a_measurement_add_up_to_its_breakdown_and_are_flat() -> None:
    measured = simulate(RUN)
    rows = measured.rows()
    at_peak = Counter[str]()
    for row in rows:
        at_peak[row["kind"]] += row["bytes"] * row["at_peak"]
    assert at_peak == Counter(dict(measured.breakdown)) and len(rows) == len(measured.allocations)
    assert all(row.keys() == rows[0].keys() for row in rows) and json.loads(json.dumps(rows)) == rows
    assert all(isinstance(cell, str | int | None) for row in rows for cell in row.values())
    assert {row["provenance"] for row in rows} == {str(measured.provenance)}
    wanted = {"module": "blocks.1.mlp.up", "phase": "forward", "step": 2, "operation": "addmm"}
    [up] = [row for row in rows if wanted.items() <= row.items()]
    assert (up["shape"], up["dtype"], up["bytes"]) == ("(256, 3072)", "bfloat16", 2 * 256 * 3072)


def test_rows_of_a_comparison_have_both_sides_and_their_difference() -> None:
    compared = compare(RUN, "simulated")
    rows = {row["name"]: row for row in compared.rows()}
    for kind in KINDS:
        name = kind.replace("_", " ")
        pair = compared.estimate[kind], compared.measurement.breakdown[kind]
        assert (name in rows) == any(pair)
        if any(pair):
            row = rows[name]
            assert (row["estimated"], row["simulated"], row["difference"]) == (*pair, pair[0] - pair[1])
    assert list(rows)[-3:] == ["tensors", "allocator's counter", "reserved"]
    assert "measured" not in rows["tensors"]
    assert rows["tensors"]["run"] == RUN.code() and rows["tensors"]["provenance"] == str(
        compared.measurement.provenance
    )
    assert compared.to_dict()["rows"] == compared.rows()
