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

import pytest
import torch
from engine import simulate

from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import compare_with_gpu, snapshot_of
from course_utils.cli.main import parse
from course_utils.gpus import Gpu
from course_utils.measuring import devices
from course_utils.measuring.counting import count_peaks, time_calls
from course_utils.measuring.devices import Cuda, Host
from course_utils.measuring.live import KernelRefused, ready
from course_utils.measuring.recording_file import Line, append, read_lines, repair
from course_utils.measuring.simulated import simulated_gpu
from course_utils.planning.twin import fits
from course_utils.recording import gpu_turns, hardware, recorder
from course_utils.recording import one_task as recording_work
from course_utils.recording.allocation_history import unpacked
from course_utils.recording.hardware import (
    Prepared,
    context_bytes,
    kernel_times,
    prepared_operations,
    scratch_bytes,
    workspace_bytes,
)
from course_utils.recording.one_task import perform
from course_utils.recording.published_steps import TEN, counting, published_rows
from course_utils.recording.recorder import RecordingError, chosen, listing, plan, run_process
from course_utils.recording.tasks import Task, everything, recording_list, rehearsal_list, run_task
from course_utils.run import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun
from course_utils.units import GB, MB, MiB

ROOT = Path(__file__).resolve().parent.parent
SMALL = TrainingRun("tiny-gpt", 2, 64, "fp32", attention="eager")
H200 = {
    "device": {"name": "NVIDIA H200", "capability": [9, 0], "memory": 150 * GB, "driver": "580.1"},
    "torch": "2.13.0+cu130",
    "commit": "abc",
}


def python(code: str) -> Callable[[Task, Path, float], list[str]]:
    """In place of a task's process: this code, which finds the path of its results in `results`."""

    def command(task: Task, results: Path, seconds: float) -> list[str]:
        send = "def send(**part):\n    open(results, 'a').write(json.dumps(part) + chr(10))\n"
        return [sys.executable, "-c", f"import json, os, sys, time\nresults = {str(results)!r}\n{send}{code}"]

    return command


def task(name: str = "a task", seconds: float = 60.0) -> Task:
    return Task(name, "context", "a test", seconds=seconds)


def recorded(
    tmp_path: Path, code: str, *tasks: Task, seconds: float = 120.0
) -> tuple[list[dict[str, Any]], int]:
    """The content of the file after `tasks`, and how many were left."""
    file = tmp_path / "gpu.jsonl"
    left = recorder.record(
        tasks or (task(),), file, H200, time.monotonic() + seconds, python(code), lambda _: None
    )
    return [line.content for line in read_lines(file)] if file.exists() else [], left


def fails(error: Exception) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    return failing


# Whatever happens to a task


def test_a_result_says_where_it_is_from_and_how_it_went(tmp_path):
    [line], left = recorded(tmp_path, "send(part='context', context=5)")
    assert left == 0 and line["status"] == "measured" and line["parts"] == {"context": {"context": 5}}
    assert {name: line[name] for name in H200} == H200
    assert (line["schema"], line["task"], line["kind"], line["steps"]) == (1, "a task", "context", 2)


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("os.kill(os.getpid(), 11)", "crashed", "ended by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "crashed", "ended by SIGKILL"),
        (
            "print('one'); print('CUDA says no', file=sys.stderr); sys.exit(3)",
            "crashed",
            "exit code 3; CUDA says no",
        ),
        ("send(part='error', error='KeyError: 1'); sys.exit(1)", "failed", "KeyError: 1"),
        ("send(part='out_of_memory', message='too large')", "out of memory", ""),
        ("send(part='refused', message='no such kernel')", "refused", "no such kernel"),
        (
            "import faulthandler; faulthandler.dump_traceback_later(0.1, exit=True); time.sleep(60)",
            "timed out",
            "",
        ),
    ],
)
def test_however_a_task_ends_it_is_recorded_and_the_next_is_done(tmp_path, code, status, detail):
    lines, left = recorded(tmp_path, f"send(part='first')\n{code}", task("one"), task("two"))
    assert [line["task"] for line in lines] == ["one", "two"] and left == 0
    for line in lines:
        assert line["status"] == status and line["parts"]["first"] == {}
        assert line["detail"].startswith(detail) if status == "timed out" else line["detail"] == detail


