"""Real processes: what ranks report, how failures read, that none is left; data parallelism as torch does it.

Every start of processes costs seconds: so tests share what they can. Nothing here may signal the test's own
process.
"""

import base64
import dataclasses
import functools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine import tiny

from course_utils import estimate, measure
from course_utils.breakdown import KINDS
from course_utils.estimating import moments
from course_utils.estimating.sharding import bucket_sizes, ddp_communication, rank_0_states, zero_1_shares
from course_utils.estimating.states import is_hidden_matrix
from course_utils.measurement import Measurement
from course_utils.measuring.data_parallel import check_data_parallel, whole_batch
from course_utils.measuring.recorded import from_json
from course_utils.measuring.step import Training
from course_utils.measuring.tracing import SEED
from course_utils.models import parameter_shapes
from course_utils.networks import loss_of
from course_utils.ranks import launch as distributed
from course_utils.ranks.launch import RankFailed, RanksUnavailable, run_ranks
from course_utils.ranks.worker import RESULTS, report
from course_utils.run import TrainingRun
from course_utils.units import BLOCK

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def program(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def left_behind() -> list[psutil.Process]:
    """Every process that was started for ranks, launcher or rank, and still runs."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and HERE in process.environ().get(RESULTS, ""):
                found.append(process)
        except psutil.Error:  # ended since it was listed, or another user's
            continue
    return found


HERE = f"course-ranks-test-{os.getpid()}"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    """After each test: no process, and this one still in the group and the session that it was in."""
    folder = tmp_path_factory.mktemp(HERE)
    monkeypatch.setattr(distributed.tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    before = os.getpgrp(), os.getsid(0)
    yield
    assert left_behind() == []
    assert (os.getpgrp(), os.getsid(0)) == before


# Launching


def sum_of_ranks(start: int, names: list[str]):
    import os

    import torch.distributed as dist
    from torch import tensor

    class Rank:
        number = int(os.environ["RANK"])
        whole = tensor([start + number])

    dist.init_process_group("gloo")
    dist.all_reduce(Rank.whole)
    print(f"{names[Rank.number]} has {Rank.whole.item()}")
    dist.destroy_process_group()
    return [Rank.whole.item(), os.environ["CUDA_VISIBLE_DEVICES"]]


def test_a_function_runs_on_every_rank_in_silence_and_finds_no_gpu(capfd, monkeypatch):
    """A notebook's outputs are compared. And torch would start CUDA, for Adam and for each mesh."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run_ranks(sum_of_ranks, 2, start=10, names=["Ann", "Bob"]) == [[21, ""]] * 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("forks", [True, False] if sys.platform == "linux" else [False])
def test_every_rank_of_a_program_reports_in_order(program, monkeypatch, forks):
    """On macOS, and where there is a GPU, which forked ranks could not use, each is a Python of its own."""
    pretend = f"import torch; torch.cuda.is_available = lambda: {not forks}; {distributed.LAUNCHER}"
    monkeypatch.setattr(distributed, "LAUNCHER", pretend)
    path = program("""
        import multiprocessing, os, sys
        from course_utils.ranks.worker import report
        assert __name__ == "__main__"
        rank, of = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        forked = type(multiprocessing.current_process()).__name__ == "ForkProcess"
        report({"rank": rank, "of": of, "argument": sys.argv[1], "forked": forked})
    """)
    reported = [{"rank": rank, "of": 3, "argument": "hello", "forked": forks} for rank in range(3)]
    assert run_ranks(path, 3, ["hello"]) == reported


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


def one_hangs():
    import os
    import time

    print("hello from", os.environ["RANK"])
    if os.environ["RANK"] == "1":
        time.sleep(3600)


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


def wait_for_ranks() -> None:
    deadline = time.monotonic() + 300
    while len(left_behind()) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_a_caller_that_is_interrupted_or_killed(how):
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}\n"
        "from test_distributed import one_hangs, run_ranks\n"
        "run_ranks(one_hangs, 2)"
    )
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code], **quiet) as caller:
        wait_for_ranks()
        assert left_behind()
        caller.send_signal(how)
    deadline = time.monotonic() + 300
    while left_behind() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_behind() == []


def test_a_rank_without_a_result_is_named(program):
    path = program("""
        import os
        from course_utils.ranks.worker import report
        if os.environ["RANK"] == "0":
            report(None)
    """)
    with pytest.raises(RankFailed, match=r"rank 1 of .* ended without a result: let it call report"):
        run_ranks(path, 2)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "2", True, 1000])
