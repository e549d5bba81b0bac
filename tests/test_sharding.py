"""Shards and what goes between ranks: ZeRO's table, torch's own partitions, and FSDP2 as rank 0 of many."""

import dataclasses
import sys
from math import prod

import pytest
import torch
from engine import GPT, assert_rank_0_is_near, simulate, tiny
from torch._C import _distributed_c10d as distributed_c10d

from course_utils import estimate, measure, rank_states
from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import compare_with_gpu, read_snapshot, save_snapshot
from course_utils.estimating import megatron
from course_utils.estimating.formula_of_ranks import buffers, rank_0_states
from course_utils.estimating.sharding import (
    BUCKET,
    FIRST_BUCKET,
    bucket_sizes,
    ddp_buckets,
    zero_1_shares,
    zero_bytes,
)
from course_utils.measuring.files import from_json, to_json
from course_utils.models import parameter_shapes
from course_utils.run import TrainingRun
from course_utils.units import GB, round_up

RUN = TrainingRun(tiny("gpt2"), 2, 64, world_size=8, zero_stage=3)


# ZeRO's formulas


@pytest.mark.parametrize(("stage", "shown"), [(0, "120"), (1, "31.4"), (2, "16.6"), (3, "1.9")])
def test_zeros_own_table(stage, shown):
    """Rajbhandari et al. 2020, figure 1; the paper cuts 16.64 to 16.6 and 1.875 to 1.9."""
    assert f"{zero_bytes(7_500_000_000, 64, stage) / GB:.{1 if '.' in shown else 0}f}" == shown


# DistributedDataParallel and ZeRO-1, without any process


@pytest.mark.parametrize("model", [tiny("llama"), GPT], ids=lambda model: model.name)
@pytest.mark.parametrize("caps", [(FIRST_BUCKET, BUCKET), (sys.maxsize,), (512,)], ids=str)
def test_buckets_are_those_of_torch(model, caps):
    shapes = list(reversed(parameter_shapes(model).values()))
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    dense = [False] * len(tensors)
    order = list(range(len(tensors)))
    indices, _ = distributed_c10d._compute_bucket_assignment_by_size(tensors, list(caps), dense, order)
    theirs = [sum(4 * prod(shapes[index]) for index in bucket) for bucket in indices]
    assert sorted(theirs) == sorted(ddp_buckets([4 * prod(shape) for shape in shapes], caps))


def test_zero_1_shares_out_whole_tensors_once_each():
    shares = zero_1_shares(parameter_shapes(GPT), 5)
    assert sum(prod(shape) for share in shares for shape in share.values()) == GPT.parameters
    assert sorted(name for share in shares for name in share) == sorted(parameter_shapes(GPT))
    assert "embedding.weight" in shares[0]  # the largest goes first


# FSDP2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp32", "attention": "efficient", "world_size": 3, "zero_stage": 2},
        {"precision": "bf16-master", "world_size": 64, "model": tiny("gpt2", layers=3), "loss_chunks": 4},
        {"precision": "fp16-master", "optimizer": "lion", "clip_grad_norm": 1.0, "set_to_none": False},
        {"model": tiny("llama"), "accumulation_steps": 3, "world_size": 5, "recompute": "selective"},
        # fullest at the end of backward, where the loss and its gradient still are
        {"model": tiny("llama", vocab=20_000), "micro_batch": 1, "seq_len": 8, "recompute": "full"},
    ],
    ids=str,
)
def test_peak_is_near_and_states_are_exact(changes):
    assert_rank_0_is_near(RUN.replace(**changes))


def test_gathered_and_reduced_buffers_are_on_streams_of_their_own(tmp_path):
    """FSDP2's streams, in the order it makes them: copy-in and gather, all-gather, reduce-scatter."""
    found = simulate(RUN)
    files = {item.line.partition(":")[0] for item in found.allocations}
    assert "step.py" in files and not any("track" in name or name == "sharded.py" for name in files)
    by_stream = {stream: [a for a in found.allocations if a.stream == stream] for stream in (0, 1, 2, 3)}
    assert sum(map(len, by_stream.values())) == len(found.allocations) and not by_stream[2]
    assert {a.kind for a in by_stream[1]} == {"communication"}
    assert {a.kind for a in by_stream[3]} == {"gradients"}
    assert round_up(buffers(RUN).block.arrived) in {a.bytes for a in by_stream[1]}
    assert round_up(buffers(RUN).block.share) in {a.bytes for a in by_stream[3]}
    assert from_json(to_json(found, whole=True), "").allocations == list(found.allocations)
    replayed = replay(found)
    one_stream = [dataclasses.replace(a, stream=0) for a in found.allocations]
    assert replayed.peak_reserved > replay(dataclasses.replace(found, allocations=one_stream)).peak_reserved
    assert compare_with_gpu(read_snapshot(save_snapshot(replayed, tmp_path / "step.pickle"))).exact