def test_a_task_that_hangs_is_ended_with_all_that_it_started_and_what_it_had_is_kept(tmp_path):
    code = (
        "import subprocess\n"
        "child = subprocess.Popen("
        "[sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "send(part='first', child=child.pid)\n"
        "open(results, 'a').write('{\"part\": \"half')\n"
        "time.sleep(60)"
    )
    [line], _ = recorded(tmp_path, code, task(seconds=3))
    assert (line["status"], line["detail"]) == ("timed out", "after 3 s")
    assert list(line["parts"]) == ["first"]
    assert not alive(line["parts"]["first"]["child"])


def alive(process: int) -> bool:
    """True if it runs; one that has ended and that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_time_is_kept_and_a_task_that_was_cut_short_is_no_failure(tmp_path):
    """Cut short by the recorder's own end, before the task's limit of a minute and its sleep of ten."""
    lines, left = recorded(tmp_path, "time.sleep(600)", task("one"), task("two"), task("three"), seconds=12)
    assert left == 3 and [line["status"] for line in lines] == ["cut short"]  # the first is to be done again
    assert recorded(tmp_path / "no time", "send(part='x')", seconds=5) == ([], 1)


# Several at a time


TURN = """
from course_utils.recording.gpu_turns import await_turn
open(results + '.log', 'w').close()
begun = time.monotonic()
shared = await_turn()
given = time.monotonic()
time.sleep(1.0)
send(part='turn', shared=shared, asked=begun, given=given, ended=time.monotonic())
"""


def turns_of(tmp_path: Path, memory: int, *tasks: Task, jobs: int = 4) -> dict[str, dict[str, Any]]:
    """When each task asked for the GPU, had it, and gave it back."""
    file = tmp_path / "gpu.jsonl"
    deadline = time.monotonic() + 120
    assert recorder.record(tasks, file, H200, deadline, python(TURN), lambda _: None, jobs, memory) == 0
    return {line.content["task"]: line.content["parts"]["turn"] for line in read_lines(file)}


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["given"] < other["ended"] and other["given"] < one["ended"]


def test_tasks_share_the_gpu_as_far_as_its_memory_goes_and_in_their_order(tmp_path):
    needs = {"one": 40 * GB, "two": 40 * GB, "three": 40 * GB, "four": GB}
    found = turns_of(tmp_path, 100 * GB, *(Task(name, "context", "", needs=needs[name]) for name in needs))
    assert all(turn["shared"] for turn in found.values())
    first, second, *later = sorted(found.values(), key=lambda turn: turn["given"])
    assert not all(overlap(third, first) and overlap(third, second) for third in later)
    for moment in (turn["given"] for turn in found.values()):
        assert (
            sum(needs[name] for name, turn in found.items() if turn["given"] <= moment < turn["ended"])
            <= 100 * GB
        )


def test_a_task_that_has_to_be_alone_is_and_one_that_is_larger_than_the_gpu_still_has_its_turn(tmp_path):
    tasks = (
        Task("one", "context", ""),
        Task("alone", "times", "", alone=True),
        Task("large", "run", "", needs=GB),
    )
    found = turns_of(tmp_path, MB, *tasks)
    assert not found["alone"]["shared"] and found["one"]["shared"]
    assert not any(overlap(found["alone"], found[name]) for name in ("one", "large"))
    assert not overlap(found["one"], found["large"])


def test_with_one_job_nobody_shares(tmp_path):
    found = turns_of(tmp_path, 100 * GB, task("one"), task("two"), jobs=1)
    assert not found["one"]["shared"] and found["one"]["ended"] < found["two"]["asked"]


def test_a_task_s_time_does_not_pass_while_it_waits_for_its_turn(tmp_path):
    started = recorder.begin(python("time.sleep(600)"), task(), 0.001, takes_turns=True)
    try:
        started.file(gpu_turns.ASKED).touch()
        assert started.waits and not started.is_over()
        started.give_turn(shared=False)
        while not started.is_over():  # for a millisecond from now on
            time.sleep(0.001)
        assert not started.waits and started.file(gpu_turns.GIVEN).read_text() == gpu_turns.ALONE
    finally:
        assert started.finish(killed=True).status == "timed out"


HANG = """
import subprocess
send(part="x")
# the second task hangs, and so does a process that it has started in another session
if os.path.exists({pids!r}):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}} end")
    time.sleep(600)
