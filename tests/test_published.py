"""The field's formulas give what their sources print, and refuse what those say nothing of."""

import dataclasses

import pytest

from course_utils.estimating import published
from course_utils.estimating.published import FORMULAS
from course_utils.estimating.step_time import recomputed_flops
from course_utils.models import PRESETS
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB

XL = TrainingRun("gpt2-xl", 4, 1024, "bf16-master", attention="eager")
LLAMA = TrainingRun("llama3-8b", 1, 4096, "bf16-master", attention="eager")
GPT3 = TrainingRun("gpt3-175b", 1, 2048, "bf16-master", attention="eager")
POLICIES = ("none", "selective-attention", "full")


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_s_own_table(stage, gigabytes):
    parts = published.zero_sharded_state_bytes(7_500_000_000, stage, ranks=64)
    assert sum(parts.values()) / GB == pytest.approx(gigabytes, abs=0.05)


def test_zero_adds_up_the_puzzle():
    parts = published.zero_bytes(XL.replace(micro_batch=32, seq_len=1000))
    assert parts["activations"] == pytest.approx(59 * GB, rel=0.01)
    assert sum(parts.values()) - parts["activations"] == 16 * XL.model.parameters
    checkpointed = published.zero_bytes(XL.replace(micro_batch=32, seq_len=1000, recompute="full"))
    assert checkpointed["activations"] == pytest.approx(8.5 * GB, rel=0.01)


def test_korthikanti_s_seventy_percent():
    """34 bytes of 114."""
    runs = [GPT3.replace(recompute=policy) for policy in POLICIES]
    kept = [published.korthikanti_parallel_block_bytes(run) for run in runs]
    assert kept == [each * 2048 * 12288 for each in (114, 34, 2)]


@pytest.mark.parametrize("sequence", [False, True])
def test_korthikanti_on_eight_ranks(sequence):
    run = GPT3.replace(tensor_parallel=8, sequence_parallel=sequence)
    whole = 10 / 8 if sequence else 10
    assert published.korthikanti_parallel_block_bytes(run) == 2048 * 12288 * (whole + 24 / 8 + 80 / 8)
    assert published.korthikanti_outer_bytes(run) == 2048 * (5 * 12288 + 4 * 50257) // 8
    assert published.korthikanti_parallel_block_bytes(XL) == published.korthikanti_block_bytes(XL)


def test_selective_recomputation_costs_a_third_of_what_equation_8_says():
    model = published.korthikanti_model_flops(GPT3)
    added = published.korthikanti_hardware_flops(GPT3) - model
    assert added / model == pytest.approx(0.027, abs=0.0005)
    assert added == 3 * recomputed_flops(GPT3.replace(recompute="selective-attention"))


def test_model_flops_are_six_a_parameter_and_token_and_the_attention():
    s, L, h = 2048, GPT3.model.layers, GPT3.model.hidden
    matrices = 12 * L * h * h + h * GPT3.model.vocab
    assert published.korthikanti_model_flops(GPT3) == 6 * s * matrices + 12 * L * s * s * h


def test_megatron_counts_neither_positions_nor_biases_and_pads_the_vocabulary():
    model = XL.model
    left_out = (model.max_positions + 9 * model.layers) * model.hidden
    padding = (50304 - 50257) * model.hidden
    assert published.megatron_parameter_count(XL) == model.parameters - left_out + padding
    assert published.megatron_parameter_count(LLAMA) == LLAMA.model.parameters, "it needs no padding"


def test_megatron_s_two_formulas():
    sbh = XL.micro_batch * 1024 * XL.model.hidden
    V = 50304
    plain = published.megatron_parts(XL)["activations"]
    rest = 9 * XL.micro_batch * 1024
    assert plain == pytest.approx(
        1.05 * (48 * 34 * sbh + sbh + 2 * sbh + 2 * sbh * V / 1600 + rest), rel=1e-6
    )
    run = GPT3.replace(tensor_parallel=8, sequence_parallel=True, recompute="selective-attention")
    padded = 51200
    sbh = 2048 * 12288
    split = 96 * (10 + 24 / 8) * sbh + 8 * 2048 + sbh + 2 * sbh + 2 * 2048 * padded / 8
    assert published.megatron_parts(GPT3.replace(tensor_parallel=8))["activations"] == int(1.05 * split)
    whole = 2048 * (34 * 12288 * 96 + 8 + 12288 + 4 * (12288 + padded))
    assert published.megatron_parts(run)["activations"] == whole // 8


