"""The estimate against steps that really run: states exact, peaks and moments near, of tiny models too."""

from typing import Any
from unittest.mock import Mock

import pytest
from engine import GPT, shallow, simulate, tiny

from course_utils import estimate, moments
from course_utils.estimating.formula import update
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
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
"""So narrow that most of its tensors are smaller than a block of 512 bytes."""

RUNS = [
    TrainingRun("tiny-gpt", 4, 64, "amp-fp16", "adamw-loop", accumulation_steps=2),
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
    TrainingRun(tiny("llama"), 2, 32, lora_rank=4, lora_targets="mlp", frozen_bits=4),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_peak_and_moments_are_near(run: TrainingRun) -> None:
    measured = simulate(run)
    expected = moments(run)
    assert estimate(run).total == pytest.approx(measured.peak, rel=0.01)
    assert estimate(run).phase == measured.peak_phase
    for moment in ("end of forward", "after loss"):
        assert expected[moment].total == pytest.approx(measured.moments[moment].total, rel=0.01), moment
    assert expected["end of step"].total == pytest.approx(measured.moments["end of step 2"].total, rel=0.001)


def test_of_a_model_of_tiny_tensors_the_allocators_blocks_are_most() -> None:
    """The formula counts bytes, the allocator blocks of 512; `compare` says how many of the gap that are."""
    from course_utils import compare

    found = compare(TrainingRun(NARROW, 2, 100, "bf16", "sgd", "eager"), "simulated")
    *named, elsewhere = found.terms.values()
    assert found.ratio < 0.99 and sum(found.terms.values()) == found.estimate.total - found.measurement.peak
    assert abs(elsewhere) < abs(named[0])


def test_until_torch_2_11_autocast_leaves_rmsnorm_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peaks of each torch's simulation: 3,224,064 and 3,488,256 bytes."""
    installed = "course_utils.estimating.formula_of_blocks.installed_torch"
    for release, peak in (((2, 11), 3_224_064), ((2, 12), 3_488_256)):
        monkeypatch.setattr(installed, Mock(return_value=release))
        assert estimate(RUNS[-1]).total == pytest.approx(peak, rel=0.01)


def small(family: str, precision: str, optimizer: str, **choices: Any) -> TrainingRun:
    return TrainingRun(tiny(family, hidden=64, heads=2), 1, 16, precision, optimizer, "eager", **choices)


CLIPPED_AND_ZEROED: dict[str, Any] = {"clip_grad_norm": 1.0, "set_to_none": False}

UPDATES = [
    small("gpt2", "fp32", "adamw", clip_grad_norm=1.0),
    small("llama", "amp-bf16", "adamw-foreach", **CLIPPED_AND_ZEROED),
    small("gpt2", "amp-fp16", "adamw-fused"),
    small("llama", "bf16-master", "adamw-loop", clip_grad_norm=1.0, accumulation_steps=2),
    small("gpt2", "bf16-master-fp32grad", "adafactor", **CLIPPED_AND_ZEROED),
    small("llama", "bf16", "adam8bit"),
    small("gpt2", "fp16-master", "muon", **CLIPPED_AND_ZEROED),
    small("llama", "amp-fp16", "lion"),
    # of LoRA only the factors step; what is frozen counts among the parameters
    small("llama", "amp-fp16", "adam8bit", lora_rank=4, lora_targets="mlp", frozen_bits=4),
    # 77 million elements: more than the 8-bit Adam updates at once
    TrainingRun(tiny("gpt2", vocab=300_000, layers=1), 1, 16, "bf16-master", "adam8bit", "eager"),
]


@pytest.mark.parametrize("run", UPDATES, ids=str)
def test_states_are_exact_and_the_update_is_near(run: TrainingRun) -> None:
    measured = simulate(run)
    left = measured.moments["end of step 2"]
    assert measured.moments["end of backward"]["gradients"] == gradient_bytes(run)
    assert left["parameters"] == parameter_bytes(run)
    assert left["optimizer_states"] == optimizer_state_bytes(run)
    assert left["gradients"] == (0 if run.set_to_none else gradient_bytes(run))
    step = moments(run)["optimizer step"].total
    assert step == pytest.approx(measured.phase_peaks["optimizer"].total, rel=0.01)


def test_foreach_adds_4_bytes_per_parameter_and_fused_nothing() -> None:
    run = TrainingRun("gpt2-xl", 1, 1024)
    assert update(run)["temporaries"] == pytest.approx(4 * run.model.parameters, rel=1e-3)
    assert sum(update(run.replace(optimizer="adamw-fused")).values()) == 0
    masters = run.replace(precision="bf16-master")
    largest = run.model.vocab * run.model.hidden
    assert sum(update(masters).values()) == pytest.approx((4 + 4 - 2) * largest, rel=1e-3)
    together = update(masters.replace(optimizer="adamw-foreach"))
    assert sum(together.values()) == pytest.approx((4 + 4 - 2) * run.model.parameters, rel=1e-3)


def test_two_micro_batches_stand_for_four():
    run = TrainingRun("tiny-gpt", 2, 64, "amp-fp16", accumulation_steps=4)
    with simulated_gpu(run.attention):
        training = Training(run, "cuda", simulated=True)
        in_full = follow(training, Tracker("cuda"), 2, Provenance("simulated", "simulated GPU", "", ""))
    shortened = simulate(run)
    assert shortened.breakdown == in_full.breakdown and shortened.moments == in_full.moments
    assert "2 of 4 micro-batches run" in str(shortened.provenance)
    assert estimate(run).total == pytest.approx(in_full.peak, rel=0.01)


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
    assert grows == highest * logits
    assert fp32["end of forward"] == low["end of forward"] and fp32["optimizer step"] == low["optimizer step"]
