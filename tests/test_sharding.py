"""Shards and what goes between ranks: ZeRO's table, torch's own partitions, and FSDP2 as rank 0 of many."""

import dataclasses
import sys
from math import prod

import pytest
import torch
import torch.distributed as dist
from engine import GPT, LLAMA, shallow, simulate, tiny
from torch._C import _distributed_c10d as distributed_c10d

from course_utils import estimate, measure, rank_states
from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import compare_with_gpu, read_snapshot, save_snapshot
from course_utils.estimating import megatron, moments
from course_utils.estimating.sharding import (
    BUCKET,
    FIRST_BUCKET,
    all_gather_bytes,
    all_reduce_bytes,
    bucket_sizes,
    ddp_buckets,
    fsdp_groups,
    rank_0_states,
    reduce_scatter_bytes,
    zero_1_shares,
    zero_bytes,
    zero_communication_elements,
)
from course_utils.measuring.recorded import FIELDS, from_json, to_json
from course_utils.measuring.sharded import measure_sharded
from course_utils.models import PRESETS, parameter_shapes
from course_utils.run import TrainingRun
from course_utils.units import GB, round_up

RUN = TrainingRun(tiny("gpt2"), 2, 64, world_size=8, zero_stage=3)


# ZeRO's formulas


@pytest.mark.parametrize(("stage", "shown"), [(0, "120"), (1, "31.4"), (2, "16.6"), (3, "1.9")])
def test_zeros_own_table(stage, shown):
    """Rajbhandari et al. 2020, figure 1; the paper cuts 16.64 to 16.6 and 1.875 to 1.9."""
    assert f"{zero_bytes(7_500_000_000, 64, stage) / GB:.{1 if '.' in shown else 0}f}" == shown


@pytest.mark.parametrize("stage", range(4))
def test_on_one_rank_every_stage_is_the_same(stage):
    assert zero_bytes(1000, 1, stage) == 16_000
    assert zero_bytes(1000, 1, stage, optimizer_bytes=8) == 12_000


def test_sharding_less_costs_more_and_never_less_than_an_even_share():
    for parameters in (1, 999, 10**9 + 7):
        for ranks in (2, 3, 64):
            sizes = [zero_bytes(parameters, ranks, stage) for stage in range(4)]
            assert sizes == sorted(sizes, reverse=True)
            assert 16 * parameters <= ranks * sizes[3] < 16 * parameters + ranks


def test_stage_3_sends_half_as_much_again():
    assert [zero_communication_elements(100, stage) for stage in range(4)] == [200, 200, 200, 300]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_ring_reduces_as_its_formula_says(ranks):
    """The ring, step by step: each rank sends one chunk a step, and in the end everybody has every sum."""
    chunks = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    sent = 0
    for step in range(ranks - 1):
        for rank in range(ranks):
            chunk = (rank - step) % ranks
            chunks[(rank + 1) % ranks][chunk] = chunks[(rank + 1) % ranks][chunk] | chunks[rank][chunk]
        sent += 1
    assert all(chunks[rank][(rank + 1) % ranks] == set(range(ranks)) for rank in range(ranks))
    assert reduce_scatter_bytes(ranks * 40, ranks) == all_gather_bytes(ranks * 40, ranks) == sent * 40
    assert all_reduce_bytes(ranks * 40, ranks) == 2 * sent * 40


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, None])
def test_no_ranks_at_all_are_refused(ranks):
    for refuses in (
        lambda: all_reduce_bytes(10, ranks),
        lambda: zero_bytes(10, ranks, 1),
        lambda: zero_1_shares(GPT, ranks),
    ):
        with pytest.raises(ValueError, match="ranks: a whole number of at least 1"):
            refuses()


@pytest.mark.parametrize("stage", [-1, 4, 1.5, True, "3"])
def test_an_unknown_stage_is_refused(stage):
    with pytest.raises(ValueError, match=r"0 \(nothing is sharded\), 1, 2 or 3"):
        zero_bytes(10, 2, stage)


# DistributedDataParallel and ZeRO-1, without any process


