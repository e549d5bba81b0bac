"""Two measurements next to each other: every byte of the difference has an owner. And measurements in files."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from engine import simulate, tiny

from course_utils import measure, read_measurement, replay, save_measurement
from course_utils.measurement import Provenance
from course_utils.run import TrainingRun

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
    whole, again = simulate(RUN), read_measurement(saved)
    assert again.allocations == whole.allocations and again.timeline == whole.timeline
    assert [item.line for item in again.allocations] == [item.line for item in whole.allocations]
    assert (again.breakdown, again.moments, again.phase_peaks) == (whole.breakdown, whole.moments, whole.phase_peaks)
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
    cpu = measure(RUN.replace(precision="fp32", attention="eager"), "cpu")
    assert "recorded on a CPU" in str(read_measurement(save_measurement(cpu, tmp_path / "a file")).provenance)


def test_a_file_that_is_not_ours_is_never_overwritten(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    for content in (b"a text", b"", gzip.compress(b'{"schema": 1, "runs": {}}'), saved.read_bytes()[:-9]):
        other.write_bytes(content)
        with pytest.raises(ValueError, match=r"nothing was written: thesis\.txt holds no measurement"):
            save_measurement(simulate(RUN), other)
        assert other.read_bytes() == content
    for path, words in ((tmp_path, "is no file"), (tmp_path / "none" / "a.gz", "there is no folder")):
        with pytest.raises(ValueError, match=words):
            save_measurement(simulate(RUN), path)
    with pytest.raises(TypeError, match="this is a TrainingRun"):
        save_measurement(RUN, tmp_path / "new")  # pyrefly: ignore [bad-argument-type]
    assert sorted(tmp_path.iterdir()) == [saved, other]


@pytest.mark.parametrize(
    "changes",
    [
        {"allocations": [["activations", "512", [1], "float32", "add", "", "forward", 1, 0, None, ""]]},
        {"allocations": [["activations", 512]]},
        {"allocations": 5},
        {"peak_event": "late"},
        {"marks": [["a", 1]]},
        {"changes": [["512", "activations"]]},
        {"breakdown": [{"spells": 4}, "forward", "peak"]},
        {"provenance": ["dreamt"]},
        {"timeline": None, "moments": None},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused_in_one_sentence(saved: Path, changes: dict[str, Any]) -> None:
    changed(saved, **changes)
    with pytest.raises(ValueError, match=r"^before\.json\.gz is damaged \(\w+Error: .*\): measure and save anew$"):
        read_measurement(saved)


def test_what_holds_no_measurement_is_refused_in_one_sentence(saved: Path, tmp_path: Path) -> None:
    changed(saved, schema=7)
    with pytest.raises(ValueError, match="has schema 7, and this course reads 1: save anew"):
        read_measurement(saved)
    with pytest.raises(ValueError, match="is not there"):
        read_measurement(tmp_path / "none.json.gz")
    for content in (b"", b"PK\x03\x04", b'{"schema": 1}', gzip.compress(b"[1, 2"), gzip.compress(b"[1, 2]")):
        saved.write_bytes(content)
        with pytest.raises(ValueError, match=r"before\.json\.gz holds no measurement"):
            read_measurement(saved)


# The difference
