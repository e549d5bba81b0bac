"""Results handed on: as plain data, JSON, rows for a table, and a memory snapshot for torch's viewer."""

import copy
import json
import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from engine import GPT, shallow, simulate
from torch.cuda import _memory_viz

from course_utils import KINDS, MemoryBreakdown, TrainingRun, compare, estimate, save_snapshot
from course_utils.measuring.measurement_file import read_measurement, save_measurement

RUN = TrainingRun(shallow(GPT, 2), micro_batch=2, seq_len=128, precision="amp-bf16")


def test_a_breakdown_is_one_flat_row() -> None:
    found = MemoryBreakdown({"parameters": 512, "activations": 2**60}, "backward", "the peak").to_dict()
    named = {
        "label": "the peak",
        "phase": "backward",
        "total": 512 + 2**60,
        "parameters": 512,
        "activations": 2**60,
    }
    assert found == dict.fromkeys(KINDS, 0) | named
    assert list(found)[:3] == ["label", "phase", "total"] and tuple(found)[3:] == KINDS


@pytest.mark.parametrize("of", ["breakdown", "measurement", "recorded", "comparison", "what cannot be told"])
def test_json_comes_back_as_it_went_with_whole_bytes(of: str, tmp_path: Path) -> None:
    measured = simulate(RUN)
    results = {
        "breakdown": lambda: estimate(RUN),
        "measurement": lambda: measured,
        "recorded": lambda: read_measurement(save_measurement(measured, tmp_path / "a.json.gz")),
        "comparison": lambda: compare(RUN, "simulated"),
        "what cannot be told": lambda: compare(RUN.replace(world_size=8, zero_stage=3), "simulated"),
    }
    one = results[of]()
    assert json.loads(one.to_json()) == one.to_dict()

    def numbers(value: object) -> list[object]:
        if isinstance(value, int | float):
            return [value]
        inside: Iterable[object] = ()
        if isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, list):
            inside = value
        return [number for one in inside for number in numbers(one)]

    found = numbers(one.to_dict())
    assert len(found) > 5 and all(type(number) is int for number in found)


def test_a_measurement_says_its_peak_its_moments_and_where_it_was_made() -> None:
    measured = simulate(RUN)
    found = measured.to_dict()
    assert (found["peak"], found["peak_phase"]) == (measured.peak, measured.peak_phase)
    assert sum(found["breakdown"][kind] for kind in KINDS) == found["breakdown"]["total"] == measured.peak
    assert found["moments"].keys() == measured.moments.keys() and "end of step 2" in found["moments"]
    assert max(phase["total"] for phase in found["phase_peaks"].values()) == measured.peak
    assert found["provenance"]["source"] == "simulated" and found["provenance"]["text"] == str(
        measured.provenance
    )
    found["provenance"]["source"] = "changed"
    assert measured.provenance.source == "simulated"


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


def test_rows_are_what_pandas_takes() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(simulate(RUN).rows())
    sums = table[table.at_peak].groupby("kind").bytes.sum().to_dict()
    assert sums == {kind: size for kind, size in simulate(RUN).breakdown.items() if size}
    assert str(table.bytes.dtype) == "int64"


def test_a_measurement_is_saved_as_a_snapshot_that_torchs_tools_read(tmp_path: Path) -> None:
    measured = simulate(RUN)
    path = save_snapshot(measured, tmp_path / "step.pickle")
    snapshot = pickle.loads(path.read_bytes())  # as `python -m torch.cuda._memory_viz` does
    now, highest = 0, 0
    for entry in snapshot["device_traces"][0]:
        now += entry["size"] * {"alloc": 1, "free_completed": -1}.get(entry["action"], 0)
        highest = max(highest, now)
    assert highest == max(measured.timeline.totals()) == measured.peak
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    alive = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    assert alive == now == measured.timeline.totals()[-1]
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<html" in plot(copy.deepcopy(snapshot)).lower()
    frees = sum(size < 0 for size, _ in measured.timeline.changes)
    assert _memory_viz.trace(snapshot).count("\ndel ") == frees > 100


def test_a_recording_that_kept_its_peak_alone_is_no_snapshot(tmp_path: Path) -> None:
    from course_utils.measuring.recorded import from_json, to_json

    with pytest.raises(ValueError, match="keep only what was alive at the peak: measure the run with"):
        save_snapshot(from_json(to_json(simulate(RUN)), ""), tmp_path / "step.pickle")
    assert not list(tmp_path.iterdir())
