"""Recordings: lessons run from the shipped ones alone, real GPUs' are read without a guess, and refusals."""

import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine import simulate
from ship_recordings import lesson_runs

from course_utils import TrainingRun, measure
from course_utils.evidence.published import published_rows, simulated
from course_utils.measuring import recorded, sequence
from course_utils.measuring.recorded import Recording, key, load, read_folder, recordings, thinned, to_json
from course_utils.measuring.recording_file import append
from course_utils.measuring.sequence import hash_of, kept_hash, sequence_hash
from course_utils.models import TransformerConfig

ROOT = Path(__file__).parent.parent
QUICK = ("04_counting_parameters", "18_who_is_right")
LESSONS = [
    pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.sweep(0), id=path.stem)
    for path in sorted(ROOT.glob("notebooks/src/*.py"))
]
"""All of them under --full: a run that nobody has listed shows there alone, as it takes minutes."""

WITHOUT_BLOCKS = (
    "import runpy, sys; from course_utils.measuring import on_gpu; on_gpu.print = lambda *_: None; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
"""Runs a lesson; blocks of plain code, for which there are no recordings, do not say where they ran."""


@pytest.mark.parametrize("source", LESSONS)
def test_a_lesson_measures_no_run_by_simulation_where_recordings_are_shipped(
    source: Path, tmp_path: Path
) -> None:
    environment = os.environ | {
        "COURSE_SOURCE": "recorded",
        "COURSE_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BLOCKS, source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    here = done.stdout.replace("recorded on a simulated GPU · torch", "")
    of_scripts = (
        r"\(simulated GPU · torch .+ taken, .+|→ simulated GPU · torch .+"  # which `watch` runs, and compares
    )
    measured = re.sub(of_scripts, "", here)
    # where a lesson says where it measured, it was a recording
    assert "simulated GPU · torch" not in measured


def test_every_shipped_recording_is_of_a_run_that_a_lesson_measures() -> None:
    assert set(load()) == {key(run, steps) for run, steps in lesson_runs()}


def test_a_shipped_recording_is_what_the_simulation_still_gives() -> None:
    run = TrainingRun("gpt2", micro_batch=8, seq_len=1024)
    shipped = measure(run, source="recorded", device="simulated GPU")
    simulated = thinned(measure(run, source="simulated"))
    assert shipped.breakdown == simulated.breakdown
    assert shipped.moments == simulated.moments and shipped.phase_peaks == simulated.phase_peaks
    assert list(shipped.timeline.changes) == list(simulated.timeline.changes)
    assert shipped.largest(5) == simulated.largest(5)
    assert shipped.source == "recorded" and "simulated GPU" in str(shipped.provenance)


def test_a_run_without_a_recording_is_refused_with_the_list_of_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"no recording of .*gpt2-large.*recorded are") as refused:
        measure(TrainingRun("gpt2-large"), source="recorded")
    assert "gpt2-xl" in str(refused.value)


RUN = TrainingRun("tiny-llama", 4, 256)


@pytest.mark.parametrize("points", [5, 50, 10_000])
def test_a_thinned_measurement_has_the_same_peak_kinds_and_phases(points: int) -> None:
    whole = simulate(RUN)
    short = thinned(whole, points)
    assert short.breakdown == whole.breakdown and short.moments == whole.moments
    at_peak = {kind: curve[short.peak_event - 1] for kind, curve in short.timeline.curves().items()}
    assert {kind: size for kind, size in at_peak.items() if size} == {
        k: v for k, v in whole.breakdown.items() if v
    }
    assert max(short.timeline.totals()) == max(whole.timeline.totals())
    assert short.timeline.totals()[-1] == whole.timeline.totals()[-1]
    assert short.timeline.step_peaks()[2] == whole.timeline.step_peaks()[2] == whole.peak
    assert [(mark.step, mark.phase) for mark in short.timeline.marks] == [
        (mark.step, mark.phase) for mark in whole.timeline.marks
    ]
    assert len(short.timeline) <= len(whole.timeline)


def test_at_the_beginning_of_each_phase_a_thinned_timeline_says_what_the_whole_one_says() -> None:
    whole = simulate(RUN)
    short = thinned(whole, 20)
    assert len(short.timeline) < len(whole.timeline) / 3
    totals = [0, *whole.timeline.totals()]
    thin = [0, *short.timeline.totals()]
    for before, after in zip(whole.timeline.marks, short.timeline.marks, strict=True):
        assert thin[after.event] == totals[before.event]

    assert [item.bytes for item in short.largest(30)] == [item.bytes for item in whole.largest(30)]
    assert len(list(short.alive_at(short.peak_event))) == min(
        150, len(list(whole.alive_at(whole.peak_event)))
    )


def line(run: TrainingRun = RUN, **changes: Any) -> dict[str, Any]:
    """The line that a GPU of this name would have left, by a simulation's figures."""
    counters = {"allocated": 5000, "reserved": 6000, "driver": 7000, "phases": {}}
    measured = to_json(thinned(simulate(RUN))) | {"losses": [8.5, 8.25]}
    device = {
        "name": changes.pop("device", "NVIDIA H200"),
        "capability": [9, 0],
        "memory": 1,
        "driver": "580",
    }
    content = {
        "task": key(run, 2), "kind": "run", "status": "measured", "device": device, "torch": "2.13.0+cu130",
        "date": "2026-11-21", "commit": "abc", "steps": 2, "detail": "",
        "parts": {"counters": counters, "measured": measured},
    }  # fmt: skip
    return content | changes


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ship these lines and no others."""

    def ship(*lines: dict[str, Any]) -> None:
        for number, content in enumerate(lines):
            append(tmp_path / f"{number}.jsonl", content)
        monkeypatch.setattr(recorded, "_gpu_recordings", lambda: read_folder(tmp_path))

    return ship


def test_a_recording_from_a_gpu_says_which_and_when(shipped: Any) -> None:
    shipped(line())
    found = measure(RUN, source="recorded")
    assert str(found.provenance) == "recorded on NVIDIA H200 · torch 2.13.0+cu130 · 2026-11-21"
    assert found.breakdown == simulate(RUN).breakdown and found.losses == [8.5, 8.25]
    assert found.counters == {"allocated": 5000, "reserved": 6000, "driver": 7000}


def test_one_of_several_gpus_is_picked_by_name_and_never_by_chance(shipped: Any) -> None:
    shipped(line(), line(device="NVIDIA A100-SXM4-80GB", date="2026-12-01"))
    with pytest.raises(
        ValueError, match=r"is recorded on NVIDIA A100-SXM4-80GB, NVIDIA H200: choose one, as in device="
    ):
        measure(RUN, source="recorded")
    assert "A100" in str(measure(RUN, source="recorded", device="a100").provenance)
    assert "H200" in str(measure(RUN, source="recorded", device="H200").provenance)
    assert [item.device for item in recordings("h200")] == ["NVIDIA H200"] and len(recordings()) == 2


def test_of_several_recordings_on_one_gpu_the_newest_is_taken(shipped: Any) -> None:
    shipped(line(torch="2.14.0", date="2026-12-01"), line(), line(status="crashed", date="2027-01-01"))
    assert "torch 2.14.0 · 2026-12-01" in str(measure(RUN, source="recorded").provenance)


def test_lessons_get_the_simulated_figures_whatever_gpus_are_recorded(
    shipped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainingRun("gpt2", 4, 512)
    shipped(line(run))
    monkeypatch.setenv("COURSE_SOURCE", "recorded")
    assert "simulated GPU" in str(measure(run).provenance)
    assert "H200" in str(measure(run, source="recorded").provenance)


def test_another_run_or_gpu_is_never_taken_instead(shipped: Any) -> None:
    shipped(line())
    with pytest.raises(ValueError, match=r"no recording of .*micro_batch=3.*recorded are") as refused:
        measure(RUN.replace(micro_batch=3), source="recorded")
    assert "gpt2-xl" in str(refused.value) and "measured, recorded on NVIDIA H200" in str(refused.value)
    for run, device in ((RUN.replace(micro_batch=3), "H200"), (RUN, "B300")):
        with pytest.raises(ValueError, match=f"no recording of .* on {device}; recorded are"):
            measure(run, source="recorded", device=device)


def test_a_device_goes_with_recordings_alone() -> None:
    with pytest.raises(ValueError, match="device='H200' picks a recording"):
        measure(RUN, source="simulated", device="H200")


def test_a_run_that_ran_out_of_memory_says_so(shipped: Any) -> None:
    message = "gpt2-xl does not fit this GPU."
    shipped(line(status="out of memory", parts={"out_of_memory": {"message": message}}))
    with pytest.raises(ValueError, match=f"on NVIDIA H200, 2026-11-21: out of memory. {message}"):
        measure(RUN, source="recorded")


def test_a_damaged_recording_is_named(shipped: Any) -> None:
    damaged = line()
    del damaged["parts"]["measured"]["breakdown"]
    shipped(damaged)
    with pytest.raises(ValueError, match=r"0\.jsonl, line 1 is damaged: KeyError: 'breakdown'"):
        measure(RUN, source="recorded")


def test_the_drivers_counter_is_missing_where_other_tasks_shared_the_gpu(shipped: Any) -> None:
    shared = line()
    del shared["parts"]["counters"]["driver"]
    shipped(shared)
    assert measure(RUN, source="recorded").counters == {"allocated": 5000, "reserved": 6000}


@pytest.mark.parametrize("by", [gzip, lzma], ids=lambda module: module.__name__)
def test_a_compressed_file_is_read_like_any_other(by: Any, tmp_path: Path) -> None:
    append(tmp_path / "gpu.jsonl", line())
    plain = read_folder(tmp_path)
    name = "gpu.jsonl.gz" if by is gzip else "gpu.jsonl.xz"
    (tmp_path / name).write_bytes(by.compress((tmp_path / "gpu.jsonl").read_bytes()))
    (tmp_path / "gpu.jsonl").unlink()
    assert [item.parts for item in read_folder(tmp_path)] == [item.parts for item in plain] != []


def test_a_python_without_lzma_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setitem(sys.modules, "lzma", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shipped recordings need lzma, but this Python was built without"):
        load()


def test_what_is_shipped_from_gpus_can_be_read() -> None:
    for recording in recordings():
        assert recording.device and recording.date and str(recording).endswith(recording.date)
        if recording.kind == "run" and recording.status == "measured":
            assert recording.measurement().peak > 0


# A recording belongs to what the GPU executed


def recorded_steps() -> Iterator[Any]:
    """Each step that a GPU executed: the hashes kept of it, and what hashes its simulation now."""
    for item in recorded._gpu_recordings():
        if item.kind == "run":
            now = partial(sequence_hash, run_of(item.task.removesuffix(" steps=2")))
            yield pytest.param(item.parts["simulated"]["sequence"], now, id=f"{item.device} {item.task}")
        elif item.kind == "history":
            now = partial(sequence_hash, run_of(item.task.removeprefix("history of ").rpartition(", ")[0]))
            yield pytest.param(item.parts["history"]["sequence"], now, id=f"{item.device} {item.task}")
        elif item.kind == "published":
            for name, said in item.parts.items():
                if name.startswith("said "):
                    now = partial(published_hash, name.removeprefix("said "), item)
                    yield pytest.param(said["sequence"], now, id=f"{item.device} {name}")


def run_of(code: str) -> TrainingRun:
    return eval(code, {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig})


def published_hash(name: str, item: Recording) -> str:
    """The hash of a published step on such a card, with the workspaces of the torch that recorded it."""
    [row] = [row for row in published_rows() if row.id == name]
    content = item.line.content
    major, minor = map(int, content["torch"].split(".")[:2])
    capability = tuple(content["device"]["capability"])
    return hash_of(simulated(replace(row, capability=capability, torch=(major, minor)))[0].allocations)


RECORDED_STEPS = list(recorded_steps())


def test_every_step_that_a_gpu_executed_has_a_hash() -> None:
    names = [str(step.id) for step in RECORDED_STEPS]
    kinds = Counter(word for name in names for word in ("said ", "history of ", " steps=") if word in name)
    assert kinds == {"said ": 121, "history of ": 24, " steps=": 82}


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("hashes", "now"), RECORDED_STEPS)
def test_the_course_still_takes_the_step_that_was_recorded(
    hashes: dict[str, str], now: Callable[[], str]
) -> None:
    """If it does not, delete the recording's line, and record it again."""
    assert now() == kept_hash(hashes)


def test_the_hash_of_another_release_of_torch_stands_in_where_none_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence, "release_line", lambda: "2.12")
    assert kept_hash({"2.11": "a", "2.12": "b", "2.13": "c"}) == "b"
    assert kept_hash({"2.11": "a", "2.13": "c"}) == "c"


def test_what_is_shipped_names_no_folder_and_no_person() -> None:
    private = re.compile(r"(?<![\w.])/(home|root|tmp|usr|work)/|[A-Za-z]:\\\\|[\w.+-]+@[\w-]+\.\w")
    for item in recorded._gpu_recordings():
        assert not private.search(json.dumps(item.line.content)), item.task


def test_a_file_of_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setattr("course_utils.measuring.recording_file.SCHEMA", 99)
    with pytest.raises(ValueError, match="has schema 1; this version of the course reads 99"):
        load()
