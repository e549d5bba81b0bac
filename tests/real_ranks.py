"""Real ranks for tests: none is left behind, and many runs are measured in one start of processes."""

import base64
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from engine import tiny

from course_utils.measurement import Measurement
from course_utils.measuring.files import from_json
from course_utils.ranks import launch, loaded
from course_utils.run import TrainingRun

HERE = f"course-ranks-test-{os.getpid()}"

RUN = TrainingRun(tiny("gpt2"), 2, 32, "fp32", attention="eager", world_size=2)
LARGE_VOCABULARY = RUN.replace(model=tiny("gpt2", vocab=8192))
"""Its peak owes nothing to what CPU kernels do otherwise: no dropout, a large vocabulary."""


def left_behind() -> list[psutil.Process]:
    """Every process that was started in a test, but for the one from which the next ranks will start."""
    waiting = [one.process.pid for one in loaded._idle]
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            is_ours = process.pid not in waiting and HERE in process.environ().get("TMPDIR", "")
        except psutil.Error:  # ended since it was listed, or another user's
            continue
        if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def one_hangs():
    import os
    import time

    print("hello from", os.environ["RANK"])
    if os.environ["RANK"] == "1":
        time.sleep(3600)


def left_behind_by_a_caller_that_gets(signal_number: int) -> list[psutil.Process]:
    """Start a process with two ranks, send it a signal when they run, and return what is left of them.

    Waits for no longer than five minutes, which a busy computer does not need.
    """
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    code = f"import sys; sys.path[:0] = {folders}; import real_ranks as r; r.launch.run_ranks(r.one_hangs, 2)"
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code], **quiet, preexec_fn=hears_ctrl_c) as caller:
        wait_until(
            lambda: len(left_behind()) == 5
        )  # it, the process that has loaded torch, a launcher, ranks
        assert left_behind()
        caller.send_signal(signal_number)
    wait_until(lambda: not left_behind())
    left = left_behind()
    for process in left:
        process.kill()
    return left


def hears_ctrl_c() -> None:
    """Undo what a shell does to a background job, which tests may be: it ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not done() and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def nothing_is_left(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Check after each test: no rank is left, and this process is in the group and session that it was in."""
    folder = tmp_path_factory.getbasetemp() / HERE
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(launch.tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    before = os.getpgrp(), os.getsid(0)
    yield
    assert left_behind() == []
    assert (os.getpgrp(), os.getsid(0)) == before


def follow_each(pickled: str):
    """Measure each run on one rank; all in one start of processes."""
    import base64
    import pickle

    import torch.distributed as dist

    from course_utils.measurement import Provenance
    from course_utils.measuring.data_parallel import ReplicatedTraining, ReplicaTracker
    from course_utils.measuring.files import to_json
    from course_utils.measuring.step import follow

    dist.init_process_group("gloo")
    found = []
    for run in pickle.loads(base64.b64decode(pickled)):
        provenance = Provenance("cpu", "CPU", "", "")
        measured = follow(ReplicatedTraining(run), ReplicaTracker("cpu"), 2, provenance)
        found.append((to_json(measured), list(measured.losses)))
    dist.destroy_process_group()
    return found


def measured_together(runs: Sequence[TrainingRun]) -> dict[TrainingRun, Measurement]:
    """Measure two steps of each run on two ranks, as rank 0 sees them."""
    pickled = base64.b64encode(pickle.dumps(runs)).decode()
    found = launch.run_ranks(follow_each, 2, pickled=pickled)[0]
    return {
        run: dataclasses.replace(from_json(content, ""), losses=losses)
        for run, (content, losses) in zip(runs, found, strict=True)
    }