@pytest.mark.parametrize("model", [tiny("gpt2"), tiny("llama"), GPT, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize("caps", [(FIRST_BUCKET, BUCKET), (sys.maxsize,), (512,)], ids=str)
def test_buckets_are_those_of_torch(model, caps):
    shapes = list(reversed(parameter_shapes(model).values()))
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    dense = [False] * len(tensors)
    order = list(range(len(tensors)))
    indices, _ = distributed_c10d._compute_bucket_assignment_by_size(tensors, list(caps), dense, order)
    theirs = [sum(4 * prod(shapes[index]) for index in bucket) for bucket in indices]
    assert sorted(theirs) == sorted(ddp_buckets([4 * prod(shape) for shape in shapes], caps))


def test_all_buckets_together_are_all_gradients():
    run = TrainingRun(GPT, precision="fp32", attention="eager", world_size=4)
    for rebuilt in (True, False):
        assert (
            0 <= sum(bucket_sizes(run, rebuilt)) - 4 * GPT.parameters < 512 * len(bucket_sizes(run, rebuilt))
        )
    assert len(bucket_sizes(run, rebuilt=False)) == 1 < len(bucket_sizes(run))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_zero_1_shares_out_whole_tensors_once_each(ranks):
    shares = zero_1_shares(GPT, ranks)
    assert sum(prod(shape) for share in shares for shape in share.values()) == GPT.parameters
    assert sorted(name for share in shares for name in share) == sorted(parameter_shapes(GPT))
    assert "embedding.weight" in shares[0]  # the largest goes first


# FSDP2


SHARDED = [
    {},
    {"zero_stage": 2},
    {"precision": "fp32", "attention": "efficient", "world_size": 3},
    {"precision": "bf16-master", "world_size": 64},
    {"precision": "bf16", "optimizer": "adamw-fused", "loss_chunks": 4},
    {"precision": "amp-fp16", "optimizer": "momentum", "recompute": "full"},
    {"precision": "fp16-master", "optimizer": "lion", "clip_grad_norm": 1.0, "set_to_none": False},
    {"model": tiny("llama"), "accumulation_steps": 3, "world_size": 5, "recompute": "selective"},
]


@pytest.mark.parametrize("changes", SHARDED, ids=str)
def test_states_of_rank_0_are_exact(changes):
    run = RUN.replace(**changes)
    found = simulate(run)
    before_step = found.moments["end of backward"]
    assert {
        kind: before_step[kind] for kind in ("parameters", "gradients", "optimizer_states")
    } == rank_0_states(run)
    assert before_step["communication"] == before_step["temporaries"] == before_step["activations"] == 0
    assert dict(found.moments["end of step 1"]) == dict(found.moments["end of step 2"])


def test_provenance_says_whose_memory_it_is():
    assert "rank 0 of 8 simulated ranks" in str(simulate(RUN).provenance)
    assert simulate(RUN).source == "simulated"
    assert "the fp32 shards are the master weights" in str(
        simulate(RUN.replace(precision="bf16-master")).provenance
    )
    assert "2 of 3 micro-batches" in str(simulate(RUN.replace(accumulation_steps=3)).provenance)


@pytest.mark.parametrize("changes", [SHARDED[2], SHARDED[3], SHARDED[0], SHARDED[5]], ids=str)
def test_activations_are_those_of_one_rank(changes):
    """Sharding states changes nothing that forward keeps, but for autocast's copies of padded weights."""
    run = RUN.replace(**changes)
    alone = simulate(run.replace(world_size=1, zero_stage=0))
    assert (
        simulate(run).moments["end of forward"]["activations"]
        == alone.moments["end of forward"]["activations"]
    )


LARGE_VOCABULARY = {
    "model": tiny("llama", layers=2, vocab=20_000),
    "micro_batch": 1,
    "seq_len": 8,
    "recompute": "full",
}
"""Fullest at the end of backward, where the loss and its gradient still are."""

ESTIMATED = [
    *SHARDED,
    *(
        {**LARGE_VOCABULARY, "precision": recipe, "world_size": 2}
        for recipe in ("bf16-master", "fp16-master")
    ),
    {"model": tiny("llama", layers=4), "micro_batch": 8, "recompute": "full", "precision": "bf16-master"},
    {"model": tiny("gpt2", layers=5), "optimizer": "adamw-loop", "clip_grad_norm": 1.0, "seq_len": 8},
    {"model": tiny("gpt2", layers=3), "micro_batch": 8, "recompute": "selective-attention", "loss_chunks": 4},
    {"model": shallow(GPT, 4), "micro_batch": 1, "seq_len": 512},
    {
        "model": tiny("llama", layers=3),
        "precision": "bf16-master",
        "world_size": 2,
        "zero_stage": 2,
        "seq_len": 128,
    },
    {"model": shallow(GPT, 3), "seq_len": 512, "precision": "bf16-master", "zero_stage": 2, "world_size": 7},
]


@pytest.mark.parametrize("changes", ESTIMATED, ids=str)
@pytest.mark.sweep(12)
def test_the_peak_is_exact(changes):
    run = RUN.replace(**changes)
    expected = estimate(run)
    found = simulate(run)
    assert dict(expected) == dict(found.breakdown)
    assert expected.phase == found.peak_phase
    for phase, highest in found.phase_peaks.items():
        if phase not in ("clip", "optimizer", "zero_grad"):
            assert max(m.total for m in moments(run).values() if m.phase == phase) == highest.total, phase


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"recompute": "every-2"}, "choose 'full'"), ({"model": tiny("gpt2", layers=1)}, "from 2 blocks on")],
)
def test_what_the_peak_is_not_estimated_for(changes, words):
    with pytest.raises(ValueError, match=words):
        estimate(RUN.replace(**changes))