def test_megatron_s_distributed_optimizer():
    N = published.megatron_parameter_count(XL)
    run = XL.replace(world_size=4, zero_stage=1)
    assert published.megatron_parts(XL)["weights and optimizer"] == 18 * N
    assert published.megatron_parts(run)["weights and optimizer"] == 6 * N + 12 * N // 4


def test_the_cookbook_counts_a_tied_embedding_twice():
    model = XL.model
    more = model.vocab - 5 * model.layers + XL.seq_len - model.max_positions
    assert published.cookbook_parameter_count(XL) == model.parameters + more * model.hidden


def test_the_cookbook_s_checkpointing_is_selective():
    full = published.cookbook_parts(XL.replace(recompute="full"))["activations"]
    selective = published.korthikanti_parallel_block_bytes(XL.replace(recompute="selective-attention"))
    assert full == XL.model.layers * selective
    assert published.cookbook_parts(XL)["activations"] == published.korthikanti_activation_bytes(XL)


def test_the_cookbook_counts_16_bit_activations_even_in_fp32():
    both = [published.cookbook_parts(XL.replace(precision=name)) for name in ("fp32", "bf16-master")]
    assert both[0]["activations"] == both[1]["activations"]
    assert both[0]["parameters"] == 2 * both[1]["parameters"]


def test_llm_analysis_differs_from_korthikanti_in_norms_and_masks():
    """Norms' inputs in fp32 are 4 · s·b·h more, the MLP's dropout mask 1 less, and no mask of the scores 1 ·
    a·s²·b.
    """
    s, b, h, a, L, V = 1024, XL.micro_batch, XL.model.hidden, XL.model.heads, XL.model.layers, XL.model.vocab
    block = published.korthikanti_block_bytes(XL) + (4 - 1) * s * b * h - a * s * s * b
    assert published.llm_analysis_parts(XL)["activations"] == L * block + 2 * s * b * V + 4 * s * b * h


def test_the_playbook_s_llama():
    """97, 17 and 1 GiB: s = 4,096, b = 1."""
    gib = [
        published.playbook_parts(LLAMA.replace(recompute=policy))["activations"] / GiB for policy in POLICIES
    ]
    assert gib == pytest.approx([97, 17, 1], abs=0.05)


def test_the_playbook_s_figure_splits_the_scores_or_not():
    run = GPT3.replace(tensor_parallel=8)
    scores = 96 * 5 * 96 * 2048**2
    runs = (GPT3, run, run.replace(sequence_parallel=True))
    whole, split, sequence = (published.playbook_figure_parts(one)["activations"] for one in runs)
    assert sequence - scores == pytest.approx((whole - scores) / 8, rel=1e-6)
    assert split > sequence - scores + scores // 8  # norms and dropout stay whole


def test_the_playbook_s_figure_of_a_gpt_on_one_rank_is_korthikanti_s():
    outer = published.korthikanti_outer_bytes(XL)
    (s, b, h, a, L) = (1024, 4, 1600, 25, 48)
    blocks = [
        published.playbook_figure_parts(XL.replace(recompute=policy))["activations"] - outer
        for policy in POLICIES
    ]
    assert blocks == [L * published.korthikanti_block_bytes(XL), 34 * s * b * h * L, 2 * s * b * h * L]
    in_fp32 = published.playbook_figure_parts(XL.replace(precision="fp32"))["activations"]
    # Of 34 bytes 32 are of numbers, 2 of masks; so are 2 + 2 of 5 of the scores, and 4 of 5 outside but the
    # logits.
    assert in_fp32 == L * s * b * (66 * h + 9 * a * s) + 9 * s * b * h + 4 * s * b * XL.model.vocab


