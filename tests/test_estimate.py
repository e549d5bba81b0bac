"""The estimate against steps that really run: equal to the byte, kind by kind, not only where it is easy."""

from unittest.mock import Mock

import pytest
from engine import GPT, shallow, simulate, tiny

from course_utils import estimate, moments
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.estimating.exact.program import compiled
from course_utils.measurement import Provenance
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training, follow
from course_utils.measuring.tracker import Tracker
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB

UNEVEN = tiny("llama", experts=4, experts_per_token=2)
"""33 tokens choose 66 times among 4 experts, so that two of them get one more than the others."""

NARROW = TransformerConfig("one head", "gpt2", 2, 8, 1, 31, 256, dropout=0.1)
"""So narrow that q, k and v by one matrix are another number of blocks than each by itself."""

RUNS = [
    TrainingRun("tiny-gpt", 4, 64, "amp-fp16", "adamw-loop", accumulation_steps=2),
    TrainingRun(NARROW, 2, 100, "bf16", "sgd", "eager"),
    TrainingRun(UNEVEN, 3, 11, "amp-bf16", unfused=True),
    TrainingRun(tiny("gpt2"), 2, 32, "bf16-master-fp32grad", "adamw-loop", clip_grad_norm=1.0),
    TrainingRun(tiny("gpt2", fused_qkv=False), 2, 32, "bf16", attention="cudnn", set_to_none=False),
    TrainingRun(tiny("gpt2"), 2, 32, "bf16-master", attention="eager", recompute="selective", unfused=True),
    TrainingRun(tiny("gpt2"), 2, 32, "amp-bf16", lora_rank=4, frozen_bits=8),
    TrainingRun(tiny("llama"), 2, 32, "bf16-master", "adamw-fused", recompute="full", accumulation_steps=2),
    TrainingRun(tiny("llama"), 2, 32, "amp-fp16", "adamw", "eager", "selective-attention", unfused=True),
    TrainingRun(tiny("llama", fused_qkv=True, repeat_kv=True), 2, 32, "bf16-master", recompute="selective"),
    # the MLP's tensors are large enough to go
    TrainingRun(tiny("llama"), 8, 128, "bf16", recompute="offload"),
]

LORA_IN_4_BITS = TrainingRun(tiny("llama"), 2, 32, lora_rank=4, lora_targets="mlp", frozen_bits=4)


def differences(estimated: MemoryBreakdown, measured: MemoryBreakdown) -> dict[str, int]:
    return {kind: estimated[kind] - measured[kind] for kind in KINDS if estimated[kind] != measured[kind]}


@pytest.mark.parametrize("run", [*RUNS, LORA_IN_4_BITS], ids=str)
def test_peak_and_moments_are_exact(run):
    measured = simulate(run)
    expected = moments(run)
    assert differences(estimate(run), measured.breakdown) == {}
    assert estimate(run).phase == measured.peak_phase
    for moment in ("end of forward", "after loss"):
        assert differences(expected[moment], measured.moments[moment]) == {}, moment
    assert differences(expected["end of step"], measured.moments["end of step 2"]) == {}


def test_until_torch_2_11_autocast_leaves_rmsnorm_in_16_bits(monkeypatch):
    """The peaks of each torch's simulation; `test_peak_and_moments_are_exact` holds one of them."""
    installed = "course_utils.estimating.exact.operations.installed_torch"
    for release, peak in (((2, 11), 3_224_064), ((2, 12), 3_488_256)):
        monkeypatch.setattr(installed, Mock(return_value=release))
        compiled.cache_clear()
        assert estimate(LORA_IN_4_BITS).total == peak
    compiled.cache_clear()


def test_two_micro_batches_stand_for_four():
    run = TrainingRun("tiny-gpt", 2, 64, "amp-fp16", accumulation_steps=4)
    with simulated_gpu(run.attention):
        training = Training(run, "cuda", simulated=True)
        in_full = follow(training, Tracker("cuda"), 2, Provenance("simulated", "simulated GPU", "", ""))
    shortened = simulate(run)
    assert shortened.breakdown == in_full.breakdown and shortened.moments == in_full.moments
    assert "2 of 4 micro-batches run" in str(shortened.provenance)
    assert differences(estimate(run), in_full.breakdown) == {}


def test_gpt2_xl_with_32_sequences_does_not_fit_32_gb_but_in_micro_batches_of_4_it_does():
    """The course's opening question."""
    run = TrainingRun("gpt2-xl", 32, 1024, "bf16-master", recompute="full")
    assert estimate(run).total > 32 * GiB
    assert estimate(run.replace(micro_batch=4, global_batch=32)).total < 32 * GB


@pytest.mark.parametrize(
    ("precision", "kept", "highest"),
    [
        # log-softmax 2 and its fp32 copy 4, then a gradient of 4; fp32: log-softmax 4, then two gradients of
        # 4
        ("amp-bf16", 4 - (2 + 4), (4 + 4 + 4) - (2 + 4 + 4)),
        # log-softmax 2, then two gradients of 2
        ("bf16-master", 4 - 2, (4 + 4 + 4) - (2 + 2 + 2)),
    ],
)
def test_fp32_logits_change_the_loss_by_whole_bytes_per_logit(precision, kept, highest):
    run = TrainingRun(shallow(GPT, 2), 8, 1024, precision)
    logits = 8 * 1024 * 50257
    low, fp32 = (moments(run.replace(logits=choice)) for choice in ("compute", "fp32"))
    assert fp32["after loss"].total - low["after loss"].total == kept * logits
    grows = fp32["backward of the loss"].total - low["backward of the loss"].total
    assert abs(grows - highest * logits) <= 2 * 512  # numbers that autocast copies one by one
    assert fp32["end of forward"] == low["end of forward"] and fp32["optimizer step"] == low["optimizer step"]
