"""The command `record`: a hang, crash or Ctrl-C may cost only the task that it hits. No test needs a GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch
from engine import simulate

from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import compare_with_gpu, snapshot_of
from course_utils.evidence import hardware, one_task, published, record
from course_utils.evidence import tasks as tasks_module
from course_utils.evidence.hardware import Prepared, prepared_operations
from course_utils.evidence.history import unpacked
from course_utils.evidence.live_notebook import execute_live
from course_utils.evidence.published import TEN, published_rows
from course_utils.evidence.record import Command, RecordingError, chosen, has_room, judged, to_do
from course_utils.evidence.tasks import Task, recording_list
from course_utils.measuring import devices
from course_utils.measuring.counting import count_peaks, time_calls
from course_utils.measuring.devices import Cuda, Host
from course_utils.measuring.live import KernelRefused, ready
from course_utils.measuring.recording_file import Line, append, read_lines, repair
from course_utils.measuring.sequence import release_line, sequence_hash
from course_utils.measuring.simulated import simulated_gpu
from course_utils.planning.twin import fits
from course_utils.run import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun
from course_utils.units import GB, MB, MiB

ROOT = Path(__file__).resolve().parent.parent
SMALL = TrainingRun("tiny-gpt", 2, 64, "fp32", attention="eager")
H200 = {
    "device": {"name": "NVIDIA H200", "capability": [9, 0], "memory": 150 * GB, "driver": "580.1"},
    "torch": "2.13.0+cu130",
    "free": 140 * GB,
}
ORIGIN = {"device": H200["device"], "torch": H200["torch"], "commit": "abc"}


def python(code: str) -> Command:
    """In place of a task's process: this code, which finds the path of its results in `results`."""

    def command(task: Task, results: Path) -> list[str]:
        send = "def send(**part):\n    open(results, 'a').write(json.dumps(part) + chr(10))\n"
        start = f"import json, os, sys, time\nresults, name = {str(results)!r}, {task.name!r}\n"
        return [sys.executable, "-c", f"{start}{send}{code}"]

    return command


def task(name: str = "a task", seconds: float = 60.0, **more: Any) -> Task:
    return Task(name, "context", "a test", seconds=seconds, **more)


def recorded(
    tmp_path: Path, code: str, *tasks: Task, seconds: float = 120.0, jobs: int = 1
) -> list[dict[str, Any]]:
    """The content of the file after `tasks`."""
    file = tmp_path / "gpu.jsonl"
    deadline = time.monotonic() + seconds
    assert record.record(tasks or (task(),), file, H200, deadline, jobs, python(code)) == 0
    return [line.content for line in read_lines(file)] if file.exists() else []


def fails(error: Exception) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    return failing


# Whatever happens to a task


def test_a_result_says_where_it_is_from_and_how_it_went(tmp_path):
    [line] = recorded(tmp_path, "send(part='context', context=5)")
    assert line["status"] == "measured" and line["parts"] == {"context": {"context": 5}}
    assert line["device"] == H200["device"] and line["torch"] == H200["torch"] and line["commit"]
    assert (line["schema"], line["task"], line["kind"], line["steps"]) == (1, "a task", "context", 2)


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("os.kill(os.getpid(), 11)", "crashed", "ended by signal 11"),
        ("print('CUDA says no', file=sys.stderr); sys.exit(3)", "crashed", "exit code 3; CUDA says no"),
        ("send(part='error', error='KeyError: 1'); sys.exit(1)", "failed", "KeyError: 1"),
        ("send(part='out_of_memory', message='too large')", "out of memory", ""),
        ("send(part='refused', message='no such kernel')", "refused", "no such kernel"),
        ("os.unlink(results)", "failed", "it ended without a result"),
    ],
)
def test_however_a_task_ends_it_is_recorded_and_the_next_is_done(tmp_path, code, status, detail):
    lines = recorded(tmp_path, f"send(part='first')\n{code}", task("one"), task("two"))
    assert [(line["task"], line["status"], line["detail"]) for line in lines] == [
        ("one", status, detail),
        ("two", status, detail),
    ]


