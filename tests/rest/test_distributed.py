"""Real processes: what ranks report, how failures read, that none is left; data parallelism as torch does it.

Every start of processes costs seconds: so tests share what they can. Nothing here may signal the test's own
process.
"""

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import tiny
from real_ranks import LARGE_VOCABULARY, RUN, left_behind_by_a_caller_that_gets, measured_together, one_hangs
from real_ranks import nothing_is_left as nothing_is_left

from course_utils import estimate, measure
from course_utils.estimating.formula import persistent
from course_utils.estimating.sharding import bucket_sizes, zero_1_shares
from course_utils.measurement import Measurement
from course_utils.models import parameter_shapes
from course_utils.ranks import launch as distributed
from course_utils.ranks.launch import RanksUnavailable, run_ranks
from course_utils.run import TrainingRun
from course_utils.units import BLOCK

# Launching


def sum_of_ranks(start: int, names: list[str]):
    import os

    import torch.distributed as dist
    from torch import tensor

    class Rank:
        number = int(os.environ["RANK"])
        whole = tensor([doubled(start) + number])

    dist.init_process_group("gloo")
    dist.all_reduce(Rank.whole)
    print(f"{names[Rank.number]} has {Rank.whole.item()}")
    dist.destroy_process_group()
    return [Rank.whole.item(), os.environ["CUDA_VISIBLE_DEVICES"]]


def doubled(number):
    return 2 * number


def test_a_function_runs_on_every_rank_with_those_it_calls_in_silence_and_finds_no_gpu(capfd, monkeypatch):
    """A notebook's outputs are compared. And torch would start CUDA, for Adam and for each mesh."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run_ranks(sum_of_ranks, 2, start=10, names=["Ann", "Bob"]) == [[41, ""]] * 2
    assert capfd.readouterr() == ("", "")


def test_no_rank_outlives_a_caller_that_is_killed():
    assert left_behind_by_a_caller_that_gets(signal.SIGKILL) == []


def uses_what_it_does_not_import():
    return torch.zeros(1), Path()


def closure():
    steps = 3

    def inner():
        return steps

    return inner


@pytest.mark.parametrize(
    ("function", "keywords", "words"),
    [
        (lambda: 1, {}, "a lambda cannot be sent to another process: write it with def"),
        ("".upper, {}, "not a plain function"),
        (uses_what_it_does_not_import, {}, "uses Path, torch, which another process does not know: import"),
        (closure(), {}, r"inner\(\) uses steps of the function around it.*pass steps as an argument"),
        (sum_of_ranks, {"start": 1}, r"cannot be called with start: missing a required argument"),
        (sum_of_ranks, {"start": torch.ones(1), "names": []}, "with start, names: Object of type Tensor is"),
    ],
)
def test_a_function_that_cannot_be_sent(function, keywords, words):
    with pytest.raises(TypeError, match=words):
        run_ranks(function, 2, **keywords)


@pytest.mark.parametrize(
    ("program", "world_size", "words"),
    [
        (one_hangs, 0, "a number of processes from 1 to 64"),
        (one_hangs, True, "a number of processes from 1 to 64"),
        ("nowhere.py", 2, "there is no program"),
        ("no module", 2, "neither the path"),
    ],
)
def test_what_cannot_be_started(program, world_size, words):
    with pytest.raises(ValueError, match=words):
        run_ranks(program, world_size)


def test_windows_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(distributed.sys, "platform", "win32")
    with pytest.raises(RanksUnavailable, match="WSL2"):
        run_ranks(one_hangs, 2)


# Data parallelism

STATES: list[dict[str, Any]] = [{}, {"bucket_view": True}, {"zero_stage": 1}]
PEAKS: list[dict[str, Any]] = [{}, {"bucket_view": True, "accumulation_steps": 3, "zero_stage": 1}]


@functools.cache
def all_measured() -> dict[TrainingRun, Measurement]:
    runs = [RUN.replace(**changes) for changes in STATES]
    runs += [LARGE_VOCABULARY.replace(**changes) for changes in PEAKS]
    return measured_together(runs)


def measured(run: TrainingRun) -> Measurement:
    return all_measured()[run]


@pytest.mark.parametrize("changes", STATES, ids=str)
def test_states_of_rank_0_are_exact_but_for_step_counters(changes):
    run = RUN.replace(**changes)
    before_step = measured(run).moments["end of backward"]
    shares = zero_1_shares(parameter_shapes(run.model), 2 if run.zero_stage else 1)
    counters = BLOCK * len(shares[0])  # of AdamW, on the CPU in the memory that is traced
    expected = persistent(run)
    expected["optimizer_states"] += counters
    assert {kind: before_step[kind] for kind in expected} == expected


def test_buckets_are_those_that_the_reducer_makes():
    found = measured(RUN)
    buckets = [item.bytes for item in found.alive_at(found.peak_event) if item.kind == "communication"]
    assert sorted(buckets) == sorted(bucket_sizes(RUN))
    assert len(buckets) > 1


@pytest.mark.parametrize("changes", PEAKS, ids=str)
def test_the_estimated_peak_is_near_but_for_step_counters(changes):
    run = LARGE_VOCABULARY.replace(**changes)
    found = estimate(run)
    truth = measured(run).breakdown
    shapes = parameter_shapes(run.model)
    counters = BLOCK * len(zero_1_shares(shapes, 2)[0] if run.zero_stage else shapes)
    assert found["optimizer_states"] - truth["optimizer_states"] == -counters
    assert found.total + counters == pytest.approx(truth.total, rel=0.01)
    assert found.phase == measured(run).peak_phase


@pytest.mark.parametrize(
    ("changes", "words"), [({"world_size": 9}, "Up to 8 run here"), ({"loss_chunks": 2}, "loss_chunks=1")]
)
def test_what_processes_are_not_covered_for(changes, words):
    with pytest.raises(ValueError, match=words):
        measure(RUN.replace(**changes), "cpu")


def test_zero_1_learns_the_same_as_replicas():
    losses = measured(RUN).losses
    assert losses[1] < losses[0] and losses == pytest.approx(
        measured(RUN.replace(zero_stage=1)).losses, rel=1e-6
    )


def test_too_large_for_this_computer_counts_every_rank():
    model = tiny("gpt2", vocab=200_000, hidden=512)
    run = TrainingRun(model, 1, 16, "fp32", attention="eager", world_size=4)
    with pytest.raises(ValueError, match="of host memory"):
        measure(run, "cpu")