def test_the_playbook_s_figure_counts_four_tensors_of_a_swiglu():
    s, h, a, L, ffn, V = 4096, 4096, 32, 32, 14336, 128256
    block = (34 - 16) * s * h + 5 * a * s * s + 4 * 2 * s * ffn  # a GELU's two of 4h are 16
    assert published.playbook_figure_parts(LLAMA)["activations"] == L * block + 5 * s * h + 4 * s * V


@pytest.mark.parametrize(("precision", "states"), [("fp32", 4 + 4 + 8), ("bf16-master", 2 + 2 + 12)])
def test_the_playbook_s_figure_counts_16_bytes_a_parameter(precision, states):
    parts = published.playbook_figure_parts(XL.replace(precision=precision))
    h, L = 1600, 48
    N = h * (50257 + 1024) + L * (12 * h * h + 13 * h) + 2 * h
    assert sum(parts.values()) - parts["activations"] == states * N


@pytest.mark.parametrize(("precision", "gradients"), [("bf16-master", 2), ("bf16-master-fp32grad", 2 + 4)])
def test_the_playbook_s_text_counts_16_bytes_a_parameter_or_20(precision, gradients):
    h, L = 1600, 48
    N = h * 50257 + L * (12 * h * h + 13 * h) + 2 * h
    parts = published.playbook_parts(XL.replace(precision=precision))
    assert list(parts.values())[:3] == [2 * N, gradients * N, 12 * N]


@pytest.mark.parametrize(
    "parts",
    [
        published.zero_run_state_bytes,
        published.cookbook_parts,
        published.llm_analysis_parts,
        published.playbook_figure_parts,
    ],
)
@pytest.mark.parametrize("stage", range(4))
def test_each_stage_of_zero_shards_one_kind_more(parts, stage):
    whole = parts(XL)
    found = parts(XL.replace(world_size=4, zero_stage=stage))
    for place, kind in enumerate(("optimizer_states", "gradients", "parameters")):
        assert found[kind] == whole[kind] // (4 if place < stage else 1), kind


@pytest.mark.parametrize(("stage", "elements"), [(0, 0), (1, 5e8), (2, 5e8), (3, 15e8)])
def test_the_cookbook_s_buckets(stage, elements):
    assert (
        published.cookbook_parts(XL.replace(world_size=4, zero_stage=stage))["communication"] == 2 * elements
    )


@pytest.mark.parametrize(
    "name",
    [
        "korthikanti_outer_bytes",
        "korthikanti_model_flops",
        "korthikanti_hardware_flops",
        "checkpoints_bytes",
        "cookbook_parts",
        "llm_analysis_parts",
        "playbook_parts",
    ],
)
def test_three_sequences_are_three_times_one(name):
    found = [getattr(published, name)(XL.replace(micro_batch=b)) for b in (1, 3)]
    one, three = (size["activations"] if isinstance(size, dict) else size for size in found)
    assert three == 3 * one > 0


def test_llm_analysis_knows_flash_attention_and_both_recomputations():
    s, b, h, a, L = 1024, 4, 1600, 25, 48
    changes = ({}, {"attention": "flash"}, {"recompute": "selective-attention"}, {"recompute": "full"})
    eager, flash, selective, full = (
        published.llm_analysis_parts(XL.replace(**change))["activations"] for change in changes
    )
    assert eager - selective == L * 4 * a * s * s * b
    assert flash - selective == L * (4 * s * b * h + 8 * a * s * b)
    assert full == L * 2 * s * b * h + 2 * s * b * XL.model.vocab + 4 * s * b * h


def test_deepspeed_s_own_examples():
    """T5 of 2,851 million parameters on 8 GPUs: 15.93 and 6.09 of what its documentation calls GB."""
    assert published.deepspeed_zero2_bytes(2_851_000_000, 8) / GiB == pytest.approx(15.93, abs=0.005)
    assert published.deepspeed_zero3_bytes(2_851_000_000, 32_000_000, 8) / GiB == pytest.approx(
        6.09, abs=0.005
    )


