"""Two measurements next to each other: every byte of the difference has an owner. Measurements in files."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from engine import simulate, tiny

from course_utils import difference, read_measurement, replay, save_measurement
from course_utils.breakdown import MemoryBreakdown
from course_utils.measurement import Allocation, Mark, Measurement, Provenance, Timeline
from course_utils.measuring.files import from_json, to_json
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

RUN = TrainingRun(tiny("gpt2", dropout=0.1), 2, 64)


# Measurements in files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_measurement(simulate(RUN), tmp_path / "before.json.gz")


def changed(path: Path, **changes: Any) -> None:
    """Change what the file holds, or take out what is changed to None."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["measurement"] = {k: v for k, v in (content["measurement"] | changes).items() if v is not None}
    path.write_bytes(gzip.compress(json.dumps(content | {"schema": changes.get("schema", 1)}).encode()))


def test_a_measurement_comes_back_whole_and_says_that_it_is_recorded(saved: Path) -> None:
    whole = simulate(RUN)
    again = read_measurement(saved)
    assert again.allocations == whole.allocations and again.timeline == whole.timeline
    assert [item.line for item in again.allocations] == [item.line for item in whole.allocations]
    assert again.breakdown == whole.breakdown
    assert again.moments == whole.moments
    assert again.phase_peaks == whole.phase_peaks
    assert len(difference(whole, again).rows) == 1
    assert replay(again).reserved == replay(whole).reserved
    assert str(again.provenance).startswith("recorded on a simulated GPU · torch 2.")
    assert read_measurement(save_measurement(again, saved)).provenance == again.provenance


def test_losses_counters_and_the_device_come_back(tmp_path: Path) -> None:
    live = Provenance("live", "NVIDIA H200", "2.13.0+cu130", "2026-11-21", "a note")
    counters = {"allocated": 5000, "reserved": 6000}
    measured = dataclasses.replace(simulate(RUN), provenance=live, losses=[8.5, 8.25], counters=counters)
    again = read_measurement(save_measurement(measured, tmp_path / "a file"))
    assert (again.losses, again.counters, again.word) == ([8.5, 8.25], counters, "recorded")
    assert str(again.provenance) == "recorded on NVIDIA H200 · torch 2.13.0+cu130 · 2026-11-21 · a note"


