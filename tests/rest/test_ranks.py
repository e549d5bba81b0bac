"""Ranks that fail in every way, and every optimizer and recipe in data parallelism, in real processes."""

import base64
import functools
import pickle
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine import simulate, tiny
from real_ranks import LARGE_VOCABULARY, RUN, left_behind_by_a_caller_that_gets, measured_together, one_hangs
from real_ranks import nothing_is_left as nothing_is_left

from course_utils import estimate, measure
from course_utils.estimating import moments
from course_utils.estimating.sharding import zero_1_shares
from course_utils.estimating.states import is_hidden_matrix
from course_utils.measurement import Measurement
from course_utils.measuring.data_parallel import whole_batch
from course_utils.measuring.step import SEED, Training
from course_utils.models import parameter_shapes
from course_utils.networks import loss_of
from course_utils.ranks import launch as distributed
from course_utils.ranks import loaded
from course_utils.ranks.launch import RankFailed, run_ranks
from course_utils.run import TrainingRun
from course_utils.units import BLOCK

Program = Callable[[str], Path]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


WITH_A_GPU = f"import torch; torch.cuda.is_available = lambda: True; {loaded.SERVE}"
SERVE = {
    "as here": loaded.SERVE,
    "with a GPU": WITH_A_GPU,
    "on macOS": f"import course_utils.ranks.loaded as loaded; loaded.FORKS = False; {WITH_A_GPU}",
}


@pytest.mark.parametrize("how", SERVE)
def test_every_rank_of_a_program_reports_in_order(program, monkeypatch, how):
    """On macOS, and where there is a GPU, which forked ranks could not use, each is a Python of its own."""
    monkeypatch.setattr(loaded, "SERVE", SERVE[how])
    monkeypatch.setenv("COURSE_TEST", how)  # another environment needs another process to start from
    path = program("""
        import multiprocessing, os, sys
        from course_utils.ranks.worker import report
        assert __name__ == "__main__"
        rank, of = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        forked = type(multiprocessing.current_process()).__name__ == "ForkProcess"
        report({"rank": rank, "of": of, "argument": sys.argv[1], "forked": forked})
    """)
    forked = loaded.FORKS and how == "as here" and not torch.cuda.is_available()
    reported = [{"rank": rank, "of": 2, "argument": "hello", "forked": forked} for rank in (0, 1)]
    assert run_ranks(path, 2, ["hello"]) == reported


def where_it_comes_from():
    import os
    from pathlib import Path

    import psutil

    process, *_ = psutil.Process().parents()[1:]  # above the launcher
    return [process.pid, str(Path.cwd()), os.environ.get("COURSE_TEST", ""), os.environ["RANK"]]


@pytest.mark.skipif(not loaded.FORKS, reason="a process that has used torch can be forked on Linux alone")
def test_ranks_start_from_the_same_process_until_the_environment_changes(tmp_path, monkeypatch):
    """They find the folder and the environment of their caller, and none of an earlier one."""
    first = run_ranks(where_it_comes_from, 1)[0]
    monkeypatch.chdir(tmp_path)
    again = run_ranks(where_it_comes_from, 2)[1]
    assert again == [first[0], str(tmp_path), "", "1"]
    monkeypatch.setenv("COURSE_TEST", "changed")
    changed = run_ranks(where_it_comes_from, 1)[0]
    assert changed[0] != first[0] and changed[2] == "changed"
    assert not psutil.pid_exists(first[0])


@pytest.mark.skipif(not loaded.FORKS, reason="elsewhere no process waits")
def test_the_process_that_waits_ends_by_itself_and_the_next_ranks_start_from_another(monkeypatch):
    code = f"import course_utils.ranks.loaded as l; l.IDLE_SECONDS = 3.0; {loaded.SERVE}"
    monkeypatch.setattr(loaded, "SERVE", code)
    monkeypatch.setenv("COURSE_TEST", "impatient")
    first = run_ranks(where_it_comes_from, 1)[0][0]
    assert loaded._idle[0].process.wait(timeout=300) == 0
    assert run_ranks(where_it_comes_from, 1)[0][0] != first