def test_a_later_share_of_gradients_is_communication_until_it_is_added():
    found = simulate(RUN.replace(accumulation_steps=2))
    shares = [
        a for a in found.allocations if a.bytes == fsdp_groups(RUN)[1].reduce_output and a.phase == "backward"
    ]
    assert {a.kind for a in shares} == {"gradients", "communication"}
    blocks, steps = RUN.model.layers, 2
    assert len(shares) == 2 * blocks * steps  # of each micro-batch, block and step
    assert sum(a.kind == "gradients" for a in shares) == blocks * steps


def test_gathered_and_reduced_buffers_are_on_streams_of_their_own(tmp_path):
    """FSDP2's streams, in the order it makes them: copy-in and gather, all-gather, reduce-scatter."""
    found = simulate(RUN)
    by_stream = {stream: [a for a in found.allocations if a.stream == stream] for stream in (0, 1, 2, 3)}
    assert sum(map(len, by_stream.values())) == len(found.allocations)
    gathered = fsdp_groups(RUN)[1].gather_output
    reduced = fsdp_groups(RUN)[1].reduce_output
    assert {a.bytes for a in by_stream[1]} >= {gathered} and not by_stream[2]
    assert {a.kind for a in by_stream[1]} == {"communication"}
    assert reduced in {a.bytes for a in by_stream[3]} and {a.kind for a in by_stream[3]} == {"gradients"}
    replayed = replay(found)
    one_stream = [dataclasses.replace(a, stream=0) for a in found.allocations]
    assert replayed.peak_reserved > replay(dataclasses.replace(found, allocations=one_stream)).peak_reserved
    assert {segment.stream for segment in replayed.blocks_at(len(replayed))} == {0, 1, 3}
    snapshot = read_snapshot(save_snapshot(replayed, tmp_path / "step.pickle"))
    assert compare_with_gpu(snapshot).exact


def test_a_recording_keeps_streams_where_they_are_not_the_default():
    found = simulate(RUN)
    kept = to_json(found, whole=True)
    assert from_json(kept, "").allocations == list(found.allocations)
    assert {
        len(row) for row, item in zip(kept["allocations"], found.allocations, strict=True) if not item.stream
    } == {len(FIELDS) - 1}


def test_what_a_dtensor_plans_is_not_there():
    """Momentum steps in place; 13 ranks are nobody else's, so torch plans each of its operators anew."""
    found = simulate(RUN.replace(optimizer="momentum", world_size=13), steps=3)
    made = [item for item in found.allocations if item.phase == "optimizer"]
    assert {item.kind for item in made} == {"optimizer_states"} and {item.step for item in made} == {1}


def test_stage_2_keeps_what_stage_3_frees_after_forward():
    deep = RUN.replace(model=tiny("gpt2", layers=5))
    outer, block = fsdp_groups(deep)[:2]
    kept = simulate(deep.replace(zero_stage=2)).moments["after loss"]["communication"]
    assert kept == outer.unsharded + 5 * block.unsharded
    assert simulate(deep).moments["after loss"]["communication"] == outer.unsharded