def test_a_task_that_hangs_is_ended_with_all_that_it_started_and_what_it_had_is_kept(tmp_path):
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "send(part='first', child=child.pid)\n"
        "open(results, 'a').write('{\"part\": \"half')\n"
        "time.sleep(600)"
    )
    [line] = recorded(tmp_path, code, task(seconds=3))
    assert (line["status"], line["detail"]) == ("timed out", "after 3 s")
    assert list(line["parts"]) == ["first"]
    assert ended(line["parts"]["first"]["child"])


def ended(process: int) -> bool:
    """True if it ends within a minute; one that has ended and that nobody has waited for counts."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    return False


def test_when_time_is_up_what_runs_is_ended_and_done_by_the_next_call(tmp_path, capsys):
    assert recorded(tmp_path, "time.sleep(600)", task("one"), task("two"), seconds=2) == []
    assert "2 tasks are left: run the same command again" in capsys.readouterr().out
    lines = recorded(tmp_path, "send(part='x')", task("one"), task("two"))
    assert [line["task"] for line in lines] == ["one", "two"]


def test_several_tasks_run_at_a_time(tmp_path):
    meet = (
        f"open({str(tmp_path)!r} + '/' + name, 'w').close()\n"
        f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.01)\n"
        "send(part='x')"
    )
    lines = recorded(tmp_path / "out", meet, task("one"), task("two"), jobs=2)
    assert [line["status"] for line in lines] == ["measured", "measured"] and lines[0]["jobs"] == 2


def test_tasks_share_the_gpu_as_far_as_its_memory_goes_and_one_that_has_to_be_alone_is() -> None:
    def running(one: Task) -> Any:
        return SimpleNamespace(task=one)

    large = task(needs=60 * GB)
    small = task(needs=10 * GB)
    alone = task(alone=True)
    assert has_room(large, [], 50 * GB), "alone on the GPU, whatever it needs"
    assert has_room(small, [running(large)], 80 * GB)
    assert not has_room(large, [running(large)], 120 * GB)
    assert not has_room(alone, [running(small)], 80 * GB)
    assert not has_room(small, [running(alone)], 80 * GB)
    commands = [record.command_of(shared=True)(one, Path("x")) for one in (small, alone)]
    assert ["--shared" in command for command in commands] == [True, False]


HANG = """
send(part="x")
if name == "times of precision":
    open({pid!r}, "w").write(f"{{os.getpid()}} end")
    time.sleep(600)
"""

RECORDER = """
import signal, sys; sys.path.insert(0, 'tests')
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
import test_record as t
from course_utils.cli import main as front_door
from course_utils.evidence import record
record.device_facts = lambda *_: t.H200
record.command_of = lambda shared: t.python({code!r})
sys.exit(front_door.main(['record', '--out', {out!r}, '--minutes', '5', '--only', 'times of']))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a signal cannot be sent there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_stopped_its_task_ends_and_a_later_call_does_the_rest(tmp_path, number, monkeypatch):
    pid = tmp_path / "pid"
    code = RECORDER.format(code=HANG.format(pid=str(pid)), out=str(tmp_path))
    command = [sys.executable, "-c", code]
    started = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (pid.exists() and pid.read_text().endswith("end")):
        time.sleep(0.1)
        assert started.poll() is None
    started.send_signal(number)
    told, errors = started.communicate(timeout=600)
    assert started.returncode == 130 and errors == ""
    assert "Stopped." in told and "the same command does the others" in told
    assert ended(int(pid.read_text().split()[0]))
    file = tmp_path / "nvidia-h200.jsonl"
    assert [line.content["task"] for line in read_lines(file)] == ["times of recomputation"]
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])  # a machine that stopped while it wrote
    tasks = chosen("times of")
    record.record(tasks, file, H200, time.monotonic() + 120, 1, python("send(part='x')"))
    assert [line.content["task"] for line in read_lines(file)] == [item.name for item in tasks]
    assert file.read_bytes().startswith(whole)


def test_a_full_disk_is_named_and_the_file_holds_whole_lines_only(tmp_path, monkeypatch):
    """The file may grow to a few kB only: the second line begins, and cannot be finished."""
    import resource

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    code = RECORDER.format(code="send(part='x', text='x' * 3000)", out=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=ROOT, text=True, capture_output=True, preexec_fn=limited
    )
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert (
        "nvidia-h200.jsonl cannot be written: File too large. nvidia-h200.jsonl holds whole results" in said
    )
    assert [line.content["task"] for line in read_lines(tmp_path / "nvidia-h200.jsonl")] == [
        "times of recomputation"
    ]


