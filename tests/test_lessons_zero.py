"""Lesson 11's closed forms and sliders: each number that the lesson shows is really so."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from course_utils import TrainingRun, estimate, gpu, measure
from course_utils.estimating.sharding import rank_0_states
from course_utils.lessons.sharding.sent import SentBytes
from course_utils.lessons.sharding.widget import shard_sliders
from course_utils.lessons.sharding.zero import formula, gathered_terms, gpt_of_six_blocks, tokens_to_hide
from course_utils.lessons.shared.on_ranks import pretended
from course_utils.measuring.on_gpu import on_gpu

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_the_formula_is_that_of_mixed_precision_adam() -> None:
    run = TrainingRun("gpt2", 1, 64, "bf16-master", world_size=4, zero_stage=2)
    N = run.model.parameters
    assert formula(run) == {"parameters": 2 * N, "gradients": 2 * N // 4, "optimizer_states": 12 * N // 4}


@pytest.mark.parametrize("precision", ["bf16-master", "fp32"])
def test_gathered_terms_are_the_measured_communication(precision: str) -> None:
    """In the middle of backward, where the run of six blocks peaks."""
    attention = "flash" if precision == "bf16-master" else "efficient"
    run = gpt_of_six_blocks(64).replace(precision=precision, attention=attention)
    communication = measure(run).breakdown["communication"]
    assert sum(gathered_terms(run).values()) == communication == estimate(run)["communication"]


def test_hiding_takes_as_long_as_it_computes() -> None:
    rates = gpu("A100-80GB").rates
    N = 7e9
    assert rates is not None
    tokens = tokens_to_hide(6, rates.tensor, rates.link)
    assert 6 * N * tokens / rates.tensor == pytest.approx(6 * N / rates.link)


def test_sliders_follow_ranks_and_stage() -> None:
    sliders = shard_sliders("llama3-8b", ranks=8, stage=2, gpu="A100-40GB", seq_len=4096)
    assert repr(sliders) == "Sliders over ranks and stage: run this cell to use them."
    assert "Fits an A100-40GB" in sliders.message
    sliders.controls["zero_stage"].value = 1
    assert "Does not fit" in sliders.message and sliders.run.zero_stage == 1
    sliders.controls["precision"].value = "fp32"
    assert sliders.run.attention == "efficient" and sliders.figure is not None
    assert "44.2 GB by ZeRO" in sliders.figure.alt
    sliders.controls["model"].value = "gpt2-xl"
    assert sliders.run.seq_len == 1024 and "Not possible" not in sliders.message


def test_sent_bytes_are_those_of_the_paper_by_kind() -> None:
    with pretended(0, 4), SentBytes() as sent:
        whole = torch.zeros(40)
        own = torch.zeros(10)
        dist.all_reduce(whole)
        dist.reduce_scatter_tensor(own, whole)
        dist.all_gather_into_tensor(whole, own)
        dist.broadcast(own, 0)
    assert sent.by_kind == {"all-reduce": 320, "reduce-scatter": 160, "all-gather": 160, "broadcast": 40}


def test_only_torch_s_own_stage_1_of_llama_3_8b_does_not_fit_40_gb() -> None:
    """Its buckets and its uneven shares are the reason, as lesson 11 says."""
    card = gpu("A100-40GB")
    run = TrainingRun(
        "llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=64, zero_stage=1, loss_chunks=8
    )
    peaks = [estimate(run.replace(world_size=ranks)).total for ranks in (64, 1024)]
    assert min(peaks) > card.room
    views = run.replace(bucket_view=True)
    uneven = rank_0_states(views)["optimizer_states"]
    even = formula(views)["optimizer_states"]
    assert estimate(views).total > card.room > estimate(views).total - uneven + even


def peak_of_units(apart: bool, words: int, width: int) -> int:
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words)).to("cuda")
    for unit in model if apart else blocks:
        fully_shard(unit, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    torch.cuda.reset_peak_memory_stats()
    model(torch.zeros(16, dtype=torch.long, device="cuda")).square().mean().backward()
    return torch.cuda.max_memory_allocated()


def test_an_embedding_and_a_head_as_units_of_their_own_lower_the_peak() -> None:
    peaks = []
    for apart in (False, True):
        with on_gpu(ranks=64):
            peaks.append(peak_of_units(apart, words=8_000, width=256))
    assert peaks[1] < 0.75 * peaks[0]


def test_a_model_made_on_meta_never_has_its_bytes_on_one_gpu() -> None:
    whole = 4 * 4 * (8 * 256 * 256 + 5 * 256)
    peaks = {}
    for device in ("meta", "cuda"):
        with on_gpu(ranks=8):
            with torch.device(device):
                blocks = [nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(4)]
                model = nn.Sequential(*blocks)
            for unit in (*blocks, model):
                fully_shard(unit, mp_policy=BF16)
            if device == "meta":
                model.to_empty(device="cuda")
            peaks[device] = torch.cuda.max_memory_allocated()
    assert peaks["meta"] < whole / 7 < whole <= peaks["cuda"]