open({pids!r}, "w").close()
"""

RECORDER = """
import signal, sys; sys.path.insert(0, 'tests')
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
import test_recorder as t
from course_utils.cli import main as front_door
from course_utils.recording import recorder
recorder.commit = lambda: 'abc'
recorder.device_facts = lambda *_: {{**t.H200, 'free': 10**12, 'rehearsal': True}}
recorder.work_command = lambda *_: t.python({code!r})
sys.exit(front_door.main(['record', '--rehearse', '--out', {out!r}, '--minutes', '5', '--only', 'times of']))
"""


def recorder_stopped_within_its_second_task(out: Path, number: int) -> tuple[int, list[str], list[int]]:
    """Start a recorder, send it a signal while its second task hangs; returns its exit code, what it wrote to
    stdout and stderr, and the processes of that task.
    """
    pids = out / "pids"
    code = RECORDER.format(code=HANG.format(pids=str(pids)), out=str(out))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (out / "stdout").open("w") as stdout, (out / "stderr").open("w") as stderr:
        command = [sys.executable, "-c", code]
        started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)
    for _ in range(1200):
        if pids.exists() and pids.read_text().endswith("end"):
            break
        time.sleep(0.1)
    started.send_signal(number)
    started.wait(timeout=1200)
    said = [(out / name).read_text() for name in ("stdout", "stderr")]
    return started.returncode, said, [int(number) for number in pids.read_text().split()[:2]]


def ended(process: int) -> bool:
    """True if it ends within five minutes; if it does not, it is killed for the sake of what follows."""
    for _ in range(3000):
        if not alive(process):
            return True
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    return False


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a process can outlive a recorder that is killed"
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_recorder_ends_its_task_ends_with_it_and_a_later_call_does_the_rest(
    tmp_path, number, monkeypatch
):
    code, (told, errors), processes = recorder_stopped_within_its_second_task(tmp_path, number)
    assert (code, errors) == ((-9, "") if number == signal.SIGKILL else (130, "\nStopped.\n"))
    assert "    measured\n[2/5, " in told  # what was said is not lost with the process
    assert [ended(process) for process in processes] == [True, True]
    file = tmp_path / "rehearsal.jsonl"
    assert [line.content["status"] for line in read_lines(file)] == ["measured"]
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])  # a machine that stopped while it wrote
    file.chmod(0o444)
    monkeypatch.setattr(recorder, "commit", lambda: "abc")
    monkeypatch.setattr(recorder, "device_facts", lambda *_: {**H200, "free": 0, "rehearsal": True})
    monkeypatch.setattr(recorder, "work_command", lambda *_: python("send(part='x')"))
    said: list[str] = []
    again = parse(["record", "--rehearse", "--out", str(tmp_path), "--minutes", "5", "--only", "times of"])
    assert recorder.run(again, said.append) == 0
    assert "last line of rehearsal.jsonl was cut off" in said[0] and "4 of 5 tasks to do" in said[1]
    assert file.stat().st_mode & 0o777 == 0o644 and file.read_bytes().startswith(whole)
    wanted = [item.name for item in rehearsal_list() if item.name.startswith("times of")]
    assert [line.content["task"] for line in read_lines(file)] == wanted
    assert recorder.run(again, said.append) == 0 and "0 of 5 tasks to do" in said[-2]


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
    return {**H200, **content, **changes}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one recording."""
    append(tmp_path / "gpu.jsonl", a_line())
    return tmp_path / "gpu.jsonl"


def test_a_half_written_last_line_is_cut_off_and_nothing_else(file):
    whole = file.read_bytes()
    append(file, a_line(task="Ψ"))
    both = file.read_bytes()
    for length in range(len(whole) + 1, len(both) - 1):
        file.write_bytes(both[:length])
        assert "cut off" in repair(file) and file.read_bytes() == whole
    assert repair(file) == "" and file.read_bytes() == whole


def test_a_last_line_gets_the_line_feed_that_it_lacks_and_a_file_that_is_empty_or_not_there_needs_nothing(
    file,
):
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "line feed" in repair(file) and file.read_bytes() == whole
    file.write_bytes(b"")
    assert repair(file) == repair(file.with_name("none.jsonl")) == "" and read_lines(file) == []


def test_nothing_is_appended_to_a_file_that_is_broken_elsewhere(file):
    file.write_bytes(b'{"schema":1, "half\n' + file.read_bytes())
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"gpu\.jsonl, line 1 is not JSON"):
        repair(file)
    assert file.read_bytes() == before


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
    assert plan(tasks, on_card(free), [], "abc") == fitting != list(tasks)