# The file


def a_line(**changes: Any) -> dict[str, Any]:
    content = {
        "task": "t",
        "kind": "run",
        "status": "measured",
        "date": "2026-11-21",
        "steps": 2,
        "parts": {},
    }
    return {**ORIGIN, **content, **changes}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one recording."""
    append(tmp_path / "gpu.jsonl", a_line())
    return tmp_path / "gpu.jsonl"


def test_a_half_written_last_line_is_cut_off_and_nothing_else(file):
    whole = file.read_bytes()
    append(file, a_line(task="Ψ"))
    both = file.read_bytes()
    for length in range(len(whole) + 1, len(both)):
        file.write_bytes(both[:length])
        repair(file)
        assert file.read_bytes() == whole
    repair(file)
    assert file.read_bytes() == whole
    repair(file.with_name("none.jsonl"))


def test_nothing_of_a_line_stays_that_could_not_be_written(file, monkeypatch):
    whole = file.read_bytes()
    monkeypatch.setattr(os, "fsync", fails(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        append(file, a_line())
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]\n", "is not a recording"),
        (b'{"schema": 99}\n', "each line must be a JSON object of schema 1"),
        (b"\xff\xfe\n", "is not JSON"),
        (json.dumps({"schema": 1, **a_line(parts=3)}).encode(), "no usable 'parts': it holds 3"),
        (json.dumps({"schema": 1, **a_line(device={})}).encode(), "does not name its device"),
    ],
)
def test_what_is_no_recording_is_refused_by_file_and_line(file, content, said):
    with file.open("ab") as stream:
        stream.write(content)
    with pytest.raises(ValueError, match=rf"gpu\.jsonl, line 2.*{said}"):
        read_lines(file)


# What is to be done


def on_card(free: int, capability: tuple[int, int] = (9, 0)) -> dict[str, Any]:
    return {**H200, "device": {**H200["device"], "capability": list(capability)}, "free": free}


def lines(*contents: dict[str, Any]) -> list[Line]:
    return [Line(Path("gpu.jsonl"), number, content) for number, content in enumerate(contents, start=1)]


@pytest.mark.parametrize("free", [15 * GB, 80 * GB])
def test_only_what_fits_is_tried_in_the_order_of_the_list(free):
    tasks = recording_list()
    fitting = [item for item in tasks if item.run is None or fits(item.run, free)]
    assert to_do(tasks, on_card(free), []) == fitting != list(tasks)


def test_an_old_gpu_is_spared_what_it_lacks():
    tasks = to_do(recording_list(), on_card(15 * GB, (7, 5)), [])
    names = {item.run.precision.name for item in tasks if item.run}
    assert names == {"amp-fp16", "fp32", "fp16-master"}


def test_a_later_call_goes_on_where_the_last_one_ended_for_this_device_and_torch():
    tasks = [task(name) for name in ("done", "failed", "too large", "refused", "untried")]
    there = [
        a_line(task="done"),
        a_line(task="failed", status="crashed"),
        a_line(task="too large", status="out of memory"),
        a_line(task="refused", status="refused"),
    ]
    left = to_do(tasks, H200, lines(*there))
    assert [item.name for item in left] == ["untried", "failed"]
    for changed in ({"torch": "2.14"}, {"device": {"name": "NVIDIA A100"}}):
        others = lines(*({**content, **changed} for content in there))
        assert to_do(tasks, H200, others) == tasks
    assert to_do(tasks, H200, lines(*there, a_line(task="failed"))) == [tasks[-1]]


def test_lessons_are_left_out_where_jupyter_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(record, "NOTEBOOK_PACKAGES", ["no_such_package"])
    tasks = [task(), Task("live: x", "notebook", "")]
    assert to_do(tasks, H200, []) == tasks[:1]
    assert "Lessons are left out: they need no_such_package" in capsys.readouterr().out


def test_the_first_six_tasks_tell_of_runs_workspaces_and_the_allocator():
    early = recording_list()[:6]
    assert sorted(item.kind for item in early) == ["history", "run", "run", "run", "run", "workspaces"]
    assert {item.run.model.name for item in early if item.run} == {"gpt2", "gpt2-xl", "llama3.2-1b"}


def test_a_lesson_has_a_limit_of_its_own_three_times_its_budget():
    limits = {item.topic: item.seconds for item in recording_list() if item.kind == "notebook"}
    assert limits["notebooks/10_data_parallelism.ipynb"] == 3 * 90
    assert limits["notebooks/02_adam.ipynb"] == limits["solutions/10_data_parallelism.ipynb"] == 3 * 60


def test_the_list_covers_every_choice_once():
    tasks = recording_list()
    runs = [item.run for item in tasks if item.kind == "run" and item.run is not None]
    assert len({item.name for item in tasks}) == len(tasks) and 60 <= len(runs) <= 90
    assert {run.attention for run in runs} == set(ATTENTIONS)
    assert {run.precision.name for run in runs} == set(PRECISIONS) - {"fp8"}
    assert {run.optimizer.algorithm for run in runs} == {choice.algorithm for choice in OPTIMIZERS.values()}
    assert {run.recompute for run in runs} >= set(RECOMPUTES)
    assert {run.frozen_bits for run in runs} == {None, 16, 8, 4}
    for name in ("clip_grad_norm", "lora_rank", "loss_chunks", "accumulation_steps", "set_to_none", "model"):
        assert len({getattr(run, name) for run in runs}) > 1
    assert any(run.model.experts for run in runs) and all(run.world_size == 1 for run in runs)
    order = [item.name for item in tasks]
    named = [item.name for item in tasks_module._everything()]
    assert len(order) < len(named) and order == sorted(order, key=named.index)  # each where it is named first


def test_some_can_be_chosen():
    assert {item.kind for item in chosen("SCRATCH")} == {"scratch"}
    with pytest.raises(RecordingError, match="No task matches 'gpt5'"):
        chosen("gpt5")


# The command


def command(*arguments: str, bare: bool = False) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-S", "-E"] if bare else [sys.executable]
    line = [*start, "-m", "course_utils", "record", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)


def test_the_list_needs_no_torch():
    done = command("--list", "--only", "gpt2-xl", bare=True)
    assert done.returncode == 0, done.stderr
    assert "134.5 GB" in next(
        row for row in done.stdout.splitlines() if "micro_batch=32, seq_len=1024) " in row
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs --out"),
        (("--out", "x", "--minutes", "0"), "give a time limit"),
        (("--out", "x", "--jobs", "0"), "at least 1"),
        (("--loud",), "Unknown option --loud"),
        (("--out", "README.md"), "which is not a folder"),
        (("--out", "x", "--only", "gpt5"), "No task matches"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments, said):
    done = command(*arguments, bare=True)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (ROOT / "x").exists()


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(one_task, "installed_torch", lambda: (2, 9))
    with pytest.raises(RuntimeError, match=r"torch 2\.11 or newer is needed in "):
        one_task.facts(Cuda())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path):
    done = command("--out", str(tmp_path / "out"), "--minutes", "3")
    assert done.returncode == 1 and "can use no CUDA GPU here" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


# What a task's process does, with a device of which everything is known


class Scripted(Host):
    """The CPU with counters that the test makes up."""

    def __init__(self, allocated: list[int] | None = None, peaks: list[int] | None = None) -> None:
        self.told_allocated = iter(allocated or [])
        self.told_peaks = iter(peaks or [])

    def allocated(self) -> int:
        return next(self.told_allocated, 0)

    def peaks(self) -> tuple[int, int]:
        peak = next(self.told_peaks, 0)
        return peak, 2 * peak

    def in_use(self) -> int:
        return 7 * MB

    def free(self) -> int:
        return GB


def test_peaks_are_those_of_the_last_step_and_micro_batches_count_to_their_phase():
    # Before each phase its predecessor's peak is read: nothing before "forward", then five phases, the last
    # at the end.
    device = Scripted(peaks=[0, 900, 900, 900, 900, 900, 0, 50, 60, 90, 80, 40])
    counted = count_peaks(ready(SMALL, device)[0].step, device, steps=2, before=(10, 30))
    phases = {"forward": 40, "loss": 50, "backward": 80, "optimizer": 70, "zero_grad": 30}
    assert counted == {"allocated": 80, "reserved": 150, "driver": 7 * MB, "phases": phases}
    device = Scripted(peaks=[0, 50, 60, 70, 80, 20, 95, 40, 30])
    training, _ = ready(SMALL.replace(accumulation_steps=2), device)
    counted = count_peaks(training.step, device, steps=1, before=(0, 0))
    assert counted["phases"] == {"forward": 80, "loss": 60, "backward": 95, "optimizer": 40, "zero_grad": 30}


def test_a_call_is_timed_up_to_a_number_and_at_least_thrice_however_slow():
    assert len(time_calls(lambda: None, Host(), most=4, seconds=60)) == 4
    assert len(time_calls(lambda: None, Host(), seconds=0)) == 3


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
    assert parts["simulated"]["breakdown"][0] == {
        kind: size for kind, size in simulated.breakdown.items() if size
    }
    assert parts["simulated"]["reserved"] == replay(simulated).peak_reserved > simulated.peak
    assert parts["simulated"]["sequence"] == {release_line(): sequence_hash(SMALL)}
    assert parts["estimate"]["total"] == sum(parts["estimate"]["by_kind"].values()) > 0
    assert parts["formula"]["total"] == pytest.approx(parts["estimate"]["total"], rel=0.01)
    assert list(parts)[:3] == ["estimate", "formula", "simulated"]  # said before the device was asked
    assert parts["measured"]["losses"][0] > 0 and parts["measured"]["changes"]
    # the driver's counter has other programs' bytes where others use the GPU
    assert "driver" in parts["counters"] and "driver" not in parts_of(RUN, Scripted(), True)["counters"]


OUT_OF_IT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.38 GiB.")


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
    assert set(parts) == {part, "estimate", "formula", "simulated"}
    assert part == "refused" or ("not fit this GPU" in parts[part]["message"] and parts[part]["free"] == GB)
    assert judged(parts, 0, "") == verdict


def test_a_published_step_is_simulated_for_this_card_first_and_then_counted_and_an_error_is_of_its_row(
    monkeypatch,
):
    rows = [row for row in published_rows() if row.family == "single_ops.softmax"]
    counted = {"start": [0, 0], "peak": [5, 6], "end": [1, 6]}
    steps = iter([fails(OUT_OF_IT), lambda *_, **__: counted])
    family_of = published.family_of

    def live_or_simulated(family: str, live: bool = False) -> Any:
        return next(steps) if live else family_of(family)

    monkeypatch.setattr(published, "family_of", live_or_simulated)
    parts = parts_of(Task("x", "published", "", topic=",".join(row.id for row in rows)), Scripted())
    assert list(parts) == [f"{what} {row.id}" for what in ("said", "counted") for row in rows]
    assert "out of memory" in parts[f"counted {rows[0].id}"]["error"]
    assert parts[f"counted {rows[1].id}"] == counted
    # no product: the card has no part in it
    assert parts[f"said {rows[0].id}"]["peak"] == list(rows[0].said[1:])
    assert list(parts[f"said {rows[0].id}"]["sequence"]) == [release_line()]


def test_every_published_step_of_one_rank_is_counted_once_and_those_of_the_readme_alone():
    tasks = [item for item in recording_list() if item.kind == "published"]
    named = [name for item in tasks for name in item.topic.split(",")]
    assert len(named) == len(set(named)) > 100
    assert {item.topic for item in tasks} >= {name for name in TEN if not name.startswith("titan")}
    assert all(item.needs > 0 for item in tasks)


def test_the_gpus_figures_stay_where_the_simulation_fails(monkeypatch):
    fail = fails(RuntimeError("hasPrimaryContext expects a valid device index"))
    monkeypatch.setattr(one_task, "trace_simulated", fail)
    parts = parts_of(RUN, Scripted())
    unavailable = "RuntimeError: hasPrimaryContext expects a valid device index"
    assert parts["simulated"] == {"unavailable": unavailable}
    assert parts["measured"]["breakdown"] and judged(parts, 0, "") == ("measured", "")


def test_other_errors_are_told_in_one_line_and_end_the_task(monkeypatch, tmp_path):
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nat /some/where")
    monkeypatch.setattr(one_task, "perform", fails(error))
    arguments = ["--results", str(tmp_path / "parts"), "--seconds", "600", "--task"]
    assert one_task.main([*arguments, recording_list()[0].name]) == 1
    said = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert record.read_parts(tmp_path / "parts") == {"error": {"error": said}}
    assert one_task.main([*arguments, "unknown"]) == 1


# What no simulation sees


def test_a_context_is_what_a_second_program_adds_whatever_else_runs(monkeypatch):
    seen = iter([7 * MB + 500, 7 * MB + 520, 7 * MB + 9000])
    monkeypatch.setattr(hardware.subprocess, "check_output", lambda *_, **__: f"{next(seen)}\n")
    assert parts_of(Task("", "context", ""), Scripted()) == {
        "context": {"context": 520, "readings": [500, 520, 9000]}
    }


class Late(Host):
    """A device that counts freed tensors until another thread lets go: one per wait, all in the end."""

    def __init__(self, count: int, falls: list[int]) -> None:
        self.count, self.falls, self.waited = count, falls, 0

    def allocated(self) -> int:
        return self.count

    def wait(self, seconds: float) -> None:
        self.waited += 1
        self.count -= self.falls.pop(0) if self.falls else 0

    def peaks(self) -> tuple[int, int]:
        self.count -= sum(self.falls)
        self.falls.clear()
        return self.count + 8192 + 512, 0


def test_a_counter_that_falls_late_is_read_when_it_has_fallen_and_given_up_if_it_never_rests(monkeypatch):
    device = Late(100, [30, 20, 10])
    monkeypatch.setattr(hardware.time, "sleep", device.wait)
    assert hardware.settled_bytes(device) == 40
    device = Late(100_000, [1] * 10_000)
    monkeypatch.setattr(hardware.time, "sleep", device.wait)
    with pytest.raises(hardware.Unsettled, match="still change after 200 readings"):
        hardware.settled_bytes(device)
    assert device.waited == hardware.MOST_READINGS


def test_workspaces_are_what_stays_when_the_tensors_are_gone():
    before, mm, addmm, bmm, single, backward = 100, 900, 900, 900, 950, 1750
    late = [
        value for held in (before, mm, addmm, bmm, single, backward) for value in (held + 4096, held, held)
    ]
    found = hardware.workspace_bytes(Scripted(allocated=late))
    assert found == {
        "kept_after": {"mm": 800, "addmm": 0, "bmm": 0, "fp32 mm": 50, "backward": 800},
        "together": 1650,
    }


DOUBLE = Prepared("double", lambda: torch.ones(1000), lambda x: (x + x) * 2)  # two tensors of 4,096 bytes


def test_scratch_is_what_the_device_counts_beyond_the_tensors(monkeypatch):
    impossible = Prepared("impossible", lambda: torch.ones(2), lambda x: x @ torch.ones(3))
    monkeypatch.setattr(hardware, "prepared_operations", lambda _: [DOUBLE, impossible])
    told, refused = hardware.scratch_bytes(Scripted(allocated=[1000, 1000], peaks=[1000 + 8192 + 512]))
    assert told == {"operation": "double", "counted": 8704, "tracked": 8192, "scratch": 512}
    assert refused["operation"] == "impossible" and refused["refused"].startswith("RuntimeError: ")


def test_scratch_waits_for_tensors_that_are_freed_late_and_is_never_negative(monkeypatch):
    monkeypatch.setattr(hardware, "prepared_operations", lambda _: [DOUBLE, DOUBLE])
    negative, fine = hardware.scratch_bytes(Scripted(allocated=[1000] * 4, peaks=[1000, 1000 + 8192]))
    assert set(negative) == {"operation", "unsettled"} and fine["scratch"] == 0
    assert "scratch cannot be negative" in negative["unsettled"]
    # the warm-up's tensor is still there when its result has come back
    device = Late(12_582_912 + 1000, [12_582_912])
    monkeypatch.setattr(hardware.time, "sleep", device.wait)
    assert hardware.scratch_bytes(device)[0]["scratch"] == 512


def test_every_operation_runs_and_its_backward_frees_before_it_peaks():
    with simulated_gpu("flash"):
        found = {}
        for item in prepared_operations("cuda"):
            if "attention" not in item.name or "flash" in item.name:
                found[item.name] = hardware._tracked_peak(item, Cuda())
    assert found["gelu, forward"] == found["gelu, backward"] == 8 * 1024 * 768 * 2
    logits = 8 * 1024 * 50257
    assert found["cross_entropy, forward"] >= 2 * 4 * logits  # fp32 logits and their log-softmax
    assert found["attention, flash, s=4,096, backward"] >= 3 * 4096 * 1024 * 2
    assert len(found) == 2 * 7 + 4


def test_attention_alone_is_timed_by_kernel_and_says_which_is_not_there():
    found = {item["kernel"]: item for item in hardware.kernel_times(Host(), 64, repetitions=3)}
    assert list(found) == [*ATTENTIONS, "math"] and found["math"]["milliseconds"]
    assert (
        len(found["eager"]["milliseconds"]["forward"]) == len(found["eager"]["milliseconds"]["backward"]) == 3
    )
    assert found["cudnn"]["refused"].startswith("RuntimeError: No ")


def test_written_out_attention_is_attention():
    q, k, v = (tensor.detach().float() for tensor in hardware.attention_inputs("cpu", 32))
    torch.testing.assert_close(hardware.eager_attention(q, k, v), hardware.causal_attention(q, k, v))


def test_the_history_of_a_run_begins_before_its_first_tensor(monkeypatch):
    order: list[str] = []
    snapshot = snapshot_of(replay(simulate(TrainingRun("tiny-gpt", 2, 64))))

    def build(*arguments: Any) -> Any:
        order.append("first tensor")
        return ready(*arguments)

    monkeypatch.setattr(torch.cuda, "init", lambda: order.append("context"))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: order.append("history"))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(one_task, "ready", build)
    part = parts_of(Task("history", "history", "", SMALL), Scripted())["history"]
    assert order == ["context", "history", "first tensor"]
    assert part["exact"] and compare_with_gpu(unpacked(part["history"])).exact and len(part["steps"]) == 2
    assert part["sequence"] == {release_line(): sequence_hash(SMALL)}


def test_memory_that_runs_out_within_a_history_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(one_task, "ready", fails(OUT_OF_IT))
    parts = parts_of(Task("history", "history", "", SMALL), Scripted())
    assert list(parts) == ["out_of_memory"] and judged(parts, 0, "") == ("out of memory", "")


def test_a_gpus_counters_follow_what_torch_allocates(card):
    """On a card of 200 MB with the CPU's tensors: each question has an answer that is known beforehand."""
    gpu = Cuda()
    free = gpu.free()
    taken = gpu.allocated()
    first = torch.ones(5 * MiB // 4)
    second = torch.ones(10 * MiB // 4)
    assert gpu.allocated() - taken == 15 * MiB
    assert free - gpu.free() == 15 * MiB
    assert gpu.in_use() == gpu.allocated()
    del second
    assert gpu.allocated() - taken == 5 * MiB and gpu.peaks()[0] - taken == 15 * MiB
    gpu.reset_peaks()
    assert gpu.peaks() == (gpu.allocated(), gpu.reserved())
    assert len(first) == 5 * MiB // 4


def test_a_gpus_facts_are_its_name_capability_memory_and_driver(monkeypatch):
    here = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * GB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    monkeypatch.setattr(devices, "driver_version", lambda: "580.1")
    found = Cuda().facts()["device"]
    assert found == {"name": "NVIDIA H200", "capability": [9, 0], "memory": 150 * GB, "driver": "580.1"}


def test_a_driver_that_says_nothing_has_no_version(monkeypatch):
    answers = iter(
        [subprocess.CompletedProcess([], 0, "580.1\n580.1\n"), subprocess.CompletedProcess([], 9, "x")]
    )
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: next(answers))
    assert [devices.driver_version(), devices.driver_version()] == ["580.1", ""]


# Times, histories, lessons


def test_each_variant_is_timed_with_its_spread(monkeypatch):
    variants = {"one": SMALL, "none": "this GPU cannot", "two": SMALL.replace(micro_batch=1)}
    monkeypatch.setattr(one_task, "sized", lambda *_: variants)
    parts = parts_of(Task("", "times", "", topic="precision"), Scripted())
    one, refused, two = parts["times"]["variants"]
    assert refused == {"label": "none", "refused": "this GPU cannot"}
    for step in (one["step_ms"], two["step_ms"]):
        assert step["n"] >= 3 and 0 < step["q1"] <= step["median"] <= step["q3"]


def test_at_least_ten_histories_fit_a_card_of_40_gb_under_both_settings():
    settings = [dict(item.environment) for item in recording_list() if item.kind == "history"]
    fitting = [
        item for item in recording_list() if item.kind == "history" and not item.obstacle(40 * GB, (8, 0))
    ]
    assert len(fitting) == len(settings) >= 20
    assert sum(not found for found in settings) == sum(bool(found) for found in settings) >= 10


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
