"""Recordings: simulated runs as they are shipped, real GPUs' read without a guess, and refusals."""

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine import simulate
from made_up_gpu import line as line_of
from made_up_gpu import ship
from ship_recordings import lesson_runs

from course_utils import TrainingRun, measure
from course_utils.measuring import recorded
from course_utils.measuring.files import thinned, to_json
from course_utils.measuring.recorded import key, load, recordings

RUN = TrainingRun("tiny-llama", 4, 256)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return partial(ship, tmp_path, monkeypatch)


def line(run: TrainingRun = RUN, **changes: Any) -> dict[str, Any]:
    """The line that a GPU would have left of a run, by a simulation's figures."""
    counters = {"allocated": 5000, "reserved": 6000, "driver": 7000, "phases": {}}
    measured = to_json(thinned(simulate(run))) | {"losses": [8.5, 8.25]}
    return line_of(key(run, 2), "run", {"counters": counters, "measured": measured}) | changes


# Simulated runs


def test_every_shipped_recording_is_of_a_run_that_a_lesson_measures() -> None:
    assert set(load()) == {key(run, steps) for run, steps in lesson_runs()}


def test_a_shipped_recording_is_what_the_simulation_still_gives() -> None:
    run = TrainingRun("gpt2", 8, 1024)
    stored = measure(run, source="recorded", device="simulated GPU")
    now = thinned(simulate(run))
    assert stored.breakdown == now.breakdown and stored.moments == now.moments
    assert stored.phase_peaks == now.phase_peaks and stored.largest(5) == now.largest(5)
    assert list(stored.timeline.changes) == list(now.timeline.changes)
    assert stored.source == "recorded" and "simulated GPU" in str(stored.provenance)


@pytest.mark.parametrize("points", [20, 10_000])
def test_a_thinned_measurement_has_the_same_peak_kinds_and_phases(points: int) -> None:
    whole = simulate(RUN)
    short = thinned(whole, points)
    assert short.breakdown == whole.breakdown and short.moments == whole.moments
    at_peak = {kind: curve[short.peak_event - 1] for kind, curve in short.timeline.curves().items()}
    assert all(size == at_peak.get(kind, 0) for kind, size in whole.breakdown.items())
    assert max(short.timeline.totals()) == max(whole.timeline.totals())
    assert short.timeline.step_peaks()[2] == whole.timeline.step_peaks()[2] == whole.peak
    assert len(short.timeline) <= len(whole.timeline) and (points > 20 or len(short.timeline) < 999)
    totals = [0, *whole.timeline.totals()]
    thin = [0, *short.timeline.totals()]
    for before, after in zip(whole.timeline.marks, short.timeline.marks, strict=True):
        assert (after.step, after.phase) == (before.step, before.phase)
        assert thin[after.event] == totals[before.event]
    assert [item.bytes for item in short.largest(30)] == [item.bytes for item in whole.largest(30)]


# Real GPUs


def test_a_recording_from_a_gpu_says_which_and_when(shipped: Any) -> None:
    shipped(line())
    found = measure(RUN, source="recorded")
    assert str(found.provenance) == "recorded on NVIDIA H200 · torch 2.13.0+cu130 · 2026-11-21"
    assert found.breakdown == simulate(RUN).breakdown and found.losses == [8.5, 8.25]
    assert found.counters == {"allocated": 5000, "reserved": 6000, "driver": 7000}


def test_one_of_several_gpus_is_picked_by_name_and_never_by_chance(shipped: Any) -> None:
    shipped(line(), line(device={"name": "NVIDIA A100-SXM4-80GB"}, date="2026-12-01"))
    several = r"is recorded on NVIDIA A100-SXM4-80GB, NVIDIA H200: choose one, as in device="
    with pytest.raises(ValueError, match=several):
        measure(RUN, source="recorded")
    assert "A100" in str(measure(RUN, source="recorded", device="a100").provenance)
    assert [item.device for item in recordings("h200")] == ["NVIDIA H200"] and len(recordings()) == 2


def test_lessons_get_the_simulated_figures_whatever_gpus_are_recorded(
    shipped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainingRun("gpt2", 8, 1024)
    shipped(line(run))
    monkeypatch.setenv("COURSE_SOURCE", "recorded")
    assert "simulated GPU" in str(measure(run).provenance)
    assert "H200" in str(measure(run, source="recorded").provenance)


def test_another_run_or_gpu_is_never_taken_instead(shipped: Any) -> None:
    shipped(line())
    with pytest.raises(ValueError, match=r"no recording of .*micro_batch=3.*recorded are") as refused:
        measure(RUN.replace(micro_batch=3), source="recorded")
    assert "gpt2-xl" in str(refused.value) and "measured, recorded on NVIDIA H200" in str(refused.value)
    with pytest.raises(ValueError, match=r"no recording of .* on B300; recorded are"):
        measure(RUN, source="recorded", device="B300")
    with pytest.raises(ValueError, match="device='H200' picks a recording"):
        measure(RUN, source="simulated", device="H200")


# Files


def test_what_is_shipped_from_gpus_can_be_read_is_kept_whole_and_names_no_folder_and_no_person() -> None:
    private = re.compile(r"(?<![\w.])/(home|root|tmp|usr|work)/|[A-Za-z]:\\\\|[\w.+-]+@[\w-]+\.\w")
    steps = Counter[str]()
    for recording in recorded._gpu_recordings():
        assert recording.device and recording.date
        assert not private.search(json.dumps(recording.line.content)), recording.task
        if recording.kind == "run":
            steps["run"] += bool(recording.parts["simulated"]["sequence"])
            assert recording.status != "measured" or recording.measurement().peak > 0
        elif recording.kind == "history":
            steps["history"] += bool(recording.parts["history"]["sequence"])
        elif recording.kind == "published":
            said = [part for name, part in recording.parts.items() if name.startswith("said ")]
            steps["said"] += sum(bool(part["sequence"]) for part in said)
    assert steps == {"said": 121, "history": 24, "run": 82}, "each step that a GPU executed has a hash"
