"""The command `record`: its list, its file, and what a task sends. No test needs a GPU.

tests/rest/test_record_processes.py ends tasks and the recorder in every way.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch
from engine import simulate, tiny
from made_up_gpu import H200
from made_up_gpu import line as line_of

from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import compare_with_gpu, snapshot_of
from course_utils.cli import main as front_door
from course_utils.evidence import hardware, one_task, record
from course_utils.evidence.hardware import Prepared
from course_utils.evidence.history import unpacked
from course_utils.evidence.live_notebook import execute_live
from course_utils.evidence.record import has_room, judged, to_do
from course_utils.evidence.sequence import release_line, sequence_hash
from course_utils.evidence.tasks import Task, recording_list
from course_utils.interactive.course_files import ROOT, scripts
from course_utils.measuring import devices
from course_utils.measuring.devices import Cuda, Host, count_peaks
from course_utils.measuring.files import Line, append, read_lines, repair
from course_utils.measuring.live import KernelRefused, ready
from course_utils.planning.twin import fits
from course_utils.run import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun
from course_utils.units import GB, MB

SMALL = TrainingRun(tiny("gpt2"), 2, 64, "fp32", attention="eager")
OUT_OF_IT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.38 GiB.")


def task(name: str = "a task", **more: Any) -> Task:
    return Task(name, "context", "a test", **more)


def fails(error: Exception) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    return failing


# The file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one recording."""
    append(tmp_path / "gpu.jsonl", line_of("t", "run", {}))
    return tmp_path / "gpu.jsonl"


def test_a_half_written_last_line_is_cut_off_and_nothing_else(file):
    whole = file.read_bytes()
    append(file, line_of("Ψ", "run", {}))
    both = file.read_bytes()
    for length in range(len(whole) + 1, len(both)):
        file.write_bytes(both[:length])
        repair(file)
        assert file.read_bytes() == whole
    repair(file)
    assert file.read_bytes() == whole


def test_nothing_of_a_line_stays_that_could_not_be_written(file, monkeypatch):
    whole = file.read_bytes()
    monkeypatch.setattr(os, "fsync", fails(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        append(file, line_of("t", "run", {}))
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "said"), [(b'{"schema": 99}\n', "a JSON object of schema 1"), (b"\xff\xfe\n", "is not JSON")]
)
def test_what_is_no_recording_is_refused_by_file_and_line(file, content, said):
    with file.open("ab") as stream:
        stream.write(content)
    with pytest.raises(ValueError, match=rf"gpu\.jsonl, line 2.*{said}"):
        read_lines(file)


# What is to be done


def test_tasks_share_the_gpu_as_far_as_its_memory_goes_and_one_that_has_to_be_alone_is() -> None:
    large, small, alone = task(needs=60 * GB), task(needs=10 * GB), task(alone=True)
    beside_large: list[Any] = [SimpleNamespace(task=large)]
    beside_alone: list[Any] = [SimpleNamespace(task=alone)]
    assert has_room(large, [], 50 * GB), "alone on the GPU, whatever it needs"
    assert has_room(small, beside_large, 80 * GB) and not has_room(large, beside_large, 120 * GB)
    assert not has_room(alone, beside_large, 80 * GB) and not has_room(small, beside_alone, 80 * GB)
    commands = [record.command_of(shared=True)(one, Path("x")) for one in (small, alone)]
    assert ["--shared" in command for command in commands] == [True, False]


def test_only_what_fits_and_the_card_can_do_is_tried_in_the_order_of_the_list():
    tasks = recording_list()
    fitting = [item for item in tasks if item.run is None or fits(item.run, 15 * GB)]
    assert to_do(tasks, H200 | {"free": 15 * GB}, []) == fitting != list(tasks)
    old = {"device": {**H200["device"], "capability": [7, 5]}, "free": 15 * GB}
    names = {item.run.precision.name for item in to_do(tasks, H200 | old, []) if item.run}
    assert names == {"amp-fp16", "fp32", "fp16-master"}


def test_a_later_call_goes_on_where_the_last_one_ended_for_this_device_and_torch():
    tasks = [task(name) for name in ("done", "failed", "too large", "refused", "untried")]
    ends = {"done": "measured", "failed": "crashed", "too large": "out of memory", "refused": "refused"}
    there = [line_of(name, "context", {}, status=status) for name, status in ends.items()]

    def left(**changes: Any) -> list[str]:
        lines = [Line(Path("gpu.jsonl"), number, one | changes) for number, one in enumerate(there)]
        return [item.name for item in to_do(tasks, H200, lines)]

    assert left() == ["untried", "failed"]
    assert left(torch="2.14") == left(device={"name": "NVIDIA A100"}) == [item.name for item in tasks]


