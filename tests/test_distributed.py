"""Real processes: what ranks report, how failures read, that none is left; and data parallelism as torch does it."""

import functools
import os
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from engine import tiny

from course_utils import estimate, measure
from course_utils.breakdown import KINDS
from course_utils.distributed import RankFailed, report, run_ranks
from course_utils.estimating.sharding import bucket_sizes, ddp_communication, rank_0_states, zero_1_shares
from course_utils.measuring.data_parallel import check_data_parallel, whole_batch
from course_utils.measuring.step import Training
from course_utils.measuring.tracing import SEED
from course_utils.models import parameter_shapes
from course_utils.networks import loss_of
from course_utils.run import TrainingRun
from course_utils.units import BLOCK

RUN = TrainingRun(tiny("gpt2"), 2, 32, "fp32", attention="eager", world_size=2)


@functools.cache
def measured(run: TrainingRun):
    return measure(run, "cpu")


@pytest.fixture
def program(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


# Launching


def test_every_rank_reports_in_order(program):
    path = program("""
        import os, sys
        from course_utils.distributed import report
        report({"rank": int(os.environ["RANK"]), "of": int(os.environ["WORLD_SIZE"]), "argument": sys.argv[1]})
    """)
    assert run_ranks(path, 3, ["hello"]) == [{"rank": rank, "of": 3, "argument": "hello"} for rank in range(3)]


def test_a_failing_rank_is_named_with_its_last_words(program):
    path = program("""
        import os, time
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("on purpose")
        time.sleep(300)
    """)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of .*program\.py failed.*ZeroDivisionError: on purpose"):
        run_ranks(path, 2)
    assert time.monotonic() - began < 120
    assert left_behind(path) == []


def test_a_time_out_ends_every_process(program):
    path = program("""
        import os, pathlib, sys, time
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(600)
    """)
    with pytest.raises(RankFailed, match=r"the 2 ranks of .* took more than 8 s and were ended"):
        run_ranks(path, 2, [str(path.parent)], timeout_seconds=8)
    pids = [int((path.parent / str(rank)).read_text()) for rank in range(2)]  # so both had started
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    assert left_behind(path) == []


def left_behind(program: Path) -> list[psutil.Process]:
    """Processes of this user that still run a program."""
    ours = (p for p in psutil.process_iter(["cmdline", "status"]) if p.info["status"] != psutil.STATUS_ZOMBIE)
    return [process for process in ours if str(program) in (process.info["cmdline"] or [])]


def test_a_rank_without_a_result_is_named(program):
    path = program("""
        import os
        from course_utils.distributed import report
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


def test_nobody_waits_for_a_report_made_elsewhere():
    assert "COURSE_RANK_RESULTS" not in os.environ
    with pytest.raises(RuntimeError, match="run_ranks"):
        report(1)


# Data parallelism

MEASURED = [{}, {"bucket_view": True}, {"zero_stage": 1}]


@pytest.mark.parametrize("changes", MEASURED, ids=str)
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
    apart, views = measured(RUN), measured(RUN.replace(bucket_view=True))
    kept = [found.moments["end of backward"]["gradients"] for found in (apart, views)]
    assert apart.moments["end of step 2"]["communication"] == ddp_communication(RUN) > 0
    assert views.moments["end of backward"]["communication"] == 0
    assert abs(kept[0] - kept[1]) < BLOCK * len(zero_1_shares(RUN.model, 1)[0])
    buckets = [a.bytes for a in views.alive_at(views.peak_event) if a.kind == "gradients"]
    assert sorted(buckets) == sorted(bucket_sizes(RUN.replace(bucket_view=True)))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"bucket_view": True}, {"zero_stage": 1}, {"accumulation_steps": 2},
        {"zero_stage": 1, "optimizer": "adamw-loop"}, {"bucket_view": True, "accumulation_steps": 2},
        {"bucket_view": True, "accumulation_steps": 3, "zero_stage": 1},
    ],
)  # fmt: skip
def test_the_estimated_peak_is_exact_but_for_step_counters(changes):
    """A run whose peak owes nothing to what CPU kernels do otherwise: no dropout, a large vocabulary."""
    run = RUN.replace(model=tiny("gpt2", vocab=16384), **changes)
    found, truth = estimate(run), measured(run).breakdown
    counters = BLOCK * len(zero_1_shares(run.model, 2)[0] if run.zero_stage else parameter_shapes(run.model))
    off = {kind: found[kind] - truth[kind] for kind in KINDS if found[kind] != truth[kind]}
    assert off == {"optimizer_states": -counters} and found.phase == measured(run).peak_phase


def test_with_gradients_that_stay_the_buckets_settle_in_the_third_step():
    run = RUN.replace(bucket_view=True, set_to_none=False, optimizer="sgd")
    assert measure(run, "cpu", steps=3).peak == pytest.approx(estimate(run).total, rel=0.01)
    assert "steps=3" in measured(run).provenance.note
    assert measured(run).peak > 1.1 * estimate(run).total


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
        from course_utils.distributed import report
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
    whole, part = (gradients(run, whole_batch(run)[:sequences]) for sequences in (6, 3))
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
        ({"world_size": 9}, "up to 8 run here; zero_stage=3 is simulated"),
        ({"optimizer": "muon"}, "not with muon"),
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