# DistributedDataParallel and ZeRO-1 as rank 0 of many


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "amp-bf16", "attention": "flash", "accumulation_steps": 3},
        {"precision": "bf16-master", "attention": "flash", "zero_stage": 1},
        {"precision": "fp32", "attention": "eager", "bucket_view": True, "optimizer": "sgd"},
        {"model": tiny("gpt2"), "seq_len": 16, "bucket_view": True, "set_to_none": False, "optimizer": "sgd"},
    ],
    ids=str,
)
def test_the_closed_form_is_near_a_simulated_replica(changes):
    run = TrainingRun(tiny("gpt2", vocab=8192), 2, 64, world_size=8).replace(**changes)
    found = simulate(run)
    assert estimate(run).total == pytest.approx(found.peak, rel=0.001)
    assert estimate(run).phase == found.peak_phase
    reduced = next(each for each in found.messages if each.kind == "all-reduce")
    assert reduced.bytes == run.model.parameters * run.precision.weight
    assert reduced.count == len(bucket_sizes(run))


# What is refused, and what is left behind


@pytest.mark.parametrize(
    ("changes", "source", "words"),
    [
        ({"optimizer": "muon"}, "simulated", "muon"),
        ({"zero_stage": 1, "precision": "bf16-master-fp32grad"}, "simulated", "'bf16-master'"),
        ({"zero_stage": 1}, "live", r"source='simulated', or for zero_stage 0 and 1 source='cpu'"),
    ],
)
def test_what_is_not_measured_is_refused(changes, source, words):
    with pytest.raises(ValueError, match=words):
        measure(RUN.replace(**changes), source)


# Tensor and sequence parallelism


def korthikanti(**changes):
    run = TrainingRun("gpt3-175b", 1, 2048, attention="eager", tensor_parallel=8)
    return megatron.block_activation_bytes(run.replace(**changes)) / (2048 * 12288)


def test_korthikantis_table():
    """s = 2048, b = 1, h = 12288, a = 96, t = 8: 5as/h = 80."""
    assert korthikanti(tensor_parallel=1) == 34 + 80
    assert korthikanti() == 10 + 24 / 8 + 80 / 8
    assert korthikanti(sequence_parallel=True) == (34 + 80) / 8
    assert korthikanti(attention="flash", recompute="selective-attention") == 10 + 24 / 8
    assert korthikanti(recompute="selective-attention", sequence_parallel=True) == 34 / 8
    assert korthikanti(recompute="full") == 2


def test_ranks_share_all_but_norms_positions_and_biases_after_a_sum():
    model = tiny("gpt2", vocab=511)  # 2 ranks pad it to 512
    h = model.hidden
    replicated = model.layers * (4 * h + 2 * h) + 2 * h + model.max_positions * h
    of_one = sum(map(prod, megatron.rank_shapes(model, 2).values()))
    assert 2 * of_one == model.parameters + h + replicated
    with pytest.raises(ValueError, match="do not divide 2 key and value heads"):
        megatron.rank_shapes(tiny("llama"), 4)


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp32", "adamw"), ("bf16-master", "muon"), ("fp8", "adam8bit")]
)
def test_one_tensor_parallel_rank_keeps_what_one_rank_keeps(precision, optimizer):
    run = TrainingRun(tiny("llama"), 2, 64, precision, optimizer, attention="eager")
    assert {kind: rank_states(run)[kind] for kind in rank_0_states(run)} == rank_0_states(run)


def test_a_tensor_parallel_rank_keeps_sixteen_bytes_a_parameter_of_its_own():
    run = TrainingRun(
        "gpt3-175b", 1, 2048, "bf16-master", attention="eager", tensor_parallel=8, sequence_parallel=True
    )
    found = rank_states(run)
    N = sum(map(prod, megatron.rank_shapes(run.model, 8).values()))
    states = found["parameters"] + found["gradients"] + found["optimizer_states"]
    assert 0 <= states - 16 * N < 5 * 512 * len(parameter_shapes(run.model))
    assert found["activations"] == 96 * 2048 * 12288 * (34 + 80) // 8
    assert found.label == "one of 8 tensor-parallel ranks, with its blocks' activations"
    assert found.total == states + found["activations"]


def test_tensor_parallelism_is_counted_and_not_measured():
    run = TrainingRun(tiny("gpt2"), 2, 64, tensor_parallel=2)
    states = rank_states(run)
    assert all(estimate(run)[kind] == states[kind] for kind in ("parameters", "optimizer_states"))
    with pytest.raises(ValueError, match=r"course_utils\.rank_states\(run\)"):
        measure(run)
    with pytest.raises(ValueError, match="lora_rank=0, world_size=1"):
        rank_states(run.replace(world_size=2))