def test_a_number_of_ranks_that_cannot_be(world_size):
    with pytest.raises(ValueError, match="a number of processes from 1 to 64"):
        run_ranks("course_utils.measuring.data_parallel", world_size)


@pytest.mark.parametrize("name", ["nowhere.py", "no module", "", "../course_utils"])
def test_a_program_that_is_not_there(name):
    with pytest.raises(ValueError, match=r"there is no program|neither the path"):
        run_ranks(name, 2)


def doubled(number):
    return 2 * number if number < 10 else halved(number)


def halved(number):
    return doubled(number // 2) if number >= 20 else number // 2


def calls_its_neighbors(number):
    return doubled(number)


def test_functions_that_a_function_calls_go_along():
    assert run_ranks(calls_its_neighbors, 1, number=40) == [calls_its_neighbors(40)] == [5]


class Thing:
    def method(self):
        return 1


def uses_what_it_does_not_import():
    return torch.zeros(1), Path()


def without_source():
    made: dict = {}
    exec("def typed(): return 1", made)
    return made["typed"]


@pytest.mark.parametrize(
    ("function", "keywords", "words"),
    [
        (lambda: 1, {}, "a lambda cannot be sent to another process: write it with def"),
        ((lambda steps: lambda: steps)(3), {}, "a lambda cannot be sent"),
        (Thing().method, {}, "is a method, not a plain function"),
        (print, {}, "not a plain function"),
        (functools.partial(sum_of_ranks, 1), {}, "a partial, not a plain function"),
        (
            uses_what_it_does_not_import,
            {},
            "uses Path, torch, which another process does not know: import or define",
        ),
        (without_source(), {}, r"the source of typed\(\) cannot be read"),
        (
            sum_of_ranks,
            {"start": 1},
            r"sum_of_ranks\(\) cannot be called with start: missing a required argument",
        ),
        (sum_of_ranks, {"start": 1, "names": [], "steps": 2}, "unexpected keyword argument 'steps'"),
        (
            sum_of_ranks,
            {"start": torch.ones(1), "names": []},
            "with start, names: Object of type Tensor is not JSON",
        ),
    ],
)
def test_a_function_that_cannot_be_sent(function, keywords, words):
    with pytest.raises(TypeError, match=words):
        run_ranks(function, 2, **keywords)


def test_a_closure_is_told_what_it_takes_along():
    steps = 3

    def closure():
        return steps

    words = r"closure\(\) uses steps of the function around it.*pass steps as an argument"
    with pytest.raises(TypeError, match=words):
        run_ranks(closure, 2)


def test_arguments_of_the_wrong_kind():
    with pytest.raises(ValueError, match="a function takes its arguments by name"):
        run_ranks(one_hangs, 2, ["3"])
    with pytest.raises(ValueError, match="is not a function: give its arguments as strings, not steps="):
        run_ranks("course_utils.measuring.data_parallel", 2, steps=3)


def test_windows_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(distributed.sys, "platform", "win32")
    with pytest.raises(RanksUnavailable, match="WSL2"):
        run_ranks(one_hangs, 2)


def test_of_all_that_a_rank_has_printed_a_message_repeats_the_end(tmp_path):
    (tmp_path / "launcher.log").write_bytes(b"\xff" * 10_000_000 + b"\n" + b"step\n" * 20 + b"x" * 10_000)
    said = distributed._failure({"name": "train.py"}, tmp_path, -signal.SIGKILL)
    assert said.startswith("the launcher of the ranks of train.py was killed by SIGKILL:\n")
    assert said.count("step") == distributed.LAST_LINES - 1 and len(said) < 1000


def test_nobody_waits_for_a_report_made_elsewhere():
    assert "COURSE_RANK_RESULTS" not in os.environ
    with pytest.raises(RuntimeError, match="run_ranks"):
        report(1)


# Data parallelism

RUN = TrainingRun(tiny("gpt2"), 2, 32, "fp32", attention="eager", world_size=2)
STATES = [{}, {"bucket_view": True}, {"zero_stage": 1}]
PEAKS = [
    {}, {"bucket_view": True}, {"zero_stage": 1}, {"accumulation_steps": 2},
    {"zero_stage": 1, "optimizer": "adamw-loop"}, {"bucket_view": True, "accumulation_steps": 2},
    {"bucket_view": True, "accumulation_steps": 3, "zero_stage": 1},
]  # fmt: skip
RECIPES: list[dict[str, Any]] = [
    {"optimizer": "adafactor"}, {"optimizer": "muon"}, {"optimizer": "lion"}, {"optimizer": "adam8bit"},
    {"optimizer": "adafactor", "zero_stage": 1}, {"optimizer": "muon", "zero_stage": 1},
    {"optimizer": "lion", "zero_stage": 1}, {"optimizer": "adam8bit", "zero_stage": 1},
    {"precision": "amp-bf16"}, {"precision": "bf16"}, {"precision": "bf16", "zero_stage": 1},
    {"precision": "amp-fp16", "zero_stage": 1}, {"precision": "fp16-master"},
    {"precision": "fp16-master", "zero_stage": 1},
    {"precision": "bf16-master"}, {"precision": "bf16-master", "zero_stage": 1, "optimizer": "adamw-loop"},
    {"precision": "bf16-master", "optimizer": "adamw-foreach", "bucket_view": True, "accumulation_steps": 2},
    {"precision": "bf16-master", "optimizer": "sgd", "bucket_view": True, "zero_stage": 1},
]  # fmt: skip
"""Every optimizer, and every recipe of formats that torch's reducer takes."""

SETTLING = RUN.replace(bucket_view=True, set_to_none=False, optimizer="sgd")


def large_vocabulary(changes: dict) -> TrainingRun:
    """A run whose peak owes nothing to what CPU kernels do otherwise: no dropout, a large vocabulary."""
    return RUN.replace(model=tiny("gpt2", vocab=8192), **changes)


def follow_each(pickled: str):
    """Measure each run on one rank; all in one start of processes."""
    import base64
    import pickle

    import torch.distributed as dist

    from course_utils.measurement import Provenance
    from course_utils.measuring.data_parallel import ReplicatedTraining, ReplicaTracker
    from course_utils.measuring.recorded import to_json
    from course_utils.measuring.tracing import follow

    dist.init_process_group("gloo")
    found = []
    for run, steps in pickle.loads(base64.b64decode(pickled)):
        measured = follow(
            ReplicatedTraining(run), ReplicaTracker("cpu"), steps, Provenance("cpu", "CPU", "", "")
        )
        found.append((to_json(measured), list(measured.losses)))
    dist.destroy_process_group()
    return found


@functools.cache
def all_measured() -> dict[tuple[TrainingRun, int], Measurement]:
    wanted = [(RUN.replace(**changes), 2) for changes in STATES if changes]
    wanted += [(large_vocabulary(changes), 2) for changes in PEAKS] + [(SETTLING, 2), (SETTLING, 3)]
    wanted += [(RUN.replace(**changes), 2) for changes in RECIPES]
    pickled = base64.b64encode(pickle.dumps(wanted)).decode()
    found = run_ranks(follow_each, 2, pickled=pickled)[0]
    measured = {}
    for key, (content, losses) in zip(wanted, found, strict=True):
        measured[key] = dataclasses.replace(from_json(content, ""), losses=losses)
    return measured


@functools.cache
def measured(run: TrainingRun, steps: int = 2) -> Measurement:
    return measure(run, "cpu") if run == RUN else all_measured()[run, steps]


@pytest.mark.parametrize("changes", STATES, ids=str)
def test_states_of_rank_0_are_exact_but_for_step_counters(changes):
    run = RUN.replace(**changes)
    before_step = measured(run).moments["end of backward"]
    shares = zero_1_shares(run.model, 2 if run.zero_stage else 1)
    counters = BLOCK * len(shares[0])  # of AdamW, on the CPU in the memory that is traced
    expected = rank_0_states(run) | {"communication": ddp_communication(run)}
    expected["optimizer_states"] += counters
    assert {kind: before_step[kind] for kind in expected} == expected


def test_buckets_are_those_that_the_reducer_makes():
    found = measured(RUN)
    buckets = [item.bytes for item in found.alive_at(found.peak_event) if item.kind == "communication"]
    assert sorted(buckets) == sorted(bucket_sizes(RUN))
    assert len(buckets) > 1


def test_as_views_of_buckets_gradients_are_there_once():
    apart = measured(RUN)
    views = measured(RUN.replace(bucket_view=True))
    kept = [found.moments["end of backward"]["gradients"] for found in (apart, views)]
    assert apart.moments["end of step 2"]["communication"] == ddp_communication(RUN) > 0
    assert views.moments["end of backward"]["communication"] == 0
    assert abs(kept[0] - kept[1]) < BLOCK * len(zero_1_shares(RUN.model, 1)[0])
    buckets = [a.bytes for a in views.alive_at(views.peak_event) if a.kind == "gradients"]
    assert sorted(buckets) == sorted(bucket_sizes(RUN.replace(bucket_view=True)))


@pytest.mark.parametrize("changes", PEAKS, ids=str)
def test_the_estimated_peak_is_exact_but_for_step_counters(changes):
    run = large_vocabulary(changes)
    found = estimate(run)
    truth = measured(run).breakdown
    counters = BLOCK * len(zero_1_shares(run.model, 2)[0] if run.zero_stage else parameter_shapes(run.model))
    off = {kind: found[kind] - truth[kind] for kind in KINDS if found[kind] != truth[kind]}
    assert off == {"optimizer_states": -counters} and found.phase == measured(run).peak_phase


@pytest.mark.parametrize("changes", RECIPES, ids=str)
def test_the_optimizers_step_is_exact_for_every_recipe_that_is_estimated(changes):
    run = RUN.replace(**changes)
    expected = moments(run)["optimizer step"]
    truth = measured(run).phase_peaks["optimizer"]
    off = {kind: truth[kind] - expected[kind] for kind in KINDS if truth[kind] != expected[kind]}
    names = list(zero_1_shares(run.model, 2)[0] if run.zero_stage else parameter_shapes(run.model))
    if run.optimizer.algorithm == "muon":
        names = [name for name in names if not is_hidden_matrix(name, parameter_shapes(run.model)[name])]
    counters = 0 if run.optimizer.algorithm in ("sgd", "lion", "adam8bit") else BLOCK * len(names)
    assert off == ({"optimizer_states": counters} if counters else {})


@pytest.mark.parametrize("precision", ["bf16-master-fp32grad", "fp8"])
def test_what_the_reducer_cannot_do_is_not_estimated(precision):
    for stage in (0, 1):
        with pytest.raises(ValueError, match="in the format of the weights"):
            estimate(RUN.replace(precision=precision, zero_stage=stage))


def test_with_gradients_that_stay_the_buckets_settle_in_the_third_step():
    assert measured(SETTLING, 3).peak == pytest.approx(estimate(SETTLING).total, rel=0.01)
    assert measured(SETTLING, 2).peak > 1.1 * estimate(SETTLING).total


def test_where_it_comes_from_is_said():
    found = measured(RUN)
    assert found.source == "cpu"
    assert str(found.provenance).startswith("traced on the CPU")
    assert "rank 0 of 2 processes (gloo)" in str(found.provenance)
    assert len(found.losses) == 2 and found.losses[1] < found.losses[0]


def test_zero_1_learns_the_same_as_replicas():
    assert measured(RUN.replace(zero_stage=1)).losses == pytest.approx(measured(RUN).losses, rel=1e-6)


def test_gradients_are_those_of_the_whole_batch(program):
    path = program("""
        import torch.distributed as dist
        from course_utils.ranks.worker import report
        from course_utils.measuring.data_parallel import ReplicatedTraining
        from course_utils.models import TransformerConfig
        from course_utils.networks import loss_of
        from course_utils.run import TrainingRun

        dist.init_process_group("gloo")
        model = TransformerConfig("small", "gpt2", layers=1, hidden=16, heads=2, vocab=32, max_positions=8)
        run = TrainingRun(model, 3, 8, "fp32", attention="eager", world_size=2)
        training = ReplicatedTraining(run)
        loss_of(training.network(training.tokens), training.targets).backward()
        report({name: weight.grad.tolist() for name, weight in training.network.module.named_parameters()})
        dist.destroy_process_group()
    """)
    found = run_ranks(path, 2)
    model = tiny("gpt2", layers=1, hidden=16, heads=2, vocab=32, max_positions=8)
    run = TrainingRun(model, 3, 8, "fp32", attention="eager", world_size=2)
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 9}, "Up to 8 run here; zero_stage=3 is simulated"),
        ({"loss_chunks": 2}, "loss_chunks=1"),
    ],
)
def test_what_processes_are_not_covered_for(changes, words):
    with pytest.raises(ValueError, match=words):
        check_data_parallel(RUN.replace(**changes))


def test_too_large_for_this_computer_counts_every_rank():
    model = tiny("gpt2", vocab=200_000, hidden=512)
    run = TrainingRun(model, 1, 16, "fp32", attention="eager", world_size=4)
    with pytest.raises(ValueError, match="of host memory"):
        measure(run, "cpu")
