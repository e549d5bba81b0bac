"""Lessons run from shipped recordings alone, as they must where a GPU cannot be simulated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils import TrainingRun, measure
from course_utils.authoring.recordings import lesson_runs
from course_utils.measuring.recorded import from_json, key, load, to_json

ROOT = Path(__file__).parent.parent
LESSONS = sorted(ROOT.glob("notebooks/src/*.py"))


@pytest.mark.parametrize("source", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_needs_no_simulation_where_recordings_are_shipped(source: Path, tmp_path: Path) -> None:
    environment = os.environ | {"COURSE_SOURCE": "recorded", "COURSE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, source], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recorded on a simulated GPU" in done.stdout


def test_every_shipped_recording_is_of_a_run_that_a_lesson_measures() -> None:
    assert set(load()) == {key(run, steps) for run, steps in lesson_runs()}


def test_a_shipped_recording_is_what_the_simulation_still_gives() -> None:
    run = TrainingRun("gpt2", micro_batch=8, seq_len=1024)
    shipped, simulated = measure(run, source="recorded"), measure(run, source="simulated")
    assert shipped.breakdown == simulated.breakdown
    assert shipped.moments == simulated.moments and shipped.phase_peaks == simulated.phase_peaks
    assert list(shipped.timeline.changes) == list(simulated.timeline.changes)
    assert shipped.largest(5) == simulated.largest(5)
    assert shipped.source == "recorded" and "simulated GPU" in str(shipped.provenance)


def test_a_measurement_survives_being_written_and_read() -> None:
    measured = measure(TrainingRun("tiny-gpt", micro_batch=2, seq_len=64), source="simulated")
    again = from_json(to_json(measured), note="read again")
    assert (again.peak, again.peak_phase, again.peak_event) == (measured.peak, measured.peak_phase, measured.peak_event)
    assert again.provenance.note == "read again"


def test_a_run_without_a_recording_is_refused_with_the_list_of_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"no recording of .*gpt2-large.*recorded are") as refused:
        measure(TrainingRun("gpt2-large"), source="recorded")
    assert "gpt2-xl" in str(refused.value)