def test_the_list_covers_every_choice_once():
    tasks = recording_list()
    runs = [item.run for item in tasks if item.kind == "run" and item.run is not None]
    assert len({item.name for item in tasks}) == len(tasks) and 60 <= len(runs) <= 90
    assert {run.attention for run in runs} == set(ATTENTIONS)
    assert {run.precision.name for run in runs} == set(PRECISIONS) - {"fp8"}
    assert {run.optimizer.algorithm for run in runs} == {choice.algorithm for choice in OPTIMIZERS.values()}
    assert {run.recompute for run in runs} >= set(RECOMPUTES)
    published = [name for item in tasks if item.kind == "published" for name in item.topic.split(",")]
    assert len(published) == len(set(published)) > 100


# The command


def test_the_list_needs_no_torch():
    command = [sys.executable, "-S", "-E", "-m", "course_utils", "record", "--list", "--only", "gpt2-xl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [row] = [row for row in done.stdout.splitlines() if "micro_batch=32, seq_len=1024) " in row]
    assert row.split()[1:3] == ["134.5", "GB"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs --out"),
        (("--out", "x", "--minutes", "0"), "give a time limit"),
        (("--out", str(ROOT / "README.md")), "which is not a folder"),
        (("--out", "x", "--only", "gpt5"), "No task matches"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert front_door.main(["record", *arguments]) == 1
    out, errors = capsys.readouterr()
    assert out == "" and said in errors and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# What a task's process does, with a device whose every answer is known


class Scripted(Host):
    """The CPU with counters that the test makes up."""

    def __init__(self, *peaks: int) -> None:
        self.told_peaks = iter(peaks)

    def peaks(self) -> tuple[int, int]:
        peak = next(self.told_peaks, 0)
        return peak, 2 * peak

    def in_use(self) -> int:
        return 7 * MB

    def free(self) -> int:
        return GB


def test_peaks_are_those_of_the_last_step_and_micro_batches_count_to_their_phase():
    # each phase's peak is read when it ends: nothing before "forward", then five, in each of two steps
    device = Scripted(0, 900, 900, 900, 900, 900, 0, 50, 60, 90, 80, 40)
    counted = count_peaks(ready(SMALL, device)[0].step, device, steps=2, before=(10, 30))
    phases = {"forward": 40, "loss": 50, "backward": 80, "optimizer": 70, "zero_grad": 30}
    assert counted == {"allocated": 80, "reserved": 150, "driver": 7 * MB, "phases": phases}
    device = Scripted(0, 50, 60, 70, 80, 20, 95, 40, 30)
    training, _ = ready(SMALL.replace(accumulation_steps=2), device)
    counted = count_peaks(training.step, device, steps=1, before=(0, 0))
    assert counted["phases"] == {"forward": 80, "loss": 60, "backward": 95, "optimizer": 40, "zero_grad": 30}


RUN = Task("a run", "run", "", SMALL)


def parts_of(item: Task, device: Host, shared: bool = False) -> dict[str, dict[str, Any]]:
    sent: dict[str, dict[str, Any]] = {}
    one_task.perform(item, device, lambda part, **content: sent.update({part: content}), shared)
    return json.loads(json.dumps(sent))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Runs on a `Host` say that they were on a CPU: there is no GPU whose name could be asked."""
    provenance_of = one_task.provenance_of
    monkeypatch.setattr(one_task, "provenance_of", lambda _: provenance_of("cpu"))


def test_a_run_is_counted_tracked_estimated_and_simulated():
    parts = parts_of(RUN, Scripted())
    simulated = simulate(SMALL)
    by_kind = {kind: size for kind, size in simulated.breakdown.items() if size}
    assert parts["simulated"]["breakdown"][0] == by_kind
    assert parts["simulated"]["reserved"] == replay(simulated).peak_reserved > simulated.peak
    assert parts["simulated"]["sequence"] == {release_line(): sequence_hash(SMALL)}
    assert parts["estimate"]["total"] == sum(parts["estimate"]["by_kind"].values()) > 0
    assert list(parts)[:2] == ["estimate", "simulated"]  # said before the device was asked
    assert parts["measured"]["losses"][0] > 0 and parts["measured"]["changes"]
    # the driver's counter has other programs' bytes where others use the GPU
    assert "driver" in parts["counters"] and "driver" not in parts_of(RUN, Scripted(), True)["counters"]


@pytest.mark.parametrize(
    ("error", "part", "verdict"),
    [
        (OUT_OF_IT, "out_of_memory", ("out of memory", "")),
        (KernelRefused("torch has no cudnn kernel"), "refused", ("refused", "torch has no cudnn kernel")),
    ],
)
def test_a_run_that_the_gpu_cannot_do_is_recorded_and_still_simulated(error, part, verdict, monkeypatch):
    monkeypatch.setattr(one_task, "count_peaks", fails(error))
    parts = parts_of(RUN, Scripted())
    assert set(parts) == {part, "estimate", "simulated"}
    assert part == "refused" or ("not fit this GPU" in parts[part]["message"] and parts[part]["free"] == GB)
    assert judged(parts, 0, "") == verdict


def test_other_errors_are_told_in_one_line_and_end_the_task(monkeypatch, tmp_path):
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nat /some/where")
    monkeypatch.setattr(one_task, "perform", fails(error))
    arguments = ["--results", str(tmp_path / "parts"), "--seconds", "600", "--task"]
    assert one_task.main([*arguments, recording_list()[0].name]) == 1
    said = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert record.read_parts(tmp_path / "parts") == {"error": {"error": said}}


# What no simulation sees


def test_scratch_is_what_the_device_counts_beyond_the_tensors_and_never_negative(monkeypatch):
    double = Prepared("double", lambda: torch.ones(1000), lambda x: (x + x) * 2)  # two tensors of 4,096 bytes
    impossible = Prepared("impossible", lambda: torch.ones(2), lambda x: x @ torch.ones(3))
    monkeypatch.setattr(hardware, "prepared_operations", lambda _: [double, impossible, double])
    told, refused, negative = hardware.scratch_bytes(Scripted(8192 + 512, 0))
    assert told == {"operation": "double", "counted": 8704, "tracked": 8192, "scratch": 512}
    assert refused["operation"] == "impossible" and refused["refused"].startswith("RuntimeError: ")
    assert set(negative) == {"operation", "unsettled"}


def test_a_counter_that_falls_late_is_read_when_it_has_fallen_or_given_up(monkeypatch):
    device = Host()
    monkeypatch.setattr(hardware.time, "sleep", lambda _: None)
    monkeypatch.setattr(device, "allocated", partial(next, iter([100, 70, 50, 40, 40])))
    assert hardware.settled_bytes(device) == 40
    monkeypatch.setattr(device, "allocated", partial(next, count()))
    with pytest.raises(hardware.Unsettled, match="still change after 200 readings"):
        hardware.settled_bytes(device)


def test_the_history_of_a_run_begins_before_its_first_tensor_and_may_run_out_of_memory(monkeypatch):
    order: list[str] = []
    snapshot = snapshot_of(replay(simulate(SMALL)))

    def build(*arguments: Any) -> Any:
        order.append("first tensor")
        return ready(*arguments)

    monkeypatch.setattr(torch.cuda, "init", lambda: order.append("context"))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: order.append("history"))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(one_task, "ready", build)
    item = Task("history", "history", "", SMALL)
    part = parts_of(item, Scripted())["history"]
    assert order == ["context", "history", "first tensor"]
    assert part["exact"] and compare_with_gpu(unpacked(part["history"])).exact and len(part["steps"]) == 2
    assert part["sequence"] == {release_line(): sequence_hash(SMALL)}
    monkeypatch.setattr(one_task, "ready", fails(OUT_OF_IT))
    parts = parts_of(item, Scripted())
    assert list(parts) == ["out_of_memory"] and judged(parts, 0, "") == ("out of memory", "")


def test_a_gpus_facts_are_its_name_capability_memory_and_driver(monkeypatch):
    here = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * GB)
    answers = iter([subprocess.CompletedProcess([], code, "580.1\n580.1\n") for code in (0, 9)])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: next(answers))
    assert Cuda().facts()["device"] == H200["device"]
    assert Cuda().facts()["device"]["driver"] == "", "nvidia-smi fails"


# Times and lessons


def test_a_notebook_tells_what_was_live_why_not_and_what_failed(tmp_path):
    path = tmp_path / "lesson.ipynb"
    code = nbformat.v4.new_code_cell
    cells = [
        code("import os; print('live on a card · torch', os.environ['COURSE_SOURCE'])"),
        code("print('live on a GPU: no; needs 134.5 GB, a card has 15.0 GB free')"),
        code("1 / 0", metadata={"tags": ["raises-exception"]}),
        code("# what fails\nraise ValueError('x\\ny')"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    before = path.read_bytes()
    found = execute_live(path)
    assert (found["cells"], found["live"]) == (4, 1) and found["seconds"] > 0
    assert found["not_live"] == ["needs 134.5 GB, a card has 15.0 GB free"]
    assert found["failed"] == ["# what fails: ValueError: x"]
    assert path.read_bytes() == before


def test_a_script_is_counted_and_its_speed_is_the_median_after_five_steps(tmp_path):
    path = tmp_path / "train_01.py"
    path.write_text(
        "for n in range(1, 9):\n    print(f'step {n}: loss 1.0, {1000 * n:,} tokens/s, peak 1 GB')\n"
    )
    found = one_task.counted_script(path)
    assert found["tokens_per_second"] == 7000 and len(found["sha256"]) == 64
    assert {"allocated", "reserved"} < set(found)
    names = [task.name for task in recording_list() if task.kind == "script"]
    assert names == [f"script: {path.name}" for path in scripts()] != []
