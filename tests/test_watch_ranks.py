"""A script made for torchrun, as one rank of many: its buckets, shards and messages, and what is refused."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from course_utils import on_gpu
from course_utils.errors import ScriptError
from course_utils.interactive.course_files import ROOT
from course_utils.measurement import Measurement, Messages
from course_utils.measuring.files import read_measurement, save_measurement
from course_utils.ranks.launch import run_ranks
from course_utils.units import round_up
from course_utils.watching.report import report
from course_utils.watching.script import watch_script

SCRIPTS = ROOT / "tests" / "scripts"


@pytest.fixture(autouse=True)
def the_same_everywhere(monkeypatch):
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def messages_of(measured: Measurement) -> dict[str, Messages]:
    return {each.kind: each for each in measured.messages}


def buckets_in(measured: Measurement, step: int) -> list[int]:
    """Bytes of the buffers that DistributedDataParallel made in a step; 0 is the set-up."""
    made = (one for one in measured.allocations if (one.kind, one.operation) == ("communication", "empty"))
    return [one.requested for one in made if one.step == step and one.requested > 1000]


# DistributedDataParallel

BLOCK = 2 * 512 + (256 * 768 + 768) + (256 * 256 + 256) + (256 * 1024 + 1024) + (1024 * 256 + 256)
GPT = 4 * (2048 * 256 + 64 * 256 + 2 * BLOCK + 512 + 256 * 2048)
"""Bytes of the parameters of `ranks_ddp.py`."""


def buckets_of_real_ranks(path: str, choices: list[str]) -> list[int]:
    import runpy
    import sys

    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sizes = []

    def noted(group, bucket):
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    class Noted(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, noted)

    torch.nn.parallel.DistributedDataParallel = Noted
    sys.argv = [path, *choices]
    runpy.run_path(path, run_name="__main__")
    return sizes


def test_buckets_are_those_of_real_processes_also_when_they_are_made_anew():
    path = SCRIPTS / "ranks_ddp.py"
    measured = watch_script(path, ranks=2)
    first, second = (buckets_in(measured, step) for step in (0, 2))
    real = run_ranks(buckets_of_real_ranks, 2, path=str(path), choices=[])
    assert real == [first + second + second] * 2  # of three steps
    assert len(second) == 2 and sum(first) == sum(second) == GPT


def test_a_replica_keeps_and_sends_its_gradients():
    measured = watch_script(SCRIPTS / "ranks_ddp.py", ranks=8)
    reduced = messages_of(measured)["all-reduce"]
    assert (reduced.count, reduced.bytes) == (3, GPT + 4)  # with the loss, which the script adds up
    assert reduced.sent == pytest.approx(2 * 7 / 8 * (GPT + 4), abs=8 * 3)
    end = measured.moments["end of step 2"]
    assert end["communication"] == sum(map(round_up, buckets_in(measured, 2)))
    assert end["parameters"] == pytest.approx(GPT, rel=0.01)
    assert "rank 0 of 8" in measured.provenance.note


def times_after_backward(optimizer: type = torch.optim.AdamW, hook: Any = None, **choices: Any) -> float:
    """Bytes allocated after the third backward of DistributedDataParallel, over those of the model."""
    with on_gpu(ranks=4):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
        replica = DistributedDataParallel(model, device_ids=[0], **choices)
        if hook:
            replica.register_comm_hook(None, hook)
        if optimizer is ZeroRedundancyOptimizer:
            updates = optimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
        else:
            updates = optimizer(model.parameters())
        for _ in range(3):
            replica(torch.randn(8, 1024, device="cuda")).sum().backward()
            after = torch.cuda.memory_allocated()
            updates.step()
            updates.zero_grad()
    return after / sum(weight.nbytes for weight in model.parameters())


CHOICES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 5),
    "views": ({"gradient_as_bucket_view": True}, 4),
    "unused parameters": ({"find_unused_parameters": True}, 5),
    "static": ({"static_graph": True}, 5),
    "a hook": ({"hook": bf16_compress_hook}, 5),
    "ZeRO": ({"optimizer": ZeroRedundancyOptimizer}, 4),  # states of one of two matrices
}
"""Choices of DistributedDataParallel, and how many times the model's bytes are there after backward."""


@pytest.mark.parametrize("case", CHOICES)
def test_a_replica_has_weights_gradients_buckets_and_states(case):
    choices, times = CHOICES[case]
    if case == "static" and torch.version.cuda:
        pytest.skip("static_graph=True is followed by the CPU build of torch only")
    assert times_after_backward(**choices) == pytest.approx(times, abs=0.05)