def ranks_that_had_started():
    import os
    import time

    import psutil

    count = len(psutil.Process(os.getppid()).children())
    time.sleep(0.3)  # so that the first is still there for the last
    return count


def test_no_rank_runs_its_program_before_all_are_forked():
    """A connection to the launcher while it forks another rank can leave that one with a lock forever."""
    assert run_ranks(ranks_that_had_started, 4) == [4] * 4


def one_raises():
    import os
    import time

    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("on purpose")
    time.sleep(3600)


def test_a_failing_rank_is_named_with_the_end_of_its_traceback():
    words = r"(?s)rank 1 of one_raises\(\) failed.*ZeroDivisionError: on purpose"
    with pytest.raises(RankFailed, match=words) as info:
        run_ranks(one_raises, 2)
    line = one_raises.__code__.co_firstlineno + 5
    assert f'File "one_raises.py", line {line}, in one_raises\n    raise Zero' in str(info.value)


def test_a_time_out_names_who_had_not_finished_and_where_it_was(monkeypatch):
    class Clock:
        """Lets an hour pass as soon as rank 1 has been waiting, however slow the computer is."""

        sleep = staticmethod(time.sleep)

        @staticmethod
        def time() -> float:
            waits = list(Path(distributed.tempfile.gettempdir()).glob("*/logs/*/*/1/stderr.log"))
            return time.time() + (3600 if waits and waits[0].stat().st_size else 0)

    monkeypatch.setattr(distributed, "time", Clock)
    with pytest.raises(RankFailed, match=r"the 2 ranks of one_hangs\(\) took more than 20 s") as info:
        run_ranks(one_hangs, 2, timeout_seconds=20)
    said = str(info.value)
    line = one_hangs.__code__.co_firstlineno + 6
    assert "Not finished: rank 1." in said and "rank 0" not in said
    assert f'File "one_hangs.py", line {line} in one_hangs' in said
    assert "hello from 1" in said


def test_no_rank_outlives_a_caller_that_is_interrupted():
    assert left_behind_by_a_caller_that_gets(signal.SIGINT) == []


def one_is_killed():
    import os
    import signal
    import subprocess
    import time

    subprocess.Popen(["sleep", "600"])  # holds this rank's own files open, and outlives it
    print("still here", flush=True)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def test_a_killed_rank_is_named_and_what_it_had_started_ends_too():
    words = r"(?s)rank 1 of one_is_killed\(\) was killed by SIGKILL.*still here$"
    with pytest.raises(RankFailed, match=words):
        run_ranks(one_is_killed, 2)


def outlives_its_end():
    import weakref

    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    return group() is not None


def test_a_destroyed_group_lives_until_its_rank_ends():
    """Else the reducer of a DDP model that is freed later may wait for ever."""
    assert run_ranks(outlives_its_end, 1) == [True]


def test_a_rank_without_a_result_is_named(program):
    path = program("""
        import os
        from course_utils.ranks.worker import report
        if os.environ["RANK"] == "0":
            report(None)
    """)
    with pytest.raises(RankFailed, match=r"rank 1 of .* ended without a result: let it call report"):
        run_ranks(path, 2)


# Data parallelism

PEAKS: list[dict[str, Any]] = [{"bucket_view": True, "accumulation_steps": 2}, {"zero_stage": 1}]
RECIPES: list[dict[str, Any]] = [
    {"optimizer": "adafactor"},
    {"optimizer": "muon", "zero_stage": 1},
    {"optimizer": "lion"},
    {"optimizer": "adam8bit", "zero_stage": 1},
    {"precision": "amp-bf16"},
    {"precision": "amp-fp16", "zero_stage": 1},
    {"precision": "fp16-master"},
    {"precision": "bf16-master", "optimizer": "adamw-foreach", "bucket_view": True, "accumulation_steps": 2},
    {"precision": "bf16-master", "optimizer": "sgd", "bucket_view": True, "zero_stage": 1},
]
"""Optimizers, and recipes of formats that torch's reducer takes."""


