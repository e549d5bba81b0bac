"""The estimate against steps that really run: equal to the byte, kind by kind, not only where it is easy."""

import random
from itertools import product
from unittest.mock import Mock

import pytest
from engine import LLAMA, RECIPES, shallow, simulate, tiny

from course_utils import estimate, moments
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.estimating import published
from course_utils.estimating.exact.program import compiled
from course_utils.measurement import Measurement, Provenance
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.tracing import trace
from course_utils.models import PRESETS, TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB

GPT3 = shallow(PRESETS["gpt2-xl"], 3)
LLAMA3 = shallow(LLAMA, 3)

SAMPLE = [
    TrainingRun(GPT3, 4, 512, "amp-bf16", "adamw", "flash"),
    TrainingRun(GPT3, 4, 512, "amp-bf16", "adamw-fused", "eager", "full"),
    TrainingRun(GPT3, 4, 256, "amp-fp16", "adamw-loop", "flash", "none", 2),
    TrainingRun(GPT3, 16, 1024, "bf16-master", "adamw", "eager"),
    TrainingRun(GPT3, 2, 128, "bf16-master", "adamw-foreach", "flash", "full"),
    TrainingRun(GPT3, 1, 64, "fp32", "momentum", "efficient"),
    TrainingRun(GPT3, 8, 1024, "fp32", "adamw", "eager", "full", 2),
    TrainingRun(LLAMA3, 4, 512, "amp-bf16", "adamw", "flash"),
    TrainingRun(LLAMA3, 8, 1024, "amp-bf16", "momentum", "eager", "full"),
    TrainingRun(LLAMA3, 2, 1024, "amp-fp16", "adamw-fused", "efficient", "none", 2),
    TrainingRun(LLAMA3, 1, 2048, "bf16-master", "adamw-loop", "flash", "full"),
    TrainingRun(LLAMA3, 4, 256, "fp32", "adamw-foreach", "efficient"),
    TrainingRun(shallow(PRESETS["llama3-8b"], 2), 2, 2048, "bf16-master", "adamw-fused", "flash"),
    TrainingRun(shallow(PRESETS["tinyllama-1.1b"], 2), 2, 512, "fp32", "momentum", "eager", "none", 2),
]


def name(run: TrainingRun) -> str:
    choices = (run.model.name, run.precision.name, run.optimizer.name, run.attention, run.recompute)
    return f"{'-'.join(choices)}-{run.accumulation_steps}"