def test_more_ranks_leave_less_to_each():
    sizes = [sum(rank_0_states(RUN.replace(world_size=ranks)).values()) for ranks in (2, 8, 64)]
    whole = sum(rank_0_states(RUN.replace(world_size=1, zero_stage=0)).values())
    assert whole / 2 <= sizes[0] < 0.52 * whole
    assert sizes == sorted(sizes, reverse=True)


def test_shards_in_another_format_are_copied_before_they_are_sent():
    for precision, element in (("bf16-master", 2), ("bf16", 0), ("amp-bf16", 0)):
        for group in fsdp_groups(RUN.replace(precision=precision)):
            assert group.gather_input == round_up(element * sum(group.shards))


def test_padding_is_counted():
    """A bias of 256 over 100 ranks: 3 elements a rank, so 300 are gathered."""
    run = RUN.replace(world_size=100, precision="fp32", attention="eager")
    block = fsdp_groups(run)[1]
    assert 3 in block.shards
    assert (
        block.unsharded > sum(round_up(4 * prod(shape)) for shape in parameter_shapes(run.model).values()) / 4
    )


# What is refused, and what is left behind


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"precision": "fp8"}, "fp8"), ({"optimizer": "muon"}, "muon"), ({"lora_rank": 4}, "lora_rank=0")],
)
def test_what_fsdp_is_not_covered_for(changes, words):
    with pytest.raises(ValueError, match=words):
        measure(RUN.replace(**changes), "simulated")


@pytest.mark.parametrize(("stage", "source"), [(0, "simulated"), (1, "auto"), (3, "cpu"), (2, "live")])
def test_the_error_names_what_works(stage, source):
    with pytest.raises(
        ValueError, match=r"zero_stage 2 and 3 .* source='simulated', 0 and 1 .* source='cpu'"
    ):
        measure(RUN.replace(zero_stage=stage), source)


def test_tensor_parallelism_is_not_measured():
    with pytest.raises(ValueError, match="closed forms only"):
        measure(RUN.replace(world_size=1, zero_stage=0, tensor_parallel=2), "simulated")


def test_torch_is_left_as_it_was():
    def state():
        patched = (torch.cuda.Event, torch.cuda.current_device, torch.UntypedStorage.resize_, sys.excepthook)
        return patched, torch.get_rng_state().tolist(), torch.get_default_dtype(), dist.is_initialized()

    before = state()
    measure_sharded(RUN.replace(world_size=7), 1, "once")
    assert state() == before