@functools.cache
def all_measured() -> dict[TrainingRun, Measurement]:
    runs = [LARGE_VOCABULARY.replace(**changes) for changes in PEAKS]
    runs += [RUN.replace(**changes) for changes in RECIPES]
    return measured_together([*runs, RUN])


def counters(run: TrainingRun) -> int:
    """Bytes of AdamW's step counters, which are on the CPU in the memory that is traced."""
    shapes = parameter_shapes(run.model)
    names = list(zero_1_shares(shapes, 2)[0] if run.zero_stage else shapes)
    if run.optimizer.algorithm == "muon":
        names = [name for name in names if not is_hidden_matrix(name, shapes[name])]
    return 0 if run.optimizer.algorithm in ("sgd", "lion", "adam8bit") else BLOCK * len(names)


@pytest.mark.parametrize("changes", PEAKS, ids=str)
def test_the_estimated_peak_is_near_but_for_step_counters(changes):
    run = LARGE_VOCABULARY.replace(**changes)
    measured = all_measured()[run]
    assert measured.peak - counters(run) == pytest.approx(estimate(run).total, rel=0.01)
    assert estimate(run).phase == measured.peak_phase


@pytest.mark.parametrize("changes", PEAKS, ids=str)
def test_a_simulated_rank_takes_what_a_real_one_takes_but_for_step_counters(changes):
    run = LARGE_VOCABULARY.replace(**changes)
    real = all_measured()[run]
    simulated = simulate(run)
    assert real.peak - simulated.peak == counters(run)
    for kind in ("parameters", "gradients", "activations", "communication", "temporaries"):
        assert real.breakdown[kind] == simulated.breakdown[kind], kind


@pytest.mark.parametrize("changes", RECIPES, ids=str)
def test_the_optimizers_step_is_near_for_every_recipe_that_is_estimated(changes):
    run = RUN.replace(**changes)
    expected = moments(run)["optimizer step"]
    truth = all_measured()[run].phase_peaks["optimizer"]
    assert truth["optimizer_states"] - expected["optimizer_states"] == counters(run)
    assert truth.total - counters(run) == pytest.approx(expected.total, rel=0.01)


def test_where_it_comes_from_is_said():
    found = measure(RUN, "cpu")
    assert str(found.provenance).startswith("traced on the CPU")
    assert "rank 0 of 2 processes (gloo)" in str(found.provenance)
    assert found.breakdown == all_measured()[RUN].breakdown


def gradients_of_rank(pickled: str):
    import base64
    import pickle

    import torch.distributed as dist

    from course_utils.measuring.data_parallel import ReplicatedTraining
    from course_utils.networks import loss_of

    dist.init_process_group("gloo")
    training = ReplicatedTraining(pickle.loads(base64.b64decode(pickled)))
    loss_of(training.network(training.tokens), training.targets).backward()
    dist.destroy_process_group()
    return {name: weight.grad.tolist() for name, weight in training.network.module.named_parameters()}


def test_gradients_are_those_of_the_whole_batch():
    model = tiny("gpt2", layers=1, hidden=16, heads=2, vocab=32, max_positions=8)
    run = TrainingRun(model, 3, 8, "fp32", attention="eager", world_size=2)
    found = run_ranks(gradients_of_rank, 2, pickled=base64.b64encode(pickle.dumps(run)).decode())
    whole = gradients(run, whole_batch(run)[:6])
    part = gradients(run, whole_batch(run)[:3])
    for name, expected in whole.items():
        assert found[0][name] == found[1][name]
        torch.testing.assert_close(torch.tensor(found[0][name]), expected, rtol=1e-4, atol=1e-7)
    name = "blocks.0.mlp.up.weight"
    assert not torch.allclose(torch.tensor(found[0][name]), part[name], rtol=1e-2)


def gradients(run: TrainingRun, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of one process that sees all of `text`, with the weights that every rank begins with."""
    torch.manual_seed(SEED)
    network = Training(run, "cpu", simulated=False).network
    loss_of(network(text[:, :-1]), text[:, 1:]).backward()
    return {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