def random_run(seed: int) -> TrainingRun:
    """A run of a published width and vocabulary, any recipe; the same for the same seed."""
    choose = random.Random(seed).choice
    precision, attention = choose(RECIPES)
    return TrainingRun(
        shallow(
            PRESETS[choose(["gpt2", "gpt2-medium", "llama3.2-1b", "llama3.2-3b", "tinyllama-1.1b"])],
            choose([1, 2, 4]),
        ),
        micro_batch=choose([1, 2, 3, 8]),
        seq_len=choose([64, 100, 512, 1000]),
        precision=precision,
        optimizer=choose(["adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "momentum"]),
        attention=attention,
        recompute=choose(["none", "full"]),
        accumulation_steps=choose([1, 1, 2]),
    )


def differences(estimated: MemoryBreakdown, measured: MemoryBreakdown) -> dict[str, int]:
    return {kind: estimated[kind] - measured[kind] for kind in KINDS if estimated[kind] != measured[kind]}


def assert_exact(run: TrainingRun) -> None:
    """The peak, its phase, and the moments that both name."""
    measured = simulate(run)
    expected = moments(run)
    assert differences(estimate(run), measured.breakdown) == {}
    assert estimate(run).phase == measured.peak_phase
    for moment in ("end of forward", "after loss"):
        assert differences(expected[moment], measured.moments[moment]) == {}, moment
    assert differences(expected["end of step"], measured.moments["end of step 2"]) == {}


@pytest.mark.parametrize("run", SAMPLE, ids=name)
@pytest.mark.sweep(10)
def test_chosen_runs_are_exact(run):
    assert_exact(run)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sweep(10)
def test_random_runs_are_exact(seed):
    assert_exact(random_run(seed))


UNEVEN = tiny("llama", experts=4, experts_per_token=2)
"""33 tokens choose 66 times among 4 experts, so that two of them get one more than the others."""

TINY = [
    TrainingRun(UNEVEN, 1, 33, "fp32", attention="efficient"),
    TrainingRun(UNEVEN, 3, 11, "amp-bf16"),
    TrainingRun(UNEVEN, 1, 33, "bf16-master", "muon", "eager"),
    TrainingRun(tiny("gpt2"), 2, 32, "bf16-master-fp32grad", "adamw-loop"),
    TrainingRun(tiny("gpt2"), 2, 32, "amp-bf16", lora_rank=4, frozen_bits=8),
    TrainingRun(tiny("llama"), 2, 32, "amp-bf16", lora_rank=4, lora_targets="mlp", frozen_bits=4),
    # the MLP's tensors are large enough to go
    TrainingRun(tiny("llama"), 8, 128, "bf16", recompute="offload"),
    TrainingRun(tiny("llama", layers=7), 2, 32, recompute="every-2", loss_chunks=3),
    TrainingRun(tiny("gpt2", layers=8), 2, 32, recompute="every-3", loss_chunks=7),
    TrainingRun(tiny("gpt2", layers=2), 2, 32, recompute="every-2", loss_chunks=4),
    TrainingRun(tiny("gpt2"), 2, 32, "amp-bf16", unfused=True),
    TrainingRun(tiny("gpt2"), 2, 32, "bf16-master", attention="eager", recompute="selective", unfused=True),
    TrainingRun(tiny("gpt2", norm="rmsnorm"), 2, 32, "fp32", attention="eager", unfused=True),
    TrainingRun(tiny("llama"), 2, 32, "amp-bf16", unfused=True, accumulation_steps=2),
    TrainingRun(tiny("llama"), 2, 32, "bf16-master", recompute="full", unfused=True),
    TrainingRun(tiny("llama"), 2, 32, "bf16-master", attention="eager", unfused=True),
    TrainingRun(tiny("llama"), 2, 32, "amp-fp16", "adamw", "eager", "selective-attention", unfused=True),
    TrainingRun(tiny("llama"), 2, 32, "amp-fp16", lora_rank=4, frozen_bits=4, unfused=True),
    TrainingRun(tiny("llama"), 2, 32, "bf16", lora_rank=4, frozen_bits=16, unfused=True),
    TrainingRun(UNEVEN, 3, 11, "amp-bf16", unfused=True),
    TrainingRun(tiny("llama", repeat_kv=True), 2, 32, "amp-bf16"),
    TrainingRun(tiny("llama", repeat_kv=True), 2, 32, "bf16-master", recompute="selective"),
    TrainingRun(tiny("llama", fused_qkv=True), 2, 32, "amp-bf16"),
    TrainingRun(tiny("llama", fused_qkv=True, repeat_kv=True), 2, 32, "bf16-master", recompute="full"),
    TrainingRun(tiny("gpt2", fused_qkv=False), 2, 32, "bf16"),
]


@pytest.mark.parametrize("run", TINY, ids=str)
def test_small_runs_of_every_kind_are_exact(run):
    assert_exact(run)


def test_until_torch_2_11_autocast_leaves_rmsnorm_in_16_bits(monkeypatch):
    """The peaks of each torch's simulation; `test_small_runs_of_every_kind_are_exact` holds one of them."""
    run = next(run for run in TINY if run.frozen_bits == 4 and not run.model.unfused)
    installed = "course_utils.estimating.exact.operations.installed_torch"
    for release, peak in (((2, 11), 3_224_064), ((2, 12), 3_488_256)):
        monkeypatch.setattr(installed, Mock(return_value=release))
        compiled.cache_clear()
        assert estimate(run).total == peak
    compiled.cache_clear()


# The course's opening question


PUZZLE = [
    TrainingRun("gpt2-xl", 32, 1024, precision, attention=attention, recompute=recompute)
    for precision, attention, recompute in product(
        ("amp-bf16", "bf16-master"), ("flash", "eager"), ("none", "full")
    )
]


@pytest.mark.parametrize("run", PUZZLE, ids=name)
@pytest.mark.sweep(1)
def test_gpt2_xl_agrees_eight_ways(run):
    measured = simulate(run)
    assert estimate(run).total == pytest.approx(measured.peak, rel=0.01)  # what is promised
    assert differences(estimate(run), measured.breakdown) == {}  # what is so
    assert estimate(run).phase == measured.peak_phase


def test_32_gb_are_too_few_at_32_sequences_but_enough_for_micro_batches_of_4():
    best = min(PUZZLE, key=lambda run: estimate(run).total)
    assert estimate(best).total > 32 * GiB
    assert estimate(best.replace(micro_batch=4, global_batch=32)).total < 32 * GB


# Structure


@pytest.mark.parametrize("model", [PRESETS["gpt2-xl"], PRESETS["llama3-8b"]], ids=lambda model: model.name)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.sweep(2)
def test_depth_adds_the_same_for_every_layer(model: TransformerConfig, recompute):
    def at(layers: int) -> tuple[Measurement, MemoryBreakdown]:
        run = TrainingRun(shallow(model, layers), 2, 256, recompute=recompute)
        return simulate(run), estimate(run)

    (measured_3, estimated_3) = at(3)
    (measured_6, estimated_6) = at(6)
    (measured_12, estimated_12) = at(12)
    assert measured_12.peak_phase == measured_6.peak_phase == measured_3.peak_phase
    for kind in KINDS:
        measured_growth = measured_6.breakdown[kind] - measured_3.breakdown[kind]
        assert measured_12.breakdown[kind] - measured_6.breakdown[kind] == 2 * measured_growth
        assert estimated_12[kind] - estimated_6[kind] == 2 * (estimated_6[kind] - estimated_3[kind])
    assert estimated_12.total == measured_12.peak


@pytest.mark.parametrize("run", [SAMPLE[2], SAMPLE[9]], ids=name)
def test_two_micro_batches_stand_for_four(run):
    four = run.replace(accumulation_steps=4)
    with simulated_gpu(run.attention):
        in_full = trace(four, "cuda", 2, Provenance("simulated", "simulated GPU", "", ""))
    shortened = simulate(four)
    assert shortened.breakdown == in_full.breakdown and shortened.moments == in_full.moments
    assert "2 of 4 micro-batches run" in str(shortened.provenance)
    assert differences(estimate(four), in_full.breakdown) == {}


@pytest.mark.parametrize("run", SAMPLE, ids=name)
def test_the_estimate_is_its_highest_moment(run):
    stages = moments(run)
    names = list(stages)
    assert (names[0], names[-1]) == ("forward", "end of step")
    assert estimate(run).total == max(stage.total for stage in stages.values())
    assert all(stage.label == name and stage.total == sum(stage.values()) for name, stage in stages.items())
    assert all(size >= 0 for stage in stages.values() for size in stage.values())


def test_more_of_anything_needs_more():
    run = TrainingRun("gpt2", 4, 512)
    for more in ({"micro_batch": 5}, {"seq_len": 513}, {"model": "gpt2-medium"}, {"attention": "eager"}):
        assert estimate(run.replace(**more)).total > estimate(run).total, more


def test_what_is_not_covered_is_refused_rather_than_guessed():
    with pytest.raises(ValueError, match="tensor parallelism has closed forms of its own"):
        estimate(TrainingRun("gpt2", tensor_parallel=2))
    with pytest.raises(ValueError, match="several ranks are estimated only without LoRA"):
        estimate(TrainingRun("gpt2", world_size=2, lora_rank=4))


# The field's own formulas


def test_zero_counts_24_gb_for_gpt2_xl():
    states = published.zero_state_bytes(1_500_000_000)
    assert list(states.values()) == [3 * GB, 3 * GB, 6 * GB, 6 * GB, 6 * GB]


def test_zero_counts_60_gb_of_activations_and_8_with_checkpoints():
    run = TrainingRun("gpt2-xl", 32, 1000, attention="eager")
    assert published.zero_activation_bytes(run) == pytest.approx(2 * 29.5e9, rel=0.01)
    assert published.zero_activation_bytes(run) == pytest.approx(59 * GB, rel=0.01)
    assert published.zero_checkpointed_bytes(run) == pytest.approx(8.5 * GB, rel=0.01)


def test_korthikanti_counts_276_gb_where_zero_counts_60():
    run = TrainingRun("gpt2-xl", 32, 1000, "bf16-master", attention="eager")
    assert published.korthikanti_activation_bytes(run) == pytest.approx(276 * GB, rel=0.01)
    kept = moments(run)["end of forward"]["activations"]
    assert kept == pytest.approx(published.korthikanti_activation_bytes(run), rel=0.01)


def test_checkpoints_are_5_gb_and_the_flat_buffer_6():
    run = TrainingRun("gpt2-xl", 32, 1024, recompute="full")
    assert published.checkpoints_bytes(run) == pytest.approx(5.03 * GB, rel=0.01)


# Logits copied to fp32


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
    run = TrainingRun(shallow(PRESETS["gpt2"], 2), 8, 1024, precision)
    logits = 8 * 1024 * 50257
    low, fp32 = (moments(run.replace(logits=choice)) for choice in ("compute", "fp32"))
    assert fp32["after loss"].total - low["after loss"].total == kept * logits
    grows = fp32["backward of the loss"].total - low["backward of the loss"].total
    assert abs(grows - highest * logits) <= 2 * 512  # numbers that autocast copies one by one
    assert fp32["end of forward"] == low["end of forward"] and fp32["optimizer step"] == low["optimizer step"]


def test_nothing_is_copied_where_logits_are_fp32_anyway():
    run = TrainingRun(shallow(LLAMA, 2), 2, 256, "tf32", attention="efficient")
    assert estimate(run) == estimate(run.replace(logits="compute"))
    assert dict(estimate(run)) == dict(simulate(run).breakdown)