def test_an_old_gpu_is_spared_what_it_lacks():
    tasks = plan(recording_list(), on_card(15 * GB, (7, 5)), [], "abc")
    names = {item.run.precision.name for item in tasks if item.run}
    assert names == {"amp-fp16", "fp32", "fp16-master"}


def test_a_later_call_goes_on_where_the_last_one_ended_for_this_device_torch_and_commit():
    tasks = [run_task(SMALL.replace(micro_batch=b), "") for b in (1, 2, 3, 4)]
    done, failed, oom, untried = (item.name for item in tasks)
    there = lines(
        a_line(task=done), a_line(task=failed, status="crashed"), a_line(task=oom, status="out of memory")
    )
    assert plan(tasks[:1], on_card(100 * GB), lines(a_line(task=done, status="refused")), "abc") == []
    left = plan(tasks, on_card(100 * GB), there, "abc")
    assert [item.name for item in left] == [untried, failed]
    for changed in ({"commit": "xyz"}, {"torch": "2.14"}, {"device": {"name": "NVIDIA A100"}}):
        others = lines(*({**line.content, **changed} for line in there))
        assert [item.name for item in plan(tasks, on_card(100 * GB), others, "abc")] == [
            done,
            failed,
            oom,
            untried,
        ]


def test_what_fails_again_and_again_is_left_alone_and_what_was_cut_short_is_no_failure():
    tasks = [run_task(SMALL.replace(micro_batch=b), "") for b in (1, 2)]
    failed, cut = (lines(*[a_line(task=tasks[0].name, status=one)] * 3) for one in ("timed out", "cut short"))
    assert plan(tasks, on_card(GB), failed[:2], "abc") == tasks[::-1]
    assert plan(tasks, on_card(GB), failed, "abc") == tasks[1:]
    assert plan(tasks, on_card(GB), cut, "abc") == tasks


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
    named = [item.name for item in everything()]
    assert len(order) < len(named) and order == sorted(order, key=named.index)  # each where it is named first


def test_some_can_be_chosen():
    assert {item.kind for item in chosen(recording_list(), "SCRATCH")} == {"scratch"}
    with pytest.raises(RecordingError, match="No task matches 'gpt5'"):
        chosen(recording_list(), "gpt5")


def test_the_listing_says_what_each_task_takes_and_on_a_gpu_what_fits_it():
    rows = listing(recording_list(), None).splitlines()
    assert len(rows) == 1 + len(recording_list())
    assert "134.5 GB" in next(row for row in rows if "'gpt2-xl', micro_batch=32, seq_len=1024) " in row)
    head, columns, *rows = listing(recording_list(), Gpu("Tesla T4", 15 * GB, (7, 5))).splitlines()
    assert head == "Tesla T4, 15.0 GB free:" and columns.split() == ["peak", "fits", "task"]
    for item, row in zip(recording_list(), rows, strict=True):
        said = row.partition(item.name)[0]
        able = not item.obstacle(15 * GB, (7, 5))
        assert said.split()[-1] == ("yes" if able else "no")


@pytest.mark.parametrize(
    ("said", "code", "card"),
    [
        ("NVIDIA H200, 143000, 9.0\nNVIDIA A100, 1, 8.0\n", 0, Gpu("NVIDIA H200", 143000 * MiB, (9, 0))),
        ("No devices were found\n", 0, None),
        ("NVIDIA H200, 143000, 9.0\n", 9, None),
    ],
)
def test_the_gpu_here_is_what_the_driver_says(said, code, card):
    assert recorder.card_here(lambda *_, **__: subprocess.CompletedProcess([], code, stdout=said)) == card
    assert recorder.card_here(fails(FileNotFoundError("nvidia-smi"))) is None


# The command