REDUCED = """import torch, sys
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False).cuda())
model.register_comm_hook(None, bf16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "train.py").write_text(text)
        return tmp_path / "train.py"

    return write


def test_a_hook_of_the_script_s_own_compresses_what_is_sent(written):
    measured = watch_script(written(REDUCED), ranks=2)
    assert messages_of(measured)["all-reduce"] == Messages("all-reduce", 1, 2 * 1024**2, 2 * 1024**2)
    copies = [one for one in measured.allocations if one.dtype == "bfloat16"]
    assert {one.kind for one in copies} == {"communication"}


@pytest.mark.parametrize("how", ["with world_size", "with WORLD_SIZE"])
def test_one_rank_is_watched_without_ranks(how, written, monkeypatch):
    text = REDUCED
    if how == "with WORLD_SIZE":
        monkeypatch.setenv("WORLD_SIZE", "1")
    else:
        text = text.replace('"nccl"', '"gloo", "tcp://127.0.0.1:29500", rank=0, world_size=1')
    measured = watch_script(written(text))
    assert measured.messages == ()
    assert measured.moments["end of step 2"]["communication"] == 4 * 1024**2


# Shards


@pytest.mark.parametrize("made_on", ["meta", "cpu"])
def test_fsdp2_gathers_in_16_bits_and_reduces_in_32(made_on, written):
    text = (SCRIPTS / "ranks_fsdp2.py").read_text()
    if made_on == "cpu":  # then fully_shard moves it
        text = text.replace('"meta"', '"cpu"').replace('model.to_empty(device="cuda")\n', "")
    measured = watch_script(written(text), ranks=8)
    weights = 4 * 512 * 512
    messages = messages_of(measured)
    gathered = Messages("all-gather", 8, 2 * 2 * weights, 2 * 2 * weights * 7 // 8)  # forward and backward
    assert messages["all-gather"] == gathered
    assert messages["reduce-scatter"] == Messages("reduce-scatter", 4, 4 * weights, 4 * weights * 7 // 8)
    end = measured.moments["end of step 2"]
    assert end["parameters"] == 4 * weights / 8
    assert end["optimizer_states"] == 2 * 4 * weights / 8


def test_two_dimensions_share_weights_and_reduce_activations():
    measured = watch_script(SCRIPTS / "ranks_2d.py", ranks=8)
    weights = 3 * 2 * 256 * 1024 * 4
    messages = messages_of(measured)
    # a layer's shards are half of it, gathered twice and reduced once among 4
    assert messages["all-gather"] == Messages("all-gather", 6, weights, weights * 3 // 4)
    assert messages["reduce-scatter"] == Messages("reduce-scatter", 3, weights // 2, weights // 2 * 3 // 4)
    # activations are added up after each layer, and in backward before all but the first
    hidden = 4 * 32 * 256 * 4
    assert messages["all-reduce"] == Messages("all-reduce", 5, 5 * hidden, 5 * hidden)
    assert measured.moments["end of step 2"]["parameters"] == weights / 8


# What a script finds, and what is refused

ENVIRONMENT = """import os, torch
import torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
assert (dist.get_rank(), dist.get_world_size()) == (11, 16)
assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["11", "0", "16"]
objects = [None] * 16
dist.all_gather_object(objects, {"rank": 11})
assert objects == [{"rank": 11}] * 16
group = dist.new_group(range(8, 16), backend="gloo")
counts = torch.ones(3, device="cuda")
work = dist.all_reduce(counts, group=group, async_op=True)
assert work.wait() and work.get_future().value()[0] is counts
"""


def test_a_rank_finds_torchrun_s_variables_and_its_group(written):
    text = ENVIRONMENT + REDUCED.replace('dist.init_process_group("nccl")', "")
    before = dict(os.environ), sys.excepthook
    assert "rank 11 of 16" in watch_script(written(text), ranks=16, rank=11).provenance.note
    assert (dict(os.environ), sys.excepthook) == before and not dist.is_initialized()


BEGUN = 'import torch, torch.distributed as dist\ndist.init_process_group("nccl")\nx = torch.ones(3).cuda()\n'
REFUSED = {
    "dist.send(x, 1)": "exchanges tensors with one other rank",
    "torch.cuda.nccl.all_reduce([x])": "torch.cuda.nccl.all_reduce is not followed",
    "from torch.distributed import fsdp; fsdp.FullyShardedDataParallel(None)": "fully_shard (FSDP2) can",
    "dist.destroy_process_group(); dist.init_process_group('nccl', rank=0, world_size=4)": "--ranks 4",
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_followed_is_one_sentence_with_its_line(code, written):
    with pytest.raises(ScriptError, match=r"train\.py:4  .*: ") as refused:
        watch_script(written(f"{BEGUN}{code}\n"), ranks=8)
    assert REFUSED[code] in str(refused.value) and "\n" not in str(refused.value)


def test_a_group_without_ranks_names_the_option(written):
    with pytest.raises(ScriptError, match="--ranks 8"):
        watch_script(written(BEGUN))


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (4, 4), (4, -1), (None, 1)])
def test_a_rank_that_does_not_exist_is_refused(ranks, rank):
    with pytest.raises(ValueError, match="rank"):
        watch_script(SCRIPTS / "ranks_ddp.py", ranks=ranks, rank=rank)


def test_messages_are_reported_and_saved(tmp_path):
    measured = watch_script(SCRIPTS / "ranks_2d.py", ranks=8)
    found = report(measured)
    assert "all-gather      6 ×   6.29 MB         4.72 MB" in str(found)
    assert {each["kind"] for each in found.to_dict()["messages"]} == set(messages_of(measured))
    again = read_measurement(save_measurement(measured, tmp_path / "saved"))
    assert again.messages == measured.messages