def test_a_file_that_is_not_ours_is_never_overwritten(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    for content in (b"a text", b"", gzip.compress(b'{"schema": 1, "runs": {}}'), saved.read_bytes()[:-9]):
        other.write_bytes(content)
        with pytest.raises(ValueError, match=r"nothing was written: thesis\.txt holds no measurement"):
            save_measurement(simulate(RUN), other)
        assert other.read_bytes() == content
    with pytest.raises(ValueError, match="there is no folder"):
        save_measurement(simulate(RUN), tmp_path / "none" / "a.gz")
    with pytest.raises(TypeError, match="this is a TrainingRun"):
        save_measurement(RUN, tmp_path / "new")  # pyrefly: ignore [bad-argument-type]
    assert sorted(tmp_path.iterdir()) == [saved, other]


@pytest.mark.parametrize(
    "changes",
    [
        {"allocations": [["activations", "512", [1], "float32", "add", "", "forward", 1, 0, None, ""]]},
        {"marks": [["a", 1]]},
        {"provenance": ["dreamt"]},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused_in_one_sentence(saved: Path, changes: dict[str, Any]) -> None:
    changed(saved, **changes)
    words = r"^before\.json\.gz is damaged \(\w+Error: .*\): measure and save again$"
    with pytest.raises(ValueError, match=words):
        read_measurement(saved)


def test_what_holds_no_measurement_is_refused_in_one_sentence(saved: Path, tmp_path: Path) -> None:
    changed(saved, schema=7)
    with pytest.raises(ValueError, match="has schema 7, this course reads 1: save it again"):
        read_measurement(saved)
    with pytest.raises(ValueError, match="does not exist or is not a file"):
        read_measurement(tmp_path / "none.json.gz")
    saved.write_bytes(gzip.compress(b"[1, 2]"))
    with pytest.raises(ValueError, match=r"before\.json\.gz holds no measurement"):
        read_measurement(saved)


# The difference


WIDE = TrainingRun(tiny("gpt2", dropout=0.1), 16, 128, "bf16-master")


@pytest.mark.parametrize("change", [{"recompute": "full"}, {"model": tiny("llama", layers=3)}], ids=str)
def test_the_rows_are_the_whole_difference_and_change_their_sign_with_the_order(change: Any) -> None:
    before = simulate(WIDE)
    after = simulate(WIDE.replace(**change))
    found = difference(before, after)
    assert sum(row.bytes for row in found.rows) == found.bytes == after.peak - before.peak != 0
    assert (found.rows[-1].change, found.rows[-1].bytes) == ("not attributed", 0)
    assert sum(found.by_kind.values()) == found.bytes
    back = difference(after, before)
    turned_round = {(row.now, row.was, -row.bytes) for row in back.rows}
    assert {(row.was, row.now, row.bytes) for row in found.rows} == turned_round


def made(*tensors: Allocation, phase: str = "backward") -> Measurement:
    """A measurement of step 2 at whose peak these are alive, and a tensor that is not has been before."""
    gone = dataclasses.replace(TENSOR, born=0, died=1)
    events = [(gone.bytes, gone.kind), (-gone.bytes, gone.kind)]
    alive = [dataclasses.replace(item, born=len(events) + number) for number, item in enumerate(tensors)]
    events += [(item.bytes, item.kind) for item in alive]
    timeline = Timeline(events, [Mark(0, 1, phase), Mark(2, 2, phase)])
    kinds = {item.kind: sum(other.bytes for other in alive if other.kind == item.kind) for item in alive}
    peak = MemoryBreakdown(kinds, phase, "peak")
    provenance = Provenance("simulated", "simulated GPU", "2.13.0", "2026-11-23")
    return Measurement(
        peak, {}, timeline, provenance, len(timeline), [gone, *alive], phase_peaks={phase: peak}
    )


WHERE = {"module": "blocks.0.mlp", "phase": "forward", "step": 2, "line": "model.py:42  x = up(x)"}
TENSOR = Allocation("activations", 2048, (512,), "float32", "addmm", born=0, died=None, **WHERE)
OTHER = dataclasses.replace(TENSOR, module="head", operation="mm", bytes=512, shape=(128,))


def what(before: Measurement, after: Measurement) -> list[tuple[str, int, int]]:
    rows = difference(before, after).rows[:-1]
    return [(row.change, (row.now or row.was).count, row.bytes) for row in rows]  # pyrefly: ignore [missing-attribute]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"line": "model.py:57  x = up(x)"}, []),
        ({"module": "blocks.7.mlp"}, []),
        ({"bytes": 4096, "shape": (1024,), "line": "model.py:43"}, [("grew", 1, 2048)]),
        ({"bytes": 1024, "dtype": "bfloat16", "module": "blocks.3.mlp"}, [("shrank", 1, -1024)]),
        ({"kind": "temporaries"}, [("went", 1, -2048), ("came", 1, 2048)]),
        ({"operation": "gelu"}, []),
        ({"operation": "gelu", "bytes": 4096}, [("came", 1, 4096), ("went", 1, -2048)]),
    ],
    ids=str,
)
def test_a_tensor_is_known_again_where_code_moved_and_by_module_and_operation(
    changes: Any, expected: Any
) -> None:
    changed = dataclasses.replace(TENSOR, **changes)
    assert what(made(OTHER, TENSOR), made(changed, OTHER)) == expected


def test_graphs_of_earlier_steps_and_blocks_that_were_added_are_rows_of_their_own() -> None:
    earlier = [dataclasses.replace(TENSOR, step=step) for step in (1, 0, -1)]
    (row, _) = difference(made(TENSOR), made(*earlier, TENSOR)).rows
    assert row.change == "came" and row.now
    assert (row.now.count, row.now.made_in) == (3, "forward, steps -1 to 1")
    blocks = [dataclasses.replace(TENSOR, module=f"blocks.{number}.mlp") for number in range(4)]
    (row, _) = difference(made(*blocks[:2]), made(*blocks)).rows
    assert row.now and (row.was, row.bytes, row.now.count, row.now.module) == (None, 4096, 2, "blocks.*.mlp")


def test_a_peak_that_moved_to_another_phase_is_said_first() -> None:
    old = simulate(WIDE)
    new = simulate(WIDE.replace(micro_batch=1))
    found = difference(old, new)
    assert (old.peak_phase, new.peak_phase) == ("backward", "optimizer")
    sizes = f"{format_bytes(old.peak)} → {format_bytes(new.phase_peaks['backward'].total)}"
    opening = repr(found).splitlines()[0]
    assert opening.startswith("The peak moved from backward to optimizer")
    assert opening.endswith(f"alone: {sizes}.")
    assert "two different moments" in found._repr_html_()


def test_what_a_recording_does_not_hold_is_not_attributed_and_said() -> None:
    whole = simulate(RUN)
    larger = simulate(RUN.replace(micro_batch=4))
    at_peak = from_json(to_json(whole), "")
    assert difference(at_peak, larger).rows == difference(whole, larger).rows
    assert "Of before the allocations at the peak alone are kept" in repr(difference(at_peak, larger))
    few = dataclasses.replace(larger, allocations=larger.largest(10))
    found = difference(whole, few)
    unknown = larger.peak - sum(item.bytes for item in larger.largest(10))
    assert found.rows[-1].bytes == unknown > 0 and sum(row.bytes for row in found.rows) == found.bytes
    small = f"without small ones ({format_bytes(unknown)})"
    assert f"Of after the allocations at the peak alone are kept, {small}." in repr(found)