def record(*arguments: str, path: Path | None = None, bare: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    start = [sys.executable, "-S", "-E"] if bare else [sys.executable]
    command = [*start, "-m", "course_utils", "record", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )


def test_the_list_needs_no_torch():
    done = record("--list", "--only", "gpt2-xl", bare=True)
    assert done.returncode == 0, done.stderr
    assert "134.5 GB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs --out"),
        (("--out", "x", "--minutes", "0"), "give a time limit"),
        (("--out", "x", "--minutes", "soon"), "invalid float value"),
        (("--loud",), "Unknown option --loud"),
        (("--out", "README.md"), "which is not a folder"),
        (("--out", "x", "--only", "gpt5"), "No task matches"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments, said):
    done = record(*arguments, bare=True)
    assert done.returncode == 1 and done.stdout == ""
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (ROOT / "x").exists()


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1+cu128"))
    with pytest.raises(RuntimeError, match=r"torch 2\.11 or newer is needed in .*, not 2\.9\.1"):
        recording_work.facts(Host())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path):
    done = record("--out", str(tmp_path / "out"), "--minutes", "3")
    assert done.returncode == 1 and "can use no CUDA GPU here" in done.stderr
    assert not (tmp_path / "out").exists()


def test_it_records_where_there_is_neither_jupyter_nor_a_widget_and_goes_on_where_it_ended(tmp_path):
    absent = (
        "IPython",
        "ipywidgets",
        "jupyterlab",
        "jupyter_client",
        "nbformat",
        "matplotlib",
        "pytest",
        "jupytext",
    )
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{blocked}")
    arguments = ("--rehearse", "--out", str(tmp_path / "out"), "--minutes", "3", "--only", "recompute")
    done = record(*arguments, path=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = read_lines(tmp_path / "out" / "rehearsal.jsonl")
    assert line.content["status"] == "measured", line.content["detail"]
    assert set(line.content["parts"]) == {"counters", "measured", "estimate", "formula", "simulated"}
    assert line.content["jobs"] == 1
    assert all(text not in json.dumps(line.content) for text in (str(tmp_path), str(ROOT)))
    again = record(*arguments, path=tmp_path)
    assert "0 of 1 tasks" in again.stdout and len(read_lines(tmp_path / "out" / "rehearsal.jsonl")) == 1


# What a task's process does, with a device of which everything is known


class Scripted(Host):
    """The CPU with counters that the test makes up."""

    has_history = True

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


def parts_of(item: Task, device: Host) -> dict[str, dict[str, Any]]:
    sent: dict[str, dict[str, Any]] = {}
    perform(item, device, lambda part, **content: sent.update({part: content}))
    return json.loads(json.dumps(sent))


def test_a_run_is_counted_tracked_estimated_and_simulated():
    parts = parts_of(rehearsal_list()[0], Host())
    simulated = simulate(SMALL)
    assert parts["simulated"]["breakdown"][0] == {
        kind: size for kind, size in simulated.breakdown.items() if size
    }
    assert parts["simulated"]["reserved"] == replay(simulated).peak_reserved > simulated.peak
    assert parts["estimate"]["total"] == sum(parts["estimate"]["by_kind"].values()) > 0
    assert parts["formula"]["total"] == pytest.approx(parts["estimate"]["total"], rel=0.01)
    assert list(parts)[:3] == ["estimate", "formula", "simulated"]  # said before the device was asked
    assert parts["measured"]["losses"][0] > 0 and parts["measured"]["changes"]


OUT_OF_IT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.38 GiB.")


@pytest.mark.parametrize(
    ("error", "part", "judged"),
    [
        (OUT_OF_IT, "out_of_memory", ("out of memory", "")),
        (KernelRefused("torch has no cudnn kernel"), "refused", ("refused", "torch has no cudnn kernel")),
    ],
)
def test_a_run_that_the_gpu_cannot_do_is_recorded_and_still_simulated(error, part, judged, monkeypatch):
    monkeypatch.setattr(recording_work, "count_peaks", fails(error))
    parts = parts_of(rehearsal_list()[0], Scripted())
    assert set(parts) == {part, "estimate", "formula", "simulated"}
    assert part == "refused" or ("not fit this GPU" in parts[part]["message"] and parts[part]["free"] == GB)
    assert recorder.judged(parts, 0, "") == judged


def test_the_drivers_counter_is_left_out_where_others_use_the_gpu():
    sent: dict[str, dict[str, Any]] = {}
    for shared in (False, True):
        recording_work.record_run(SMALL, Host(), lambda part, **content: sent.update({part: content}), shared)
        assert ("driver" in sent["counters"]) is not shared and "allocated" in sent["counters"]


def test_a_published_step_is_simulated_for_this_card_first_and_then_counted_and_an_error_is_of_its_row(
    monkeypatch,
):
    rows = [row for row in published_rows() if row.family == "single_ops.softmax"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    counted = {"start": [0, 0], "peak": [5, 6], "end": [1, 6]}
    steps = iter([fails(OUT_OF_IT), lambda *_, **__: counted])
    family_of = counting.family_of
    monkeypatch.setattr(counting, "family_of", lambda *_, live: next(steps))
    parts = parts_of(Task("published: x", "published", "", topic=",".join(row.id for row in rows)), Host())
    assert list(parts) == [f"{what} {row.id}" for what in ("said", "counted") for row in rows]
    assert "out of memory" in parts[f"counted {rows[0].id}"]["error"]
    assert parts[f"counted {rows[1].id}"] == counted
    # no product: the card has no part in it
    assert parts[f"said {rows[0].id}"]["peak"] == list(rows[0].said[1:])
    assert callable(family_of(rows[0].family))


def test_every_published_step_of_one_rank_is_counted_once_and_those_of_the_readme_alone():
    tasks = [item for item in recording_list() if item.kind == "published"]
    named = [name for item in tasks for name in item.topic.split(",")]
    assert len(named) == len(set(named)) > 100
    assert {item.topic for item in tasks} >= {name for name in TEN if not name.startswith("titan")}
    assert all(item.needs > 0 for item in tasks)


def test_the_gpus_figures_stay_where_the_simulation_fails(monkeypatch):
    fail = fails(RuntimeError("hasPrimaryContext expects a valid device index"))
    monkeypatch.setattr(recording_work, "trace_simulated", fail)
    parts = parts_of(rehearsal_list()[0], Host())
    assert parts["simulated"] == {
        "unavailable": "RuntimeError: hasPrimaryContext expects a valid device index"
    }
    assert parts["measured"]["breakdown"] and recorder.judged(parts, 0, "") == ("measured", "")


def test_other_errors_are_told_in_one_line_and_end_the_task(monkeypatch, tmp_path):
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nat /some/where")
    monkeypatch.setattr(recording_work, "count_peaks", fails(error))
    arguments = ["--results", str(tmp_path / "parts"), "--seconds", "60", "--rehearse", "--task"]
    assert recording_work.main([*arguments, rehearsal_list()[0].name]) == 1
    found = recorder.read_parts(tmp_path / "parts")
    assert found["error"] == {"error": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    assert "counters" not in found


def test_a_task_that_failed_ends_nothing_else_later(tmp_path):
    code = (
        "import sys, time; from course_utils.recording.one_task import main; "
        "print(main(sys.argv[1:])); time.sleep(4); print('alive')"
    )
    arguments = ["--results", str(tmp_path / "parts"), "--seconds", "3", "--rehearse", "--task", "unknown"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["1", "alive"]), done.stderr
    assert recorder.read_parts(tmp_path / "parts") == {
        "error": {"error": "ValueError: there is no task 'unknown'"}
    }


# What no simulation sees


def test_a_context_is_what_a_second_program_adds_whatever_else_runs():
    seen = iter([7 * MB + 500, 7 * MB + 520, 7 * MB + 9000])
    assert context_bytes(Scripted(), lambda: next(seen)) == {"context": 520, "readings": [500, 520, 9000]}


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
    found = workspace_bytes(Scripted(allocated=late))
    assert found == {
        "kept_after": {"mm": 800, "addmm": 0, "bmm": 0, "fp32 mm": 50, "backward": 800},
        "together": 1650,
    }


DOUBLE = Prepared("double", lambda: torch.ones(1000), lambda x: (x + x) * 2)  # two tensors of 4,096 bytes


def test_scratch_is_what_the_device_counts_beyond_the_tensors(monkeypatch):
    impossible = Prepared("impossible", lambda: torch.ones(2), lambda x: x @ torch.ones(3))
    monkeypatch.setattr(hardware, "prepared_operations", lambda _: [DOUBLE, impossible])
    told, refused = scratch_bytes(Scripted(allocated=[1000, 1000], peaks=[1000 + 8192 + 512]))
    assert told == {"operation": "double", "counted": 8704, "tracked": 8192, "scratch": 512}
    assert refused["operation"] == "impossible" and refused["refused"].startswith("RuntimeError: ")


def test_scratch_waits_for_tensors_that_are_freed_late_and_is_never_negative(monkeypatch):
    monkeypatch.setattr(hardware, "prepared_operations", lambda _: [DOUBLE, DOUBLE])
    negative, fine = scratch_bytes(Scripted(allocated=[1000] * 4, peaks=[1000, 1000 + 8192]))
    assert set(negative) == {"operation", "unsettled"} and fine["scratch"] == 0
    assert (
        "peak of 0 bytes and the tensors alone take 8,192: scratch cannot be negative"
        in negative["unsettled"]
    )
    # the warm-up's tensor is still there when its result has come back
    device = Late(12_582_912 + 1000, [12_582_912])
    monkeypatch.setattr(hardware.time, "sleep", device.wait)
    assert scratch_bytes(device)[0]["scratch"] == 512


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
    found = {item["kernel"]: item for item in kernel_times(Host(), 64, repetitions=2)}
    assert list(found) == [*ATTENTIONS, "math"] and found["math"]["milliseconds"]
    assert (
        len(found["eager"]["milliseconds"]["forward"]) == len(found["eager"]["milliseconds"]["backward"]) == 2
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
    monkeypatch.setattr(recording_work, "ready", build)
    parts = parts_of(Task("history", "history", "", SMALL), Scripted())
    assert order == ["context", "history", "first tensor"]
    assert parts["history"]["exact"] and len(parts["history"]["steps"]) == 2


def test_memory_that_runs_out_within_a_history_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(recording_work, "ready", fails(OUT_OF_IT))
    parts = parts_of(Task("history", "history", "", SMALL), Scripted())
    assert list(parts) == ["out_of_memory"] and recorder.judged(parts, 0, "") == ("out of memory", "")


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


def test_a_program_that_writes_nothing_has_measured_nothing():
    outcome = run_process(python("pass"), task(), 30)
    assert (outcome.parts, outcome.status, outcome.detail) == ({}, "failed", "it ended without a result")


# Times and histories


def test_each_variant_is_timed_with_its_spread(monkeypatch):
    variants = {"one": SMALL, "none": "this GPU cannot", "two": SMALL.replace(micro_batch=1)}
    monkeypatch.setattr(recording_work, "rehearsed_variants", lambda topic: variants)
    one, refused, two = recording_work.variant_times("precision", Host())
    assert refused == {"label": "none", "refused": "this GPU cannot"}
    for step in (one["step_ms"], two["step_ms"]):
        assert step["n"] >= 3 and 0 < step["q1"] <= step["median"] <= step["q3"]


def test_a_history_is_kept_and_says_what_was_reserved_at_each_steps_end():
    found = parts_of(Task("history", "history", "", SMALL), Host())["history"]
    compared = compare_with_gpu(unpacked(found["history"]))
    [(at, counted)] = found["steps"]
    assert compared.exact
    assert found["exact"]
    assert counted == compared.real[at - 1] > 0
    assert at == len(compared.real)


def test_at_least_ten_histories_fit_a_card_of_40_gb_under_both_settings():
    settings = [dict(item.environment) for item in recording_list() if item.kind == "history"]
    fitting = [
        item for item in recording_list() if item.kind == "history" and not item.obstacle(40 * GB, (8, 0))
    ]
    assert len(fitting) == len(settings) >= 20
    assert sum(not found for found in settings) == sum(bool(found) for found in settings) >= 10


def test_what_executes_cells_waits_where_jupyter_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(recorder, "NOTEBOOK_PACKAGES", ["no_such_package"])
    monkeypatch.setattr(recorder, "device_facts", lambda *_: {**H200, "free": 0, "rehearsal": True})
    monkeypatch.setattr(recorder, "work_command", lambda *_: python("send(part='x')"))
    said: list[str] = []
    options = parse(["record", "--rehearse", "--out", str(tmp_path), "--only", "live: notebooks"])
    assert recorder.run(options, said.append) == 0
    assert "execute cells and wait for no_such_package: see docs/gpu.md" in said[0]
    assert not (tmp_path / "rehearsal.jsonl").exists()


def test_every_kind_of_task_is_rehearsed_but_those_that_need_a_card():
    listed = {item.kind for item in recording_list()}
    assert listed - {item.kind for item in rehearsal_list()} == {"context", "scratch", "cells", "published"}
    assert {item.topic for item in recording_list() if item.kind == "notebook"} >= {
        "notebooks/05_activations.ipynb",
        "solutions/05_activations.ipynb",
    }
