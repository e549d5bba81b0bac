"""The command `record`: a hang, crash or Ctrl-C may cost only the task that it hits. No test needs a GPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_gpu import H200, in_place_of_a_task

from course_utils.evidence import record
from course_utils.evidence.record import chosen
from course_utils.evidence.tasks import Task
from course_utils.interactive.course_files import ROOT
from course_utils.measuring.files import read_lines


def task(name: str = "a task", seconds: float = 60.0) -> Task:
    return Task(name, "context", "a test", seconds=seconds)


def recorded(
    tmp_path: Path, code: str, *tasks: Task, seconds: float = 120.0, jobs: int = 1
) -> list[dict[str, Any]]:
    """The content of the file after `tasks`."""
    file = tmp_path / "gpu.jsonl"
    deadline = time.monotonic() + seconds
    assert record.record(tasks or (task(),), file, H200, deadline, jobs, in_place_of_a_task(code)) == 0
    return [line.content for line in read_lines(file)] if file.exists() else []


def test_a_task_that_crashes_is_recorded_and_the_next_is_done_and_each_says_where_it_is_from(tmp_path):
    crash = "send(part='context', context=5)\nname == 'one' and os.kill(os.getpid(), 11)"
    one, two = recorded(tmp_path, crash, task("one"), task("two"))
    assert (one["task"], one["status"], one["detail"]) == ("one", "crashed", "ended by signal 11")
    assert (two["task"], two["status"], two["detail"]) == ("two", "measured", "")
    assert two["parts"] == {"context": {"context": 5}} and (two["schema"], two["steps"]) == (1, 2)
    assert two["device"] == H200["device"] and two["torch"] == H200["torch"] and two["commit"]


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


RECORDER = """
import signal, sys; sys.path.insert(0, 'tests')
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
import made_up_gpu
from course_utils.cli import main as front_door
from course_utils.evidence import record
record.device_facts = lambda *_: made_up_gpu.H200
record.command_of = lambda shared: made_up_gpu.in_place_of_a_task({code!r})
sys.exit(front_door.main(['record', '--out', {out!r}, '--minutes', '5', '--only', 'times of']))
"""
"""The command itself, on a GPU that is made up; the first task is the times of recomputation."""

HANG = """
send(part="x")
if name == "times of precision":
    open({pid!r}, "w").write(f"{{os.getpid()}} end")
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a signal cannot be sent there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_stopped_its_task_ends_and_a_later_call_does_the_rest(tmp_path, number):
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
    record.record(tasks, file, H200, time.monotonic() + 120, 1, in_place_of_a_task("send(part='x')"))
    assert [line.content["task"] for line in read_lines(file)] == [item.name for item in tasks]
    assert file.read_bytes().startswith(whole)


def test_a_full_disk_is_named_and_the_file_holds_whole_lines_only(tmp_path):
    """The file may grow to a few kB only: the second line begins, and cannot be finished."""
    import resource

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    code = RECORDER.format(code="send(part='x', text='x' * 3000)", out=str(tmp_path))
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, preexec_fn=limited)
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert "nvidia-h200.jsonl cannot be written: File too large. nvidia-h200.jsonl holds whole" in said
    [line] = read_lines(tmp_path / "nvidia-h200.jsonl")
    assert line.content["task"] == "times of recomputation"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "course_utils", "record", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 1 and "can use no CUDA GPU here" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