def test_the_group_is_ended_when_the_run_fails(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("course_utils.measuring.sharded.follow", broken)
    with pytest.raises(ZeroDivisionError):
        measure_sharded(RUN.replace(world_size=6), 1, "fails")
    assert not dist.is_initialized()


# Tensor and sequence parallelism


def korthikanti(**changes):
    run = TrainingRun("gpt3-175b", 1, 2048, attention="eager", tensor_parallel=8)
    return megatron.block_activation_bytes(run.replace(**changes)) / (2048 * 12288)


def test_korthikantis_table():
    """s = 2048, b = 1, h = 12288, a = 96, t = 8: 5as/h = 80."""
    assert korthikanti(tensor_parallel=1) == 34 + 80
    assert korthikanti() == 10 + 24 / 8 + 80 / 8
    assert korthikanti(sequence_parallel=True) == (34 + 80) / 8
    assert korthikanti(recompute="selective-attention") == 10 + 24 / 8
    assert korthikanti(recompute="selective-attention", sequence_parallel=True) == 34 / 8
    assert korthikanti(recompute="full") == 2
    with pytest.raises(ValueError, match="does not cover sqrt"):
        korthikanti(recompute="sqrt")


@pytest.mark.parametrize(
    "model", [PRESETS["gpt3-175b"], PRESETS["llama3-8b"], tiny("gpt2"), tiny("llama")], ids=str
)
def test_ranks_have_everything_between_them(model):
    for ranks in (1, 2):
        vocabulary = -(-model.vocab // ranks) * ranks - model.vocab
        padding = vocabulary * model.hidden * (1 if model.tied else 2)
        shapes = megatron.rank_shapes(model, ranks)
        replicated = sum(
            prod(shape) for name, shape in shapes.items() if shape == parameter_shapes(model)[name]
        )
        total = ranks * sum(map(prod, shapes.values()))
        assert total == model.parameters + padding + (ranks - 1) * (replicated if ranks > 1 else 0)


def test_replicated_are_norms_positions_and_biases_after_a_sum():
    model = tiny("gpt2")
    h = model.hidden
    L = model.layers
    whole = parameter_shapes(model)
    replicated = sum(
        prod(shape) for name, shape in megatron.rank_shapes(model, 2).items() if shape == whole[name]
    )
    assert replicated == L * (4 * h + 2 * h) + 2 * h + model.max_positions * h


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="do not divide 2 key and value heads"):
        megatron.rank_shapes(tiny("llama"), 4)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("gpt3-175b", {"precision": "fp32", "attention": "eager"}, "does not cover fp32"),
        ("gpt3-175b", {"attention": "flash"}, "the flash kernel"),
        ("gpt3-175b", {"attention": "eager", "lora_rank": 8, "tensor_parallel": 1}, "LoRA"),
        ("gpt3-175b", {"attention": "eager", "dropout": 0.0}, "without dropout"),
        ("llama3-8b", {"attention": "eager"}, "a gated MLP"),
        (
            dataclasses.replace(GPT, kv_heads=4),
            {"attention": "eager", "tensor_parallel": 2},
            "grouped queries",
        ),
        (dataclasses.replace(GPT, ffn=1024), {"attention": "eager", "tensor_parallel": 2}, "an MLP of 1024"),
    ],
    ids=str,
)
def test_what_korthikantis_table_says_nothing_of_is_refused(model, changes, words):
    choices = {"precision": "bf16-master", "tensor_parallel": 8} | changes
    with pytest.raises(ValueError, match=words):
        megatron.block_activation_bytes(TrainingRun(model, 1, 1024, **choices))


def test_where_the_core_is_recomputed_the_kernel_makes_no_difference():
    assert korthikanti(attention="flash", recompute="selective-attention") == 10 + 24 / 8
    assert korthikanti(attention="flash", recompute="full") == 2


def test_elements_that_ranks_do_not_divide_are_rounded_up():
    run = TrainingRun(tiny("gpt2"), 1, 3, attention="eager", tensor_parallel=4, dropout=0.1)
    h, a = run.model.hidden, run.model.heads
    split = 24 * 3 * h + 5 * a * 9
    assert split % 4 == 0 or -(-split // 4) * 4 > split
    assert megatron.block_activation_bytes(run) == 10 * 3 * h + -(-split // 4)


@pytest.mark.parametrize(
    "precision", ["fp32", "amp-fp16", "bf16-master", "bf16-master-fp32grad", "bf16", "fp8"]
)
@pytest.mark.parametrize(
    "optimizer", ["sgd", "momentum", "adamw", "adamw-fused", "adafactor", "adam8bit", "muon"]
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


def test_states_come_without_activations_where_none_are_covered_and_say_so():
    found = rank_states(
        TrainingRun("llama3-70b", 1, 4096, "bf16-master", attention="flash", tensor_parallel=8)
    )
    assert found["activations"] == 0 < found["optimizer_states"] == 6 * found["parameters"]
    assert "8 tensor-parallel ranks, without activations: " in found.label
    assert "the flash kernel" in found.label


def test_tensor_parallelism_beside_something_else_is_refused():
    run = TrainingRun(tiny("gpt2"), 2, 64, tensor_parallel=2)
    for changes in ({"world_size": 2}, {"lora_rank": 4, "tensor_parallel": 1}):
        with pytest.raises(ValueError, match="lora_rank=0, world_size=1"):
            rank_states(run.replace(**changes))


@pytest.mark.parametrize("verb", [estimate, measure], ids=["estimate", "measure"])
def test_who_asks_for_tensor_parallelism_is_told_what_answers(verb):
    with pytest.raises(ValueError, match=r"course_utils\.rank_states\(run\)"):
        verb(TrainingRun(tiny("gpt2"), 2, 64, tensor_parallel=2))