def test_the_largest_layer():
    assert published.largest_layer(XL) == XL.model.vocab * XL.model.hidden
    wide = dataclasses.replace(XL.model, vocab=1000)
    assert published.largest_layer(XL.replace(model=wide)) == 4 * 1600 * 1600 + 4 * 1600


def test_accelerate_takes_the_largest_stage_for_the_whole():
    N = XL.model.parameters
    for precision, stages in {"amp-bf16": [4, 6, 8, 8], "fp32": [4, 4, 8, 16]}.items():
        run = XL.replace(precision=precision)
        assert list(published.accelerate_stages(run).values()) == [each * N for each in stages]
        assert published.accelerate_bytes(run) == max(stages) * N


@pytest.mark.parametrize(
    ("formula", "changes"),
    [
        (published.zero_run_state_bytes, {"tensor_parallel": 2}),
        (published.zero_bytes, {"tensor_parallel": 2}),
        (published.cookbook_parts, {"tensor_parallel": 2}),
        (published.llm_analysis_parts, {"tensor_parallel": 2}),
        (published.playbook_parts, {"tensor_parallel": 2}),
        (published.playbook_parts, {"world_size": 2}),
        (published.deepspeed_zero2_run_bytes, {"tensor_parallel": 2}),
        (published.deepspeed_zero2_run_bytes, {"world_size": 2}),
        (published.deepspeed_zero2_run_bytes, {"world_size": 2, "zero_stage": 3}),
        (published.deepspeed_zero3_run_bytes, {"world_size": 2, "zero_stage": 2}),
        (published.accelerate_stages, {"precision": "fp32", "tensor_parallel": 2}),
        (published.accelerate_stages, {"precision": "fp32", "world_size": 2}),
        (published.accelerate_stages, {"precision": "bf16-master"}),
        (published.megatron_parts, {"world_size": 2, "zero_stage": 2}),
        (published.megatron_parts, {"recompute": "full"}),
    ],
)
def test_what_a_source_says_nothing_of_is_refused(formula, changes):
    with pytest.raises(ValueError, match="does not cover"):
        formula(XL.replace(**{"model": "gpt2"} | changes))


def test_deepspeed_s_estimate_of_a_run():
    N = XL.model.parameters
    run = XL.replace(world_size=4, zero_stage=2)
    assert published.deepspeed_zero2_run_bytes(run) == 4 * N + 16 * N // 4
    assert published.deepspeed_zero3_run_bytes(run.replace(zero_stage=3)) == 4 * 50257 * 1600 + 18 * N // 4


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": 8}, "LoRA"),
        ({"loss_chunks": 2}, "loss in chunks"),
        ({"recompute": "offload"}, "offloaded"),
        ({"recompute": "every-2"}, "every-2"),
        ({"optimizer": "momentum"}, "momentum"),
        ({"precision": "bf16"}, "bf16"),
        ({"model": dataclasses.replace(PRESETS["gpt2"], experts=4, experts_per_token=2)}, "experts"),
    ],
    ids=str,
)
def test_what_no_formula_covers_is_refused_by_name(formula, changes, words):
    precision = "fp32" if formula.name == "accelerate" else "bf16-master"
    with pytest.raises(ValueError, match="does not cover") as refusal:
        formula.bytes(XL.replace(**{"precision": precision} | changes))
    assert words in str(refusal.value)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
def test_a_formula_gives_whole_bytes_that_grow_with_the_model(formula):
    precision = "amp-bf16" if formula.name == "accelerate" else "bf16-master"
    small, large = (
        formula.bytes(XL.replace(model=name, precision=precision)) for name in ("gpt2", "gpt2-xl")
    )
    assert type(small) is int and 0 < small < large
    assert formula.counts in ("states", "activations", "activations and loss", "total") and formula.source
